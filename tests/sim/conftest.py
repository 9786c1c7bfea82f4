"""What all simulated worlds have."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quiet(caplog):
    """A faulty store is warned about; that is no news here."""
    caplog.set_level("CRITICAL", logger="kvtier")
