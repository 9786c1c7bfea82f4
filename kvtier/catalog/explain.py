"""Explain: for each chunk of a prompt where it is, or why it is not, and what ends the match."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.shelf import Room
from kvtier.catalog.usable import usable_tokens
from kvtier.identity.record import RecordId
from kvtier.identity.shape import Shape

REASONS: Final = {
    "evicted": "evicted from {tier} {ago}",
    "cleared": "cleared from {tier} {ago}",
    "forgotten": "too many parts were known of {tier} {ago}; a fetch asks",
    "lost": "{tier} had lost it, {ago}",
    "corrupt": "corrupt in {tier}, {ago}",
    "newer": "in {tier}, of a version that is not read here yet, {ago}",
    "invalidated": "invalidated {ago}",
    "purged": "purged {ago}",
    "expired": "expired {ago}",
    "idle": "left {tier} {ago}, not used for its ttl",
    "busy": "not saved, no slot was free, {ago}",
    "copy": "not saved, its copy failed, {ago}",
    "failed": "not saved, it could not be sealed, {ago}",
    "orphan": "not saved, its parent was in no tier, {ago}",
    "headless": "an orphan: chunk {parent} is in no tier",
    "silent": "{tier} does not answer",
    "unknown": "never seen, or gone for long",
    "incomplete": "no whole chunk",
}
"""What each reason means, as it is told."""


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where one part of a chunk is. A value.

    name: its component, and its shard and stage where there are several. tiers: that have it,
    fastest first. state: ``reading``, ``saving`` or nothing. held: by a lease, a copy, a read or
    a write; pinned: by a pin. reason: why it is in no tier or cannot be used, a key of REASONS,
    or nothing; tier, seconds: which tier that was in, and how long ago.
    """

    name: str
    tiers: tuple[str, ...]
    state: str = ""
    held: bool = False
    pinned: bool = False
    reason: str = ""
    tier: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where one chunk is: tokens [first, stop), and its parts."""

    chunk: int
    first: int
    stop: int
    parts: tuple[PartPlace, ...]

    def where(self) -> str:
        """Return its tiers as text; by part, where those differ."""
        return _alike([(part.name, ", ".join(part.tiers) or "-") for part in self.parts])

    def why(self) -> str:
        """Return what else there is to say of it, as text."""
        return _alike([(part.name, ", ".join(self._notes(part))) for part in self.parts])

    def _notes(self, part: PartPlace) -> Iterator[str]:
        states = {"reading": "being read", "saving": "being saved"}
        if part.state:
            yield states[part.state]
        if part.pinned:
            yield "pinned"
        elif part.held and not part.state:
            yield "held"
        if part.reason:
            yield REASONS[part.reason].format(
                tier=part.tier, ago=ago(part.seconds), parent=self.chunk - 1
            )


@dataclass(frozen=True, slots=True)
class End:
    """What ends a match: the chunk, or None where the prompt itself ends, and why."""

    chunk: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a prompt's chunks are, and why no more of it is usable. A value; print it.

    tokens: of the prompt; usable: of them, now. Each chunk is told as it was when it was looked
    at: a long prompt is looked at in pieces.
    """

    tokens: int
    usable: int
    end: End
    chunks: tuple[ChunkPlace, ...]

    def plain(self) -> dict[str, object]:
        """Return it as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return it as a table; chunks that are alike in a row share a line."""
        rows = [("chunk", "tokens", "where", "why")]
        alike = itertools.groupby(self.chunks, key=lambda one: (one.where(), one.why()))
        for (where, why), group in alike:
            chunks = list(group)
            first, last = chunks[0], chunks[-1]
            numbers = f"{first.chunk}" if first is last else f"{first.chunk}-{last.chunk}"
            rows.append((numbers, f"{first.first}-{last.stop}", where, why))
        widths = [max(len(row[at]) for row in rows) for at in range(3)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows]
        ends = "" if self.end.chunk is None else f" Chunk {self.end.chunk} ends the match:"
        head = f"{self.usable} of {self.tokens} tokens are usable.{ends} {self.end.why}"
        return "\n".join([head, *lines])


class Glance:
    """A look at the catalog, under its lock. silent: bits of the tiers that do not answer."""

    def __init__(self, room: Room, pinned: Container[int], silent: int, now: float) -> None:
        self._room = room
        self._pinned = pinned
        self._silent = silent
        self._now = now

    def at(self, name: RecordId, label: str) -> PartPlace:
        """Return where a part is."""
        index, row = self._room.index, self._room.index.find(name)
        if row == NO_ROW:
            return PartPlace(label, (), **self._why(name))
        bits = index.present[row]
        shelves = enumerate(self._room.shelves)
        tiers = tuple(shelf.name for tier, shelf in shelves if bits & 1 << tier)
        place = PartPlace(label, tiers, "", index.holds[row] > 0, row in self._pinned)
        if index.serial[row] and not bits & 1 << DRAM:
            place = replace(place, state="reading" if bits else "saving")
        if index.orphan(row):
            return replace(place, reason="headless")
        if bits and not bits & ~self._silent:
            return replace(place, reason="silent", tier=tiers[0])
        return place if bits or place.state else replace(place, **self._why(name))

    def _why(self, name: RecordId) -> dict[str, Any]:
        why = self._room.gone.why(name)
        if why is None:
            return {"reason": "unknown"}
        return {"reason": why.reason, "tier": why.tier, "seconds": self._now - why.at}


def find_end(shape: Shape, chunks: Sequence[ChunkPlace], limit: int) -> tuple[int, End]:
    """Return how many tokens are usable, and what ends them there.

    chunks: complete ones; limit: tokens that could be usable at most.
    """

    def has(chunk: int, at: int) -> bool:
        part = chunks[chunk].parts[at]
        return bool(part.tiers) and part.reason != "silent"

    size = shape.chunk_tokens
    usable, whole = usable_tokens(shape, len(chunks), limit, has)
    further = min(whole * size, (usable // size + 1) * size)  # where windows and states may lack
    if further <= usable:
        wanted = [(whole, at) for at in shape.always if whole < len(chunks)]
    else:
        last = -(-further // size)
        wanted = [(chunk, at) for chunk in range(last) for at in shape.needed(further, chunk)]
    for chunk, at in wanted:
        if not has(chunk, at):
            part = chunks[chunk].parts[at]
            alone = ChunkPlace(chunk, 0, 0, (part,))
            named = f"{part.name}: " if len(shape.names) > 1 else ""
            return usable, End(chunk, f"{named}{alone.why()}.")
    return usable, End(None, "No more can be: the last token, and what is no chunk, is computed.")


def _alike(texts: list[tuple[str, str]]) -> str:
    """Return the text that all parts have in common, or each with the names of its parts."""
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(parts)}: {text}" for text, parts in names.items() if text)


def ago(seconds: float) -> str:
    """Return how long ago something was, in so few words that neighbours are alike."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
