"""``python -m kvtier`` and ``kvtier``: the command line."""

from __future__ import annotations

import os
import signal
from typing import Final, NoReturn

_INTERRUPTED: Final = 130


def main() -> NoReturn:
    """Run this process's command line and exit."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may ignore it
    if ours:  # an interrupt while modules are imported has nothing to clean up
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from kvtier.cli.main import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
