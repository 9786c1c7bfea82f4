"""The arena against a plain model of it, with parts of several sizes."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import MisuseError
from kvtier.memory import arena as module
from kvtier.memory.arena import Arena, Slot, slot_bytes_for
from kvtier.memory.sealed import PAGE_BYTES, sealed_memory

SIZES = [PAGE_BYTES, 3 * PAGE_BYTES - 100, 5 * PAGE_BYTES]
PAGES = 47  # the last extent is too short for the largest part


class ArenaMachine(RuleBasedStateMachine):
    """Extents of 15 pages, so that few steps fill them, empty them and cut them anew."""

    def __init__(self) -> None:
        super().__init__()
        usual, module._EXTENTS = module._EXTENTS, 3
        try:
            self.arena = self.opened()
        finally:
            module._EXTENTS = usual
        self.foreign: set[Slot] = set()
        self.extents = [(extent.first, extent.nbytes) for extent in self.arena._extents]
        self.live: dict[Slot, int] = {}
        self.serials: set[int] = set()

    def opened(self) -> Arena:
        return Arena(PAGES * PAGE_BYTES + 77, [SIZES[1], SIZES[2]])

    def inside(self, first: int, nbytes: int) -> list[Slot]:
        """Return the slots in use that were handed out here."""
        own = (slot for slot in self.live if slot not in self.foreign)
        return [slot for slot in own if first <= slot.offset < first + nbytes]

    def places(self, first: int, nbytes: int, size: int) -> int:
        """Count the slots of a size into which an extent can be cut, beside what is foreign."""
        starts = range(first, first + nbytes // size * size, size)
        return sum(not any(across(start, size, slot) for slot in self.foreign) for start in starts)

    def fits(self, size: int) -> bool:
        """Say whether a slot of that size must be found: in an empty extent, or in one like it."""
        for first, nbytes in self.extents:
            slots = self.inside(first, nbytes)
            if (not slots or slots[0].nbytes == size) and len(slots) < self.places(
                first, nbytes, size
            ):
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
        self.foreign.discard(slot)
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
        self.foreign.clear()
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


def across(start: int, nbytes: int, slot: Slot) -> bool:
    return start < slot.offset + slot.nbytes and slot.offset < start + nbytes


class OutlivedMachine(ArenaMachine):
    """The same over memory of which an earlier arena has handed out slots, cut otherwise."""

    def opened(self) -> Arena:
        return Arena(0, fd=sealed_memory(PAGES * PAGE_BYTES + 77))

    @initialize(
        runs=st.lists(
            st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 255)), max_size=8
        )
    )
    def adopt(self, runs: list[tuple[int, int, int]]) -> None:
        page = 0
        for serial, (gap, pages, value) in enumerate(runs, 1):
            page += gap
            if page + pages > PAGES:
                break
            slot = Slot(page * PAGE_BYTES, pages * PAGE_BYTES, serial)
            self.arena.adopt(slot)
            self.arena.memory[slot.offset : slot.offset + slot.nbytes] = value
            self.live[slot] = value
            self.serials.add(serial)
            self.foreign.add(slot)
            page += pages
        usual, module._EXTENTS = module._EXTENTS, 3
        self.arena.cut_for([SIZES[1], SIZES[2]])
        module._EXTENTS = usual
        self.extents = [(extent.first, extent.nbytes) for extent in self.arena._extents]


TestArena = ArenaMachine.TestCase
TestArena.settings = hypothesis.settings(max_examples=40, stateful_step_count=40)
TestOutlived = OutlivedMachine.TestCase
TestOutlived.settings = hypothesis.settings(max_examples=40, stateful_step_count=40)
