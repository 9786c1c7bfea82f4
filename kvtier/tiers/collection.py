"""Collection: what of a shared medium goes, to hold its capacity and the age of what it keeps.

Leaves go first, so that what is left is always servable: a record goes only after all that hang
under it and could be read. A pack counts as one record. What cannot be reached from a prompt's
first chunk is an orphan; it goes too, once it is old enough that nobody is still writing what it
hangs under. What is no record of this version is counted, and left alone. Where something could
not be read, or is of a later version, others may hang under it that seem to hang under nothing: no
orphan goes then.

Nothing here has to be exclusive: two collections at once delete the same things. A claim on the
medium keeps them from doing the work twice.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from kvtier.clock import Clock, monotonic
from kvtier.codecs.known import KNOWN
from kvtier.errors import Unavailable
from kvtier.events import noted
from kvtier.identity.record import FIRST_PLUG_IN, KEY_BYTES, Header, RecordId
from kvtier.tiers.pack import CODEC_PACK, CODEC_SIZED_PACK, order_of, unpacked_id
from kvtier.tiers.store import Span, Status

A = TypeVar("A")
Listing = tuple[RecordId, int, float]  # a record's name, its size and its age

_BATCH: Final = 1000  # as many as S3 lists, and deletes, by one request
_HEADERS: Final = 256
_LISTED: Final = 1 << 12  # objects of a step
_TRIES: Final = 3  # at what a medium fails to read: a server in bad weather fails some of many

CLAIM_SECONDS: Final = 120.0
"""How long a claim lasts that is not renewed; it is renewed four times as often."""


class Listed(NamedTuple):
    """One object: its record's name, None for what is no record; its size, and its age."""

    id: RecordId | None
    nbytes: int
    age_s: float


class Medium(Protocol):
    """What a shared Store offers to whoever collects there. All calls block.

    requests: how many were sent, by kind.
    """

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests sent so far, by kind."""
        ...

    def listed(self) -> Iterator[Listed]:
        """Yield all that lies there. Raises Unavailable when it cannot be listed to its end."""
        ...

    def headers(self, ids: Sequence[RecordId]) -> list[Header | Status]:
        """Return the header of each record, or why there is none."""
        ...

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore."""
        ...

    def remove(self, ids: Sequence[RecordId]) -> list[bool]:
        """Delete records without asking whether they are there; say which are gone.

        Why the others are not is noted, see ``events``.
        """
        ...

    def claim(self, seconds: float) -> bool:
        """Take, or renew, the right to collect; False while another has it."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...

    def cost(self) -> tuple[float, float]:
        """Return US dollars for the requests so far, and for a GB kept a month."""
        ...

    def race(self, writers: int) -> int:
        """Let writers create one object at once; return how many were told that they did."""
        ...

    def keeps_versions(self) -> bool:
        """Say whether what is deleted is kept all the same, and paid for."""
        ...


@runtime_checkable
class Collectable(Protocol):
    """A Store on whose medium can be collected."""

    def medium(self) -> Medium:
        """Return the medium. Reaches nothing."""
        ...


class Found(NamedTuple):
    """A record, or a pack: its size and age, what it hangs under, and the parts that are in it."""

    id: RecordId
    nbytes: int
    age_s: float
    depth: int
    parent: RecordId | None
    members: Sequence[RecordId]


class Kept(NamedTuple):
    """What is to hold: bytes, or None; seconds since the write, or None; and for orphans."""

    capacity: int | None
    max_age_s: float | None
    orphan_age_s: float


@dataclass(slots=True)
class Collected:
    """What was found and done. Sizes are bytes; removed: objects, by why they went.

    overshoot_bytes: above the capacity, before. strangers: objects that are no records; unreadable:
    records of another version, or spoilt; unread: those that the medium failed to read. newer: if
    any is of a later version. ended: why it ended early, if it did. requests: by kind; request_usd,
    month_usd: by the prices of S3 Standard in us-east-1.
    """

    objects: int = 0
    nbytes: int = 0
    overshoot_bytes: int = 0
    strangers: int = 0
    unreadable: int = 0
    unread: int = 0
    newer: bool = False
    removed: dict[str, int] = field(default_factory=dict)
    removed_bytes: int = 0
    unconfirmed: int = 0
    left_bytes: int = 0
    left_over_bytes: int = 0
    ended: str = ""
    requests: Mapping[str, int] = field(default_factory=dict)
    request_usd: float = 0.0
    month_usd: float = 0.0


def collect(
    medium: Medium,
    kept: Kept,
    tell: Callable[[str, int, int], None],
    *,
    dry_run: bool,
    clock: Clock = monotonic,
) -> Collected:
    """Delete what is to go. Blocks; raises Unavailable when the medium cannot be listed.

    tell: what is done, how much of it, and of how much. dry_run: say what would go, and delete
    nothing.
    """
    out = Collected()
    if not dry_run and not medium.claim(CLAIM_SECONDS):
        out.ended = "another collection is under way"
        return out

    renewed = clock()

    def step(text: str, done: int, count: int) -> None:
        """Tell of a step, and renew the claim where it is time, or something is removed."""
        nonlocal renewed
        tell(text, done, count)
        if not dry_run and (text == "remove" or clock() - renewed > CLAIM_SECONDS / 4):
            if not medium.claim(CLAIM_SECONDS):
                raise _TakenOverError
            renewed = clock()

    try:
        records = _look(medium, out, step)
        if out.unread or out.newer:
            kept = kept._replace(orphan_age_s=math.inf)
        doomed = choose(records, kept)
        _remove(medium, records, doomed, out, step, dry_run=dry_run)
    except _TakenOverError:
        out.ended = "another collection has taken over"
    finally:
        if not dry_run:
            medium.release()
    out.left_bytes = out.nbytes - out.removed_bytes
    if kept.capacity is not None:
        out.overshoot_bytes = max(out.nbytes - kept.capacity, 0)
        out.left_over_bytes = max(out.left_bytes - kept.capacity, 0)
    out.requests = dict(medium.requests)
    out.request_usd, gigabyte = medium.cost()
    out.month_usd = out.left_bytes / 1e9 * gigabyte
    return out


class _TakenOverError(Exception):
    """The claim could not be renewed."""


def _look(medium: Medium, out: Collected, step: Callable[[str, int, int], None]) -> list[Found]:
    listed = []
    for number, one in enumerate(medium.listed(), 1):
        if not number % _LISTED:
            step("list", 0, number)
        if one.id is None:
            out.strangers += 1
            continue
        out.objects += 1
        out.nbytes += one.nbytes
        listed.append((one.id, one.nbytes, one.age_s))
    found: list[Found] = []

    def look(lot: Sequence[Listing]) -> list[Listing]:
        failed = []
        headers = medium.headers([name for name, _, _ in lot])
        for one, header in zip(lot, headers, strict=True):
            name, nbytes, age_s = one
            if header is Status.FAILED:
                failed.append(one)
            elif isinstance(header, Header) and _readable(header):
                own = (unpacked_id(name),)
                found.append(Found(name, nbytes, age_s, header.depth, header.parent, own))
            elif header is not Status.ABSENT:
                out.unreadable += 1
                out.newer |= header is Status.NEWER or isinstance(header, Header)
        return failed

    out.unread = len(_read(listed, look, functools.partial(step, "look")))
    out.unread += _with_members(medium, found, functools.partial(step, "look into packs"))
    return found


def _read(
    items: Sequence[A], read: Callable[[Sequence[A]], list[A]], step: Callable[[int, int], None]
) -> list[A]:
    """Read all items, those that failed again; return what could not be read.

    read: reads some, and returns those that failed. Raises Unavailable when nobody answers.
    """
    left = list(items)
    for turn in range(_TRIES):
        failed: list[A] = []
        for start in range(0, len(left), _HEADERS):
            step(start, len(left))
            try:
                failed += read(left[start : start + _HEADERS])
            except Unavailable:  # it says so also where all that failed before fails again
                if not turn:
                    raise
                return failed + left[start:]
        left = failed
    return left


def _readable(header: Header) -> bool:
    """Say whether it is known what a record's name and parent mean: of another version, not."""
    return header.codec in (*KNOWN, CODEC_PACK, CODEC_SIZED_PACK) or header.codec >= FIRST_PLUG_IN


def _with_members(medium: Medium, found: list[Found], step: Callable[[int, int], None]) -> int:
    """Read what parts are in the packs in which the parents of others may lie.

    Returns of how many that could not be read.
    """
    ends = {one.members[0] for one in found}
    depths = {one.depth - 1 for one in found if one.parent and one.parent not in ends}
    wanted = [
        at
        for at, one in enumerate(found)
        if order_of(one.id)
        and any(depth in depths for depth in range(one.depth, one.depth + (1 << order_of(one.id))))
    ]

    def look(lot: Sequence[int]) -> list[int]:
        tables = [bytearray(KEY_BYTES << order_of(found[at].id)) for at in lot]
        spans = [
            Span(found[at].id, 0, [memoryview(table)])
            for at, table in zip(lot, tables, strict=True)
        ]
        statuses = medium.read_spans(spans)
        for at, table, status in zip(lot, tables, statuses, strict=True):
            if status is Status.OK:
                tail = unpacked_id(found[at].id)[KEY_BYTES:]
                keys = range(0, len(table), KEY_BYTES)
                members = [bytes(table[key : key + KEY_BYTES]) + tail for key in keys]
                found[at] = found[at]._replace(members=members)
        return [at for at, status in zip(lot, statuses, strict=True) if status is Status.FAILED]

    return len(_read(wanted, look, step))


def choose(records: Sequence[Found], kept: Kept) -> list[tuple[int, str]]:
    """Return the places of the records that go, deepest first, and why each does."""
    under, reached = _hanging(records)
    why: dict[int, str] = {}
    order = sorted(range(len(records)), key=lambda at: (-records[at].depth, records[at].id))
    for at in order:
        if all(child in why for child in under[at]):
            age_s = records[at].age_s
            if at not in reached:
                if age_s >= kept.orphan_age_s:
                    why[at] = "orphan"
            elif kept.max_age_s is not None and age_s >= kept.max_age_s:
                why[at] = "age"
    if kept.capacity is not None:
        over = sum(one.nbytes for one in records) - kept.capacity
        over -= sum(records[at].nbytes for at in why)
        _make_room(records, under, why, over)
    return [(at, why[at]) for at in order if at in why]


def _hanging(records: Sequence[Found]) -> tuple[list[list[int]], dict[int, None]]:
    """Return what hangs under each record, and which can be reached from a first chunk."""
    holders: dict[RecordId, list[int]] = {}
    for at, one in enumerate(records):
        for member in one.members:
            holders.setdefault(member, []).append(at)
    under: list[list[int]] = [[] for _ in records]
    reached: dict[int, None] = {}
    for at, one in enumerate(records):
        if one.parent is None:
            reached[at] = None
        for above in holders.get(one.parent, ()) if one.parent else ():
            if above != at:
                under[above].append(at)
    ways = list(reached)
    while ways:
        for child in under[ways.pop()]:
            if child not in reached:
                reached[child] = None
                ways.append(child)
    return under, reached


def _make_room(
    records: Sequence[Found], under: Sequence[Sequence[int]], why: dict[int, str], over: int
) -> None:
    """Choose leaves, the ones written first before others, until so many bytes are gone."""
    left = [sum(child not in why for child in children) for children in under]
    above: dict[int, list[int]] = {}
    for at, children in enumerate(under):
        for child in children:
            above.setdefault(child, []).append(at)
    leaves = [
        (-one.age_s, -one.depth, at)
        for at, one in enumerate(records)
        if not left[at] and at not in why
    ]
    heapq.heapify(leaves)
    while over > 0 and leaves:
        _, _, at = heapq.heappop(leaves)
        why[at] = "capacity"
        over -= records[at].nbytes
        for parent in above.get(at, ()):
            left[parent] -= 1
            if not left[parent] and parent not in why:
                one = records[parent]
                heapq.heappush(leaves, (-one.age_s, -one.depth, parent))


def _remove(
    medium: Medium,
    records: Sequence[Found],
    doomed: Sequence[tuple[int, str]],
    out: Collected,
    step: Callable[[str, int, int], None],
    *,
    dry_run: bool,
) -> None:
    for start in range(0, len(doomed), _BATCH):
        step("remove", start, len(doomed))
        lot = doomed[start : start + _BATCH]
        names = [records[at].id for at, _ in lot]
        noted()  # of what was read
        gone = [True] * len(lot) if dry_run else medium.remove(names)
        for (at, reason), confirmed in zip(lot, gone, strict=True):
            if confirmed:
                out.removed[reason] = out.removed.get(reason, 0) + 1
                out.removed_bytes += records[at].nbytes
            else:
                out.unconfirmed += 1
        if not all(gone):  # what hangs there must not lose what it hangs under
            why = noted()
            out.ended = "not everything could be deleted" + (f": {why}" if why else "")
            return
