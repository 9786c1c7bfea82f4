"""Devices by name: what a benchmark or an engine's operator gives."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvtier.bench.settings import Settings, check_device
from kvtier.device.cpu import CpuDevice
from kvtier.device.named import device_named
from kvtier.errors import ConfigError


def settings(**given):
    sizes = {"threads": 1, "seed": 0, "chunk_tokens": 256, "dram": None, "disk": 1 << 30}
    places = {"directory": Path(), "s3": None, "s3_delay": 0.0, "verbose": False}
    return Settings(arms=("dram",), model="random", **sizes, **places, **given)


def test_the_cpu_is_named():
    with closing(device_named("cpu")) as device:
        assert isinstance(device, CpuDevice)
    assert check_device("cpu") == "cpu"


@pytest.mark.parametrize("make", [device_named, check_device])
def test_a_gpu_that_cannot_be_used_is_refused_and_no_cpu_taken(monkeypatch, make):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"built without CUDA: install .*the CPU is used"):
        make("cuda:1")


@pytest.mark.parametrize("make", [device_named, check_device])
def test_other_names_are_refused(make):
    with pytest.raises(ConfigError, match="there is no device 'tpu': give cpu, cuda, or a GPU"):
        make("tpu")


def test_a_chaotic_order_is_of_the_cpu():
    assert settings(device_chaos=3).device == "cpu"
    with pytest.raises(ConfigError, match="CPU's copies; leave out --device"):
        settings(device_chaos=3, device="cuda")
