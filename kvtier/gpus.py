"""GPUs by name, where they are, and whether torch can use one: asked before anything is built."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError

_PCI: Final = Path("/sys/bus/pci/devices")
_NAME: Final = re.compile(r"cuda(?::(0|[1-9]\d{0,3}))?")


def gpu_index(device: str) -> int | None:
    """Return the number of the GPU that a device's name means; None: it is the CPU's.

    "cpu", "cuda" (the first GPU) or "cuda:1". Asks no driver. Raises ConfigError for other names.
    """
    if device == "cpu":
        return None
    found = _NAME.fullmatch(device)
    if found is None:
        raise ConfigError(f"there is no device {device!r}: give cpu, cuda, or a GPU like cuda:1")
    return int(found[1] or 0)


def gpu_title(device: str) -> str:
    """Return what its maker calls a device that can be used; of the CPU nothing."""
    index = gpu_index(device)
    if index is None:
        return ""
    return str(torch_for_gpu(index, "").cuda.get_device_properties(index).name)


def gpu_node(pci: str, root: Path = _PCI) -> int | None:
    """Return the memory node that a GPU is at; None where the kernel does not say.

    pci: its address on the bus, as CUDA writes it: 0000:3B:00.0.
    """
    try:
        node = int((root / pci.lower() / "numa_node").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: all nodes are as near


def torch_for_gpu(index: int, otherwise: str) -> Any:
    """Return the module torch, which can use that GPU; index: as torch counts them.

    Blocks for a second or two, the first time. otherwise: how to choose the CPU, said with every
    refusal. Raises ConfigError, with cause and remedy, where torch is not there or is built
    without CUDA, where the driver is none or too old, and for a GPU that is not there.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"a CUDA device needs torch: pip install torch; {otherwise}")
    import torch

    if torch.version.cuda is None:
        raise ConfigError(
            f"this torch ({torch.__version__}) is built without CUDA: install one that is built "
            f"with it; {otherwise}"
        )
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:  # no driver, an old one, or no GPU
        remedy = f"install a driver that is as new as CUDA {torch.version.cuda}"
        if "fork" in str(error):  # the parent uses CUDA, which does not cross it
            remedy = "start this process by spawn, or use CUDA in its parent only after the fork"
        raise ConfigError(f"CUDA cannot be used: {error}; {remedy}; {otherwise}") from error
    if not 0 <= index < count:
        raise ConfigError(f"GPU {index} is not there, of {count} that torch finds; {otherwise}")
    return torch
