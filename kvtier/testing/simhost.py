"""Shared tiers in a simulated world, and another host that has written there."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvtier.cache import Cache
from kvtier.catalog.catalog import Part
from kvtier.identity.keys import TokenIds
from kvtier.identity.record import (
    HEADER_BYTES,
    KEY_BYTES,
    Header,
    RecordId,
    checksum,
    split_record_id,
)
from kvtier.storage_backends.memory import MemoryStore
from kvtier.storage_backends.scratch import copy
from kvtier.testing.oracle import payload
from kvtier.tiers.pack import order_of, unpacked_id
from kvtier.tiers.packer import Packer
from kvtier.tiers.store import Capabilities, Span, SpanStore, Status, Store, Write


class SharedMemory(MemoryStore):
    """A MemoryStore that other hosts write to as well."""

    @property
    def capabilities(self) -> Capabilities:
        """Shared, and whatever is in it may vanish."""
        return replace(super().capabilities, shared=True, self_evicting=True)


class PackedMemory(SharedMemory):
    """One that reads pieces of records, so that its Tier packs small parts."""

    @property
    def capabilities(self) -> Capabilities:
        """Ranged, whatever else."""
        return replace(super().capabilities, ranged=True)

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore."""
        return [self._read_span(span) for span in spans]

    def _read_span(self, span: Span) -> Status:
        found = self._records.get(span.id)
        if found is None:
            return Status.ABSENT
        data, at = found[1], span.start
        if at < 0:
            data, at = memoryview(found[0].pack() + bytes(data)), at + HEADER_BYTES
        if at + sum(map(len, span.into)) > len(data) or span.total not in (0, len(found[1])):
            return Status.CORRUPT
        for into in span.into:
            copy(into, data[at : at + len(into)])
            at += len(into)
        return Status.OK

    def members(self) -> Iterator[tuple[RecordId, RecordId]]:
        """Yield each part that lies in a pack, with the pack's name."""
        for header, data in list(self._records.values()):
            tail = unpacked_id(header.id)[KEY_BYTES:]
            for at in range(1 << order_of(header.id) if order_of(header.id) else 0):
                yield bytes(data[at * KEY_BYTES : (at + 1) * KEY_BYTES]) + tail, header.id


def parts_in(store: Store) -> set[RecordId]:
    """Return the names of the parts that a simulated store has, alone or in packs."""
    alone = {header.id for header in store.scan() if not order_of(header.id)}
    return (
        alone | {part for part, _ in store.members()} if isinstance(store, PackedMemory) else alone
    )


def write_as_another_host(
    cache: Cache, store: Store, prompts: Iterable[TokenIds], rng: random.Random
) -> None:
    """Put the beginnings of some prompts into a shared store."""
    for tokens in prompts:
        prefix = cache.prefix(tokens)
        count = rng.randrange(len(prefix.names) + 1)
        parts = [part for chunk in prefix.parts(0, count) for part in chunk]
        records = [_record(cache, part) for part in parts]
        (Packer(store) if isinstance(store, SpanStore) else store).write_many(records)


def _record(cache: Cache, part: Part) -> Write:
    data = payload(part.name, part.nbytes)
    total = checksum(data)
    key, which = split_record_id(part.name)
    header = Header(
        namespace=cache.namespace.digest,
        key=key,
        parent=part.parent,
        depth=part.depth,
        part=which,
        raw_bytes=part.nbytes,
        stored_bytes=part.nbytes,
        raw_sum=total,
        stored_sum=total,
    )
    return Write(header, memoryview(bytearray(data)))
