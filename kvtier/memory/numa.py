"""An arena on a host of several memory nodes: its pages are spread over all of them.

One node would fill alone, and engines on the others would share its bandwidth. The policy belongs
to the memory, a memfd's too, so that it holds whoever touches a page first.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["interleave", "memory_nodes"]

_NODES: Final = Path("/sys/devices/system/node")
_MBIND: Final = {"x86_64": 237, "aarch64": 235}  # asm/unistd_64.h, asm-generic/unistd.h
_MPOL_INTERLEAVE: Final = 3  # linux/mempolicy.h
_WORD: Final = 64  # bits of an unsigned long


def memory_nodes(root: Path = _NODES) -> list[int]:
    """Return the nodes that have memory, as in ``0-1,3``; none where the kernel does not say."""
    try:
        text = (root / "has_memory").read_text(encoding="utf-8").strip()
        runs = [run.partition("-") for run in text.split(",") if run]
        return [
            node for first, _, last in runs for node in range(int(first), int(last or first) + 1)
        ]
    except (OSError, ValueError):
        return []


def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """Have pages that are not taken yet come from these nodes in turn.

    address: of a mapping, a page's. Raises OSError where the system does not let this process.
    """
    call = _MBIND.get(platform.machine())
    if call is None:
        return
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
