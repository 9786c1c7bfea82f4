"""How fast copies between an engine's blocks and slots are here, and which way they are to go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtier.bench.copypaths import CPU_BLOCK, cpu_speeds, measure
from kvtier.cli.probes import Finding
from kvtier.device.driver import Driver
from kvtier.device.nvrtc import default_folder
from kvtier.device.paths import Speed, Table
from kvtier.device.torch_driver import TorchDriver
from kvtier.errors import KvtierError
from kvtier.memory.numa import memory_nodes
from kvtier.units import format_bytes


def copies() -> list[Finding]:
    """Measure the CPU device, and the CUDA device where there is one. Blocks for up to minutes."""
    found = ", ".join(f"{role} {speed:.1f} GB/s" for role, speed in cpu_speeds())
    size = format_bytes(CPU_BLOCK)
    means = f"scattered blocks of {size} a plane, by one thread each"
    findings = [Finding("copies by CPU", "ok", found, means)]
    try:
        driver = TorchDriver()
    except KvtierError as error:
        means = "no copies to or from a GPU were measured"
        return [*findings, Finding("copies by GPU", "missing", "not run", means, str(error))]
    return [*findings, *copies_of(driver, default_folder())]


def copies_of(driver: Driver, folder: Path, table: Table | None = None) -> list[Finding]:
    """Measure the ways of a GPU, and keep what was found for its device to choose by. Blocks.

    table: measured already.
    """
    try:
        table = table or measure(driver)
        where = table.keep(folder)
    except (KvtierError, OSError, RuntimeError) as error:
        means = "copies go the ways that are best on most GPUs"
        return [Finding("copies by GPU", "limited", f"{driver.name}: {error}", means)]
    means = f"kept in {where}; new devices choose by it"
    rows = [Finding(_title(one), "ok", found, means) for one, found in _best(table.speeds)]
    return [*rows, *_nearest(driver, memory_nodes())]


def _nearest(driver: Driver, nodes: Sequence[int]) -> list[Finding]:
    """Say which memory a GPU is near to, where there is a choice."""
    if driver.node is None or len(nodes) < 2:  # noqa: PLR2004  (the only one is near to all)
        return []
    means = f"where only GPUs of that node use a cache, open it with dram:SIZE?numa={driver.node}"
    return [Finding("memory near the GPU", "ok", f"NUMA node {driver.node} of {len(nodes)}", means)]


def _title(one: Speed) -> str:
    return f"{one.role} of {one.runs} runs of {format_bytes(one.run_bytes)}"


def _best(speeds: Iterable[Speed]) -> list[tuple[Speed, str]]:
    """Return for each kind of copy the fastest, and what was found of all ways."""
    kinds: dict[tuple[str, int, int], list[Speed]] = {}
    for one in speeds:
        kinds.setdefault((one.role, one.run_bytes, one.runs), []).append(one)
    rows = []
    for found in kinds.values():
        ordered = sorted(found, key=lambda one: -one.gb_per_s)
        rows.append((ordered[0], ", ".join(f"{_way(one)} {one.gb_per_s:.1f}" for one in ordered)))
    return [(one, f"{text} GB/s") for one, text in rows]


def _way(one: Speed) -> str:
    return one.choice.way + (f" ({one.choice.grid})" if one.choice.way == "direct" else "")
