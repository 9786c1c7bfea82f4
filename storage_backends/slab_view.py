"""A slab directory seen from outside: nothing is locked, made or written.

Somebody may have it open meanwhile: then files come and go, and the index is as last committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, Corrupt
from kvtier.storage_backends.slab import Segment
from kvtier.storage_backends.slab_directory import FORMAT, holder, refuse_odd_files
from kvtier.storage_backends.slab_pages import IndexPages

_FORMAT: Final = re.compile(rb"kvtier slab store, format (\d{1,9})\n")
_SETTINGS: Final = re.compile(rb"capacity (\d{1,19})\ndurability (none|batch|each)\n")
_KEPT: Final = re.compile(r"index-\w+\.bad")
_OWN: Final = re.compile(
    r"format|lock|settings|unsynced|selftest|[\w.]+\.tmp|index\.lmdb(-lock)?|index-\w+\.bad"
)
_MOST: Final = 4096  # bytes of a small file that are looked at


class View:
    """A directory that holds a store of this version. Raises ConfigError for any other."""

    def __init__(self, path: Path) -> None:
        """Look whether there is such a store, and who has it open."""
        self.path = path
        try:
            if path.is_dir():
                refuse_odd_files(path)
            self.version = self._version()
            self.holder = holder(path)
            self.capacity, self.durability = self._settings()
        except OSError as error:
            raise self._refused(error) from error

    @property
    def index(self) -> Path:
        """Where the index is."""
        return self.path / "index.lmdb"

    def entries(self) -> IndexPages:
        """Open the index. Raises Corrupt when it is missing or no whole index; ConfigError."""
        try:
            return IndexPages(self.index)
        except FileNotFoundError:
            raise Corrupt("missing") from None
        except OSError as error:
            raise self._refused(error) from error

    def segments(self) -> dict[int, Segment]:
        """Return the segments by number. Those that an owner removes meanwhile may be missing."""
        found = {}
        for name in self._names():
            with contextlib.suppress(FileNotFoundError):
                segment = Segment.named(name, (self.path / name).stat().st_size)
                if segment is not None:
                    found[segment.number] = segment
        return found

    @property
    def empty(self) -> bool:
        """Whether there is no index, as in a store that nothing was written to."""
        return self.index_bytes() == 0

    def index_bytes(self) -> int:
        """Return the length of the index file, 0 if there is none."""
        try:
            return self.index.stat().st_size
        except FileNotFoundError:
            return 0

    def set_aside_bytes(self) -> int:
        """Return what an unreadable index that was kept takes on the disk."""
        return self._blocks(name for name in self._names() if _KEPT.fullmatch(name))

    def disk_bytes(self) -> int:
        """Return what the directory and the store's files in it take on the disk."""
        own = (name for name in self._names() if _OWN.fullmatch(name))
        return self._blocks([".", *own, *(segment.name for segment in self.segments().values())])

    def _blocks(self, names: Iterable[str]) -> int:
        total = 0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (self.path / name).stat().st_blocks * 512
        return total

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.path.iterdir())
        except OSError as error:
            raise self._refused(error) from error

    def _version(self) -> int:
        if not self.path.is_dir():
            cause = "is no directory" if self.path.exists() else "does not exist"
            raise ConfigError(f"{self.path} {cause}; name the directory of an lmdb tier")
        content = self._small("format")
        if content is None:
            raise ConfigError(
                f"{self.path} holds no lmdb tier: it has no file named format; "
                f"name the directory that stands in the tier's URL"
            )
        found = _FORMAT.fullmatch(content)
        if found is None:
            raise ConfigError(
                f"{self.path} is no lmdb tier, or a damaged one: its file named format begins with "
                f"{content[:40]!r}; empty the directory, or name another"
            )
        if content != FORMAT:
            raise ConfigError(
                f"{self.path} has format {int(found[1])}, and this kvtier knows only "
                f"{FORMAT.split()[-1].decode()}; use the kvtier that wrote it"
            )
        return int(found[1])

    def _settings(self) -> tuple[int | None, str | None]:
        found = _SETTINGS.fullmatch(self._small("settings") or b"")
        return (int(found[1]), found[2].decode()) if found else (None, None)

    def _small(self, name: str) -> bytes | None:
        try:
            with (self.path / name).open("rb") as file:
                return file.read(_MOST)
        except FileNotFoundError:
            return None

    def _refused(self, error: OSError) -> ConfigError:
        number = error.errno or 0
        remedy = (
            "run this as the user that owns it" if number == errno.EACCES else "look at its disk"
        )
        name = errno.errorcode.get(number, str(number))
        return ConfigError(f"{self.path}: {name} ({os.strerror(number)}); {remedy}")


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
