"""The examples run as a newcomer runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXAMPLES = {
    "01_open_a_cache.py": "the bytes are the same",
    "02_embed_in_an_engine.py": "computed 1040 tokens, then 16",
    "03_write_a_store.py": "ok and exact",
    "04_explain.py": "Chunk 1 ends the match: invalidated just now.",
    "05_share_a_daemon.py": "the bytes are the other's: True",
}


def test_every_example_is_listed(root):
    assert {path.name for path in (root / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize(("name", "says"), EXAMPLES.items())
def test_an_example_does_what_it_says(root, tmp_path, name, says):
    command = [sys.executable, str(root / "examples" / name)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert says in done.stdout


def test_the_store_of_the_example_passes_the_contract(root):
    command = [sys.executable, "-m", "pytest", "-q", "examples/03_write_a_store.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
