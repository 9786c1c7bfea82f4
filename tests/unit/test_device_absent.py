"""The CUDA device where there is no CUDA, or an old one: the reason is told, and no CPU taken."""

from __future__ import annotations

import sys

import pytest
import torch

from kvtier.device import torch_driver
from kvtier.device.torch_driver import cuda_device
from kvtier.errors import ConfigError


def test_drivers_before_batched_copies_are_not_asked_for_them():
    assert torch_driver.batched_copies(12070) is None


def test_without_cuda_the_reason_is_told_and_no_cpu_taken(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"built without CUDA: install .*CPU is used only where"):
        cuda_device()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("The NVIDIA driver on your system is too old", "install a driver .* 13.0"),
        ("no NVIDIA driver", "install a driver .* 13.0"),
        ("Cannot re-initialize CUDA in forked subprocess", "start this process by spawn"),
    ],
)
def test_an_old_driver_or_none_is_told(monkeypatch, said, remedy):
    def init():
        raise RuntimeError(said)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match=rf"CUDA cannot be used: {said}; {remedy}"):
        cuda_device()


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for index in (2, -1):
        with pytest.raises(ConfigError, match=f"GPU {index} is not there, of 2"):
            cuda_device(index)


@pytest.mark.parametrize(
    ("name", "remedy"), [("torch", "pip install torch"), ("cupy", r"kvtier\[cuda\]")]
)
def test_a_missing_package_is_told(monkeypatch, name, remedy):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = torch_driver.importlib.util.find_spec
    hidden = lambda one: None if one == name else found(one)  # noqa: E731
    monkeypatch.setattr(torch_driver.importlib.util, "find_spec", hidden)
    with pytest.raises(ConfigError, match=remedy):
        cuda_device()


def test_a_cupy_that_cannot_be_imported_is_told(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('libcublas.so.13 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(ConfigError, match=r"imported: libcublas.so.13 is missing; pip install"):
        torch_driver._cupy()
