"""An arena over memory that outlives it: cut when that is known for what, less what is out."""

from __future__ import annotations

import os

import pytest

from kvtier.errors import ConfigError, MisuseError
from kvtier.memory import arena as module
from kvtier.memory.arena import Arena, Slot
from kvtier.memory.sealed import PAGE_BYTES, sealed_memory

MIB = 1 << 20


# -------------------------------------------------------------------- cut late, over given memory


def test_nothing_can_be_had_before_it_is_known_for_what():
    arena = Arena(4 * MIB)
    try:
        assert not arena.fits(1)
        assert arena.allocate(1) is None
        arena.cut_for([MIB])
        assert arena.allocate(MIB)
    finally:
        arena.close()


def test_it_is_cut_anew_for_larger_parts_while_nothing_is_in_use():
    arena = Arena(64 * PAGE_BYTES, [PAGE_BYTES])
    try:
        slot = arena.allocate(PAGE_BYTES)
        with pytest.raises(ConfigError, match=r"parts of 32 KiB do not fit .* or clear dram"):
            arena.cut_for([8 * PAGE_BYTES])
        assert arena.holds(slot)
        arena.free(slot)
        arena.cut_for([8 * PAGE_BYTES])
        assert arena.allocate(8 * PAGE_BYTES)
    finally:
        arena.close()


def test_cut_anew_while_in_use_slots_would_lie_across_each_other(monkeypatch):
    monkeypatch.setattr(module, "any", lambda _: False, raising=False)
    arena = Arena(64 * PAGE_BYTES, [PAGE_BYTES])
    try:
        slot = arena.allocate(PAGE_BYTES)
        arena.cut_for([8 * PAGE_BYTES])
        taken = [arena.allocate(8 * PAGE_BYTES) for _ in range(8)]
        assert any(one.offset <= slot.offset < one.offset + one.nbytes for one in taken)
    finally:
        arena.close()


def test_parts_larger_than_all_memory_are_refused_with_its_size():
    arena = Arena(4 * MIB)
    try:
        with pytest.raises(ConfigError, match="capacity 4 MiB is below one chunk of 5 MiB"):
            arena.cut_for([5 * MIB])
    finally:
        arena.close()


def test_two_arenas_over_one_memory_see_the_same_bytes():
    fd = sealed_memory(4 * MIB + 5)
    first, second = Arena(0, fd=os.dup(fd)), Arena(0, fd=fd)
    try:
        assert first.nbytes == second.nbytes == 4 * MIB
        first.memory[77] = 5
        assert second.memory[77] == 5
        first.close()
        assert second.memory[77] == 5
    finally:
        first.close()
        second.close()


class NoLock:
    """A C library whose mlock2 always fails."""

    @staticmethod
    def mlock2(address: object, size: object, flags: object) -> int:
        return -1


def bytes_after_another(monkeypatch) -> bytes:
    """Return what a client wrote, after a second arena took the same memory on an old kernel."""
    monkeypatch.setattr(module.ctypes, "CDLL", lambda *_, **__: NoLock)
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 250)  # no kernel knows this one
    fd = sealed_memory(4 * MIB)
    first = Arena(0, fd=os.dup(fd))
    first.memory[:] = 7
    second = Arena(0, fd=fd)
    try:
        return first.memory.tobytes()
    finally:
        first.close()
        second.close()


def test_memory_that_was_taken_before_is_not_touched(monkeypatch):
    assert bytes_after_another(monkeypatch) == b"\7" * (4 * MIB)


def test_taken_again_it_would_be_written_to_under_those_who_copy(monkeypatch):
    monkeypatch.setattr(module, "_all_taken", lambda fd: False)
    assert bytes_after_another(monkeypatch).count(0) == 4 * MIB // PAGE_BYTES


def test_memory_that_was_taken_before_is_pinned_all_the_same():
    fd = sealed_memory(2 * MIB)
    first, second = Arena(0, fd=os.dup(fd)), Arena(0, fd=fd)
    pinned = (first.pinned, second.pinned)
    first.close()
    second.close()
    assert pinned[0] == pinned[1]


def test_memory_that_its_clients_could_truncate_is_refused():
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(ConfigError, match="not sealed"):
        Arena(0, fd=fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -------------------------------------------------------------------------------- what was out


def outlived(*slots: Slot) -> Arena:
    arena = Arena(0, fd=sealed_memory(64 * PAGE_BYTES))
    for slot in slots:
        arena.adopt(slot)
    arena.cut_for([PAGE_BYTES])
    return arena


def test_what_was_handed_out_before_is_not_handed_out_again_until_it_is_freed():
    out = [Slot(3 * PAGE_BYTES, 2 * PAGE_BYTES, 7), Slot(40 * PAGE_BYTES, PAGE_BYTES, 9)]
    arena = outlived(*out)
    try:
        assert arena.slots_in_use == 2
        assert arena.used_bytes == 3 * PAGE_BYTES
        taken = [arena.allocate(PAGE_BYTES) for _ in range(61)]
        assert {slot.offset // PAGE_BYTES for slot in taken} == set(range(64)) - {3, 4, 40}
        assert min(slot.serial for slot in taken) > 9
        assert arena.allocate(PAGE_BYTES) is None
        arena.free(out[0])
        assert not arena.holds(out[0])
        assert {arena.allocate(PAGE_BYTES).offset // PAGE_BYTES for _ in range(2)} == {3, 4}
        assert arena.allocate(PAGE_BYTES) is None
    finally:
        arena.close()


def test_forgotten_it_would_be_handed_out_again(monkeypatch):
    monkeypatch.setattr(module._Extent, "clear", lambda *_: True)
    arena = outlived(Slot(3 * PAGE_BYTES, PAGE_BYTES, 7))
    try:
        taken = [arena.allocate(PAGE_BYTES) for _ in range(64)]
        assert 3 * PAGE_BYTES in [slot.offset for slot in taken]
    finally:
        arena.close()


@pytest.mark.parametrize(
    "wrong",
    [
        Slot(-PAGE_BYTES, PAGE_BYTES, 1),
        Slot(60 * PAGE_BYTES, 5 * PAGE_BYTES, 1),
        Slot(5, PAGE_BYTES, 1),
        Slot(0, 5, 1),
        Slot(0, 0, 1),
        Slot(0, PAGE_BYTES, 0),
        Slot(9 * PAGE_BYTES, 2 * PAGE_BYTES, 3),
        Slot(11 * PAGE_BYTES, PAGE_BYTES, 3),
        Slot(10 * PAGE_BYTES, 2 * PAGE_BYTES, 2),
    ],
)
def test_what_cannot_have_been_handed_out_is_not_adopted(wrong: Slot):
    arena = Arena(0, fd=sealed_memory(64 * PAGE_BYTES))
    try:
        arena.adopt(Slot(10 * PAGE_BYTES, 2 * PAGE_BYTES, 2))
        with pytest.raises(MisuseError, match=r"no slot of this memory|lies across another"):
            arena.adopt(wrong)
        assert arena.slots_in_use == 1
    finally:
        arena.close()


def test_nothing_is_adopted_once_slots_can_be_had():
    arena = outlived()
    try:
        with pytest.raises(MisuseError, match="before that"):
            arena.adopt(Slot(0, PAGE_BYTES, 1))
    finally:
        arena.close()
