"""What lies in a slab directory: by namespace, and by size of the slots. No payload is read."""

from __future__ import annotations

import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, Corrupt, Unavailable
from kvtier.identity.record import Header, RecordId, codec_name
from kvtier.storage_backends.slab import Segment
from kvtier.storage_backends.slab_directory import FIXED_BYTES
from kvtier.storage_backends.slab_index import Entry
from kvtier.storage_backends.slab_view import View
from kvtier.tiers.survey import Found, SlotClass, Spread, Survey, Tell

_DATED: Final = 10**14
"""Sequences from here on are times in microseconds: this is 1973. Older kvtiers counted from 1."""

_LISTINGS: Final = 20


def header_of(name: RecordId, entry: Entry) -> Header:
    """Return the header of an entry. Raises Corrupt where it is none, or another record's."""
    header = Header.unpack(entry.head)
    if header.id != name:
        raise Corrupt("the header is another record's")
    return header


class _Tally:
    """The records of one namespace, counted."""

    def __init__(self) -> None:
        self._depths = array("q")
        self._sizes = array("q")
        self._times = array("Q")
        self._raw_bytes = 0
        self._codecs: Counter[str] = Counter()

    def add(self, header: Header, sequence: int) -> None:
        """Count a record."""
        self._depths.append(header.depth)
        self._sizes.append(header.stored_bytes)
        self._raw_bytes += header.raw_bytes
        self._codecs[codec_name(header.codec)] += 1
        if sequence >= _DATED:
            self._times.append(sequence)

    def found(self, namespace: bytes, now: float) -> Found:
        """Return what was counted. now: seconds since 1970."""
        ages = [max(0.0, round(now - at / 1e6, 3)) for at in self._times]
        return Found(
            namespace=namespace.hex(),
            records=len(self._sizes),
            stored_bytes=sum(self._sizes),
            raw_bytes=self._raw_bytes,
            codecs=dict(sorted(self._codecs.items())),
            depth=_spread(self._depths),
            record_bytes=_spread(self._sizes),
            age_s=_spread(ages) if ages else None,
        )


class _Count:
    """All records of an index, counted as they are read."""

    def __init__(self) -> None:
        self.records = 0
        self.headless = 0
        self.tallies: defaultdict[bytes, _Tally] = defaultdict(_Tally)
        self.slots: Counter[int] = Counter()  # by segment
        self.bytes: Counter[int] = Counter()

    def add(self, name: RecordId, entry: Entry) -> None:
        """Count an entry."""
        self.records += 1
        try:
            header = header_of(name, entry)
        except Corrupt:
            self.headless += 1
            return
        self.tallies[header.namespace].add(header, entry.sequence)
        self.slots[entry.segment] += 1
        self.bytes[entry.segment] += header.stored_bytes

    def astray(self, segments: Mapping[int, Segment]) -> int:
        """Return how many entries lead to no segment, or are none."""
        lost = sum(count for number, count in self.slots.items() if number not in segments)
        return self.headless + lost


def survey(path: Path, tell: Tell) -> Survey:
    """Say what lies in a directory. See Surveyed.survey.

    Blocks: a million records take about 8 s of CPU (benchmarks/verify.py).
    """
    view = View(path)
    before = view.segments()
    count = _counted(view, before, tell)
    segments = _settled(view)
    now = time.time()
    namespaces = [tally.found(namespace, now) for namespace, tally in count.tallies.items()]
    namespaces.sort(key=lambda found: (-found.stored_bytes, found.namespace))
    index_bytes = view.index_bytes()
    charges = sum(segment.charge for segment in segments.values())
    return Survey(
        path=str(path),
        format=view.version,
        holder=view.holder,
        capacity=view.capacity,
        durability=view.durability,
        charged_bytes=FIXED_BYTES + view.set_aside_bytes() + index_bytes + charges,
        disk_bytes=view.disk_bytes(),
        index_bytes=index_bytes,
        records=count.records,
        stored_bytes=sum(found.stored_bytes for found in namespaces),
        astray=count.astray(before | segments),  # some came or went meanwhile
        namespaces=namespaces,
        classes=_classes(segments.values(), count),
    )


def _settled(view: View) -> dict[int, Segment]:
    """Return the segments of one moment, as far as an owner makes and removes some all the time."""
    segments = view.segments()
    for _ in range(_LISTINGS):
        again = view.segments()
        if again.keys() == segments.keys():
            break
        segments = again
    return segments


def _counted(view: View, segments: Mapping[int, Segment], tell: Tell) -> _Count:
    count = _Count()
    if view.empty and not segments:
        return count
    try:
        with view.entries() as index:
            known = index.count
            for lot in index.pages():
                for name, entry in lot:
                    count.add(name, entry)
                tell("reading the index", count.records, max(known, count.records))
    except Corrupt as error:
        raise ConfigError(
            f"the index of {view.path} is damaged ({error}); "
            f"look at it with: kvtier verify {view.path}"
        ) from error
    except Unavailable as error:
        raise ConfigError(str(error)) from error
    return count


def _classes(segments: Iterable[Segment], count: _Count) -> list[SlotClass]:
    by_stride: defaultdict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_stride[segment.stride].append(segment)
    return [
        SlotClass(
            slot_bytes=stride,
            segments=len(those),
            slots=sum(segment.slots for segment in those),
            used_slots=sum(count.slots[segment.number] for segment in those),
            stored_bytes=sum(count.bytes[segment.number] for segment in those),
        )
        for stride, those in sorted(by_stride.items())
    ]


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    return Spread(ordered[0], ordered[len(ordered) // 2], ordered[-1])
