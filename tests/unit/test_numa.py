"""Memory nodes: which there are, and that an arena's pages come from all of them."""

from __future__ import annotations

import errno
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from kvtier.memory import arena as module
from kvtier.memory.arena import Arena
from kvtier.memory.numa import interleave, memory_nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", [0]), ("0-1\n", [0, 1]), ("0-1,3,8-9\n", [0, 1, 3, 8, 9]), ("\n", []), ("x\n", [])],
)
def test_nodes_are_read_as_the_kernel_lists_them(tmp_path, text, nodes):
    (tmp_path / "has_memory").write_text(text)
    assert memory_nodes(tmp_path) == nodes


def test_a_kernel_without_nodes_has_none(tmp_path):
    assert memory_nodes(tmp_path) == []


def policy(address: int) -> str:
    """Return the policy of a mapping of this process."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if line.startswith(f"{address:x} "):
            return line.split()[1]
    return ""


def test_the_kernel_takes_the_policy_for_memory_that_is_shared():
    """With the nodes of this machine, be it one: what the kernel says of the mapping counts."""
    nodes = memory_nodes()
    with mmap.mmap(-1, 1 << 20) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        try:
            interleave(address, 1 << 20, nodes or [0])
        except OSError as error:
            if error.errno in {errno.EPERM, errno.ENOSYS}:
                pytest.skip(f"this system does not let mbind: {error.strerror}")
            raise
        assert re.fullmatch(r"interleave.*:[\d,-]+", policy(address))


@pytest.mark.parametrize("nodes", [[], [0], [0, 1]])
def test_an_arena_is_spread_only_over_several_nodes(monkeypatch, nodes):
    calls = []
    monkeypatch.setattr(module, "memory_nodes", lambda: nodes)
    monkeypatch.setattr(module, "interleave", lambda *args: calls.append(args))
    arena = Arena(1 << 20)
    where = (arena.memory.ctypes.data, arena.nbytes, nodes)
    assert calls == ([where] if len(nodes) > 1 else [])
    arena.close()


def test_where_it_may_not_be_it_goes_on_and_says_so(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module, "memory_nodes", lambda: [0, 1])
    monkeypatch.setattr(module, "interleave", refuse)
    Arena(1 << 20).close()
    assert "not spread over the NUMA nodes 0, 1 (Operation not permitted)" in caplog.text
