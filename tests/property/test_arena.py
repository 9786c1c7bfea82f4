"""The arena against a plain model of it, with parts of several sizes."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import MisuseError
from kvtier.memory import arena as module
from kvtier.memory.arena import Arena, Slot, slot_bytes_for
from kvtier.memory.sealed import PAGE_BYTES

SIZES = [PAGE_BYTES, 3 * PAGE_BYTES - 100, 5 * PAGE_BYTES]
PAGES = 47  # the last extent is too short for the largest part


class ArenaMachine(RuleBasedStateMachine):
    """Extents of 15 pages, so that few steps fill them, empty them and cut them anew."""

    def __init__(self) -> None:
        super().__init__()
        usual, module._EXTENTS = module._EXTENTS, 3
        try:
            self.arena = Arena(PAGES * PAGE_BYTES + 77, [SIZES[1], SIZES[2]])
        finally:
            module._EXTENTS = usual
        self.extents = [(extent.first, extent.nbytes) for extent in self.arena._extents]
        self.live: dict[Slot, int] = {}
        self.serials: set[int] = set()

    def inside(self, first: int, nbytes: int) -> list[Slot]:
        return [slot for slot in self.live if first <= slot.offset < first + nbytes]

    def fits(self, size: int) -> bool:
        """Say whether a slot of that size must be found: in an empty extent, or in one like it."""
        for first, nbytes in self.extents:
            slots = self.inside(first, nbytes)
            if not slots and nbytes >= size:
                return True
            if slots and slots[0].nbytes == size and len(slots) < nbytes // size:
                return True
        return False

    @rule(nbytes=st.sampled_from(SIZES), value=st.integers(1, 255))
    def allocate(self, nbytes: int, value: int) -> None:
        must = self.fits(slot_bytes_for(nbytes))
        slot = self.arena.allocate(nbytes)
        assert (slot is not None) == must
        if slot is None:
            return
        assert slot.nbytes == slot_bytes_for(nbytes)
        assert slot.offset % PAGE_BYTES == 0
        assert slot.offset + slot.nbytes <= self.arena.nbytes
        assert slot.serial not in self.serials
        self.serials.add(slot.serial)
        self.arena.memory[slot.offset : slot.offset + slot.nbytes] = value
        self.live[slot] = value

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[slot]
        self.arena.free(slot)
        assert not self.arena.holds(slot)
        try:
            self.arena.free(slot)
        except MisuseError:
            return
        raise AssertionError("freed twice")

    @rule()
    def free_all(self) -> None:
        for slot in self.live:
            self.arena.free(slot)
        self.live.clear()
        for nbytes in SIZES:
            size = slot_bytes_for(nbytes)
            taken = []
            while (slot := self.arena.allocate(nbytes)) is not None:
                taken.append(slot)
            assert len(taken) == sum(length // size for _, length in self.extents)
            self.serials.update(slot.serial for slot in taken)
            for slot in taken:
                self.arena.free(slot)

    @invariant()
    def nobody_wrote_into_anothers_slot(self) -> None:
        for slot, value in self.live.items():
            assert self.arena.holds(slot)
            view = self.arena.memory[slot.offset : slot.offset + slot.nbytes]
            assert (view == value).all()

    @invariant()
    def the_accounts_are_right(self) -> None:
        assert self.arena.used_bytes == sum(slot.nbytes for slot in self.live)
        assert self.arena.slots_in_use == len(self.live)
        assert self.arena.nbytes == PAGES * PAGE_BYTES

    @invariant()
    def an_extent_in_use_has_one_size(self) -> None:
        for first, nbytes in self.extents:
            slots = self.inside(first, nbytes)
            assert len({slot.nbytes for slot in slots}) <= 1
            assert all((slot.offset - first) % slot.nbytes == 0 for slot in slots)

    def teardown(self) -> None:
        self.arena.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = hypothesis.settings(max_examples=40, stateful_step_count=40)
