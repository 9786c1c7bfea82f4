"""Everything about copies between blocks and slots that can be shown without a GPU.

``python -m kvtier.testing.device --schedules 1000`` runs each hazard on so many schedules, with
its edges and without one, and the CUDA device on CPU streams on a tenth of them; compiles the
copy kernel with each compiler that is here, and runs it on the CPU; and changes kernel and
planner, one thing at a time, each of which has to show. The last line that it prints is a JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvtier.device.nvrtc import kernel_source
from kvtier.device.paths import PATHS, Way
from kvtier.testing.compilers import NOT_RUN, compilers
from kvtier.testing.hazards import AT_ONCE, HAZARDS, Examined, examine
from kvtier.testing.kernel_mutants import HARMLESS, kernel_mutants
from kvtier.testing.kernels import build, compiler, right, survivors
from kvtier.testing.planner_mutants import planner_holds, planner_mutants

__all__ = ["kernels_alive", "planners_alive"]

_FEWER: Final = 10  # schedules of each way of the CUDA device


def kernels_alive(every: int = 1) -> tuple[list[str], int]:
    """Return which changed kernels nothing was seen of, and of how many; of each `every`-th.

    The harmless ones are not among them. Blocks. Needs g++. Raises AssertionError where the
    kernel itself is wrong.
    """
    tried = [one for one in kernel_mutants() if one.name not in HARMLESS][::every]
    sources = [kernel_source(), *(one.source for one in tried)]
    with tempfile.TemporaryDirectory(prefix="kvtier-kernels-") as folder:
        left = right(build(Path(folder), "plain", sources), range(len(sources)))
        if 0 not in left:
            raise AssertionError("the kernel does not copy all cases right")
        again = build(Path(folder), "sanitized", [sources[number] for number in left])
        alive = [left[number] for number in right(again, range(len(left)))]
    return [tried[number - 1].name for number in alive if number], len(tried)


def planners_alive(every: int = 1) -> tuple[list[str], int]:
    """Return which changes of the planner nothing was seen of, and of how many. Blocks.

    Raises AssertionError where the planner itself is wrong.
    """
    if not planner_holds():
        raise AssertionError("the planner does not plan all cases right")
    tried = list(planner_mutants())[::every]

    def holds(number: int) -> bool:
        with tried[number].removed():
            return planner_holds()

    return [tried[at].name for at in survivors(holds, range(len(tried)))], len(tried)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where something is not good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--every", type=int, default=1, help="of the changes, to try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    built = compilers()
    alive, planned = planners_alive(options.every)
    report: dict[str, Any] = {"gpu": NOT_RUN, "compilers": built}
    report |= {"kernel_mutants": NOT_RUN, "kernel_mutants_alive": NOT_RUN}
    if compiler() is not None:
        kernels, tried = kernels_alive(options.every)
        alive = kernels + alive
        report["kernel_mutants"] = {
            "kernel": tried,
            "planner": planned,
            "harmless": HARMLESS,
            "alive": alive,
        }
        report["kernel_mutants_alive"] = len(alive)
    for name, found in built.items():
        sys.stderr.write(f"{name}: {found}\n")
    sys.stderr.write(f"changes of kernel and planner that nothing showed: {alive or 'none'}\n")
    rows = []
    for hazard in HAZARDS:
        rows.append(examine(hazard, options.schedules))
        sys.stderr.write(f"{rows[-1].name}: {'good' if rows[-1].good else 'NOT GOOD'}\n")
    report["hazards"] = [asdict(row) for row in rows]
    ways = {way: _on_way(way, -(-options.schedules // _FEWER)) for way in PATHS}
    report["cuda_device_on_cpu"] = {
        way: [asdict(row) for row in found] for way, found in ways.items()
    }
    disordered = [row.name for found in ways.values() for row in found if not row.ordered]
    sys.stderr.write(f"the CUDA device on CPU streams: {disordered or 'good'}\n")
    line = json.dumps(report)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    wrong = [found for found in built.values() if found != NOT_RUN and not found.get("right", True)]
    good = all(row.good for row in rows) and not disordered
    return 0 if good and not alive and not wrong else 1


def _on_way(way: Way, schedules: int) -> list[Examined]:
    """Run the hazards on the CUDA device, all of whose copies go one way, on CPU streams."""
    return [examine(one, schedules, way) for one in HAZARDS if one not in AT_ONCE]


if __name__ == "__main__":
    sys.exit(main())
