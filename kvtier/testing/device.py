"""Everything about copies between blocks and slots that can be shown without a GPU.

``python -m kvtier.testing.device --schedules 1000`` runs each hazard on so many schedules, with
its edges and without one, and the CUDA device on CPU streams on a tenth of them; compiles the
copy kernel with each compiler that is here, and runs it on the CPU; and changes kernel and
planner, one thing at a time, each of which has to show. All cores are used. The last line that it
prints is a JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvtier.cli.progress import progress
from kvtier.device.nvrtc import kernel_source
from kvtier.device.paths import PATHS, Way
from kvtier.testing.compilers import NOT_RUN, compilers
from kvtier.testing.forks import Job, Tell, forked
from kvtier.testing.hazards import AT_ONCE, HAZARDS, Examined, Hazard, examine
from kvtier.testing.kernel_mutants import HARMLESS, kernel_mutants
from kvtier.testing.kernels import build, compiler, right
from kvtier.testing.planner_mutants import planner_holds, planner_mutants

_FEWER: Final = 10  # schedules of each way of the CUDA device
_SLICE: Final = 250  # schedules that one process runs in a row
_TRY_SECONDS: Final = 20  # of CPU time, for a changed planner
Step = Callable[[str], Tell]
"""Called with what begins; returns what to call with how far that is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where something is not good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--every", type=int, default=1, help="of the changes, to try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with (
        progress() as bar,
        tempfile.TemporaryDirectory(prefix="kvtier-kernels-") as folder,
    ):
        report, good = _report(Path(folder), options.schedules, options.every, _steps(bar))
    line = json.dumps(report)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    return 0 if good else 1


def _steps(bar: Callable[[str, int, int], None]) -> Step:
    """Return what names a step where somebody watches, on the bar, and in a log."""

    def begin(text: str) -> Tell:
        bar(text, 0, 1)
        if not sys.stderr.isatty():
            sys.stderr.write(f"{text} ...\n")
            sys.stderr.flush()
        return partial(bar, text)

    return begin


def _report(folder: Path, schedules: int, every: int, step: Step) -> tuple[dict[str, Any], bool]:
    """Return what is to be told, and whether all of it is good."""
    built = compilers(folder, step("the copy kernel under each compiler"))
    alive, planned = _planners_alive(every, step("changes of the planner"))
    report: dict[str, Any] = {"gpu": NOT_RUN, "compilers": built}
    report |= {"kernel_mutants": NOT_RUN, "kernel_mutants_alive": NOT_RUN}
    if compiler() is not None:
        kernels, tried = _kernels_alive(folder, every, step)
        alive = kernels + alive
        report["kernel_mutants"] = {
            "kernel": tried,
            "planner": planned,
            "harmless": HARMLESS,
            "alive": alive,
        }
        report["kernel_mutants_alive"] = len(alive)
    rows = _examined(HAZARDS, schedules, (None,), step("hazards"))[None]
    report["hazards"] = [asdict(row) for row in rows]
    later = [one for one in HAZARDS if one not in AT_ONCE]
    ways = _examined(later, -(-schedules // _FEWER), PATHS, step("hazards on the CUDA device"))
    report["cuda_device_on_cpu"] = {
        str(way): [asdict(row) for row in found] for way, found in ways.items()
    }
    disordered = [row.name for found in ways.values() for row in found if not row.ordered]
    wrong = [found for found in built.values() if found != NOT_RUN and not found.get("right", True)]
    for name, found in built.items():
        sys.stderr.write(f"{name}: {found}\n")
    sys.stderr.write(f"changes of kernel and planner that nothing showed: {alive or 'none'}\n")
    for row in rows:
        sys.stderr.write(f"{row.name}: {'good' if row.good else 'NOT GOOD'}\n")
    sys.stderr.write(f"the CUDA device on CPU streams: {disordered or 'good'}\n")
    return report, all(row.good for row in rows) and not (disordered or alive or wrong)


def _planners_alive(every: int, tell: Tell) -> tuple[list[str], int]:
    """Return which changes of the planner nothing was seen of, and of how many. Blocks.

    Raises AssertionError where the planner itself is wrong, which is tried as they are.
    """
    import torch

    torch.set_num_threads(1)  # here, once: a fork has none of its other threads, and waits for them
    tried = list(planner_mutants())[::every]

    def holds(number: int) -> bool:
        with tried[number].removed():
            return planner_holds()

    jobs: list[Job] = [planner_holds, *(partial(holds, at) for at in range(len(tried)))]
    whole, *ended = forked(jobs, tell, seconds=_TRY_SECONDS)
    if not whole.result:
        raise AssertionError(f"the planner does not plan all cases right {whole.error}")
    return [one.name for one, end in zip(tried, ended, strict=True) if end.result], len(tried)


def _kernels_alive(folder: Path, every: int, step: Step) -> tuple[list[str], int]:
    """Return which changed kernels nothing was seen of, and of how many; of each `every`-th.

    The harmless ones are not among them. Blocks. Needs g++. Raises AssertionError where the
    kernel itself is wrong.
    """
    tried = [one for one in kernel_mutants() if one.name not in HARMLESS][::every]
    sources = [kernel_source(), *(one.source for one in tried)]
    step("compiling changes of the kernel")
    plain = build(folder, "plain", sources)
    left = right(plain, len(sources), step("changes of the kernel"))
    if 0 not in left:
        raise AssertionError("the kernel does not copy all cases right")
    tell = step("changes of the kernel, sanitized")
    again = right(build(folder, "sanitized", [sources[at] for at in left]), len(left), tell)
    return [tried[left[at] - 1].name for at in again if at], len(tried)


def _examined(
    hazards: Sequence[Hazard], schedules: int, ways: Sequence[Way | None], tell: Tell
) -> dict[Way | None, list[Examined]]:
    """Run hazards on schedules, by each way; see ``examine``. Blocks."""

    def parts() -> Iterator[tuple[int, int]]:
        for first in range(0, schedules, _SLICE):
            yield first, min(_SLICE, schedules - first)

    def one(hazard: Hazard, way: Way | None, first: int, count: int) -> dict[str, Any]:
        return asdict(examine(hazard, count, way, first))

    names = [(way, hazard, *part) for way in ways for hazard in hazards for part in parts()]
    jobs = [partial(one, hazard, way, *part) for way, hazard, *part in names]
    sums: dict[tuple[Way | None, str], list[Examined]] = {}
    for (way, hazard, *_), end in zip(names, forked(jobs, tell), strict=True):
        sums.setdefault((way, hazard.__name__), []).append(Examined(**end.value))
    added = {key: functools.reduce(operator.add, found) for key, found in sums.items()}
    return {way: [added[way, hazard.__name__] for hazard in hazards] for way in ways}


if __name__ == "__main__":
    sys.exit(main())
