"""Collection: what goes are leaves, whatever the records; what is left can always be reached."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from kvtier.cli.gc import _lines
from kvtier.clock import Clock, monotonic
from kvtier.errors import Unavailable
from kvtier.events import note
from kvtier.identity.record import Header, PartName, record_id
from kvtier.tiers import collection as module
from kvtier.tiers.collection import Collected, Found, Kept, Listed, choose, collect
from kvtier.tiers.pack import CODEC_PACK, CODEC_SIZED_PACK, pack, pack_id, unpacked_id
from kvtier.tiers.store import Span, Status, Write

HOUR = 3600.0
ALL = Kept(None, None, HOUR)


def name(number: int) -> bytes:
    return record_id(number.to_bytes(32, "little"), PartName())


def found(number: int, above: int | None, *, age_s: float = 10.0, depth: int = 0) -> Found:
    parent = None if above is None else name(above)
    return Found(name(number), 100, age_s, depth, parent, [name(number)])


def tree(rng: random.Random, count: int) -> list[Found]:
    """Return records that hang under each other as those of many prompts do."""
    records = [found(0, None, age_s=rng.uniform(0, 100))]
    for number in range(1, count):
        above = rng.randrange(-1, number)
        depth = 0 if above < 0 else records[above].depth + 1
        age_s = rng.uniform(0, 100)
        records.append(found(number, above if above >= 0 else None, age_s=age_s, depth=depth))
    return records


def headless(records: Sequence[Found]) -> list[Found]:
    """Return the records whose parent is in none."""
    there = {member for one in records for member in one.members}
    return [one for one in records if one.parent and one.parent not in there]


@pytest.mark.parametrize("seed", range(30))
def test_at_every_moment_of_a_collection_nothing_is_headless(seed):
    rng = random.Random(seed)
    records = tree(rng, 60)
    kept = Kept(rng.randrange(6000), rng.choice((None, 50.0)), HOUR)
    doomed = choose(records, kept)
    assert doomed or sum(one.nbytes for one in records) <= kept.capacity
    left = dict(enumerate(records))
    for at, _ in doomed:
        del left[at]
        assert not headless(list(left.values()))
    assert sum(one.nbytes for one in left.values()) <= kept.capacity


def test_no_more_goes_than_is_above_the_capacity_and_the_oldest_leaf_first():
    records = [found(0, None, age_s=99), found(1, 0, age_s=50, depth=1), found(2, 0, age_s=70)]
    assert choose(records, Kept(200, None, HOUR)) == [(2, "capacity")]
    assert choose(records, Kept(300, None, HOUR)) == []


def test_what_is_old_goes_only_when_nothing_younger_hangs_under_it():
    records = [found(0, None, age_s=99), found(1, 0, age_s=99, depth=1), found(2, 1, depth=2)]
    assert choose(records, Kept(None, 50.0, HOUR)) == []
    records[2] = records[2]._replace(age_s=60.0)
    assert [at for at, _ in choose(records, Kept(None, 50.0, HOUR))] == [2, 1, 0]


def test_orphans_go_with_all_that_hangs_under_them_once_they_are_old():
    records = [found(5, 4, depth=5, age_s=2 * HOUR), found(6, 5, depth=6, age_s=2 * HOUR)]
    assert choose(records, ALL) == [(1, "orphan"), (0, "orphan")]
    records[1] = records[1]._replace(age_s=10.0)
    assert choose(records, ALL) == [], "somebody may be writing what it hangs under"


def test_a_ring_of_lying_records_is_an_orphan_and_ends():
    ring = [found(1, 2, depth=1, age_s=2 * HOUR), found(2, 1, depth=1, age_s=2 * HOUR)]
    choose(ring, ALL)
    assert choose([found(1, 1, depth=1, age_s=2 * HOUR)], ALL) == [(0, "orphan")]


def test_what_hangs_under_the_middle_of_a_pack_keeps_the_pack():
    members = [name(at) for at in range(4)]
    packed = Found(pack_id(members[-1], 2), 400, 99.0, 0, None, members)
    branch = found(9, 1, depth=2, age_s=10.0)
    assert choose([packed, branch], Kept(None, 50.0, HOUR)) == []
    assert [at for at, _ in choose([packed, branch], Kept(0, None, HOUR))] == [1, 0]


# ------------------------------------------------------------------------------------ on a medium


class Shelf:
    """A medium in memory. other: who else has claimed it; refuses: what it keeps.

    fails: how often a read of a record fails.
    """

    def __init__(self, records: Sequence[Write], age_s: float = 2 * HOUR) -> None:
        self.records = {record.header.id: record for record in records}
        self.age_s = age_s
        self.strangers = 0
        self.requests: Counter[str] = Counter()
        self.others: list[bool] = []
        self.claims = 0
        self.refuses: set[bytes] = set()
        self.spoilt: set[bytes] = set()
        self.fails: dict[bytes, int] = {}

    def listed(self) -> Iterator[Listed]:
        for key, record in self.records.items():
            yield Listed(key, len(record.data), self.age_s)
        yield from [Listed(None, 7, self.age_s)] * self.strangers

    def headers(self, ids: Sequence[bytes]) -> list[Header | Status]:
        if all(self.fails.get(one) for one in ids):
            raise Unavailable("none of them could be read")
        return [self._failure(one) or self.records[one].header for one in ids]

    def _failure(self, key: bytes) -> Status | None:
        if self.fails.get(key):
            self.fails[key] -= 1
            return Status.FAILED
        return Status.CORRUPT if key in self.spoilt else None

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        if all(self.fails.get(span.id) for span in spans):
            raise Unavailable("none of them could be read")
        for key, start, (into,), _ in spans:
            into[:] = self.records[key].data[start : start + len(into)]
        return [self._failure(span.id) or Status.OK for span in spans]

    def remove(self, ids: Sequence[bytes]) -> list[bool]:
        gone = [one not in self.refuses for one in ids]
        for one, removed in zip(ids, gone, strict=True):
            if removed:
                self.records.pop(one, None)
            else:
                note("it is not to go")
        return gone

    def claim(self, seconds: float) -> bool:
        assert seconds == module.CLAIM_SECONDS
        self.claims += 1
        return not (self.others and self.others.pop(0))

    def release(self) -> None:
        self.claims -= 100

    def cost(self) -> tuple[float, float]:
        return 0.5, 0.023

    def race(self, writers: int) -> int:
        return writers

    def keeps_versions(self) -> bool:
        return False


def record(number: int, above: int | None, depth: int, *, codec: int = 0) -> Write:
    parent = None if above is None else name(above)
    key = number.to_bytes(32, "little")
    header = Header(
        bytes(32), key, parent, depth, PartName(), 100, 100, bytes(16), bytes(16), codec
    )
    return Write(header, memoryview(bytes(100)))


def chain(first: int, stop: int) -> list[Write]:
    return [record(at, at - 1 if at else None, at) for at in range(first, stop)]


def run(
    shelf: Shelf, kept: Kept = ALL, *, dry_run: bool = False, clock: Clock = monotonic
) -> Collected:
    return collect(shelf, kept, lambda *_: None, dry_run=dry_run, clock=clock)


def test_a_branch_off_the_middle_of_a_pack_is_no_orphan():
    packed = pack(chain(0, 4), 2)
    assert packed.header.codec == CODEC_PACK
    assert unpacked_id(packed.header.id) == name(3)
    shelf = Shelf([packed, record(9, 1, 2), record(10, 8, 2)])
    out = run(shelf)
    assert dict(out.removed) == {"orphan": 1}
    assert set(shelf.records) == {packed.header.id, name(9)}


def test_strangers_and_what_is_spoilt_or_of_another_version_stay():
    shelf = Shelf([*chain(0, 2), record(20, 19, 5, codec=CODEC_SIZED_PACK + 1), record(21, 19, 5)])
    shelf.strangers = 3
    shelf.spoilt = {name(21)}
    out = run(shelf, Kept(0, None, HOUR))
    assert (out.strangers, out.unreadable, dict(out.removed)) == (3, 2, {"capacity": 2})
    assert set(shelf.records) == {name(20), name(21)}
    assert out.left_over_bytes == out.left_bytes == 200


@pytest.mark.parametrize("failures", [1, 1000])
def test_what_hangs_under_what_could_not_be_read_is_no_orphan(failures):
    """A server in bad weather fails some of many reads: their tails must not go for that."""
    packed = pack(chain(0, 4), 2)
    tables = [packed, record(9, 1, 2), pack(chain(4, 8), 2), record(10, 5, 6)]
    for records, key in ((chain(0, 6), name(2)), (tables, packed.header.id)):
        shelf = Shelf(records)
        shelf.fails = {key: failures}
        out = run(shelf)
        assert (out.unread, dict(out.removed)) == (int(failures > 1), {})
        shelf.fails = {}
        shelf.records[name(30)] = record(30, 29, 7)
        assert dict(run(shelf).removed) == {"orphan": 1}, "once all is read, orphans go"


def test_when_nothing_can_be_read_that_is_said():
    shelf = Shelf(chain(0, 6))
    shelf.fails = dict.fromkeys(shelf.records, 1)
    with pytest.raises(Unavailable):
        run(shelf)


def test_twin_tried_no_more_and_taken_for_absent_its_tail_would_go(monkeypatch):
    monkeypatch.setattr(module, "_TRIES", 1)
    monkeypatch.setattr(Kept, "_replace", lambda kept, **_: kept)
    shelf = Shelf(chain(0, 6))
    shelf.fails = {name(2): 1}
    assert dict(run(shelf).removed) == {"orphan": 3}


def test_what_hangs_under_a_record_of_a_later_version_is_no_orphan():
    later = record(2, 1, 2, codec=CODEC_SIZED_PACK + 1)
    shelf = Shelf([*chain(0, 2), later, *chain(3, 6)])
    assert dict(run(shelf).removed) == {}
    del shelf.records[name(2)]
    assert dict(run(shelf).removed) == {"orphan": 3}, "its tail would be, if it was not there"


@pytest.mark.parametrize("newer", [True, False])
def test_it_is_said_that_orphans_were_not_looked_for(newer):
    shelf = Shelf([*chain(0, 2), record(2, 1, 2, codec=CODEC_SIZED_PACK + newer)])
    shelf.spoilt = set() if newer else {name(2)}
    out = run(shelf)
    assert out.unreadable == 1
    assert ("no orphans were looked for" in "".join(_lines(out, dry_run=False))) is newer


def test_overshoot_and_money_are_told():
    out = run(Shelf(chain(0, 5)), Kept(300, None, HOUR))
    assert (out.nbytes, out.overshoot_bytes, out.left_bytes, out.left_over_bytes) == (
        500,
        200,
        300,
        0,
    )
    assert out.request_usd == 0.5
    assert out.month_usd == pytest.approx(300 / 1e9 * 0.023)


def test_while_another_collects_nothing_is_done():
    shelf = Shelf(chain(0, 5))
    shelf.others = [True]
    assert run(shelf, Kept(0, None, HOUR)).ended == "another collection is under way"
    assert len(shelf.records) == 5


def test_a_collection_that_lost_its_claim_ends_between_batches(monkeypatch):
    monkeypatch.setattr(module, "_BATCH", 2)
    shelf = Shelf(chain(0, 6))
    shelf.others = [False, False, True]
    out = run(shelf, Kept(0, None, HOUR))
    assert out.ended == "another collection has taken over"
    assert sorted(shelf.records) == sorted(name(at) for at in range(4))
    assert (out.removed_bytes, out.left_bytes) == (200, 400)


def test_a_claim_is_renewed_while_all_is_looked_at(monkeypatch):
    """That takes hours in a large bucket: another would take over, and whoever is next from it."""
    monkeypatch.setattr(module, "_HEADERS", 2)
    monkeypatch.setattr(module, "_LISTED", 3)
    shelf = Shelf([pack(chain(0, 4), 2), record(9, 1, 2), *chain(4, 8)])
    claims: list[float] = []
    monkeypatch.setattr(shelf, "claim", lambda seconds: not claims.append(seconds))
    run(shelf, Kept(None, None, HOUR), clock=itertools.count(0, 31).__next__)
    assert len(claims) == 1 + 2 + 3 + 1, "at first, listing, headers, packs"
    claims.clear()
    run(shelf, Kept(None, None, HOUR), clock=lambda: 0.0)
    assert len(claims) == 1, "and not more often than is needed"


def test_a_collection_that_lost_its_claim_while_it_looked_removes_nothing():
    shelf = Shelf(chain(0, 6))
    shelf.others = [False, True]
    out = run(shelf, Kept(0, None, HOUR), clock=itertools.count(0, 31).__next__)
    assert out.ended == "another collection has taken over"
    assert len(shelf.records) == 6


def test_what_could_not_be_deleted_keeps_what_it_hangs_under(monkeypatch):
    monkeypatch.setattr(module, "_BATCH", 2)
    shelf = Shelf(chain(0, 6))
    shelf.refuses = {name(4)}
    out = run(shelf, Kept(0, None, HOUR))
    assert (out.unconfirmed, out.ended) == (1, "not everything could be deleted: it is not to go")
    assert sorted(shelf.records) == sorted(name(at) for at in range(5))
    shelf.refuses = set()
    out = run(shelf, Kept(0, None, HOUR))
    assert (dict(out.removed), out.unconfirmed) == ({"capacity": 5}, 0), "the next one tries again"
    assert not shelf.records


def test_a_dry_run_changes_nothing_and_claims_nothing():
    shelf = Shelf(chain(0, 5))
    out = run(shelf, Kept(200, None, HOUR), dry_run=True)
    assert dict(out.removed) == {"capacity": 3}
    assert len(shelf.records) == 5
    assert shelf.claims == 0


def test_two_collections_at_once_leave_what_one_would():
    """As on a server that ignores conditions: both have the claim."""
    shelf = Shelf(chain(0, 8))
    choose_of = module.choose

    def both(records: Sequence[Found], kept: Kept) -> list[tuple[int, str]]:
        chosen = choose_of(records, kept)
        module.choose = choose_of
        run(shelf, kept)
        return chosen

    module.choose = both
    try:
        run(shelf, Kept(300, None, HOUR))
    finally:
        module.choose = choose_of
    assert sorted(shelf.records) == sorted(name(at) for at in range(3))
