"""What ``benchmarks/device.py --device cuda`` measures on a GPU. It has not run on one yet.

Steps, in their order, each of which is saved before the next begins; those that do not fit into
four minutes are named as left out:

link       1 GiB each way, pinned and pageable, and both ways at once
right      bytes of each way of copying, there and back, beside ``torch.index_select``
copies     each way and direction for the chunks of three models: GB/s, the share of the link,
           microseconds of the caller's time for a chunk, and for a run of bytes
near       batched copies of runs about 28 KiB, where an H100 falls; loads in any order, too
inside     the kernel between blocks and the GPU's own memory, over no link
overlap    80 products of 8192 x 8192 matrices in bf16, alone and beside copies of each way
layers     which part of a load's bytes has landed when what waits for its first layers begins
ttft       a prompt recomputed, loaded whole, and loaded layer by layer under 32 random layers
order      what copies and compute must wait for: see ``device_order.py``
engine     the reference engine on the GPU: see ``engine_gpu.py``
memcheck   what compute-sanitizer sees of a few small copies, where it is installed
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
from device_order import Hazards
from device_runs import inside, memcheck, near
from device_sizes import HERE, Layer, Sizes, machine
from engine_gpu import milliseconds, on_gpu

from kvtier.device.base import Copy
from kvtier.device.cuda import CudaDevice
from kvtier.device.driver import Driver
from kvtier.device.paths import Choice
from kvtier.device.spread import describe
from kvtier.device.torch_driver import cuda_device
from kvtier.testing.layouts import plane_groups

BUDGET, MINUTES_4 = 220.0, 240.0  # seconds, after which no step begins, and all has to be over
LIMITS = {"llama": 0.9, "mla": 0.8}
TURNS = 3
RUNS = 20_000  # that are enqueued, at 0.6 us each, in half of a fortieth of a second
SECONDS = 60.0


class Bench:
    """A GPU, pinned memory, and what is measured with them."""

    def __init__(self, device: CudaDevice, driver: Driver, torch: Any, sizes: Sizes = HERE) -> None:
        self.torch, self.device, self.driver, self.sizes = torch, device, driver, sizes
        self.arena = np.frombuffer(mmap.mmap(-1, 2 * sizes.link), np.uint8)
        device.pin(self.arena)
        self.link = {"load": 0.0, "store": 0.0}
        self.begin = time.perf_counter()

    def choices(self) -> Iterator[Choice]:
        """Yield all ways of copying."""
        if self.driver.batches:
            yield Choice("batch")
        yield Choice("staged")
        yield from (Choice("direct", grid) for grid in self.sizes.grids)

    def timed(self, stream: Any, work: Callable[[], object], *, asleep: int = 0) -> list[float]:
        """Return the milliseconds that some turns took on a stream, the first one left out.

        asleep: let the stream sleep until so many runs are enqueued, so that the host's time does
        not count.
        """
        cuda, found = self.torch.cuda, []
        for _ in range(TURNS + 1):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            cuda.synchronize()
            if asleep:
                self.sleep(stream, asleep)
            begin.record(stream)
            work()
            end.record(stream)
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return found[1:]

    def sleep(self, stream: Any, runs: int) -> None:
        """Let a stream sleep for longer than it takes to enqueue the copies of so many runs."""
        cycles = self.sizes.sleep // 4 * (1 + runs // RUNS)
        with self.torch.cuda.stream(stream):
            self.torch.cuda._sleep(cycles)  # noqa: SLF001  (there is no public one)

    def cache(self, planes: int, block: int, blocks: int) -> Any:
        """Return a KV tensor of random bytes, [planes, blocks, bytes]."""
        shape = (planes, blocks, block)
        return self.torch.randint(0, 255, shape, dtype=self.torch.uint8, device="cuda")

    def copies(self, kv: Any, chunk: int, total: int | None = None) -> list[Copy]:
        """Return copies of whole chunks of scattered blocks; slots lie one after another."""
        total = self.sizes.total if total is None else total
        planes, blocks, block = kv.shape
        pages, size = self.device.pages(kv, planes, block), planes * chunk * block
        order = np.random.default_rng(0).permutation(blocks)
        count = min(total // size, blocks // chunk)
        places = [at % (self.arena.size // size) * size for at in range(count)]
        slots = [self.arena[at : at + size].reshape(planes, chunk, block) for at in places]
        ids = (order[at * chunk : (at + 1) * chunk].tolist() for at in range(count))
        return [Copy(pages, some, slot) for some, slot in zip(ids, slots, strict=True)]

    def run(self, role: str, copies: list[Copy], groups: int = 1) -> list[Any]:
        """Enqueue a load or a store, after what this thread has computed; return its fences."""
        return self.after(role, copies, [self.device.host_fence()], groups)

    def after(self, role: str, copies: list[Copy], fences: list[Any], groups: int = 1) -> list[Any]:
        """Enqueue a load or a store after fences. Raises what the driver refuses, which is fast."""
        if role == "store":
            found: list[Any] = [self.device.gather(self.device.stream("store"), copies, fences)]
        else:
            cut = plane_groups(copies, groups)
            found = [*self.device.scatter(self.device.stream("load"), cut, fences)]
        for fence in found:
            if fence.error is not None:
                raise fence.error
        return found

    # ------------------------------------------------------------------------------ the steps

    def step_link(self) -> dict[str, float]:
        """Measure single large copies."""
        torch = self.torch
        here, size = torch.from_numpy(self.arena), self.sizes.link
        there, more = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        paged = torch.zeros(size, dtype=torch.uint8)
        stream, other = (self.device.stream(role).handle for role in ("load", "store"))

        def one(to: Any, of: Any) -> float:
            with torch.cuda.stream(stream):
                took = self.timed(stream, lambda: to.copy_(of, non_blocking=True))
            return size / statistics.median(took) / 1e6

        def both() -> None:
            other.wait_stream(stream)
            with torch.cuda.stream(stream):
                there.copy_(here[:size], non_blocking=True)
            with torch.cuda.stream(other):
                here[size:].copy_(more, non_blocking=True)
            stream.wait_stream(other)

        self.link = {"load": one(there, here[:size]), "store": one(here[:size], there)}
        return {
            **{f"{role} pinned": speed for role, speed in self.link.items()},
            "load pageable": one(there, paged),
            "store pageable": one(paged, there),
            "both at once": 2 * size / statistics.median(self.timed(stream, both)) / 1e6,
        }

    def step_right(self) -> dict[str, bool]:
        """Compare bytes, there and back."""
        torch, found = self.torch, {}
        for name, (planes, block, chunk) in self.sizes.geometries.items():
            kv = self.cache(planes, block, 4 * chunk)
            copies = self.copies(kv, chunk, 2 * planes * block * chunk)
            ids = [torch.tensor(copy.blocks, device="cuda") for copy in copies]
            want = [kv.index_select(1, some) for some in ids]
            for choice in self.choices():
                self.device.way = choice
                self.arena[: 2 * copies[0].slot.nbytes] = 0
                (stored,) = self.run("store", copies)
                right = stored.wait(SECONDS) and all(
                    np.array_equal(copy.slot, wanted.cpu().numpy())
                    for copy, wanted in zip(copies, want, strict=True)
                )
                fresh = torch.zeros_like(kv)
                pages = self.device.pages(fresh, planes, block)
                back = [Copy(pages, copy.blocks, copy.slot) for copy in copies]
                *_, landed = self.run("load", back, 4)
                right = right and landed.wait(SECONDS)
                for some, wanted in zip(ids, want, strict=True):
                    right = right and torch.equal(fresh.index_select(1, some), wanted)
                named = fresh.index_select(1, torch.cat(ids)).sum(dtype=torch.int64)
                right = right and torch.equal(fresh.sum(dtype=torch.int64), named)
                found[f"{name}, {title(choice)}"] = bool(right)
        return found

    def step_copies(self) -> dict[str, Any]:
        """Measure all ways for all geometries."""
        found: dict[str, Any] = {}
        for name, (planes, block, chunk) in self.sizes.geometries.items():
            kv = self.cache(planes, block, 2 * self.sizes.total // (planes * block))
            copies = self.copies(kv, chunk)
            moved, runs = sum(copy.slot.nbytes for copy in copies), len(describe(copies))
            for role in ("load", "store"):
                for choice in self.choices():
                    self.device.way = choice
                    spent: list[float] = []

                    def work(
                        role: str = role, copies: Any = copies, spent: list[float] = spent
                    ) -> None:
                        spent.append(1e3 * milliseconds(lambda: self.run(role, copies)))

                    stream = self.device.stream(role).handle
                    speeds, called = (
                        sorted(moved / one / 1e6 for one in self.timed(stream, work, asleep=asleep))
                        for asleep in (runs, 0)
                    )
                    least = min(spent[1:])
                    found[f"{name}, {role}, {title(choice)}"] = {
                        "gb_per_s": statistics.median(speeds),
                        "min": speeds[0],
                        "max": speeds[-1],
                        "of_link": statistics.median(speeds) / self.link[role],
                        "gb_per_s_with_submit": statistics.median(called),
                        "submit_us_per_chunk": least / len(copies),
                        "submit_us_per_run": least / runs,
                    }
        best: dict[str, float] = {}
        for key, one in found.items():
            kind = key.rpartition(", ")[0]
            best[kind] = max(best.get(kind, 0.0), one["of_link"])
        return {"best_of_link": best, "limits": LIMITS, "all": found}

    def step_near(self) -> dict[str, float]:
        """Measure batched copies of runs about 28 KiB."""
        return near(self)

    def step_inside(self) -> dict[str, float]:
        """Measure the kernel where there is no link."""
        return inside(self)

    def step_overlap(self) -> dict[str, Any]:
        """Measure matrix products beside copies."""
        torch = self.torch
        copies = self.first()
        moved = sum(copy.slot.nbytes for copy in copies)
        side = self.sizes.matrix
        one = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
        out, compute = torch.empty_like(one), torch.cuda.current_stream()

        def products() -> None:
            for _ in range(self.sizes.products):
                torch.mm(one, one, out=out)

        alone = statistics.median(self.timed(compute, products))
        found: dict[str, Any] = {"alone_ms": alone}
        for role in ("load", "store"):
            stream = self.device.stream(role)
            for choice in self.choices():
                self.device.way = choice
                times = max(1, int(alone * self.link[role] * 1e6 * 0.8 / moved))

                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

                def both(
                    role: str = role,
                    stream: Any = stream,
                    times: int = times,
                    begin: Any = begin,
                    end: Any = end,
                ) -> None:
                    began = self.device.host_fence()
                    products()  # first: what the copies cost the host must not count here
                    stream.wait(began)
                    begin.record(stream.handle)
                    for _ in range(times):
                        self.after(role, copies, [])
                    end.record(stream.handle)

                beside = statistics.median(self.timed(compute, both))
                torch.cuda.synchronize()
                found[f"{role}, {title(choice)}"] = {
                    "slower_percent": (beside / alone - 1) * 100,
                    "copies": times,
                    "copies_gb_per_s": times * moved / begin.elapsed_time(end) / 1e6,
                }
        return found

    def step_layers(self) -> dict[str, dict[str, float]]:
        """Measure what has landed of a load when work behind its first group begins."""
        cuda, found, groups = self.torch.cuda, {}, 8  # as a cache cuts 32 layers
        copies = self.first()
        # torch hands out a few streams over and over; of this priority nobody else here has one.
        watch = cuda.Stream(priority=-1)
        for choice in self.choices():
            self.device.way, shares = choice, []
            for _ in range(TURNS + 1):
                first, *ends = (cuda.Event(enable_timing=True) for _ in range(groups + 1))
                cuda.synchronize()
                # All is enqueued before anything lands: an event would else be recorded too late.
                self.sleep(self.device.stream("load").handle, RUNS)
                fences = self.run("load", copies, groups)
                self.device.hold(fences[0], SECONDS)
                first.record()
                for fence, end in zip(fences, ends, strict=True):
                    with cuda.stream(watch):
                        self.device.hold(fence, SECONDS)
                    end.record(watch)
                cuda.synchronize()
                later = sum(first.elapsed_time(one) >= 0 for one in ends[1:])
                shares.append(1 - later / groups)
            found[title(choice)] = statistics.median(shares[1:])
        return {"layer0_before_bytes_fraction": found}

    def step_ttft(self) -> dict[str, Any]:
        """Measure a prompt recomputed, loaded whole, and loaded layer by layer."""
        layer, found = Layer(self.torch, self.sizes.hidden), {}
        planes, block, chunk = next(iter(self.sizes.geometries.values()))
        compute, self.device.way = self.torch.cuda.current_stream(), None
        fresh = layer.prompt(128)  # beyond its prefix
        for tokens in self.sizes.prompts:
            prompt = layer.prompt(tokens)
            recompute = self.sizes.layers * statistics.median(
                self.timed(compute, lambda p=prompt: layer(p))
            )
            blocks = tokens // 16
            kv = self.cache(planes, block, blocks)
            copies = self.copies(kv, min(chunk, blocks), planes * block * blocks)

            def load(groups: int, copies: list[Copy] = copies) -> None:
                fences = self.run("load", copies, groups)
                for number in range(self.sizes.layers):
                    self.device.hold(fences[number * groups // self.sizes.layers], SECONDS)
                    layer(fresh)

            whole, layered = (
                statistics.median(self.timed(compute, lambda n=groups: load(n)))
                for groups in (1, self.sizes.layers)
            )
            names = ("recompute_ms", "load_whole_ms", "load_by_layer_ms")
            found[str(tokens)] = dict(zip(names, (recompute, whole, layered), strict=True))
        wins = [int(n) for n, one in found.items() if one["load_by_layer_ms"] < one["recompute_ms"]]
        return {"tokens": found, "break_even_at_most": min(wins, default=None)}

    def step_order(self) -> dict[str, dict[str, bool]]:
        """Say of each hazard whether bytes were right, waiting and not."""
        hazards, found = Hazards(self.torch, self.device, self.arena, self.sizes.sleep), {}
        for choice in [one for one in self.choices() if one.way != "direct"] + [Choice("direct")]:
            self.device.way = choice
            found[title(choice)] = hazards.all()
        return found

    def step_engine(self) -> dict[str, Any]:
        """Measure the engine."""
        self.device.way = None
        return on_gpu(self.device)

    def step_memcheck(self) -> str:
        """Look for accesses beyond memory."""
        return memcheck(max(MINUTES_4 - (time.perf_counter() - self.begin), 10.0))

    def first(self) -> list[Copy]:
        """Return copies of the first geometry."""
        planes, block, chunk = next(iter(self.sizes.geometries.values()))
        kv = self.cache(planes, block, 2 * self.sizes.total // (planes * block))
        return self.copies(kv, chunk)


def title(choice: Choice) -> str:
    """Name a way."""
    return f"direct {choice.grid}" if choice.way == "direct" else choice.way


def measure(save: Callable[[dict[str, Any]], None]) -> bool:
    """Run all steps; call `save` with what is known after each. Say whether all went well.

    A step that fails is told, and the next one begins. Raises ConfigError, with no GPU.
    """
    # As the engine does that is measured last: read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with closing(cuda_device()) as device:
        import torch

        return run(Bench(device, device.driver, torch), save)


def run(bench: Bench, save: Callable[[dict[str, Any]], None]) -> bool:
    """Run the steps of a bench; see ``measure``."""
    begin, found, well = time.perf_counter(), {}, True
    found["device"] = machine(bench.torch, bench.device, bench.driver)
    steps = [name for name in vars(Bench) if name.startswith("step_")]
    for step in steps:
        late = time.perf_counter() - begin > BUDGET
        name = step.removeprefix("step_")
        try:
            found[name] = "left out: no time" if late else getattr(bench, step)()
        except Exception as error:  # noqa: BLE001  (what else is measured must not be lost)
            traceback.print_exc()
            found[name], well = f"failed: {type(error).__name__}: {error}", False
        bench.torch.cuda.empty_cache()
        found["seconds"] = time.perf_counter() - begin
        save(found)
        print(f"{found['seconds']:6.1f} s  {name}: {found[name]}", flush=True)
    return well
