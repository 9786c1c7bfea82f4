"""Host memory that several processes map: a memfd whose size nobody can change."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.units import format_bytes

PAGE_BYTES: Final = 4096
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memory(capacity: int) -> int:
    """Return the descriptor of a memfd of `capacity` bytes, in whole pages, whose size is sealed.

    Its pages are not taken yet: an Arena does that. Raises ConfigError where there is no room.
    """
    check_room(capacity)
    fd = os.memfd_create("kvtier-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, capacity // PAGE_BYTES * PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise no_memory(capacity, error) from error
    return fd


def check_room(capacity: int) -> None:
    """Refuse less than a page, and more than is available. Raises ConfigError."""
    if capacity < PAGE_BYTES:
        raise ConfigError(
            f"dram capacity {format_bytes(capacity)} is below one chunk of any model, and below "
            f"one page of {format_bytes(PAGE_BYTES)}; ask for more"
        )
    available = available_bytes()
    if capacity > available:
        raise ConfigError(
            f"dram capacity {format_bytes(capacity)} is more than the "
            f"{format_bytes(available)} of memory available here; ask for less"
        )


def sealed_size(fd: int) -> int:
    """Return the size of an arena's memory. Raises ConfigError for what others may truncate."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ConfigError("this memory is not sealed; it must come from kvtier's sealed_memory")
    return os.fstat(fd).st_size


def no_memory(capacity: int, error: OSError) -> ConfigError:
    """Build the error for memory that the system does not give."""
    limit = "-f, LimitFSIZE=" if error.errno == errno.EFBIG else "-v, LimitAS="
    return ConfigError(
        f"cannot take {format_bytes(capacity)} of memory for dram "
        f"({error.strerror}; {format_bytes(available_bytes())} available); ask for less, or "
        f"raise this process's limit (ulimit {limit})"
    )


def available_bytes(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that a new arena may take: of the host, of this cgroup and those above."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    inside = ""
    with contextlib.suppress(OSError):
        inside = (proc / "self" / "cgroup").read_text().partition("0::/")[2].strip()
    for folder in (root / inside, *(root / inside).parents):
        if folder.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or no cgroup v2
                available = min(available, _cgroup_room(folder))
    return max(available, 0)


def _cgroup_room(folder: Path) -> int:
    """Return what a cgroup may still take; the page cache that counts in it can be taken back."""
    limit = int((folder / "memory.max").read_text())
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in map(str.split, lines)}
    used = int((folder / "memory.current").read_text())
    return limit - used + stat["inactive_file"] + stat["active_file"]
