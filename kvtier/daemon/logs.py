"""How a daemon logs: what kvtier says from a level on, and of all others what is a warning."""

from __future__ import annotations

import logging
import os
from typing import Final

from kvtier.errors import unknown

LEVEL: Final = "KVTIER_LOG_LEVEL"
_LEVELS: Final = ("debug", "info", "warning", "error")


def set_up() -> None:
    """Log to stderr; with times, unless a journal adds its own. A server inherits its level.

    Raises ConfigError for a level that is none.
    """
    level = os.environ.get(LEVEL, "info").lower()
    if level not in _LEVELS:
        raise unknown(f"level in {LEVEL}", level, _LEVELS)
    said = "%(levelname)s %(name)s: %(message)s"
    if "JOURNAL_STREAM" not in os.environ:  # systemd.exec(5)
        said = f"%(asctime)s {said}"
    logging.basicConfig(format=said, level=logging.WARNING)
    logging.getLogger("kvtier").setLevel(level.upper())
