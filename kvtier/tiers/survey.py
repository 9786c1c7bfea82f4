"""What can be said of a medium in a directory without opening it: an optional part of a Store.

A Store's class may be `Surveyed` besides. Everything here is plain data; no payload is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Tell = Callable[[str, int, int], None]
"""Called with the step that is under way, and how many of how many are behind."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The least, the median and the most of several values."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True)
class Found:
    """The records of one namespace.

    namespace: its digest in hex. codecs: records by codec. depth: of chunks in their prefixes.
    record_bytes: stored, of one record. age_s: seconds since the write; None where no record tells.
    """

    namespace: str
    records: int
    stored_bytes: int
    raw_bytes: int
    codecs: Mapping[str, int]
    depth: Spread
    record_bytes: Spread
    age_s: Spread | None


@dataclass(frozen=True, slots=True)
class SlotClass:
    """The segments whose slots have one size. slot_bytes: with the page of the header."""

    slot_bytes: int
    segments: int
    slots: int
    used_slots: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in a directory, as it was last committed.

    holder: the process that has it open, None if nobody has. capacity, durability: of the last
    opening, None where that was not written down. charged_bytes: what counts against the capacity.
    disk_bytes: what the files take. astray: entries that lead to no slot or have no whole header.
    """

    path: str
    format: int
    holder: str | None
    capacity: int | None
    durability: str | None
    charged_bytes: int
    disk_bytes: int
    index_bytes: int
    records: int
    stored_bytes: int
    astray: int
    namespaces: Sequence[Found]
    classes: Sequence[SlotClass]


@dataclass(frozen=True, slots=True)
class Damage:
    """A record that is not what the index says. key, namespace: in hex. part: see record.PartName.

    reason: header (the entry has none of its own), place (it leads to no slot of its size), overlap
    (another entry has the slot), payload, raw (a checksum fails) or unreadable; detail: in words.
    """

    reason: str
    key: str
    part: tuple[int, ...] | None
    namespace: str | None
    segment: int
    slot: int
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found.

    whole: nothing is wrong any more. checked, checked_bytes: records whose payload was read.
    changed: records that their owner replaced or removed meanwhile. raw_unchecked: records of a
    codec that is not known here, whose raw checksum was not computed. torn: pages of the index that
    cannot be read. removed: entries that were taken out. index_replaced: a new index was written.
    """

    path: str
    holder: str | None
    whole: bool
    checked: int
    checked_bytes: int
    seconds: float
    changed: int
    raw_unchecked: int
    damage: Sequence[Damage]
    torn: Sequence[str]
    removed: int
    index_replaced: bool


@dataclass(frozen=True, slots=True)
class Purged:
    """What was purged: the digest in hex, the records, and their stored bytes."""

    path: str
    namespace: str
    removed: int
    stored_bytes: int


@runtime_checkable
class Surveyed(Protocol):
    """A Store's class that can look at a directory without opening it.

    All methods block, take the location of the tier's URL, and raise ConfigError with cause and
    remedy when there is no such medium.
    """

    @classmethod
    def survey(cls, location: str, tell: Tell) -> Survey:
        """Say what lies there. Takes no lock and writes nothing; somebody may have it open."""
        ...

    @classmethod
    def verify(cls, location: str, tell: Tell, *, repair: bool = False) -> Verdict:
        """Read every record and compare it with its checksums.

        Takes no lock and writes nothing, unless it is to `repair`: then nobody may have it open,
        and what is wrong is removed.
        """
        ...

    @classmethod
    def purge(cls, location: str, namespace: str, tell: Tell) -> Purged:
        """Remove all records of a namespace from a directory that nobody has open.

        namespace: its digest in hex, or the first 8 or more digits of it where no other namespace
        begins with them.
        """
        ...
