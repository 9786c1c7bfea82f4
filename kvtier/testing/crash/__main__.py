"""Crashes, power losses and damage: what a real NVMe store makes of them.

    python -m kvtier.testing.crash [--short] [--jobs N] [--folder DIR] [--json FILE]

Under ``batch`` and ``each``, processes that write are killed at each system call that changes a
file, at each named step, and while they recover; power is lost at any moment of a recorded run, on
disks that sync and on disks that lie; calls fail; files are flipped, cut, swapped and put back.
After each, everything is read as a Tier reads it. The last line is a JSON object; the exit status
is 0 only if nothing was wrong and the control, in which checksums are not compared, shows wrong
bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

from kvtier.cli.progress import progress
from kvtier.testing.crash.campaign import SHORT, WHOLE, run

_SHOWN = 40


def main() -> int:
    """Run from the command line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--short", action="store_true", help="a few dozen of each")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments.add_argument("--folder", type=Path, help="where to do it, instead of in memory")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)  # it warns of what is done to it
    begin = time.monotonic()
    with progress() as tell:
        totals = run(SHORT if options.short else WHOLE, options.jobs, tell, options.folder)
    found = totals.summary()
    found["seconds"] = round(time.monotonic() - begin, 1)
    for note in totals.notes[:_SHOWN]:
        sys.stdout.write(f"{note}\n")
    if not totals.traced:
        sys.stdout.write(
            "this system does not let a process trace its children: no kills at system calls, and "
            "no power losses\n"
        )
    line = json.dumps(found)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    right = not totals.notes and bool(found["control_wrong_bytes"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
