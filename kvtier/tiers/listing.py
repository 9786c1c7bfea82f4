"""What a Store lists, lot by lot: what came before an error is not lost with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvtier.identity.record import Header
from kvtier.tiers.store import Store


class Listing:
    """Of one Store; for one thread at a time. ended: whether there is no further lot."""

    def __init__(self, store: Store, most: int) -> None:
        # Nothing is asked before the first lot is taken.
        self._records: Iterator[Header] = (header for one in [store] for header in one.scan())
        self._most = most
        self._error: Exception | None = None
        self.ended = False

    def take(self) -> list[Header]:
        """Return the next headers, at most so many. Blocks; raises what the Store raises."""
        lot: list[Header] = []
        if self._error is not None:
            self.ended = True
            raise self._error
        try:
            for header in itertools.islice(self._records, self._most):
                lot.append(header)  # noqa: PERF402  (these are kept where the next one fails)
        except Exception as error:
            if not lot:
                self.ended = True
                raise
            self._error = error  # for the next call
            return lot
        self.ended = len(lot) < self._most
        return lot
