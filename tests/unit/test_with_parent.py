"""What a fork of a process for tests has of its parent's descriptors."""

from __future__ import annotations

import subprocess
import sys

LOOK = """
import os
from kvtier.testing.with_parent import fork_with_parent
reading, writing = os.pipe()
def look():
    os.write(writing, " ".join(os.listdir("/proc/self/fd")).encode())
child = fork_with_parent(look, [writing])
os.close(writing)
print(writing, ":", os.read(reading, 1000).decode())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_fork_has_the_descriptors_that_it_keeps_and_no_others():
    ran = subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True)
    kept, had = ran.stdout.split(":")
    listing = 1  # the descriptor by which it looks
    found = set(map(int, had.split()))
    assert found >= {0, 1, 2, int(kept)}
    assert len(found) == 4 + listing
