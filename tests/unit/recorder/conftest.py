"""Recorders of a test's folder, by a clock that goes on when told."""

from __future__ import annotations

import pytest

from kvtier.testing.hands import Hands
from kvtier.testing.small_recorder import recorders


@pytest.fixture
def clock() -> Hands:
    return Hands(50.0)


@pytest.fixture
def record(tmp_path, clock):
    """Return what starts a recorder."""
    with recorders(tmp_path, clock) as start:
        yield start


@pytest.fixture
def recorder(record):
    return record()
