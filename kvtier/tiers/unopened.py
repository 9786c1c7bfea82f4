"""A Store that could not be opened yet: it stands in its Tier until what it names answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, Self, TypeVar

from kvtier.errors import ConfigError, Unavailable
from kvtier.identity.record import Header, RecordId
from kvtier.tiers.store import LateStore, Option, Read, Status, Store, Write

T = TypeVar("T")

AGAIN_SECONDS: Final = 5.0
"""Between the end of one attempt to open it and the next."""


class UnopenedStore:
    """Promises what its kind does, and fails whatever it is asked.

    opens: what opens it, and raises ConfigError. why: what that raised.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    THREADS: ClassVar[int] = 1
    ALIGNMENT: ClassVar[int] = 1

    def __init__(self, kind: type[LateStore], opens: Callable[[], Store], why: str) -> None:
        self.why = why
        self.capabilities = kind.PROMISES
        self._kind = kind
        self._opens = opens
        self._lock = threading.Lock()
        self._opened: Store | None = None
        self._closed = False

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> Self:
        """See Store. No URL names one."""
        del capacity, options
        raise ConfigError(f"{location!r} names no store")

    def again(self, look: Callable[[Store], T]) -> tuple[Store, T]:
        """Try to open it; return it, and what `look` says of it. Blocks.

        It is closed with this one, at once if that is closed by now, or before the next attempt,
        which says that it was not taken. Raises what they raise.
        """
        self._let_go()
        store, kept = self._opens(), False
        try:
            found = look(store)
            with self._lock:
                if kept := not self._closed:
                    self._opened = store
        finally:
            if not kept:
                store.close()
        return store, found

    def footprint(self, stored_bytes: int) -> int:
        """See Store."""
        return self._kind.footprint(stored_bytes)

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        return [Status.FAILED] * len(ids)

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store."""
        return [Read(Status.FAILED) for _ in zip(ids, into, strict=True)]

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store."""
        return [Status.FAILED] * len(records)

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        return [Status.FAILED] * len(ids)

    def scan(self) -> Iterator[Header]:
        """See Store."""
        raise Unavailable(self.why)

    def close(self) -> None:
        """Close what was opened and not taken. Idempotent."""
        with self._lock:
            self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
