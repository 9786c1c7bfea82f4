"""``python -m kvtier``: the command line."""

from __future__ import annotations

from kvtier.cli.main import main

if __name__ == "__main__":
    main()
