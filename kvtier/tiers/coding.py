"""Coding: which records of one tier a codec writes down, and what that costs and saves.

A codec takes a thread's time on the way down and on the way up again; fewer bytes take less of
the link's, both ways. Where it has to pay, both are measured, by the thread that waits for them:
so a link that many threads share counts as slow as it is for one of them. Only calls of a MiB and
more tell of it: what smaller ones take is mostly the way there and back, which no codec shortens.
What is written as it is lets a codec be tried now and then, on a few MiB that it throws away.
Where both ways take about the same, what was chosen last is kept: an estimate wavers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from kvtier.clock import Clock
from kvtier.codecs.base import Codec
from kvtier.cost import Line
from kvtier.identity.record import CODEC_RAW, Header, checksum
from kvtier.metrics import Metrics
from kvtier.tiers.exact import Fetched
from kvtier.tiers.store import Read, Status, Store, Write

WORTH: Final = 16
"""What a codec does not make smaller by one part in so many is written as it is."""

_MARGIN: Final = 1.25
"""The other way has to take less by this factor before it is chosen: one time weighs a fifth."""

_OLD: Final = 0.8  # what is known still weighs when the next observation comes
_TRIAL_BYTES: Final = 4 << 20
_TRIAL_EVERY: Final = 64
_TELLING_BYTES: Final = 1 << 20
_LOT_BYTES: Final = 16 << 20  # that are encoded before they are written


class Written(NamedTuple):
    """What became of a record, and the header that says how it was written."""

    status: Status
    header: Header


def is_failed(outcome: object) -> bool:
    """Say whether that is what became of a record, read or written."""
    return _status(outcome) is Status.FAILED


def is_full(outcome: object) -> bool:
    """Say whether there was no room for a record."""
    return _status(outcome) is Status.FULL


def blamed(outcomes: Sequence[object], said: str) -> list[str]:
    """Return why a whole call came to nothing, if it did. said: by the Store, in that call.

    A tier that has reached its capacity says nothing; of a medium that is full below it, it does.
    """
    if all(map(is_failed, outcomes)):
        return [said or f"it fails all {len(outcomes)} records of a call"]
    return [said] if said and all(map(is_full, outcomes)) else []


def _status(outcome: object) -> object:
    return outcome.status if isinstance(outcome, Fetched | Written) else outcome


class Coding:
    """One tier's. Safe from any thread; `encode` and `chooses` block while a codec works.

    always: whether it pays or not. element_bytes: of the elements that its codec is for.
    """

    def __init__(
        self, name: str, codec: Codec, clock: Clock, metrics: Metrics, *, always: bool
    ) -> None:
        self.element_bytes = codec.element_bytes
        self._name = name
        self._codec = codec
        self._clock = clock
        self._metrics = metrics
        self._always = always
        self._lock = threading.Lock()
        self._for: dict[bytes, float | None] = {}  # namespaces; the part of their bytes saved
        self._chosen: dict[bytes, bool] = {}  # whether they were encoded last
        self._down, self._up = Line(), Line()
        self._encoding = self._decoding = 0.0  # seconds of a raw byte
        self._passed = 0

    def admit(self, namespace: bytes) -> None:
        """Take it that parts of a namespace, by its digest, have the elements of the codec."""
        with self._lock:
            self._for.setdefault(namespace)

    # ---- what was seen

    def timed(self, store: Store, records: Sequence[Write]) -> list[Status]:
        """Let the Store write records, and take note of how long that took. Blocks."""
        began = self._clock()
        out = store.write_many(records)
        seconds = self._clock() - began
        nbytes = sum(record.header.stored_bytes for record in records)
        if nbytes >= _TELLING_BYTES and any(status is Status.OK for status in out):
            with self._lock:
                self._down.add(nbytes, seconds)
        return out

    def received(self, reads: Sequence[Read], seconds: float) -> None:
        """Take note that the Store took `seconds` for reading records."""
        nbytes = sum(read.header.stored_bytes for read in reads if read.header is not None)
        if nbytes >= _TELLING_BYTES:
            with self._lock:
                self._up.add(nbytes, seconds)

    def figures(self) -> None:
        """Set the gauges. From any thread."""
        with self._lock:
            speeds = {"encode": self._encoding, "decode": self._decoding}
        for verb, per_byte in speeds.items():
            if per_byte:
                rate = 1 / per_byte
                self._metrics.set("codec_bytes_per_second", rate, tier=self._name, verb=verb)

    # ---- what follows

    def chooses(self, records: Sequence[Write]) -> bool:
        """Say whether records, which are written together, are to be encoded; count what is not."""
        namespace = records[0].header.namespace
        if namespace not in self._for:
            why = "elements"
        elif self._always or self._pays(namespace):
            return True
        else:
            why = "link"
            self._try(records[0])
        self._pass(sum(record.header.raw_bytes for record in records), why)
        return False

    def encode(self, record: Write, into: memoryview) -> Header | None:
        """Encode a record into the beginning of a buffer of its raw bytes; return its new header.

        None where that does not make it smaller.
        """
        header, data = record
        if header.codec != CODEC_RAW:
            return None
        raw = data[: header.raw_bytes]
        began = self._clock()
        count = self._codec.encode(raw, into[: _limit(len(raw))])
        self._learn(header.namespace, len(raw), count, self._clock() - began)
        if not count:
            self._pass(len(raw), "size")
            return None
        self._metrics.add("encoded_bytes", len(raw), tier=self._name)
        self._metrics.add("encoded_stored_bytes", count, tier=self._name)
        total = checksum(into[:count])
        number = self._codec.number
        return structs.replace(header, stored_bytes=count, stored_sum=total, codec=number)

    def _pass(self, nbytes: int, why: str) -> None:
        self._metrics.add("unencoded_bytes", nbytes, tier=self._name, reason=why)

    def _pays(self, namespace: bytes) -> bool:
        """Say whether the time of the bytes saved, down and up, is more than the codec's.

        More by the margin, where they were not encoded last; by which it may be less, where they
        were.
        """
        with self._lock:
            saved = self._for[namespace]
            if saved is None or not self._down.known:
                return False
            up = self._up if self._up.known else self._down
            gain = saved * (self._down.per_byte + up.per_byte)
            cost = self._encoding + self._decoding
            held = self._chosen.get(namespace, False)
            self._chosen[namespace] = gain * (_MARGIN if held else 1 / _MARGIN) > cost
            return self._chosen[namespace]

    def _learn(self, namespace: bytes, raw: int, count: int, seconds: float) -> None:
        """Take note of what encoding took, and of what it saved."""
        with self._lock:
            saved = 1 - count / raw if count else 0.0
            self._for[namespace] = _faded(self._for[namespace], saved)
            self._encoding = _faded(self._encoding or None, seconds / raw)

    def _try(self, record: Write) -> None:
        """Encode and decode something now and then, so that it is known what that takes."""
        with self._lock:
            due = not self._passed % _TRIAL_EVERY
            self._passed += 1
        if not due or not (nbytes := min(record.header.raw_bytes, _TRIAL_BYTES)):
            return
        raw = record.data[:nbytes]
        into = np.empty(nbytes, np.uint8).data
        began = self._clock()
        count = self._codec.encode(raw, into[: _limit(nbytes)])
        between = self._clock()
        self._learn(record.header.namespace, nbytes, count, between - began)
        if count and self._codec.decode(into[:count], into):
            with self._lock:
                seconds = self._clock() - between
                self._decoding = _faded(self._decoding or None, seconds / nbytes)


def send_each(store: Store, records: Sequence[Write], coding: Coding | None) -> list[Written]:
    """Write records that lie alone; with a codec some MiB at a time, where it pays. Blocks."""
    if coding is None:
        statuses = store.write_many(records)
        return [Written(s, one.header) for s, one in zip(statuses, records, strict=True)]
    out: list[Written] = []
    for lot in _lots(records):
        ready = [encoded(record, coding, store.ALIGNMENT) for record in lot]
        statuses = coding.timed(store, ready)
        out += [Written(s, one.header) for s, one in zip(statuses, ready, strict=True)]
    return out


def encoded(record: Write, coding: Coding, alignment: int) -> Write:
    """Return a record encoded in a buffer of its own, or as it is where that does not pay."""
    if not coding.chooses([record]):
        return record
    nbytes = record.header.raw_bytes
    space = np.empty(nbytes + alignment, np.uint8)
    start = -space.ctypes.data % alignment
    into = space.data[start : start + nbytes]
    header = coding.encode(record, into)
    return record if header is None else Write(header, into)


def _lots(records: Sequence[Write]) -> list[list[Write]]:
    """Cut records into lots that are together of some MiB."""
    lots: list[list[Write]] = []
    size = 0
    for record in records:
        size += record.header.raw_bytes
        if not lots or size > _LOT_BYTES:
            lots.append([])
            size = record.header.raw_bytes
        lots[-1].append(record)
    return lots


def _limit(raw_bytes: int) -> int:
    return raw_bytes - raw_bytes // WORTH


def _faded(known: float | None, seen: float) -> float:
    return seen if known is None else _OLD * known + (1 - _OLD) * seen
