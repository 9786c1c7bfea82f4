"""The copy kernel under each compiler that is here: what it made of it, or that it did not run."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from kvtier.device.nvrtc import Nvrtc, kernel_source
from kvtier.errors import ConfigError
from kvtier.testing.kernels import BUILDS, build, compiler, right
from kvtier.testing.layouts import cases

__all__ = ["ARCHITECTURES", "NOT_RUN", "compilers"]

ARCHITECTURES: Final = (80, 90, 100)
NOT_RUN: Final = "not run"
_SECONDS: Final = 120.0
_VERBOSE: Final = "-Xptxas=-v"


def compilers() -> dict[str, Any]:
    """Return by compiler and target what came of the copy kernel. Blocks for some seconds.

    g++: cases, and whether all were right. The others: registers, bytes spilled, bytes of the
    cubin. "not run" where there is no such compiler; raises where one refuses the kernel.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-kernel-") as folder:
        for kind in BUILDS:
            found[f"g++ {kind}"] = _on_cpu(Path(folder), kind)
        for architecture in ARCHITECTURES:
            found[f"nvcc sm_{architecture}"] = _nvcc(Path(folder), architecture)
    try:
        nvrtc = Nvrtc()
    except ConfigError:
        return {**found, "nvrtc": NOT_RUN}
    for architecture in ARCHITECTURES:
        made, log = nvrtc.compile(kernel_source(), architecture, "--ptxas-options=-v")
        found[f"nvrtc {nvrtc.version} sm_{architecture}"] = _resources(log, len(made))
    return found


def _on_cpu(folder: Path, kind: str) -> Any:
    if compiler() is None:
        return NOT_RUN
    library = build(folder, kind, [kernel_source()])
    return {"cases": sum(1 for _ in cases()), "right": right(library, [0]) == [0]}


def _nvcc(folder: Path, architecture: int) -> Any:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return NOT_RUN
    text, made = folder / "copy.cu", folder / f"sm_{architecture}.cubin"
    text.write_text(kernel_source(), encoding="utf-8")
    target = ("-std=c++17", "-cubin", f"-arch=sm_{architecture}")
    command = [nvcc, *target, _VERBOSE, "-o", str(made), str(text)]
    done = subprocess.run(  # noqa: S603  (a compiler)
        command, capture_output=True, text=True, check=True, timeout=_SECONDS
    )
    return _resources(done.stderr + done.stdout, made.stat().st_size)


def _resources(log: str, size: int) -> dict[str, int]:
    """Read what ptxas says that a kernel takes."""
    found = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) reg", log, re.DOTALL
    )
    if found is None:
        raise ValueError(f"ptxas does not say what the kernel takes: {log}")
    stored, loaded, registers = map(int, found.groups())
    return {"registers": registers, "spilled": stored + loaded, "cubin_bytes": size}
