"""Memory nodes: which there are, and that an arena's pages come from all of them."""

from __future__ import annotations

import errno
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from kvtier.cli import copies
from kvtier.config import Config
from kvtier.device.paths import Table
from kvtier.errors import ConfigError
from kvtier.gpus import gpu_node
from kvtier.memory import arena as module
from kvtier.memory import numa
from kvtier.memory.arena import Arena
from kvtier.memory.numa import chosen_nodes, interleave, memory_nodes
from kvtier.testing.cpu_driver import CpuDriver


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
    monkeypatch.setattr(module, "chosen_nodes", lambda _: nodes)
    monkeypatch.setattr(module, "interleave", lambda *args: calls.append(args))
    arena = Arena(1 << 20)
    where = (arena.memory.ctypes.data, arena.nbytes, nodes)
    assert calls == ([where] if len(nodes) > 1 else [])
    arena.close()


def test_where_it_may_not_be_it_goes_on_and_says_so(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module, "chosen_nodes", lambda _: [0, 1])
    monkeypatch.setattr(module, "interleave", refuse)
    Arena(1 << 20).close()
    assert "not spread over the NUMA nodes 0, 1 (Operation not permitted)" in caplog.text


def test_a_machine_on_which_nobody_knows_how_is_told_of_too(monkeypatch, caplog):
    monkeypatch.setattr(numa.platform, "machine", lambda: "vax")
    monkeypatch.setattr(module, "chosen_nodes", lambda _: [1])
    Arena(1 << 20, nodes=[1]).close()
    assert "not spread over the NUMA nodes 1 (Function not implemented)" in caplog.text


# -------------------------------------------------------------------------------------- chosen


def test_nodes_that_are_named_are_the_only_ones(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "chosen_nodes", lambda wanted: list(wanted) or [0, 1])
    monkeypatch.setattr(module, "interleave", lambda *args: calls.append(args[2]))
    Arena(1 << 20, nodes=[1]).close()
    assert calls == [[1]]


def test_a_node_without_memory_is_refused_before_any_is_taken(tmp_path):
    (tmp_path / "has_memory").write_text("0-1\n")
    assert chosen_nodes([], tmp_path) == [0, 1]
    assert chosen_nodes([1], tmp_path) == [1]
    with pytest.raises(ConfigError, match=r"no memory on NUMA node 2, 7: it has some on 0, 1"):
        chosen_nodes([7, 1, 2], tmp_path)
    with pytest.raises(ConfigError, match="NUMA node 1023"):
        Arena(1 << 20, nodes=[1023])


def test_a_url_names_nodes():
    assert Config.from_urls(["dram:1GiB?numa=0,2-3"]).numa == (0, 2, 3)
    assert Config.from_urls(["dram:1GiB"]).numa == ()


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1-", "-1", "3-1", "0,,1", "1024", "0-9999999999", "1.5", "0-1-2"),
        *("1_0", "\u0661", " 1", "%2B1"),
    ],
)
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(ConfigError, match="numa"):
        Config.from_urls([f"dram:1GiB?numa={text}"])


@pytest.mark.parametrize("nodes", [[0], ("0",), (True,), (-1,), (0.0,)])
def test_a_config_by_hand_is_checked(nodes):
    with pytest.raises(ConfigError, match="memory node"):
        Config(1 << 30, numa=nodes)


@pytest.mark.parametrize(
    ("node", "nodes", "found"),
    [(1, [0, 1], ["NUMA node 1 of 2"]), (0, [0], []), (None, [0, 1], [])],
)
def test_the_doctor_names_it_where_there_is_a_choice(monkeypatch, tmp_path, node, nodes, found):
    monkeypatch.setattr(copies, "memory_nodes", lambda: nodes)
    driver = CpuDriver()
    driver.node = node
    rows = copies.copies_of(driver, tmp_path, Table(driver.name, ()))
    assert [row.found for row in rows] == found


def test_a_gpu_says_its_node(tmp_path):
    (tmp_path / "0000:3b:00.0").mkdir()
    file = tmp_path / "0000:3b:00.0" / "numa_node"
    for text, node in (("1\n", 1), ("-1\n", None), ("?\n", None)):
        file.write_text(text)
        assert gpu_node("0000:3B:00.0", tmp_path) == node
    assert gpu_node("0000:4B:00.0", tmp_path) is None
