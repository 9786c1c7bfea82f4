"""Which way a copy goes between a GPU and pinned memory: as measured here, or by default."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from kvtier.device.base import Role
from kvtier.errors import ConfigError

Way = Literal["batch", "staged", "direct"]
"""batch: the driver's batched copies. staged: the kernel, and one copy from or to the GPU's own
memory; what of slots lies apart in many short pieces goes directly. direct: the kernel on mapped
host memory, with a share of the SMs."""

PATHS: Final[tuple[Way, ...]] = get_args(Way)

LINK_BYTES: Final = 32 << 10
"""From so long runs on, batched copies over the link are as fast as one long copy. An H100 falls
from 40 to 7 GB/s between 28 and 24 KiB: vllm-project/vllm#42212."""
_GRID: Final = 8
"""Blocks of threads that a direct copy has by default: few, so that compute keeps the SMs."""
_VERSION: Final = 1
_FILE_BYTES: Final = 1 << 20


class Choice(msgspec.Struct, frozen=True):
    """How a copy goes. grid: blocks of threads, of the direct way."""

    way: Way
    grid: int = _GRID


class Speed(msgspec.Struct, frozen=True):
    """What was measured: runs of so many bytes, so many of them, on one way, in GB/s."""

    role: Role
    run_bytes: int
    runs: int
    choice: Choice
    gb_per_s: float


class Table(msgspec.Struct, frozen=True):
    """Measured speeds of one GPU with its driver, by whose name they are kept; none: defaults."""

    gpu: str
    speeds: tuple[Speed, ...] = ()
    version: int = _VERSION

    def choose(self, role: Role, total: int, runs: int, *, batches: bool = True) -> Choice:
        """Return the way for a copy of `total` bytes in so many runs.

        The fastest of what was measured with runs nearest to these, in size first.
        """
        size = total / max(runs, 1)
        known = [
            one
            for one in self.speeds
            if one.role == role and (batches or one.choice.way != "batch")
        ]
        known = _nearest(known, [one.run_bytes for one in known], size)
        known = _nearest(known, [one.runs for one in known], runs)
        if known:
            return max(known, key=lambda one: one.gb_per_s).choice
        if batches and size >= LINK_BYTES:
            return Choice("batch")
        return Choice("staged" if role == "store" else "direct")

    def keep(self, folder: Path) -> Path:
        """Write it where ``kept_table`` looks. Raises OSError."""
        path = table_path(folder, self.gpu)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        part.replace(path)
        return path


def _nearest(speeds: list[Speed], numbers: Sequence[int], wanted: float) -> list[Speed]:
    """Return those whose number is nearest in proportion."""
    if not speeds:
        return []
    far = [abs(math.log(max(number, 1) / max(wanted, 1))) for number in numbers]
    return [one for one, apart in zip(speeds, far, strict=True) if apart == min(far)]


DEFAULT: Final = Table("")


def table_path(folder: Path, gpu: str) -> Path:
    """Return the file of a GPU's table in a folder."""
    return folder / f"paths-{re.sub('[^A-Za-z0-9.]+', '-', gpu)}.json"


def kept_table(folder: Path, gpu: str) -> Table:
    """Return the table that was measured for a GPU, or the defaults where there is none.

    Raises ConfigError for a file that is no such table: it says how to have a good one.
    """
    path = table_path(folder, gpu)
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES)
    except OSError:
        return Table(gpu)
    try:
        found = msgspec.json.decode(text, type=Table)
        _check(found.speeds)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path} is no table of copy paths ({error}); remove it, or measure anew by "
            "`kvtier doctor --device`"
        ) from error
    return found if (found.gpu, found.version) == (gpu, _VERSION) else Table(gpu)


def _check(speeds: Iterable[Speed]) -> None:
    for one in speeds:
        if min(one.run_bytes, one.runs, one.choice.grid) < 1 or not one.gb_per_s >= 0:
            raise ValueError(f"{one} cannot be")
