"""``python -m kvtier`` and ``kvtier``: the command line."""

from __future__ import annotations

import sys
from typing import NoReturn

from kvtier.cli.interrupts import INTERRUPTED, AtOnce
from kvtier.cli.streams import ready_streams


def main() -> NoReturn:
    """Run this process's command line and exit."""
    try:
        ready_streams()
        with AtOnce():
            from kvtier.cli.main import main as run
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
