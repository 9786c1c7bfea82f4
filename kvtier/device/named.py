"""Devices by name, as an operator gives them."""

from __future__ import annotations

from kvtier.device.base import Device
from kvtier.device.cpu import CpuDevice
from kvtier.gpus import gpu_index


def device_named(name: str) -> Device:
    """Return the device of "cpu", "cuda" or a GPU like "cuda:1", for copies of what is there.

    Raises ConfigError for another name and, as ``cuda_device`` does, for a GPU that cannot be
    used: the CPU is never taken in its place.
    """
    index = gpu_index(name)
    if index is None:
        return CpuDevice()
    from kvtier.device.torch_driver import cuda_device

    return cuda_device(index)
