"""How fast a device copies between an engine's blocks and slots, beside plain copies.

    python benchmarks/device.py [--device cpu|cuda] [--json FILE] [--plot FILE.png]

gather, scatter: parts of 16 blocks in any order, 32 MiB of them in one call, from that until its
fence is done, and by CPU time, which others on this machine disturb less, beside ``np.copyto`` of
as many bytes part by part; interleaved, in memory that no cache holds. A block has 32 KiB a plane,
as 16 tokens of Llama-3-8B have; smaller ones are shown beside it, and each plane as a tensor of its
own. every other: what the machine allows for such pieces: one ``np.copyto`` a part of as many
blocks, each second one of a row, which needs no list of them, and whose next place the processor
can foresee; none is in two of the parts. With blocks of 2 KiB that stays below the limit of 0.8,
and so does a loop of ``memcpy`` in C over the list of blocks.
submit: how long the call itself takes for a part of 2 MiB, of 64 planes, of 16 blocks; and of 256
that are smaller, scattered, with holes, or in a row; by the clock, and by this thread's CPU time.
checked: the same in the race checker. planned: what a GPU's device does before the driver's calls,
by CPU time, with a driver that does nothing: for sixteen such chunks in one call, and as many of 32
MiB, as 256 tokens of Llama-3-8B have, and where each layer has a tensor, microseconds a chunk of
each way, also of a load in 8 groups of layers, and a run of bytes of the batched one. grouped: a
load of 16 chunks of 2 MiB, by its plan, in 8 groups of layers, also where each layer has a tensor.
layer 0: which part of a load's bytes has landed when the reference engine computes its first layer
behind it (both: ``device_layers.py``). With --device cuda it is the GPU that is measured, by
``device_gpu.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from plot import draw, option

from kvtier.device.base import HOLE, Copy, Device, PlaneGroups
from kvtier.device.cpu import CpuDevice, CpuFence
from kvtier.device.cuda import CudaDevice
from kvtier.device.driver import Work
from kvtier.device.layout import bytes_at
from kvtier.device.paths import DEFAULT, PATHS, Choice
from kvtier.device.race import Checked
from kvtier.device.spread import describe
from kvtier.device.stack import stacked
from kvtier.errors import ConfigError
from kvtier.testing.cpu_driver import CpuDriver

PLANES, BLOCKS = 64, 16
PLANE_BYTES = {"32KiB": 32 << 10, "8KiB": 8 << 10, "2KiB": 2 << 10}  # of a block; the first counts
APART = "8KiB, a tensor a plane"
CALL = 32 << 20  # bytes of parts that one call copies, as one prompt has several
SIZES = {"2MiB": 2 << 20, "16MiB": 16 << 20}
ROUNDS = 25
MEMORY = 256 << 20  # of each kind
GROUPS = 8  # of planes, of a load
LIMITS = {
    "gather": 0.8,
    "scatter": 0.8,
    "submit": 30.0,
    "batch_us_per_run": 0.6,
    "planned": 25.0,
    "layer 0": 0.15,
}
PANELS = {
    "times of copyto": "spread.over_copyto.*.{gather,scatter}",
    "submitting a copy, us": "submit_us.*",
    "planning one, us": "planned_us.*.{batch,staged,direct}",
}
KINDS = {
    "16 blocks": ("scattered", BLOCKS),
    "256 blocks": ("scattered", 256),
    "256 blocks with holes": ("with holes", 256),
    "256 blocks in a row": ("in a row", 256),
}
SECONDS = 60.0


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Time one call: by the clock, and by what all threads of this process have computed."""
    begin, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - used


def spread(values: list[float]) -> dict[str, float]:
    """Summarise: median, least, most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def over_copyto(device: Device, size: int, kind: str) -> dict[str, dict[str, float]]:
    """Return the speed of gather and scatter over that of a plain copy, pair by pair."""
    block = PLANE_BYTES[kind.partition(",")[0]]
    parts, planes, several = MEMORY // size, size // block // BLOCKS, CALL // size
    pages = np.ones((planes, parts * BLOCKS, block), np.uint8)
    (kv,) = stacked(list(pages[:, None])) if kind == APART else (pages,)
    slots = np.ones((parts, planes, BLOCKS, block), np.uint8)
    plain = np.ones((2, parts, size), np.uint8)
    order = np.random.default_rng(0).permutation(parts * BLOCKS).reshape(parts, BLOCKS).tolist()
    names = ("gather", "scatter", "every other out", "every other in")
    ratios: dict[str, list[float]] = {
        f"{name}{clock}": [] for name in names for clock in ("", " by CPU time")
    }
    first = 0
    for turn in range(ROUNDS):
        for name in names:
            mine = [(first + at) % parts for at in range(several)]
            others = [(part + parts // 2) % parts for part in mine]
            first += several  # so that no turn finds what another has left in a cache
            copies = [Copy(kv, order[part], slots[part]) for part in mine]
            if name in ("gather", "scatter"):
                copied = seconds(lambda name=name, copies=copies: copy(device, name, copies))
            else:
                copied = seconds(lambda name=name, mine=mine: every_other(name, mine, pages, slots))
            bound = seconds(lambda others=others: [np.copyto(*plain[:, part]) for part in others])
            if turn:  # the first touches a thread that has to start
                ratios[name].append(bound[0] / copied[0])
                ratios[f"{name} by CPU time"].append(bound[1] / copied[1])
    return {name: spread(values) for name, values in ratios.items()}


def every_other(name: str, parts: list[int], pages: Any, slots: Any) -> None:
    """Copy the parts' slots out of, or into, each second block."""
    for part in parts:
        first = 2 * part * BLOCKS % pages.shape[1]  # not what the part before it left in a cache
        blocks = pages[:, first : first + 2 * BLOCKS : 2]
        np.copyto(*((slots[part], blocks) if name.endswith("out") else (blocks, slots[part])))


def copy(device: Device, name: str, copies: list[Copy]) -> None:
    """Enqueue copies and wait for them."""
    if name == "gather":
        device.gather(device.stream("store"), copies, ()).wait(SECONDS)
    else:
        device.scatter(device.stream("load"), [copies], ())[-1].wait(SECONDS)


def ids(kind: str, count: int, chunk: int = 0) -> tuple[int, ...]:
    """Return the blocks of one of eight chunks, of as many that there are in all of them."""
    if kind == "in a row":
        return tuple(range(chunk * count, (chunk + 1) * count))
    holes = kind == "with holes"
    return tuple(HOLE if holes and at % 4 == 1 else 8 * at + chunk for at in range(count))


def chunk(kind: str, count: int) -> Copy:
    """Return the copy of a chunk of 2 MiB."""
    block = SIZES["2MiB"] // PLANES // count
    pages = np.ones((PLANES, 8 * count, block), np.uint8)
    return Copy(pages, ids(kind, count), np.ones((PLANES, count, block), np.uint8))


def submit(device: Device, kind: str = "scattered", count: int = BLOCKS) -> dict[str, Any]:
    """Return the microseconds that a call takes, of a chunk of 2 MiB in so many blocks."""
    copy, times, used = chunk(kind, count), [], []
    for _ in range(ROUNDS * 5):
        begin, began = time.perf_counter(), time.thread_time()
        fence = device.gather(device.stream("store"), [copy], (device.host_fence(),))
        used.append((time.thread_time() - began) * 1e6)
        times.append((time.perf_counter() - begin) * 1e6)
        fence.wait(SECONDS)
    return {**spread(times[1:]), "cpu": spread(used[1:])}


class Idle(CpuDriver):
    """A driver that does nothing: what is left is the planner."""

    def record(self, _: Any) -> CpuFence:
        """Return what is done."""
        fence = CpuFence()
        fence.settle()
        return fence

    def wait(self, stream: Any, event: Any) -> None:
        """Wait for nothing."""

    def copy(
        self, stream: Any, to: int, of: int, nbytes: int, planes: int = 1, step: int = 0
    ) -> None:
        """Copy nothing."""

    def batch(self, stream: Any, table: Any) -> None:
        """Copy nothing."""

    def launch(self, stream: Any, work: Work, grid: int) -> None:
        """Copy nothing."""


def planned(kind: str, count: int, size: int, tensors: int = 1) -> dict[str, Any]:
    """Return the microseconds of planning a chunk, way by way, and a run of a batched copy.

    Nothing is copied: pages and slots are addresses, and no memory. tensors: in which the planes
    lie, with some memory between them.
    """
    many, block, planes = 16, size // PLANES // count, PLANES // tensors
    row = 8 * count * block
    (pages,) = stacked(
        [
            bytes_at(None, at * planes * 2 * row, (planes, 8 * count, block), (row, block, 1))
            for at in range(1, tensors + 1)
        ]
    )
    slots = bytes_at(None, 1 << 44, (many, PLANES, count, block), (size, count * block, block, 1))
    copies = [Copy(pages, ids(kind, count, at % 8), slot) for at, slot in enumerate(slots)]
    runs = len(describe(copies))
    found: dict[str, Any] = {"runs": runs}
    with closing(CudaDevice(Idle(), DEFAULT)) as device:
        device.pin(slots)
        cuts = tuple((at, at + PLANES // GROUPS) for at in range(0, PLANES, PLANES // GROUPS))
        groups = PlaneGroups(copies, [cuts] * many, GROUPS)
        for way in PATHS:
            device.way = Choice(way)
            store = partial(device.gather, device.stream("store"), copies, ())
            load = partial(device.scatter, device.stream("load"), groups, ())
            for name, call in ((way, store), (f"{way} in groups", load)):
                used = []
                for _ in range(ROUNDS + 1):
                    begin = time.thread_time()
                    call()
                    used.append((time.thread_time() - begin) * 1e6)
                found[name] = spread([one / many for one in used[1:]])
    found["batch_us_per_run"] = found["batch"]["median"] * many / runs
    return found


def on_gpu(path: Path | None) -> int:
    """Measure the GPU and save after each step; 1 where there is none, or a step failed."""
    from device_gpu import measure

    def save(found: object) -> None:
        if path:
            path.write_text(json.dumps({"gpu": found}, indent=1) + "\n")

    try:
        return 0 if measure(save) else 1
    except ConfigError as error:
        print(f"gpu: not run: {error}")
        save("not run")
        return 1


def tell(
    ratios: Mapping[str, Any],
    told: Mapping[str, float],
    checked: Mapping[str, float],
    grouped: Mapping[str, float],
    others: Mapping[str, Any],
    plans: Mapping[str, Any],
) -> None:
    """Print what copies and their submission took."""
    for kind, sizes in ratios.items():
        for name, row in sizes.items():
            for way, found in row.items():
                low, high = found["min"], found["max"]
                print(
                    f"{way:27} {name:6} blocks of {kind:22} {found['median']:6.2f} of copyto ",
                    end="",
                )
                print(f"({low:.2f} to {high:.2f})")
    print(
        f"submit   {told['median']:6.1f} us a chunk, {checked['median']:.1f} us checked, ", end=""
    )
    print(f"{grouped['median']:.1f} us grouped ({grouped['min']:.1f} to {grouped['max']:.1f})")
    for name, one in others.items():
        print(
            f"submit   {one['median']:6.1f} us ({one['min']:.1f} to {one['max']:.1f}), "
            f"{one['cpu']['median']:.1f} us of CPU time: a chunk of {name}"
        )
    for name, one in plans.items():
        ways = ", ".join(
            f"{way} {one[way]['median']:.1f} ({one[f'{way} in groups']['median']:.1f})"
            for way in PATHS
        )
        print(f"planned  {ways} us a chunk (in groups), ", end="")
        print(f"{one['batch_us_per_run']:.3f} us a run: {name}")


def main() -> int:
    """Measure, interleaved, and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    option(arguments)
    options = arguments.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if options.device == "cuda":
        if options.plot:
            arguments.error("--plot draws what the CPU gives, and nothing of a GPU's")
        return on_gpu(options.json)
    with closing(CpuDevice()) as device:
        told, checked = submit(device), submit(Checked(device))
        others = {name: submit(device, *kind) for name, kind in KINDS.items()}
        ratios = {
            kind: {name: over_copyto(device, size, kind) for name, size in SIZES.items()}
            for kind in (*PLANE_BYTES, APART)
        }
    plans = {name: planned(*kind, SIZES["2MiB"]) for name, kind in KINDS.items()}
    plans["16 blocks, 32 MiB"] = planned("scattered", BLOCKS, 32 << 20)
    plans["16 blocks, a tensor a layer"] = planned("scattered", BLOCKS, SIZES["2MiB"], PLANES // 2)
    import device_layers

    landed, grouped = device_layers.layers(ROUNDS), device_layers.submit(ROUNDS * 5)
    apart = device_layers.submit(ROUNDS * 5, apart=True)
    counted = ratios[next(iter(PLANE_BYTES))]
    cpu: dict[str, object] = {
        f"{way}_over_copyto": {name: row[way]["median"] for name, row in counted.items()}
        for way in ("gather", "scatter")
    }
    cpu["submit_us_per_chunk"] = told["median"]
    cpu["grouped_submit_us_per_chunk"] = grouped["median"]
    cpu["grouped_submit_us_per_chunk_of_a_tensor_a_layer"] = apart["median"]
    cpu["checked_submit_us_per_chunk"] = checked["median"]
    cpu["submit_us"], cpu["planned_us"] = others, plans
    cpu["layer0_before_bytes_fraction"] = landed["fraction"]["median"]
    cpu["layers"] = landed
    cpu["spread"] = {
        "over_copyto": ratios,
        "submit_us": told,
        "checked_submit_us": checked,
        "grouped_submit_us": grouped,
    }
    tell(ratios, told, checked, grouped, others, plans)
    low, high = apart["min"], apart["max"]
    print(f"submit   {apart['median']:6.1f} us grouped ({low:.1f} to {high:.1f}): a tensor a layer")
    part = landed["fraction"]
    print(f"layer 0  {part['median']:.3f} of a load's bytes landed before it ", end="")
    print(f"({part['min']:.3f} to {part['max']:.3f}), in {landed['groups']} groups of layers")
    print(f"limits: gather {LIMITS['gather']}, scatter {LIMITS['scatter']} of copyto, ", end="")
    print(
        f"submit {LIMITS['submit']:g} us, planned {LIMITS['planned']:g} us staged and direct, "
        f"a run of a batch {LIMITS['batch_us_per_run']:g} us, ",
        end="",
    )
    print(f"layer 0 {LIMITS['layer 0']:g} of the bytes")
    print("gpu: not run")
    if options.json:
        options.json.write_text(json.dumps({"cpu": cpu, "gpu": "not run"}, indent=1) + "\n")
    draw(cpu, options.plot, PANELS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
