"""What ``device_gpu.py`` measures of runs of bytes, and what a tool of CUDA's sees of the kernel.

near: loads by batched copies of runs about 28 KiB, in stream order, and in any order, since nobody
writes their source. inside: the kernel from blocks to the GPU's own memory and back, over no link.
memcheck: accesses of the kernel beyond memory, by compute-sanitizer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from device_sizes import KIB

from kvtier.device.base import Copy
from kvtier.device.driver import Driver, Work
from kvtier.device.layout import bytes_at
from kvtier.device.paths import Choice
from kvtier.device.spread import Spread, spreads
from kvtier.device.torch_driver import TorchDriver, batched_copies

if TYPE_CHECKING:
    from device_gpu import Bench

ROOT = Path(__file__).parents[1]
ANY_ORDER = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY
WRONG = 9  # the status that compute-sanitizer is to end with


@contextlib.contextmanager
def in_any_order(driver: Driver) -> Iterator[None]:
    """Let batched copies read their sources in any order: nobody may write those meanwhile."""
    if not isinstance(driver, TorchDriver):
        yield
        return
    kept, driver.copies = driver.copies, batched_copies(driver.version, order=ANY_ORDER)
    try:
        yield
    finally:
        driver.copies = kept


def near(bench: Bench) -> dict[str, float]:
    """Measure loads of runs of few sizes, few and many, scattered and in order."""
    found: dict[str, float] = {}
    if not bench.driver.batches:
        return found
    bench.device.way = Choice("batch")
    stream = bench.device.stream("load").handle
    for block in bench.sizes.near:
        for count in bench.sizes.near_runs:
            kv = bench.cache(1, block, 2 * count)
            (copy,) = bench.copies(kv, count, count * block)
            load = partial(bench.run, "load", [copy])
            name = f"{count} runs of {block >> 10} KiB"
            took = bench.timed(stream, load, asleep=count)
            found[name] = copy.slot.nbytes / statistics.median(took) / 1e6
            with in_any_order(bench.driver):
                took = bench.timed(stream, load, asleep=count)
            found[f"{name}, any order"] = copy.slot.nbytes / statistics.median(took) / 1e6
    many = bench.sizes.near_runs[-1]
    kv = bench.cache(1, 8 * KIB, 2 * many + 32)
    pages = bench.device.pages(kv, 1, 8 * KIB)
    slot = bench.arena[: many * 8 * KIB].reshape(1, many, 8 * KIB)
    ids = [at // 16 * 32 + at % 16 for at in range(many)]
    load = partial(bench.run, "load", [Copy(pages, ids, slot)])
    took = bench.timed(stream, load, asleep=many)
    found["8 KiB, 16 in a row joined"] = slot.nbytes / statistics.median(took) / 1e6
    return found


def inside(bench: Bench) -> dict[str, float]:
    """Measure the kernel alone, with all SMs: what the staged way takes before the link."""
    found: dict[str, float] = {}
    stream = bench.device.stream("store").handle
    for name, (planes, block, chunk) in bench.sizes.geometries.items():
        kv = bench.cache(planes, block, 2 * bench.sizes.total // (planes * block))
        copies = bench.copies(kv, chunk)
        first, total = bench.arena.ctypes.data, sum(copy.slot.nbytes for copy in copies)
        there = bench.torch.zeros(total, dtype=bench.torch.uint8, device="cuda")
        moved = [
            Copy(pages, ids, bytes_at(there, _inside(slot, first, there), slot.shape, slot.strides))
            for pages, ids, slot in copies
        ]
        (spread,) = spreads([moved])[0]
        for role in ("store", "load"):
            table, work = _work(bench.torch, spread.cut(), into_slot=role == "store")
            launch = partial(bench.driver.launch, stream, work, bench.driver.processors)
            took = bench.timed(stream, launch)
            found[f"{name}, {role}"] = total / statistics.median(took) / 1e6
            del table  # which the kernel has read by now
        _check(bench.torch, kv, copies, there)
    return found


def _check(torch: Any, kv: Any, copies: list[Copy], there: Any) -> None:
    """Raise RuntimeError where copies of whole chunks, one after another, are not there."""
    at = 0
    for _, ids, slot in copies:
        want = kv.index_select(1, torch.tensor(ids, device="cuda"))
        if not torch.equal(there[at : at + slot.nbytes].view(want.shape), want):
            raise RuntimeError(f"the kernel copied blocks {ids[:3]}... wrong")
        at += slot.nbytes


def _inside(slot: Any, first: int, there: Any) -> int:
    """Return where a slot of memory that begins at `first` is, in the GPU's memory."""
    return int(there.data_ptr()) + slot.ctypes.data - first


def _work(torch: Any, spread: Spread, *, into_slot: bool) -> tuple[Any, Work]:
    """Return a table in the GPU's memory, and what of it the kernel is to do: all."""
    rows = np.concatenate(spread.rows(into_slot=into_slot)).view(np.int64)
    table = torch.tensor(rows, device="cuda")
    planes, runs, begins = len(spread.planes[0]), len(spread.runs), int(table.data_ptr())
    return table, Work(begins, begins + 16 * planes, planes, runs, planes, runs)


def memcheck(seconds: float) -> str:
    """Let compute-sanitizer see the copies of one layout on each way; say what it found."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "not run: there is no compute-sanitizer"
    tests = ROOT / "tests" / "unit" / "test_device_gpu.py"
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "MLA", tests)
    command = [tool, "--error-exitcode", str(WRONG), *pytest]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # to end what the tool has started, too, which holds the GPU
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"left out: not over in {seconds:.0f} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}: {said[-2000:]}")
    return "nothing was found"
