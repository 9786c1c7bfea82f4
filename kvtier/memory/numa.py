"""An arena on a host of several memory nodes: its pages are spread over all of them, or over some.

One node would fill alone, and engines on the others would share its bandwidth. Where all engines
are on one node, its own memory is nearer. The policy belongs to the memory, a memfd's too, so that
it holds whoever touches a page first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

_NODES: Final = Path("/sys/devices/system/node")
_MBIND: Final = {"x86_64": 237, "aarch64": 235}  # asm/unistd_64.h, asm-generic/unistd.h
_MPOL_INTERLEAVE: Final = 3  # linux/mempolicy.h
_WORD: Final = 64  # bits of an unsigned long
_MOST: Final = 1023  # the highest node a kernel can be built for
_RUN: Final = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def memory_nodes(root: Path = _NODES) -> list[int]:
    """Return the nodes that have memory, as in ``0-1,3``; none where the kernel does not say."""
    try:
        text = (root / "has_memory").read_text(encoding="utf-8").strip()
        return list(parse_nodes(text))
    except (OSError, ValueError):
        return []


def parse_nodes(text: str) -> tuple[int, ...]:
    """Return the nodes of a list like ``0-1,3``, in order. Raises ValueError for what is none."""
    nodes: set[int] = set()
    for run in text.split(","):
        found = _RUN.fullmatch(run)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not low <= high <= _MOST:
            raise ValueError(run)
        nodes.update(range(low, high + 1))
    return tuple(sorted(nodes))


def chosen_nodes(wanted: Sequence[int], root: Path = _NODES) -> list[int]:
    """Return the nodes that memory is to come from: all, where none is wanted.

    Raises ConfigError for one without memory.
    """
    there = memory_nodes(root)
    absent = sorted(set(wanted) - set(there))
    if absent:
        raise ConfigError(
            f"this host has no memory on NUMA node {', '.join(map(str, absent))}: it has some on "
            f"{', '.join(map(str, there)) or 'none that the kernel tells of'}; "
            "leave numa= out to take it from all"
        )
    return list(wanted) or there


def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """Have pages that are not taken yet come from these nodes in turn.

    address: of a mapping, a page's. Raises OSError where the system does not let this process,
    or where it is not known how to ask it.
    """
    call = _MBIND.get(platform.machine())
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = (ctypes.c_ulong * (max(nodes) // _WORD + 1))()
    for node in nodes:
        words[node // _WORD] |= 1 << node % _WORD
    libc = ctypes.CDLL(None, use_errno=True)
    most = ctypes.c_ulong(len(words) * _WORD + 1)
    start, size = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    mode, flags = ctypes.c_ulong(_MPOL_INTERLEAVE), ctypes.c_ulong(0)
    if libc.syscall(ctypes.c_long(call), start, size, mode, words, most, flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
