"""What a daemon writes into its log: its own words from a level on, and others' warnings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtier.daemon.logs import LEVEL, set_up
from kvtier.errors import ConfigError

SAYS = """
import logging
from kvtier.daemon.logs import set_up

set_up()
for name in ("kvtier", "botocore.credentials"):
    logging.getLogger(name).info("found some")
    logging.getLogger(name).warning("found none")
"""


def logged(**environ: str) -> list[str]:
    kept = {k: v for k, v in os.environ.items() if k not in (LEVEL, "JOURNAL_STREAM")}
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=kept | environ, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_others_are_heard_when_they_warn_and_a_journal_has_times_of_its_own():
    assert logged(JOURNAL_STREAM="8:1") == [
        "INFO kvtier: found some",
        "WARNING kvtier: found none",
        "WARNING botocore.credentials: found none",
    ]
    assert all(line.startswith("20") for line in logged())


def test_a_level_says_from_where_on():
    assert len(logged(**{LEVEL: "warning"})) == 2
    assert len(logged(**{LEVEL: "ERROR"})) == 1


def test_a_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv(LEVEL, "loud")
    with pytest.raises(ConfigError, match="unknown level in KVTIER_LOG_LEVEL 'loud'"):
        set_up()
