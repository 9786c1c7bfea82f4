"""Which file system a directory is on."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

_IN_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def file_system(directory: Path) -> str:
    """Return the type of the file system that holds `directory`; empty if the system hides it."""
    best, kind = Path(), ""
    try:
        path = directory.resolve()
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount, name, *_ = line.split(" ")
        place = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), mount))
        # Of mounts on one place the last one counts.
        if path.is_relative_to(place) and len(place.parts) >= len(best.parts):
            best, kind = place, name
    return kind


def current_directory() -> Path:
    """Return it. Raises ConfigError when it was removed: torch does not even load there."""
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError("the current directory is gone; change to another") from error


def disk_directory() -> Path:
    """Return a directory to write to that is not in memory. Raises ConfigError for none."""
    for place in (current_directory(), Path("/var/tmp"), Path(tempfile.gettempdir())):  # noqa: S108  (made unguessable)
        try:
            if file_system(place) in _IN_MEMORY:
                continue
            with tempfile.TemporaryFile(dir=place):
                return place
        except OSError:
            continue
    raise ConfigError("no directory on a disk can be written to here; name one with --dir")
