"""Every record of a slab directory compared with its checksums, and the index with the slots.

Nothing is locked. An owner may write meanwhile, but an index entry is gone before its slot is
written again: so a record that looks wrong is looked up once more, and it is damaged only if it
still looks wrong while the same entry was there before and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtier.errors import Corrupt
from kvtier.identity.record import CODEC_RAW, Header, RecordId, split_record_id
from kvtier.storage_backends.slab import Segment, stride_for
from kvtier.storage_backends.slab_audit import PIECE, Audit, Placed, Run, Wrong
from kvtier.storage_backends.slab_index import Entry
from kvtier.storage_backends.slab_pages import IndexPages, Torn
from kvtier.storage_backends.slab_survey import header_of
from kvtier.storage_backends.slab_view import View
from kvtier.tiers.survey import Damage, Tell

_Record = tuple[RecordId, Entry]


class Checked:
    """What a check found. good: entries that are right; bad: the names of those that are not.

    bytes: of the good ones. changed: records that were replaced or removed meanwhile. unreadable:
    what is wrong with the index as a whole, if it is that.
    """

    def __init__(self) -> None:
        self.good: list[Placed] = []
        self.bad: list[RecordId] = []
        self.damage: list[Damage] = []
        self.torn: set[Torn] = set()
        self.bytes = 0
        self.changed = 0
        self.raw_unchecked = 0
        self.unreadable = ""

    def torn_said(self) -> list[str]:
        """Say what is wrong with the index itself."""
        if self.unreadable:
            return [f"the index is {self.unreadable}"]
        return [f"page {torn.page} of the index {torn.reason}" for torn in sorted(self.torn)]


def check(view: View, index: IndexPages, tell: Tell) -> Checked:
    """Read everything. Blocks. Keeps the index in memory, about 1 KiB a record.

    Raises Corrupt for an index that is none as a whole, Unavailable, OSError, ConfigError.
    """
    checked = Checked()
    records: list[_Record] = []
    known = index.count
    for lot in index.pages(torn=checked.torn):
        records += lot
        tell("reading the index", len(records), max(known, len(records)))
    segments = view.segments()
    placed: list[Placed] = []
    suspects: list[_Record] = []
    for name, entry in records:
        header = _fitting(name, entry, segments)
        if isinstance(header, Wrong):
            suspects.append((name, entry))
        else:
            placed.append(Placed(name, entry, header))
    placed.sort(key=lambda one: (one.entry.segment, one.entry.slot))
    with Audit(view.path) as audit:
        _read_all(checked, audit, placed, segments, suspects, tell)
        again = _Again(view, index, audit, Counter(map(_where, records)))
        for number, (name, entry) in enumerate(suspects):
            tell("looking again at what is wrong", number, len(suspects))
            again.look(name, entry, checked)
    return checked


def _read_all(
    checked: Checked,
    audit: Audit,
    placed: Sequence[Placed],
    segments: Mapping[int, Segment],
    suspects: list[_Record],
    tell: Tell,
) -> None:
    total = sum(one.header.stored_bytes for one in placed)
    behind = 0
    for run, wrongs in audit.all(_runs(placed, segments)):
        for record, wrong in zip(run.records, wrongs, strict=True):
            behind += record.header.stored_bytes
            if wrong is None:
                _count(checked, record)
            else:
                suspects.append((record.name, record.entry))
        tell("verifying", behind, total)


def _runs(placed: Iterable[Placed], segments: Mapping[int, Segment]) -> Iterator[Run]:
    """Put neighbours together, up to one piece. placed: by segment and slot."""
    run: list[Placed] = []
    for record in placed:
        last = run[-1].entry if run else None
        if last is not None:
            follows = (last.segment, last.slot + 1) == _where((record.name, record.entry))
            if not follows or (len(run) + 1) * segments[last.segment].stride > PIECE:
                yield Run(segments[last.segment], run)
                run = []
        run.append(record)
    if run:
        yield Run(segments[run[0].entry.segment], run)


def _where(record: _Record) -> tuple[int, int]:
    return record[1].segment, record[1].slot


def _count(checked: Checked, record: Placed) -> None:
    checked.good.append(record)
    checked.bytes += record.header.stored_bytes
    checked.raw_unchecked += record.header.codec != CODEC_RAW


def _fitting(name: RecordId, entry: Entry, segments: Mapping[int, Segment]) -> Header | Wrong:
    """Return the header of an entry that leads to a slot of its size, or what is wrong with it."""
    try:
        header = header_of(name, entry)
    except Corrupt as error:
        return Wrong("header", str(error))
    segment = segments.get(entry.segment)
    if segment is None:
        return Wrong("place", f"there is no segment {entry.segment}")
    if entry.slot >= segment.slots:
        return Wrong("place", f"its segment has only {segment.slots} slots")
    stride = stride_for(header)
    if stride != segment.stride:
        return Wrong("place", f"it takes {stride} bytes, the slots have {segment.stride}")
    return header


class _Again:
    """The second look at what looked wrong. shared: how many entries lead to each slot."""

    def __init__(
        self, view: View, index: IndexPages, audit: Audit, shared: Mapping[tuple[int, int], int]
    ) -> None:
        self._view = view
        self._index = index
        self._audit = audit
        self._shared = shared

    def look(self, name: RecordId, entry: Entry, checked: Checked) -> None:
        """Count a record as right, as changed meanwhile, or as damaged."""
        if self._index.find(name) != entry:
            checked.changed += 1
            return
        segments = self._view.segments()
        header = _fitting(name, entry, segments)
        if isinstance(header, Header):
            record = Placed(name, entry, header)
            (wrong,) = self._audit.one(Run(segments[entry.segment], [record]))
            if wrong is None:
                _count(checked, record)
                return
        else:
            wrong = header
        if self._index.find(name) != entry:
            checked.changed += 1
            return
        if wrong.reason == "payload" and self._shared[entry.segment, entry.slot] > 1:
            wrong = Wrong("overlap", f"another entry has the same slot; {wrong.detail}")
        checked.bad.append(name)
        checked.damage.append(_damage(name, entry, wrong))


def _damage(name: RecordId, entry: Entry, wrong: Wrong) -> Damage:
    try:
        key, part = split_record_id(name)
    except Corrupt:
        key, part = name, None
    try:
        namespace = Header.unpack(entry.head).namespace.hex()
    except Corrupt:
        namespace = None
    return Damage(
        reason=wrong.reason,
        key=key.hex(),
        part=None if part is None else tuple(part),
        namespace=namespace,
        segment=entry.segment,
        slot=entry.slot,
        detail=wrong.detail,
    )
