"""A shared Store in this process's memory that reads spans: what a Packer packs above."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.identity.record import HEADER_BYTES, RecordId
from kvtier.storage_backends.memory import MemoryStore
from kvtier.tiers.store import Capabilities, Span, Status


class SpanMemory(MemoryStore):
    """Notes what it is asked for. spans: each that was read; deleted: the names of each."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.deleted: list[RecordId] = []

    @property
    def capabilities(self) -> Capabilities:
        """Shared, so that its Tier packs."""
        return Capabilities(shared=True, ranged=True)

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore."""
        self.spans += spans
        return [self._span(span) for span in spans]

    def _span(self, span: Span) -> Status:
        if span.id not in self._records:
            return Status.ABSENT
        header, data = self._records[span.id]
        at = span.start
        if at < 0:
            data, at = memoryview(header.pack() + bytes(data)), at + HEADER_BYTES
        if span.total and len(data) != span.total:
            return Status.CORRUPT
        for piece in span.into:
            if at + len(piece) > len(data):
                return Status.CORRUPT
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
        return Status.OK

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        self.deleted += ids
        return super().delete_many(ids)
