"""The copy kernel under each compiler that is here: what it made of it, or that it did not run."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvtier.device.nvrtc import Nvrtc, kernel_source
from kvtier.errors import ConfigError
from kvtier.testing.forks import Tell, forked
from kvtier.testing.kernels import BUILDS, build, compiler, right
from kvtier.testing.layouts import cases

ARCHITECTURES: Final = (80, 90, 100)
NOT_RUN: Final = "not run"
_SECONDS: Final = 120.0
_VERBOSE: Final = "-Xptxas=-v"


def compilers(folder: Path, tell: Tell = lambda _done, _count: None) -> dict[str, Any]:
    """Return by compiler and target what came of the copy kernel. Blocks for some seconds.

    folder: for what they make. g++: cases, and whether all were right. The others: registers, bytes
    spilled, bytes of the cubin. "not run" where there is no such compiler; raises where one
    refuses the kernel.
    """
    jobs = {f"g++ {kind}": partial(_on_cpu, folder, kind) for kind in BUILDS}
    for architecture in ARCHITECTURES:
        jobs[f"nvcc sm_{architecture}"] = partial(_nvcc, folder, architecture)
    with contextlib.suppress(ConfigError):
        version = Nvrtc().version
        for architecture in ARCHITECTURES:
            jobs[f"nvrtc {version} sm_{architecture}"] = partial(_nvrtc, architecture)
    ended = forked(list(jobs.values()), tell)
    found = {name: one.value for name, one in zip(jobs, ended, strict=True)}
    return found if any("nvrtc" in name for name in found) else {**found, "nvrtc": NOT_RUN}


def _on_cpu(folder: Path, kind: str) -> Any:
    if compiler() is None:
        return NOT_RUN
    library = build(folder, kind, [kernel_source()])
    return {"cases": sum(1 for _ in cases()), "right": right(library, 1) == [0]}


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


def _nvrtc(architecture: int) -> dict[str, int]:
    made, log = Nvrtc().compile(kernel_source(), architecture, "--ptxas-options=-v")
    return _resources(log, len(made))


def _resources(log: str, size: int) -> dict[str, int]:
    """Read what ptxas says that a kernel takes."""
    found = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) reg", log, re.DOTALL
    )
    if found is None:
        raise ValueError(f"ptxas does not say what the kernel takes: {log}")
    stored, loaded, registers = map(int, found.groups())
    return {"registers": registers, "spilled": stored + loaded, "cubin_bytes": size}
