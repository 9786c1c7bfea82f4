"""Copies as runs of bytes: right for every layout, joined and cut, and changes of it show."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvtier.device.base import Copy
from kvtier.device.descriptors import Runs, cut, joined
from kvtier.device.spread import Spread, describe
from kvtier.testing.kernel_mutants import HARMLESS, kernel_mutants
from kvtier.testing.layouts import CHOICES, LAYOUTS, Case, cases, is_right
from kvtier.testing.planner_mutants import planner_holds, planner_mutants


def move(spread: Spread, into_slot: bool) -> None:
    for to, of, nbytes in joined(spread.expanded()).table(into_slot=into_slot).T.tolist():
        ctypes.memmove(to, of, nbytes)


def test_every_layout_is_copied_to_the_byte_and_bad_copies_are_refused():
    assert planner_holds()


def test_every_layout_meets_every_choice_of_blocks_and_every_shift():
    found = list(cases())
    assert {(case.layout.name, case.blocks) for case in found} == {
        (layout.name, blocks) for layout in LAYOUTS for blocks in CHOICES.values()
    }
    assert len({(case.page_shift, case.slot_shift) for case in found}) == 16


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_mover_that_leaves_the_last_byte_is_seen(layout):
    def careless(spread: Spread, into_slot: bool) -> None:
        runs = spread.runs
        less = Runs(runs.pages, runs.slots, runs.nbytes - np.uint64(1))
        move(Spread(spread.planes, less, spread.first), into_slot)

    case = Case(layout, CHOICES["scattered"], 0, 0)
    assert is_right(case, move)
    assert not is_right(case, careless)


def test_some_changes_of_the_planner_are_seen():
    """Those of addresses could write anywhere: `make device` tries them, each in a fork."""
    found = {guard.name.partition("-")[0]: guard for guard in planner_mutants()}
    for name in (
        *("descriptors.starts:dropped", "layout._dense:never", "layout._apart:never"),
        *("spread._on_a_plane:dropped", "staging.Staged._stage:never"),
    ):
        with found[name].removed():
            assert not planner_holds()
    assert planner_holds()


def test_a_chunk_in_order_is_one_run_where_memory_allows():
    pages, slot = np.zeros((1, 8, 4096), np.uint8), np.zeros((1, 4, 4096), np.uint8)
    (size,) = describe([Copy(pages, (2, 3, 4, 5), slot)]).nbytes
    assert size == slot.size
    assert len(describe([Copy(pages, (2, 4, 3, 5), slot)])) == 4


def test_few_long_runs_are_cut_for_many_blocks_of_threads():
    pages = np.zeros((1, 2, 3 * 65536 + 8), np.uint8)
    runs = cut(describe([Copy(pages, (1,), np.zeros((1, 1, pages.shape[2]), np.uint8))]))
    assert runs.nbytes.tolist() == [65536, 65536, 65536, 8]
    assert runs.total == pages.shape[2]


def test_changes_of_the_kernel_have_names_of_their_own_and_harmless_ones_exist():
    names = [mutant.name for mutant in kernel_mutants()]
    assert len(names) > 80
    assert set(HARMLESS) < set(names)
