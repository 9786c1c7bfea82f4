"""How fast a device copies between an engine's blocks and slots, beside plain copies.

    python benchmarks/device.py [--device cpu] [--json FILE]

gather, scatter: one part of 32 layers of K and V, 16 blocks in any order, from the call until its
fence is done, beside ``np.copyto`` of as many bytes in one piece; interleaved, in memory that no
cache holds. submit: how long the call itself takes for a part of 2 MiB; checked: the same in the
race checker. There is no CUDA device yet, so a GPU is not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from kvtier.device.base import Copy, Device
from kvtier.device.cpu import CpuDevice
from kvtier.device.race import Checked

PLANES, BLOCKS = 64, 16
SIZES = {"2MiB": 2 << 20, "16MiB": 16 << 20}
ROUNDS = 41
MEMORY = 256 << 20  # of each kind
LIMITS = {"gather": 0.8, "scatter": 0.8, "submit": 30.0}
SECONDS = 60.0


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def spread(values: list[float]) -> dict[str, float]:
    """Summarise: median, least, most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def over_copyto(device: Device, size: int) -> dict[str, dict[str, float]]:
    """Return the speed of gather and scatter over that of a plain copy, pair by pair."""
    parts, block = MEMORY // size, size // PLANES // BLOCKS
    pages = np.ones((PLANES, parts * BLOCKS, block), np.uint8)
    slots = np.ones((parts, PLANES, BLOCKS, block), np.uint8)
    plain = np.ones((2, parts, size), np.uint8)
    order = np.random.default_rng(0).permutation(parts * BLOCKS).reshape(parts, BLOCKS).tolist()
    ratios: dict[str, list[float]] = {"gather": [], "scatter": []}
    for turn in range(ROUNDS):
        part = turn % parts
        copy = Copy(pages, order[part], slots[part])
        ways = {
            "gather": lambda copy=copy: device.gather(device.stream("store"), [copy], ()),
            "scatter": lambda copy=copy: device.scatter(device.stream("load"), [copy], ())[-1],
        }
        for name, way in ways.items():
            copied = seconds(lambda way=way: way().wait(SECONDS))
            target, source = plain if name == "gather" else plain[::-1]
            bound = seconds(lambda to=target[part], of=source[part]: np.copyto(to, of))
            if turn:  # the first touches a thread that has to start
                ratios[name].append(bound / copied)
    return {name: spread(values) for name, values in ratios.items()}


def submit(device: Device) -> dict[str, float]:
    """Return the microseconds that a call takes, of a chunk of 2 MiB."""
    block = SIZES["2MiB"] // PLANES // BLOCKS
    pages = np.ones((PLANES, 8 * BLOCKS, block), np.uint8)
    copy = Copy(pages, tuple(range(0, 8 * BLOCKS, 8)), np.ones((PLANES, BLOCKS, block), np.uint8))
    times = []
    for _ in range(ROUNDS * 5):
        begin = time.perf_counter()
        fence = device.gather(device.stream("store"), [copy], (device.host_fence(),))
        times.append((time.perf_counter() - begin) * 1e6)
        fence.wait(SECONDS)
    return spread(times[1:])


def main() -> None:
    """Measure, interleaved, and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", choices=["cpu"], default="cpu")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    with closing(CpuDevice()) as device:
        ratios = {name: over_copyto(device, size) for name, size in SIZES.items()}
        told, checked = submit(device), submit(Checked(device))
    cpu: dict[str, object] = {
        f"{way}_over_copyto": {name: row[way]["median"] for name, row in ratios.items()}
        for way in ("gather", "scatter")
    }
    cpu["submit_us_per_chunk"] = told["median"]
    cpu["checked_submit_us_per_chunk"] = checked["median"]
    cpu["spread"] = {"over_copyto": ratios, "submit_us": told, "checked_submit_us": checked}
    for name, row in ratios.items():
        for way, found in row.items():
            low, high = found["min"], found["max"]
            print(f"{way:8} {name:6} {found['median']:6.2f} of copyto   ({low:.2f} to {high:.2f})")
    print(f"submit   {told['median']:6.1f} us a chunk, {checked['median']:.1f} us checked")
    print(f"limits: gather {LIMITS['gather']}, scatter {LIMITS['scatter']} of copyto, ", end="")
    print(f"submit {LIMITS['submit']:g} us")
    print("gpu: not run")
    if options.json:
        options.json.write_text(json.dumps({"cpu": cpu, "gpu": "not run"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
