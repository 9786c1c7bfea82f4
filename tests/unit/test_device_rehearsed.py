"""What a GPU is to be measured by, on the CPU: that each step runs, and nothing of a GPU's speed.

torch's calls for CUDA are stand-ins over the CPU's streams, so that no step is first run there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from kvtier.device.cpu import CpuStream
from kvtier.device.cuda import CudaDevice
from kvtier.device.paths import DEFAULT
from kvtier.device.torch_driver import TorchDriver
from kvtier.testing.cpu_driver import CpuDriver
from kvtier.testing.device_answers import Answers
from kvtier.testing.tape import TapeCompute

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 10.0


class Stream(CpuStream):
    """A stream as torch has it."""

    def wait_stream(self, other):
        self.wait(other.record())


class Now:
    """The stream that this thread computes on: what is computed is done."""

    def wait_stream(self, other):
        assert other.record().wait(SECONDS)


class Event:
    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at = 0.0

    def record(self, stream=None):
        if isinstance(stream, CpuStream):
            stream.enqueue(self.look)
            self.fence = stream.record()
        else:
            self.look()

    def look(self):
        self.at = time.perf_counter()

    def synchronize(self):
        assert not hasattr(self, "fence") or self.fence.wait(SECONDS)

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


class Cuda:
    """See torch.cuda."""

    Event, Stream = Event, staticmethod(lambda priority: Now())

    def __init__(self, driver):
        self._driver = driver
        self._on = None

    def synchronize(self):
        for stream in self._driver._streams:
            assert stream.record().wait(SECONDS)

    @contextlib.contextmanager
    def stream(self, stream):
        self._on = stream
        yield
        self._on = None

    def current_stream(self):
        return Now()

    def empty_cache(self):
        pass

    def _sleep(self, cycles):
        sleep = partial(time.sleep, cycles / 2e9)
        if isinstance(self._on, CpuStream):
            self._on.enqueue(sleep)
        else:
            sleep()


class Torch:
    """torch, whose GPU is the CPU."""

    def __init__(self, driver):
        self.cuda = Cuda(driver)

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name not in ("zeros", "randint", "randn", "tensor"):
            return found
        return lambda *args, device="cpu", **more: found(
            *args, device={"cuda": "cpu"}.get(device, device), **more
        )


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import device_gpu
    import device_sizes
    import engine_gpu

    yield device_gpu, device_sizes, engine_gpu
    for name in ("device_gpu", "device_sizes", "device_order", "device_runs", "engine_gpu"):
        del sys.modules[name]


def rehearsed(scripts, monkeypatch, **fails):
    """Run all steps; return what was saved after each, and whether all went well."""
    script, sizes, _ = scripts
    monkeypatch.setattr(script, "on_gpu", lambda device: {"engine": device.name})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(script, "TURNS", 1)
    for name, step in fails.items():
        monkeypatch.setattr(script.Bench, name, step)
    driver, saved = CpuDriver(Stream), []
    with closing(CudaDevice(driver, DEFAULT, staging_bytes=1 << 18)) as device:
        bench = script.Bench(device, driver, Torch(driver), sizes.REHEARSAL)
        well = script.run(bench, lambda found: saved.append(dict(found)))
    return saved, well


def test_each_step_of_what_a_gpu_is_measured_by_runs(scripts, monkeypatch):
    saved, well = rehearsed(scripts, monkeypatch)
    assert well
    assert [len(one) for one in saved] == list(range(3, 3 + len(saved))), "saved after each step"
    found = json.loads(json.dumps(saved[-1]))
    assert all(found["right"].values())
    assert len(found["right"]) == 2 * 3
    assert found["copies"]["best_of_link"].keys() == {
        f"{name}, {role}" for name in ("llama", "mla") for role in ("load", "store")
    }
    assert all(one["copies_gb_per_s"] > 0 for key, one in found["overlap"].items() if "," in key)
    assert found["ttft"]["tokens"].keys() == {"32"}
    assert found["near"].keys() == {
        *("8 runs of 16 KiB", "8 runs of 16 KiB, any order", "8 KiB, 16 in a row joined")
    }
    assert found["inside"].keys() == {
        f"{name}, {role}" for name in ("llama", "mla") for role in ("load", "store")
    }
    assert found["engine"]
    assert found["memcheck"] == "not run: there is no compute-sanitizer"
    assert len(found["order"]) == 3
    for rows in found["order"].values():
        waited = {name: right for name, right in rows.items() if name.endswith(", waiting")}
        assert len(waited) == 9
        assert all(waited.values()), waited


def test_a_step_that_fails_is_told_and_the_others_are_run(scripts, monkeypatch, capsys):
    def fails(bench):
        raise RuntimeError("out of memory")

    rest = {
        name: lambda _: {}
        for name in vars(scripts[0].Bench)
        if name.startswith("step_") and name != "step_link"
    }
    saved, well = rehearsed(scripts, monkeypatch, **rest, step_link=fails)
    assert not well
    assert saved[-1]["link"] == "failed: RuntimeError: out of memory"
    assert saved[-1]["engine"] == {}
    assert "out of memory" in capsys.readouterr().err


def test_copies_that_the_driver_refuses_are_no_fast_ones(scripts, monkeypatch):
    def refuses(driver, stream, table):
        raise RuntimeError("status 1")

    monkeypatch.setattr(CpuDriver, "batch", refuses)
    rest = {
        name: lambda _: {}
        for name in vars(scripts[0].Bench)
        if name.startswith("step_") and name not in ("step_link", "step_copies", "step_overlap")
    }
    saved, well = rehearsed(scripts, monkeypatch, **rest)
    assert not well
    assert saved[-1]["copies"] == saved[-1]["overlap"] == "failed: RuntimeError: status 1"


def test_a_kernel_that_copies_wrong_inside_the_gpu_is_told(scripts, monkeypatch):
    """Its own tables are made there: addresses that are none would end all that comes after."""
    import device_runs

    made = device_runs._work

    def shorter(torch, spread, *, into_slot):
        table, work = made(torch, spread, into_slot=into_slot)
        return table, work._replace(planes=work.planes - 1)

    monkeypatch.setattr(device_runs, "_work", shorter)
    rest = {
        name: lambda _: {}
        for name in vars(scripts[0].Bench)
        if name.startswith("step_") and name != "step_inside"
    }
    saved, well = rehearsed(scripts, monkeypatch, **rest)
    assert not well
    assert "the kernel copied blocks" in saved[-1]["inside"]


def test_batched_copies_are_in_any_order_for_as_long_as_that_is_measured(scripts, monkeypatch):
    import device_runs

    driver = object.__new__(TorchDriver)
    driver.version, driver.copies = 13000, "in stream order"
    monkeypatch.setattr(device_runs, "batched_copies", lambda version, *, order: (version, order))
    seen = []

    def fails():
        with device_runs.in_any_order(driver):
            seen.append(driver.copies)
            raise KeyError("a copy")

    with pytest.raises(KeyError, match="a copy"):
        fails()
    assert seen == [(13000, 3)]
    assert driver.copies == "in stream order"


@pytest.mark.parametrize(
    ("does", "found"),
    [
        ("exit 0", "nothing was found"),
        ("echo Invalid read; exit 9", "Invalid read"),
    ],
)
def test_what_compute_sanitizer_sees_is_told(scripts, monkeypatch, tmp_path, does, found):
    import device_runs

    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{does}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    look = partial(device_runs.memcheck, SECONDS)
    if does.endswith("9"):
        with pytest.raises(RuntimeError, match=f"status 9: {found}"):
            look()
    else:
        assert look() == found
    asked = (tmp_path / "asked").read_text()
    assert "--error-exitcode 9" in asked
    assert "-k MLA" in asked


def test_what_compute_sanitizer_has_started_ends_with_it(scripts, monkeypatch, tmp_path):
    """It would hold the GPU."""
    import device_runs

    tool, begun, started = tmp_path / "compute-sanitizer", tmp_path / "begun", []
    os.mkfifo(begun)
    tool.write_text(f"#!/bin/sh\ntail -f /dev/null > /dev/null & echo $! > {begun}\nwait\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def late(_, timeout):
        started.append(os.pidfd_open(int(begun.read_text())))
        raise subprocess.TimeoutExpired(str(tool), timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", late)
    assert device_runs.memcheck(SECONDS) == f"left out: not over in {SECONDS:.0f} s"
    (process,) = started
    try:
        assert select.select([process], [], [], SECONDS)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def test_what_a_gpu_is_measured_by_of_the_engine_runs(scripts, monkeypatch):
    _, _, script = scripts

    def answers(model, prompts, sampling, copies, *, device, graphs):
        """Stand in for what test_engine_rehearsed looks at."""
        del model, prompts, sampling, copies, device
        tokens = [(1, 2)]
        return Answers(tokens, tokens, tokens, {}, 5 if graphs else 0)

    monkeypatch.setattr(script, "answers", answers)
    monkeypatch.setattr(script, "TURNS", 1)
    monkeypatch.setattr(script, "STEPS", 1)
    monkeypatch.setattr(script, "CHUNK", 32)
    sizes = script.REHEARSAL._replace(requests=(2,), context=20, prompt=40)
    with closing(CudaDevice(CpuDriver(), DEFAULT, in_flight=2)) as device:
        found = script.engine_figures(TapeCompute(), device, sizes)
    assert list(found["same"].values()) == [True, True]
    assert found["decode_ms"].keys() == {"2 requests"}
    assert found["ttft"]["by layer_ms"]["median"] > 0
