"""A short form of ``make engines``, where its venv is there: real vLLM, one model, DRAM alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = Path(os.environ.get("KVTIER_ENGINES", ROOT / ".venv-engines"))
SECONDS = 900


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_real_engines_answer_as_they_do_without_kvtier():
    python = ENGINES / "bin" / "python"
    if not (ENGINES / ".engines-done").exists():
        pytest.skip("vLLM absent: `make engines` installs it and runs all of its cases")
    done = subprocess.run(
        [python, ROOT / "tests" / "engines" / "run.py", "--short"],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.stdout, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert {how for cases in outcomes.values() for how in cases.values()} == {"ok"}, done.stderr
