"""The directory of a files store as whoever collects there sees it. See ``tiers.collection``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvtier.errors import Unavailable
from kvtier.identity.record import HEADER_BYTES, Header, RecordId
from kvtier.seams import IoPool
from kvtier.storage_backends.files_folder import Folder
from kvtier.storage_backends.files_usage import DRAFT, SHELVES, footprint, lock
from kvtier.tiers.collection import Listed
from kvtier.tiers.store import Span, Status

_CLAIM: Final = "collection"
"""The file whose lock is the claim: the filesystem drops it with its process."""


class FilesMedium:
    """See Medium. headers, spans, remove: how the store does it; id_of: a record's name by path."""

    def __init__(
        self,
        folder: Folder,
        headers: Callable[[Sequence[RecordId]], list[Header | Status]],
        spans: Callable[[Sequence[Span]], list[Status]],
        remove: Callable[[Sequence[RecordId]], list[Status]],
        id_of: Callable[[str], RecordId | None],
    ) -> None:
        self._folder = folder
        self._headers = headers
        self._spans = spans
        self._remove = remove
        self._id_of = id_of
        self._claim = -1
        self._requests: Counter[str] = Counter()

    @property
    def requests(self) -> Mapping[str, int]:
        """Directories listed, files read and files deleted, so far."""
        return self._requests

    def cost(self) -> tuple[float, float]:
        """See Medium. Nobody charges by the request."""
        return 0.0, 0.0

    def keeps_versions(self) -> bool:
        """See Medium."""
        return False

    def listed(self) -> Iterator[Listed]:
        """See Medium. Ages are by the filesystem's clock; what is being written is left out."""
        try:
            with self._folder.use():
                now = self._now()
                for shelf in SHELVES:
                    self._requests["LIST"] += 1
                    for name, size, changed in self._folder.listed(shelf):
                        if not DRAFT.fullmatch(name):
                            taken = footprint(max(0, size - HEADER_BYTES))
                            yield Listed(self._id_of(f"{shelf}/{name}"), taken, now - changed)
        except OSError as error:
            raise Unavailable(f"{self._folder.path}: {error}") from error

    def headers(self, ids: Sequence[RecordId]) -> list[Header | Status]:
        """See Medium."""
        self._requests["GET"] += len(ids)
        return self._headers(ids)

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore."""
        self._requests["GET"] += len(spans)
        return self._spans(spans)

    def remove(self, ids: Sequence[RecordId]) -> list[bool]:
        """See Medium."""
        self._requests["DELETE"] += len(ids)
        return [status in (Status.OK, Status.ABSENT) for status in self._remove(ids)]

    def claim(self, seconds: float) -> bool:
        """See Medium. It lasts as long as the process does."""
        del seconds
        if self._claim < 0:
            self._claim = self._folder.keep(_CLAIM)
        return lock(self._claim, fcntl.F_WRLCK, self._folder.path)

    def release(self) -> None:
        """See Medium."""
        if self._claim >= 0:
            lock(self._claim, fcntl.F_UNLCK, self._folder.path)

    def race(self, writers: int) -> int:
        """See Medium. The file is deleted afterwards."""
        name = f"{_CLAIM}-race-{secrets.token_hex(8)}"

        def make(_: int) -> bool:
            try:
                os.close(self._folder.change(name, new=True))
            except FileExistsError:
                return False
            return True

        pool = IoPool("race", writers)
        try:
            won = pool.map(make, range(writers))
        finally:
            pool.close()
            with contextlib.suppress(FileNotFoundError):
                self._folder.unlink(name)
        return sum(won)

    def _now(self) -> float:
        """Return the filesystem's time."""
        name = f"{_CLAIM}-time-{secrets.token_hex(8)}"
        descriptor = self._folder.change(name, new=True)
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            self._folder.unlink(name)
