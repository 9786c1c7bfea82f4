"""Opens what a crash left, in a process of its own, and says whether a promise was broken."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvtier.errors import ConfigError, Unavailable
from kvtier.identity.record import Header
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.crash.tracing import fork_and_wait
from kvtier.testing.crash.workload import CAPACITY, GONE, NAMES, Told, open_store, record_of
from kvtier.testing.overrun import disk_bytes
from kvtier.testing.records import NAMESPACE, aligned, make_record
from kvtier.tiers import exact
from kvtier.tiers.store import Status

_POISON: Final = 0xAB
_MOST_NOTES: Final = 50


class Verdict(msgspec.Struct):
    """What was found. wrong: hits with other bytes than were written. lost: of what is durable.

    hits, misses: reads. notes: what an investigator wants to know.
    """

    wrong: int = 0
    lost: int = 0
    hits: int = 0
    misses: int = 0
    deaths: int = 0
    refused: int = 0
    notes: list[str] = []


@dataclass
class Findings:
    """What a series of cases gave, added up."""

    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, case: str, verdict: Verdict) -> None:
        """Add what one case gave."""
        for name in ("wrong", "lost", "hits", "misses", "deaths", "refused"):
            self.counts[name] += getattr(verdict, name)
        self.notes += [f"{case}: {note}" for note in verdict.notes]


def serve(store: LmdbSlabStore, number: int) -> tuple[Header | None, memoryview]:
    """Read a name as a Tier does; return the header if it is a hit, and the bytes.

    Raises Unavailable like a Store.
    """
    wanted = record_of(number, 0).header
    buffer = aligned(-(-wanted.stored_bytes // 4096) * 4096)
    buffer[:] = bytes([_POISON]) * len(buffer)
    (read,) = store.read_many([wanted.id], [buffer])
    one = exact.Wanted(wanted.id, NAMESPACE, wanted.stored_bytes, buffer)
    hit = read.status is Status.OK and read.header is not None and exact.is_exact(read.header, one)
    return (read.header if hit else None), buffer[: wanted.stored_bytes]


def version_of(header: Header, number: int, data: memoryview, told: Told) -> int | None:
    """Return which written version of a name a hit is, None if its bytes are none."""
    version, name = divmod(header.depth, NAMES)
    if name == number and version in told.written[number]:
        return version if data == record_of(number, version).data else None
    return next((v for v in told.written[number] if data == record_of(number, v).data), None)


def judge(folder: Path, durability: str, told: Told, *, durable: bool = True) -> Verdict:
    """Open what is left, read all of it, and use it, in a child.

    durable: what the notes promise has to be there.
    """
    return in_child(lambda: _look(folder, durability, told, durable=durable))


def in_child(look: Callable[[], Verdict]) -> Verdict:
    """Return what a child finds; its death is a finding, too."""
    reading, writing = os.pipe()
    status = fork_and_wait(lambda: _say(writing, look()))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    if os.WIFSIGNALED(status):
        died = signal.Signals(os.WTERMSIG(status)).name
        return Verdict(deaths=1, notes=[f"the process died of {died}"])
    if not said:
        return Verdict(deaths=1, notes=[f"the process ended with {os.WEXITSTATUS(status)}"])
    return msgspec.json.decode(said, type=Verdict)


def _say(pipe: int, verdict: Verdict) -> None:
    kept = msgspec.structs.replace(verdict, notes=verdict.notes[:_MOST_NOTES])
    os.write(pipe, msgspec.json.encode(kept))  # less than a pipe holds


def _look(folder: Path, durability: str, told: Told, *, durable: bool) -> Verdict:
    found = Verdict()
    try:
        store = open_store(folder, durability)
    except ConfigError as error:
        found.refused = 1
        found.notes.append(f"refused: {error}")
        if durable:
            found.lost = sum(GONE not in versions for versions in told.durable.values())
        return found
    with_all: tuple[Callable[[], None], ...] = (
        lambda: read_all(store, told, found, durable=durable),
        lambda: _use(store, found),
        store.close,
    )
    for step in with_all:
        try:
            step()
        except Unavailable as error:
            found.notes.append(f"unavailable: {error}")
    weigh(folder, CAPACITY, found)
    return found


def weigh(folder: Path, capacity: int, found: Verdict) -> None:
    """Note it where a directory takes more than it may."""
    if disk_bytes(folder) > capacity:
        found.notes.append("above its capacity")


def read_all(store: LmdbSlabStore, told: Told, found: Verdict, *, durable: bool) -> None:
    """Read each name; count what is wrong. durable: also what of the promised is not there."""
    for number in range(NAMES):
        header, data = serve(store, number)
        version: int | None = GONE
        if header is None:
            found.misses += 1
        else:
            found.hits += 1
            version = version_of(header, number, data, told)
        if version is None:
            found.wrong += 1
            found.notes.append(f"name {number}: bytes that were never written")
        elif durable and version not in told.durable[number]:
            found.lost += 1
            found.notes.append(f"name {number}: {version}, and not of {told.durable[number]}")


def _use(store: LmdbSlabStore, found: Verdict) -> None:
    """Write, read and delete as if nothing had been."""
    list(store.scan())
    extra = make_record(1000, 30_000)
    store.delete_many([record_of(number, 0).header.id for number in range(NAMES)])
    buffer = aligned(32_768)
    if store.write_many([extra]) != [Status.OK]:
        found.notes.append("not usable: a write fails")
        return
    (read,) = store.read_many([extra.header.id], [buffer])
    if read.status is not Status.OK or buffer[:30_000] != extra.data:
        found.notes.append("not usable: what was written is not read")
