"""What is wrong in a slab directory, or of one namespace, taken out of its index.

The payloads stay where they are, in slots that are free from now on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvtier.clock import Clock
from kvtier.errors import ConfigError, Corrupt, Unavailable
from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab import INDEX_FLOOR, FileIO, Segment, index_bytes_for
from kvtier.storage_backends.slab_audit import Placed
from kvtier.storage_backends.slab_directory import FIXED_BYTES, SlabDirectory, config_error
from kvtier.storage_backends.slab_index import Entry, Index, pack_entry
from kvtier.storage_backends.slab_recovery import KEEP_SHARE
from kvtier.storage_backends.slab_renewal import remake
from kvtier.storage_backends.slab_sound import examine, read_sound
from kvtier.storage_backends.slab_survey import header_of
from kvtier.storage_backends.slab_verify import Checked, check
from kvtier.storage_backends.slab_view import View
from kvtier.tiers.survey import Purged, Tell, Verdict

_DIGEST: Final = re.compile(r"[0-9a-f]{8,64}")
_DIGITS: Final = 64
_STEP: Final = 4096  # entries of one commit, which is made of small transactions


def verify(path: Path, tell: Tell, clock: Clock, *, repair: bool) -> Verdict:
    """See Surveyed.verify. clock: tells how long it took."""
    began = clock()
    view = View(path)
    with _owned(view) if repair else contextlib.nullcontext() as directory:
        checked, whole = _check(view, tell)
        removed = 0
        remade = False
        if directory is not None and not whole:
            removed, remade = _repair(view, directory, checked, tell)
            whole = True
    return Verdict(
        path=str(path),
        holder=view.holder,
        whole=whole,
        checked=len(checked.good),
        checked_bytes=checked.bytes,
        seconds=clock() - began,
        changed=checked.changed,
        raw_unchecked=checked.raw_unchecked,
        damage=checked.damage,
        torn=checked.torn_said(),
        removed=removed,
        index_replaced=remade,
    )


@contextlib.contextmanager
def _owned(view: View) -> Iterator[SlabDirectory]:
    """Have a directory to oneself. Raises ConfigError that names who has it."""
    if view.holder is not None:
        raise ConfigError(
            f"{view.path} is in use by process {view.holder}, and cannot be changed meanwhile; "
            f"stop that, then run this again"
        )
    directory = SlabDirectory(view.path, FileIO())
    try:
        yield directory
    except OSError as error:
        raise config_error(error, view.path) from error
    except Unavailable as error:
        raise ConfigError(f"{view.path}: {error}; look at its disk, then run this again") from error
    finally:
        directory.release()


def _check(view: View, tell: Tell) -> tuple[Checked, bool]:
    """Check everything; say whether nothing is wrong."""
    checked = Checked()
    if view.empty and not view.segments():
        return checked, True
    try:
        with view.entries() as index:
            checked = check(view, index, tell)
            replaced = index.replaced
    except Corrupt as error:
        checked.unreadable = str(error)
        return checked, False
    except Unavailable as error:
        raise ConfigError(str(error)) from error
    if replaced:
        raise ConfigError(f"{view.path} has a new index from its owner since then; run this again")
    if view.holder is None:
        checked.torn |= examine(view.path / "index.lmdb")[1]
    return checked, not checked.damage and not checked.torn


def _repair(view: View, directory: SlabDirectory, checked: Checked, tell: Tell) -> tuple[int, bool]:
    """Take what is wrong out of the index; return how many entries, and whether it is a new one."""
    if checked.unreadable:
        directory.discard(checked.unreadable if directory.index.exists() else None, _room(view))
        return 0, True
    if checked.torn:
        _remake(view, directory, checked, tell)
        return len(checked.bad), True
    try:
        _remove(directory, checked.bad, tell)
    except (Corrupt, Unavailable):  # LMDB must not see it, or finds it damaged itself
        _remake(view, directory, checked, tell)
        return len(checked.bad), True
    return len(checked.bad), False


def _room(view: View) -> int:
    """Return how large an unreadable index may be to be kept, as at an opening."""
    return (view.capacity or 0) // KEEP_SHARE


def _remove(directory: SlabDirectory, names: Sequence[RecordId], tell: Tell) -> None:
    read_sound(directory.index)
    size = directory.index.stat().st_size
    index = Index(directory.index, max(size, INDEX_FLOOR), synced=True)
    try:
        for done in range(0, len(names), _STEP):
            tell("removing", done, len(names))
            index.commit(dict.fromkeys(names[done : done + _STEP]))
    finally:
        index.close()


def _remake(view: View, directory: SlabDirectory, checked: Checked, tell: Tell) -> None:
    """Write what is right into a new index, and put it in the place of the torn one.

    For a moment there are two. Where the capacity has no room for that, segments go, those with
    the fewest records first.
    """
    segments = view.segments()
    good = _within(view, segments, checked.good)

    def lots() -> Iterator[list[tuple[RecordId, bytes]]]:
        for done in range(0, len(good), _STEP):
            tell("writing a new index", done, len(good))
            some = good[done : done + _STEP]
            yield [(record.name, pack_entry(record.entry)) for record in some]

    remake(directory, index_bytes_for(len(good)), lots())


def _within(view: View, segments: Mapping[int, Segment], good: list[Placed]) -> list[Placed]:
    """Return the records that are kept, in the order of their names."""
    by_segment: dict[int, list[Placed]] = {number: [] for number in segments}
    for record in good:
        by_segment[record.entry.segment].append(record)
    order = sorted(segments.values(), key=lambda one: len(by_segment[one.number]))
    taken = FIXED_BYTES + view.set_aside_bytes() + view.index_bytes()
    kept = len(good)
    charges = sum(segment.charge for segment in order)
    for segment in order:
        if view.capacity is None or taken + charges + index_bytes_for(kept) <= view.capacity:
            break
        charges -= segment.charge
        kept -= len(by_segment.pop(segment.number))
        (view.path / segment.name).unlink()
    return sorted(record for those in by_segment.values() for record in those)


def purge(path: Path, namespace: str, tell: Tell) -> Purged:
    """See Surveyed.purge."""
    wanted = namespace.lower()
    if not _DIGEST.fullmatch(wanted):
        raise ConfigError(
            f"{namespace!r} is no namespace's digest: give its {_DIGITS} hex digits, or the first "
            f"8 or more; kvtier inspect shows them"
        )
    view = View(path)
    with _owned(view) as directory:
        found = _of_namespace(view, wanted, tell)
        if len(found) > 1:
            raise ConfigError(
                f"{len(found)} namespaces begin with {wanted}: "
                f"{', '.join(digest.hex() for digest in sorted(found))}; give more digits"
            )
        if not found and len(wanted) < _DIGITS:
            raise ConfigError(f"no namespace in {path} begins with {wanted}; see kvtier inspect")
        if not found:
            return Purged(str(path), wanted, removed=0, stored_bytes=0)
        ((digest, records),) = found.items()
        try:
            _remove(directory, list(records), tell)
        except Corrupt as error:
            raise _damaged(view, error.__cause__ or error) from error
    return Purged(str(path), digest.hex(), len(records), sum(records.values()))


def _of_namespace(view: View, wanted: str, tell: Tell) -> dict[bytes, dict[RecordId, int]]:
    """Return stored bytes by name of the records whose namespace begins like that."""
    found: dict[bytes, dict[RecordId, int]] = {}
    if view.empty:
        return found
    seen = 0
    try:
        with view.entries() as index:
            for lot in index.pages():
                seen += len(lot)
                tell("reading the index", seen, max(seen, index.count))
                for name, entry in lot:
                    _sort(found, wanted, name, entry)
    except Corrupt as error:
        raise _damaged(view, error) from error
    return found


def _damaged(view: View, error: BaseException) -> ConfigError:
    return ConfigError(
        f"the index of {view.path} is damaged ({error}); repair it first: "
        f"kvtier verify {view.path} --repair"
    )


def _sort(
    found: dict[bytes, dict[RecordId, int]], wanted: str, name: RecordId, entry: Entry
) -> None:
    with contextlib.suppress(Corrupt):  # that leads nowhere: opening drops it
        header = header_of(name, entry)
        if header.namespace.hex().startswith(wanted):
            found.setdefault(header.namespace, {})[name] = header.stored_bytes
