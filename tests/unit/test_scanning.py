"""All headers of a medium, or an error; what came before that is not lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.errors import Unavailable
from kvtier.identity.record import Header
from kvtier.storage_backends.memory import MemoryStore
from kvtier.storage_backends.scanning import headers_of
from kvtier.testing.records import make_record
from kvtier.tiers.listing import Listing
from kvtier.tiers.store import Status

RECORDS = [make_record(number, 10).header for number in range(5)]
NAMES = [header.id for header in RECORDS]


def scanned(failures: dict[bytes, int], lacking: dict[bytes, Status]) -> list[Header]:
    known = dict(zip(NAMES, RECORDS, strict=True))

    def read(names):
        out = []
        for name in names:
            failures[name] = failures.get(name, 0) - 1
            failed = failures[name] >= 0
            out.append(Status.FAILED if failed else lacking.get(name, known[name]))
        return out

    return list(headers_of([NAMES[:2], NAMES[2:]], read, "here"))


def test_what_failed_comes_at_another_try_and_what_is_absent_or_spoilt_does_not():
    assert scanned({}, {}) == RECORDS
    assert scanned({NAMES[1]: 1, NAMES[4]: 2}, {}) == [*(RECORDS[at] for at in (0, 2, 3, 1, 4))]
    lacking = {NAMES[0]: Status.ABSENT, NAMES[1]: Status.CORRUPT, NAMES[2]: Status.NEWER}
    assert scanned({}, lacking) == RECORDS[3:]


def test_what_fails_again_and_again_is_an_error():
    with pytest.raises(Unavailable, match="here: 2 records could not be read"):
        scanned({NAMES[0]: 3, NAMES[3]: 9}, {})


class Broken(MemoryStore):
    """Its list breaks off after so many."""

    most = 5

    def scan(self) -> Iterator[Header]:
        yield from RECORDS[: self.most]
        if self.most < len(RECORDS):
            raise Unavailable("it broke off")


@pytest.mark.parametrize("most", [0, 1, 3, 4])
def test_what_was_listed_before_an_error_is_not_lost(most):
    store = Broken()
    store.most = most
    listing, found = Listing(store, 3), []
    for _ in range(-(-most // 3)):
        found += listing.take()
        assert not listing.ended
    with pytest.raises(Unavailable, match="it broke off"):
        listing.take()
    assert (found, listing.ended) == (RECORDS[:most], True)


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_a_list_comes_in_lots(size):
    listing, lots = Listing(Broken(), size), []
    while not listing.ended:
        lots.append(listing.take())
    assert [header for lot in lots for header in lot] == RECORDS
    assert max(map(len, lots)) <= size
