"""H09: every process derives the same keys, whatever it was started with.

`unit/test_keys.py` holds the golden file, the kinds of token arrays, hash seeds, spawn and fork.
Here its script runs in processes that differ in everything else that a deployment may set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

WAYS = {
    "C locale": ({"LC_ALL": "C", "PYTHONUTF8": "0"}, []),
    "UTF-8 mode": ({"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}, []),
    "seed": ({"PYTHONHASHSEED": "4294967295"}, []),
    "optimised": ({}, ["-O"]),
    "no docstrings": ({}, ["-OO"]),
    "development mode": ({"PYTHONMALLOC": "debug"}, ["-X", "dev"]),
    "far away": ({"TZ": "Pacific/Kiritimati", "HOME": "/nonexistent", "USER": "nobody"}, []),
    "no bytecode": ({"PYTHONDONTWRITEBYTECODE": "1"}, ["-B"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_process_started_in_any_way_derives_the_golden_keys(root, tmp_path, way):
    environment, options = WAYS[way]
    script = root / "tests" / "unit" / "test_keys.py"
    done = subprocess.run(
        [sys.executable, *options, str(script), "here"],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=50,
    )
    golden = json.loads((script.parent / "golden" / "keys-v1.json").read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == [case["expected"] for case in golden["cases"]]
