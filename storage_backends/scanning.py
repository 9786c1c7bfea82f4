"""All headers of a medium, or an error: what could not be read must not pass for absent.

Whoever lists a namespace to delete it, or what there is to count it, would take the rest for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvtier.errors import Unavailable
from kvtier.identity.record import Header, RecordId
from kvtier.tiers.store import Status

_TRIES: Final = 3
_LOT: Final = 256


def headers_of(
    lots: Iterable[Sequence[RecordId]],
    read: Callable[[Sequence[RecordId]], Sequence[Header | Status]],
    where: str,
) -> Iterator[Header]:
    """Yield the headers of records; of those that failed, once they come at another try.

    read: reads some headers, or says why there are none. Blocks. Raises Unavailable at the end if
    some could not be read, and when `read` does.
    """
    failed: list[RecordId] = []
    for turn in range(_TRIES):
        if turn:
            left, failed = failed, []
            lots = (left[start : start + _LOT] for start in range(0, len(left), _LOT))
        for lot in lots:
            for name, found in zip(lot, read(lot), strict=True):
                if isinstance(found, Header):
                    yield found
                elif found is Status.FAILED:
                    failed.append(name)
    if failed:
        raise Unavailable(f"{where}: {len(failed)} records could not be read; try again")
