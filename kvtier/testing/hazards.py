"""What goes wrong between an engine's blocks and slots when one edge of the order is missing.

Each hazard is run on schedules of the chaos device with all its edges, when its bytes must be
right and the checker silent, and as its twin with one edge taken away, which the checker has to
find on every schedule, and the bytes on some.

``python -m kvtier.testing.device`` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import partial
from typing import Final, cast

import numpy as np

from kvtier.device.base import Copy, Fence
from kvtier.device.paths import Way
from kvtier.device.race import Race
from kvtier.testing.device_rig import BLOCKS, CHUNK, PLANES, Rig, settled, values
from kvtier.transfer import CopyStatus

Hazard = Callable[[Rig, bool], bool]
"""Runs on a rig, with all edges or without one (False), and says whether the bytes were right."""

# ------------------------------------------------------------------------------------ the hazards


def store_before_compute(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A store reads blocks that compute has not written yet."""
    computed = rig.write([1, 2], 7)
    rig.store([1, 2], 0, (computed,) if edge else ())
    rig.close()
    return values(rig.slots[0]) == [7]


def block_reused_under_store(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A block gets its next owner's KV while the store of the last one reads it."""
    stored = rig.store([1, 2], 0, (rig.write([1, 2], 7),))
    rig.write([2], 9, (stored,) if edge else ())
    rig.close()
    return values(rig.slots[0]) == [7]


def attention_before_load(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """Attention of the last layers trusts the fence of the first ones."""
    rig.fill(0, 5)
    seen: list[int] = []
    landed = rig.load([3, 4], 0, groups=2)
    rig.attend(4, seen, (landed[0],), slice(0, 2))
    rig.attend(4, seen, (landed[1] if edge else landed[0],), slice(2, 4))
    rig.close()
    return seen == [5] * PLANES


def load_over_reader(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A load overwrites a block that attention still reads."""
    rig.write([3], 1)
    seen: list[int] = []
    attended = rig.attend(3, seen)
    rig.fill(0, 5)
    rig.load([3, 4], 0, (attended,) if edge else ())
    rig.close()
    return seen == [1] * PLANES


def zeroing_wipes_load(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """Blocks are zeroed for a new request after its load has come."""
    zeroed = rig.write([3, 4], 0)
    rig.fill(0, 5)
    rig.load([3, 4], 0, (zeroed,) if edge else ())
    rig.close()
    return values(rig.kv[:, 3:5]) == [5]


def slot_reused_under_load(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A slot takes another chunk while a load reads the one before."""
    rig.fill(0, 5)
    computed = rig.write([1, 2], 7)
    landed = rig.load([3, 4], 0)
    rig.store([1, 2], 0, (computed, *landed) if edge else (computed,))
    rig.close()
    return values(rig.kv[:, 3:5]) == [5] and values(rig.slots[0]) == [7]


def host_reads_early(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """The host takes a slot's checksum before the bytes have landed."""
    stored = rig.store([1, 2], 0, (rig.write([1, 2], 7),))
    if edge:
        settled([stored])
    seen = rig.read(0)
    rig.close()
    return seen == [7]


def cancelled_load_lands(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """The load of a cancelled request lands in its blocks' next owner."""
    rig.fill(0, 5)
    landing = rig.load([3, 4], 0)
    if edge:
        settled(landing)  # until then the blocks are in quarantine
    rig.write([4], 9)
    rig.close()
    return values(rig.kv[:, 4]) == [9]


def published_before_landed(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """Another request loads a chunk whose store is under way."""
    stored = rig.store([1, 2], 0, (rig.write([1, 2], 7),))
    rig.load([5, 6], 0, (stored,) if edge else ())
    rig.close()
    return values(rig.kv[:, 5:7]) == [7]


def source_in_any_order(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A batched copy may access its source before what its stream waits for."""
    computed = rig.write([1, 2], 7)
    if edge:
        rig.store([1, 2], 0, (computed,))
    else:
        stream = rig.device.stream("store")
        stream.wait(computed)
        blocks = rig.kv[:, 1:3]
        stream.declare("a copy of blocks in any order", early=[blocks], writes=[rig.slots[0]])
        rig.enqueue(stream, partial(np.copyto, rig.slots[0], blocks.copy()))  # as early as it may
    rig.close()
    return values(rig.slots[0]) == [7]


def staging_reused(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A staging buffer is gathered into while its last contents are on their way to a slot."""
    rig.write([1, 2], 7)
    rig.write([3, 4], 9)
    stored: list[Fence] = []
    for slot, first in enumerate((1, 3)):
        blocks = rig.kv[:, first : first + CHUNK]
        work = [partial(np.copyto, rig.staging, blocks)]
        staged = rig.launch(
            f"staging of blocks {first} and {first + 1}",
            work,
            stored if edge else (),
            reads=[blocks],
            writes=[rig.staging],
        )
        copy = Copy(rig.staging, range(CHUNK), rig.slots[slot])
        stored = [rig.device.gather(rig.device.stream("store"), [copy], [staged])]
    rig.close()
    return values(rig.slots[0]) == [7] and values(rig.slots[1]) == [9]


def block_table_changed(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A block table is filled anew before a copy has looked at it."""
    rig.write([5, 6], 3)
    computed = rig.write([1, 2], 7)
    table = np.array([1, 2])
    if edge:  # the device takes the ids down
        rig.store(cast("Sequence[int]", table), 0, (computed,))
    else:
        stream = rig.device.stream("store")
        stream.wait(computed)
        stream.declare("a copy by a table", reads=[table, rig.kv], writes=[rig.slots[0]])
        rig.enqueue(stream, lambda: np.copyto(rig.slots[0], rig.kv[:, table]))
    rig.device.touch("filling the table anew", writes=[table])
    table[:] = 5, 6
    rig.close()
    return values(rig.slots[0]) == [7]


def event_recorded_anew(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """An event of a pool, which a store recorded, is recorded by a load before it is asked."""
    stored = rig.store([1, 2], 0, (rig.write([1, 2], 7),))
    rig.fill(1, 5)
    (landed,) = rig.load([3, 4], 1)
    settled([stored if edge else landed])  # a Fence is recorded once; an event has its last record
    seen = rig.read(0)
    rig.close()
    return seen == [7]


def memory_freed_in_flight(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """Slots are given back to the system while a copy is under way."""
    rig.store([1, 2], 0, (rig.write([1, 2], 7),))
    if edge:
        rig.close()
    rig.fill(0, 9)  # whoever gets that memory next
    rig.close()
    return values(rig.slots[0]) == [9]


def half_a_batch_published(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """One copy of a batch fails, and the batch is published because it has ended."""
    computed = rig.write([1, 2], 7)
    copies = [
        Copy(rig.pages, [1, 2], rig.slots[0]),
        Copy(rig.pages, [1, BLOCKS], rig.slots[1]),
    ]
    stored = rig.device.gather(rig.device.stream("store"), copies, [computed])
    status = settled([stored])
    published = status is CopyStatus.OK if edge else status is not CopyStatus.TIMEOUT
    seen = [rig.read(0), rig.read(1)] if published else []
    rig.close()
    return seen in ([], [[7], [7]])


def layer_read_early(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """Layers are computed behind a load, all of them once the first of them has landed."""
    rig.fill(0, 5)
    seen: list[int] = []
    landed = rig.load([3, 4], 0, groups=PLANES)
    for layer, fence in enumerate(landed):
        rig.hold(fence if edge else landed[0])
        rig.attend(4, seen, (), slice(layer, layer + 1))
    rig.close()
    return seen == [5] * PLANES


def layer_leaves_early(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A layer's blocks are stored when the layer before it is computed."""
    computed: list[Fence] = []
    for layer in range(PLANES):
        some = slice(layer, layer + 1)
        computed.append(rig.write([1, 2], 7, (), some))
        rig.store([1, 2], 0, computed[-1:] if edge else computed[-2:-1], some)
    rig.close()
    return values(rig.slots[0]) == [7]


def slot_freed_halfway(rig: Rig, edge: bool) -> bool:  # noqa: FBT001
    """A slot takes another chunk when the first group of a load's layers has landed."""
    rig.fill(0, 5)
    landed = rig.load([3, 4], 0, groups=2)
    settled(landed if edge else landed[:1])
    rig.fill(0, 9)
    rig.close()
    return values(rig.kv[:, 3:5]) == [5]


HAZARDS: Final[tuple[Hazard, ...]] = (
    store_before_compute,
    block_reused_under_store,
    attention_before_load,
    load_over_reader,
    zeroing_wipes_load,
    slot_reused_under_load,
    host_reads_early,
    cancelled_load_lands,
    published_before_landed,
    source_in_any_order,
    staging_reused,
    block_table_changed,
    event_recorded_anew,
    memory_freed_in_flight,
    half_a_batch_published,
    layer_read_early,
    layer_leaves_early,
    slot_freed_halfway,
)


AT_ONCE: Final[tuple[Hazard, ...]] = (half_a_batch_published,)
"""Those that a CUDA device refuses when they are enqueued, so that nothing can go wrong later."""


# ---------------------------------------------------------------------------------- schedules


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. right: the bytes were. races: what the checker found."""

    right: bool
    races: tuple[Race, ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """A hazard on so many schedules, each run with all edges and, as a twin, without one.

    corrupted: with all edges, schedules whose bytes were wrong. accused: those in which the
    checker found something. twin_caught_by_bytes, twin_caught_by_checker: schedules of the twin.
    """

    name: str
    schedules: int
    corrupted: int
    accused: int
    twin_caught_by_bytes: int
    twin_caught_by_checker: int

    def __add__(self, other: Examined) -> Examined:
        """Return the same hazard on the schedules of both."""
        mine, theirs = astuple(self)[1:], astuple(other)[1:]
        return Examined(self.name, *(map(sum, zip(mine, theirs, strict=True))))

    @property
    def good(self) -> bool:
        """Say whether nothing is wrong with the edges, and the twin was caught by both."""
        return self.ordered and self.twin_caught_by_bytes > 0

    @property
    def ordered(self) -> bool:
        """Say whether nothing is wrong with the edges, and the checker caught each twin."""
        wrong = self.corrupted or self.accused
        return not wrong and self.twin_caught_by_checker == self.schedules > 0


def run(hazard: Hazard, seed: int | None, *, edge: bool, way: Way | None = None) -> Outcome:
    """Run a hazard on one schedule; seed None: on real threads. way: see Rig. Blocks."""
    rig = Rig(seed, way)
    with closing(rig):
        right = hazard(rig, edge)
    return Outcome(right, tuple(rig.races))


def examine(hazard: Hazard, schedules: int, way: Way | None = None, first: int = 0) -> Examined:
    """Run a hazard and its twin on so many schedules, from the first on. way: see Rig. Blocks."""
    seeds = range(first, first + schedules)
    kept = [run(hazard, seed, edge=True, way=way) for seed in seeds]
    twins = [run(hazard, seed, edge=False, way=way) for seed in seeds]
    return Examined(
        name=hazard.__name__.replace("_", " "),
        schedules=schedules,
        corrupted=sum(not one.right for one in kept),
        accused=sum(bool(one.races) for one in kept),
        twin_caught_by_bytes=sum(not one.right for one in twins),
        twin_caught_by_checker=sum(bool(one.races) for one in twins),
    )
