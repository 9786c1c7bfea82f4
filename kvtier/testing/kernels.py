"""The copy kernel built for a CPU by a C++ compiler, and tried, where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.device.descriptors import CUT_BYTES, Runs
from kvtier.device.driver import Work
from kvtier.device.spread import Spread
from kvtier.testing.forks import Tell, forked
from kvtier.testing.layouts import Case, cases, is_right

_SHIM: Final = Path(__file__).with_name("on_cpu.h")
BUILDS: Final[dict[str, tuple[str, ...]]] = {
    "plain": ("-O1",),
    "sanitized": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
"""By name, what a build tells the compiler."""

_ENTRY: Final = """
#define kvtier_copy kvtier_copy_{number}
namespace kvtier_{number} {{
{source}
}}
#undef kvtier_copy
extern "C" void kvtier_run_{number}(unsigned int grid, unsigned int block,
    unsigned long long seed, unsigned long long* wrote, const unsigned long long* begins,
    const unsigned long long* table, unsigned int planes, unsigned int runs, unsigned int all,
    unsigned int row) {{
  kvtier_run(grid, block, seed, wrote,
  [&] {{ kvtier_{number}::kvtier_copy_{number}(begins, table, planes, runs, all, row); }});
}}
"""
_SPARE: Final = {"plain": 4096, "sanitized": 0}  # what sanitizers see behind memory's end
_BUILD_SECONDS: Final = 300.0
_TRY_SECONDS: Final = 20  # of CPU time
_SPARE_RUNS: Final = 3  # of which a row has fewer
_GRIDS: Final = (1, 2, 7)
_THREADS: Final = (1, 3, 32)

Kernel = Callable[[int, int, int, Work], tuple[int, int]]
"""Runs on a grid, of blocks of so many threads, in the order of a seed. Returns how many bytes it
wrote, and in how many writes."""


def compiler() -> str | None:
    """Return the C++ compiler that this machine has, or None."""
    return shutil.which("g++")


def build(folder: Path, kind: str, sources: Sequence[str]) -> Path:
    """Compile kernels, given as texts, into one library. Raises CalledProcessError. Blocks."""
    text, library = folder / f"{kind}.cpp", folder / f"{kind}.so"
    entries = (_ENTRY.format(number=at, source=source) for at, source in enumerate(sources))
    text.write_text(f'#include "{_SHIM}"\n' + "".join(entries), encoding="utf-8")
    warnings = ("-w",) if sources[1:] else ("-Wall", "-Wextra", "-Werror")
    common = ("-std=c++17", "-shared", "-fPIC", *warnings, *BUILDS[kind])
    _output(str(compiler()), *common, "-o", str(library), str(text))
    return library


def right(library: Path, count: int, tell: Tell = lambda _done, _count: None) -> list[int]:
    """Return which of a library's kernels copy all cases right, and nothing is said against them.

    Each is tried in a process of its own, and given up at its first wrong case. Blocks.
    """
    names = ("libasan.so", "libubsan.so") if library.stem == "sanitized" else ()
    found = [_output(str(compiler()), f"-print-file-name={name}") for name in names]
    environment = {"LD_PRELOAD": ":".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", __name__, str(library), str(count)]
    process = subprocess.Popen(  # noqa: S603  (this module)
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
    )
    said: list[int] = []
    with process:
        for number, line in enumerate(process.stdout or ()):
            said = json.loads(line)
            tell(min(number + 1, count), count)
    if process.returncode:
        raise RuntimeError(f"{library.stem} kernels could not be tried: {process.returncode}")
    return said


def _kernel(library: Path, number: int = 0) -> Kernel:
    """Return one of the kernels of a library."""
    function = getattr(ctypes.CDLL(str(library)), f"kvtier_run_{number}")
    function.restype = None
    function.argtypes = (
        *(ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p),
        *(ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint),
    )
    return partial(_run, function)


def _large_are_right(kernel: Kernel) -> bool:
    """Say whether the longest runs are copied right, and more of them than 16 bits count."""
    for planes, apart, runs in (
        (2, 3 * CUT_BYTES, [(1, 2, CUT_BYTES), (CUT_BYTES + 16, CUT_BYTES + 32, CUT_BYTES)]),
        (300, 512, [(2 * at, 2 * at + 1, 1) for at in range(220)]),
    ):
        source = np.random.default_rng(0).integers(1, 255, (planes, apart), np.uint8)
        target, want = np.zeros_like(source), np.zeros_like(source)
        for to, of, nbytes in runs:
            want[:, to : to + nbytes] = source[:, of : of + nbytes]
        steps = np.arange(planes, dtype=np.uint64) * np.uint64(apart)
        to, of, sizes = np.array(runs, np.uint64).T
        ends = (one.ctypes.data for one in (target, source))
        to, of = (at + np.uint64(begin) for at, begin in zip((to, of), ends, strict=True))
        spread = Spread(np.stack([steps, steps]), Runs(of, to, sizes))
        _move(kernel, _GRIDS[-1], _THREADS[-1], 1, spread, True)  # noqa: FBT003  (as a Mover's)
        if not np.array_equal(target, want):
            return False
    return True


def _first_wrong(kernel: Kernel, *, spare: int = 4096) -> Case | None:
    """Return the first of all cases that a kernel copies wrong, or None. See ``is_right``."""
    for number, case in enumerate(cases()):
        shape = (_GRIDS[number % len(_GRIDS)], _THREADS[number // len(_GRIDS) % len(_THREADS)])
        if not is_right(case, partial(_move, kernel, *shape, number), spare=spare):
            return case
    return None


def _move(
    kernel: Kernel,
    grid: int,
    block: int,
    seed: int,
    spread: Spread,
    into_slot: bool,  # noqa: FBT001  (a Mover)
) -> None:
    *begins, to, of, nbytes = spread.rows(into_slot=into_slot)
    counts = (len(spread.planes[0]), len(spread.runs))
    spare = np.zeros(seed % _SPARE_RUNS, np.uint64)
    # A row may be longer than what is looked at, but where memory ends.
    planes = np.concatenate([begins[0], spare, begins[1]])
    table = np.concatenate([*(row for one in (to, of) for row in (one, spare)), nbytes])
    rows = (count + len(spare) for count in counts)
    work = Work(planes.ctypes.data, table.ctypes.data, *counts, *rows)
    wrote = kernel(grid, block, seed, work)
    runs = spread.expanded()
    each = zip(runs.pages.tolist(), runs.slots.tolist(), runs.nbytes.tolist(), strict=True)
    needed = (spread.total, sum(_writes(*row) for row in each))
    if wrote != needed:
        raise AssertionError(f"bytes and writes were {wrote}, of {needed}")


def _writes(page: int, slot: int, nbytes: int) -> int:
    """Return how many writes a run needs: of 16 bytes, or of 4, and of what is left of it."""
    for unit in (16, 4):
        if not (page | slot) % unit and nbytes >= unit:
            return nbytes // unit + nbytes % unit
    return nbytes


def _run(
    function: Callable[..., None], grid: int, block: int, seed: int, work: Work
) -> tuple[int, int]:
    wrote = np.zeros(2, np.uint64)
    function(grid, block, seed, wrote.ctypes.data, *work)
    return int(wrote[0]), int(wrote[1])


def _output(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(  # noqa: S603  (a compiler, and this module)
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=_BUILD_SECONDS,
        env=environment,
    )
    return done.stdout.strip()


def _main(library: Path, count: int) -> None:
    """Print a line when a kernel was tried, and at last which ones are right."""
    import torch

    torch.set_num_threads(1)  # here, once, so that each fork finds it loaded
    spare = _SPARE[library.stem]

    def holds(number: int) -> bool:
        kernel = _kernel(library, number)
        return _first_wrong(kernel, spare=spare) is None and _large_are_right(kernel)

    def tell(_done: int, _count: int) -> None:
        sys.stdout.write("[]\n")
        sys.stdout.flush()

    ended = forked([partial(holds, at) for at in range(count)], tell, seconds=_TRY_SECONDS)
    kept = [number for number, one in enumerate(ended) if one.result]
    sys.stdout.write(json.dumps(kept) + "\n")
    sys.stdout.flush()
    os._exit(0)  # torch takes half a second to come down


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
