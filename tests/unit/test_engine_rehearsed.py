"""What a GPU is to show of the engine, by the same code on the CPU; and that it could fail."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from kvtier.device.cpu import CpuDevice
from kvtier.device.cuda import CudaDevice
from kvtier.device.paths import DEFAULT, Choice
from kvtier.engine import Sampling
from kvtier.testing.cpu_driver import CpuDriver
from kvtier.testing.device_answers import answers
from kvtier.testing.serving import small_model
from kvtier.testing.tape import TapeCompute

PROMPTS = [
    np.random.default_rng(length).integers(0, 97, length).tolist() for length in (5, 70, 100)
]
LOADED = {"dram": 64 + 96}  # whole chunks of 32


class Loses(CpuDevice):
    """Says that a load has ended, and has copied nothing."""

    def scatter(self, stream, groups, after):
        return super().scatter(stream, [[] for _ in groups], after)


def made(kind):
    if kind == "cpu":
        return CpuDevice()
    return CudaDevice(CpuDriver(), DEFAULT, Choice(kind), in_flight=4)


@pytest.mark.parametrize("kind", ["cpu", "batch", "staged", "direct"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same_cold_and_from_either_cache(kind, temperature):
    sampling = Sampling(8, temperature=temperature, seed=3)
    with closing(made(kind)) as device:
        graphs, plain = (
            answers(small_model(), PROMPTS, sampling, device, device=TapeCompute(), graphs=on)
            for on in (True, False)
        )
    assert graphs.same
    assert plain.same
    assert graphs.cold == plain.cold
    assert graphs.hits["loaded"] == plain.hits["loaded"] == LOADED
    assert sum(graphs.hits["own"].values()) > 0
    assert graphs.replayed > 0 == plain.replayed


def test_a_load_that_brings_nothing_is_noticed():
    with closing(Loses()) as device:
        found = answers(small_model(), PROMPTS, Sampling(8), device)
    assert found.hits["loaded"] == LOADED
    assert found.cold == found.own
    assert not found.same
