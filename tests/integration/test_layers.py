"""Layers that land while others are computed, and leave so: a real engine over a real Cache.

Order is forced, not hoped for: copies of a group of layers wait for what they must not need.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from kvtier.connectors.executor import LayersLanding
from kvtier.device import cpu
from kvtier.device.chaos import ORDERS, ChaosDevice
from kvtier.device.race import Checked, Race
from kvtier.engine import Engine, Kind, Sampling
from kvtier.engine.attention import PagedAttention
from kvtier.engine.layers import StepHook
from kvtier.engine.request import Phase, Request
from kvtier.testing.serving import CHUNK, Serving, small_hybrid, small_model

LAYERS = 4
SAMPLING = Sampling(max_tokens=8)
SECONDS = 20.0
STALL = "kvtier.connectors.executor._STALL_SECONDS"
MIXED = (Kind.WINDOW, Kind.FULL, Kind.RECURRENT, Kind.LATENT, Kind.FULL, Kind.WINDOW)


@functools.cache
def model(kinds: tuple[Kind, ...] = ()):
    torch.set_num_threads(1)
    return small_hybrid(kinds, 80) if kinds else small_model(layers=LAYERS)


def prompt(count: int = CHUNK * 3 + 9, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


@functools.cache
def alone(seed: int = 0, kinds: tuple[Kind, ...] = ()) -> tuple[int, ...]:
    engine = Engine(model(kinds), num_blocks=64, chunk_tokens=CHUNK, prefix_cache=False)
    return engine.generate([prompt(seed=seed)], SAMPLING)[0].tokens


@pytest.fixture
def serving() -> Iterator[Callable[..., Serving]]:
    opened: list[Serving] = []

    def open_one(kinds: tuple[Kind, ...] = (), **options) -> Serving:
        options.setdefault("groups", LAYERS)
        opened.append(Serving(model(kinds), **options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def copying(monkeypatch, *, loads: bool, before: Callable[[int], None]) -> Counter[bool]:
    """Call `before(n)` before the n-th group of copies of a direction, on the thread that copies.

    Returns how many groups of each direction were copied.
    """
    copy_all, counts = cpu._copy_all, Counter()

    def copies(some, *, into_slot):
        if into_slot is not loads:
            before(counts[into_slot])
        counts[into_slot] += 1
        copy_all(some, into_slot=into_slot)

    monkeypatch.setattr(cpu, "_copy_all", copies)
    return counts


def computed_layers(monkeypatch) -> list[threading.Event]:
    """Return events that are set once a layer's attention has been computed."""
    read, done = PagedAttention.read, [threading.Event() for _ in range(LAYERS)]

    def reads(self, layer, *rest):
        read(self, layer, *rest)
        done[layer].set()

    monkeypatch.setattr(PagedAttention, "read", reads)
    return done


def in_use(one: Serving) -> int:
    pool = one.engine._pools.pools[0]
    return pool.num_blocks - pool.free


# ------------------------------------------------------------------------------------- landing


def test_each_layer_is_computed_before_the_next_one_lands(serving, monkeypatch):
    """The copy of each group waits until the layer before it was computed."""
    one = serving()
    assert one.answer(prompt(), SAMPLING).tokens == alone()
    monkeypatch.setattr(STALL, SECONDS)
    done, came = computed_layers(monkeypatch), []
    counts = copying(
        monkeypatch,
        loads=True,
        before=lambda group: came.append(not group or done[group - 1].wait(SECONDS)),
    )
    answer = one.answer(prompt(), SAMPLING)
    assert answer.tokens == alone()
    assert answer.finish.stats.hit_tokens == {"dram": CHUNK * 3}
    assert came == [True] * LAYERS
    assert counts[False] == LAYERS


def test_twin_a_load_that_is_waited_for_as_a_whole_never_ends_so(serving, monkeypatch):
    one = serving()
    one.answer(prompt(), SAMPLING)
    monkeypatch.setattr(one.connector, "landing", lambda request_id: None)
    done, came = computed_layers(monkeypatch), []
    copying(
        monkeypatch,
        loads=True,
        before=lambda group: came.append(not group or done[group - 1].wait(0.01)),
    )
    assert one.answer(prompt(), SAMPLING).tokens == alone()
    assert came == [True, False, False, False]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kinds", [(), MIXED], ids=["attention", "mixed"])
def test_answers_are_those_without_a_cache(serving, kinds, ahead):
    one = serving(kinds, ahead=ahead, prefix_cache=True)
    for _ in range(2):
        for seed in range(3):
            assert one.answer(prompt(seed=seed), SAMPLING).tokens == alone(seed, kinds)
        one.engine.reset_prefix_cache()
    assert in_use(one) == 0


def test_beside_other_work_it_comes_in_once_its_first_layers_are_there(serving):
    one = serving()
    one.answer(prompt(), SAMPLING)
    other = one.engine.submit(prompt(seed=1), SAMPLING)
    outputs = one.engine.step()
    with one.held("load"):
        behind = one.engine.submit(prompt(), SAMPLING)
        for _ in range(3):
            outputs += one.engine.step()
        assert one.engine._scheduler.find(behind).phase is Phase.LOADING
    assert len(outputs) == 4, "nobody else waits for it"
    tokens: dict[str, list[int]] = {behind: [], other: [o.token for o in outputs]}
    while not one.engine.idle:
        for output in one.engine.step():
            if output.token is not None:
                tokens[output.request_id].append(output.token)
    assert [tuple(tokens[name]) for name in (behind, other)] == [alone(), alone(1)]


# --------------------------------------------------------------------------------- what goes wrong


def broken(monkeypatch, failing: int) -> None:
    """Let one group of a load's layers write rubbish, and fail."""
    copy_all, count = cpu._copy_all, [0]

    def copies(some, *, into_slot):
        count[0] += not into_slot
        if into_slot or count[0] != failing + 1:
            copy_all(some, into_slot=into_slot)
            return
        for copy in some:
            copy.pages[:, list(copy.blocks)] = 0x42
        raise OSError("the link is down")

    monkeypatch.setattr(cpu, "_copy_all", copies)


@pytest.mark.parametrize(("kinds", "failing"), [*(((), n) for n in range(LAYERS)), (MIXED, 0)])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_load_that_fails_after_layers_were_read_voids_the_step(
    serving, monkeypatch, kinds, failing, ahead
):
    one = serving(kinds, prefix_cache=True, ahead=ahead)
    one.answer(prompt(), SAMPLING)
    one.engine.reset_prefix_cache()
    before = one.saved_chunks
    with monkeypatch.context() as patch:
        broken(patch, failing)
        answer = one.answer(prompt(), SAMPLING)
    assert answer.tokens == alone(0, kinds)
    assert answer.finish.stats.hit_tokens == {}
    assert one.saved_chunks == before
    assert one.answer(prompt(), SAMPLING).tokens == alone(0, kinds), "from the engine's own blocks"
    one.engine.reset_prefix_cache()
    assert one.answer(prompt(), SAMPLING).tokens == alone(0, kinds), "from what was saved"
    assert in_use(one) == 0


def test_twin_a_step_that_is_not_void_shows_rubbish(serving, monkeypatch):
    one = serving()
    one.answer(prompt(), SAMPLING)

    def goes_on(request: Request) -> None:
        """Take the step behind the failed load for good, as if all had come."""
        request.computed += request.loading

    monkeypatch.setattr(Request, "void", goes_on)
    broken(monkeypatch, LAYERS - 1)
    assert one.answer(prompt(), SAMPLING).tokens != alone()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_load_that_stands_still_is_waited_for_beside_other_work(serving, monkeypatch, ahead):
    """After the stall the request waits as before, and what it has computed does not count."""
    one = serving(ahead=ahead)
    one.answer(prompt(), SAMPLING)
    monkeypatch.setattr(STALL, 0.01)
    gate = threading.Event()
    with monkeypatch.context() as patch:
        copying(patch, loads=True, before=lambda group: group < 2 or gate.wait(SECONDS))
        behind = one.engine.submit(prompt(), SAMPLING)
        for _ in range(4):
            assert one.engine.step() == []
        request = one.engine._scheduler.find(behind)
        assert (request.phase, request.computed) == (Phase.LOADING, 0)
        other = one.engine.generate([prompt(seed=1)], SAMPLING)[0]
        assert other.tokens == alone(1)
        gate.set()
        outputs = []
        while not one.engine.idle:
            outputs += one.engine.step()
    assert tuple(o.token for o in outputs if o.token is not None) == alone()
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.stats.hit_tokens == {"dram": CHUNK * 3}


def test_who_is_aborted_behind_a_load_keeps_blocks_and_slots_until_its_last_fence(
    serving, monkeypatch
):
    one = serving()
    one.answer(prompt(), SAMPLING)
    monkeypatch.setattr(STALL, 0.01)
    gate, first = threading.Event(), threading.Event()

    def held(group: int) -> None:
        if group:
            first.set()
            gate.wait(SECONDS)

    copying(monkeypatch, loads=True, before=held)
    behind = one.engine.submit(prompt(), SAMPLING)
    one.engine.step()
    assert first.wait(SECONDS), "the first group has landed"
    one.engine.abort(behind)
    for _ in range(3):
        one.engine.step()
    assert in_use(one) > 0
    assert len(one.cache._plans) == 1, "its slots are read until the last group has landed"
    gate.set()
    one.settle()
    assert (in_use(one), len(one.cache._plans)) == (0, 0)
    assert one.answer(prompt(), SAMPLING).tokens == alone()


# ------------------------------------------------------------------------------------- leaving


def test_layers_leave_while_later_ones_are_computed(serving, monkeypatch):
    """The last layer is computed once the first one has left."""
    one = serving()
    left, came = threading.Event(), []
    copy_all, read = cpu._copy_all, PagedAttention.read

    def copies(some, *, into_slot):
        copy_all(some, into_slot=into_slot)
        left.set()

    def reads(self, layer, *rest):
        if layer == LAYERS - 1 and not came:
            came.append(left.wait(SECONDS))
        read(self, layer, *rest)

    monkeypatch.setattr(cpu, "_copy_all", copies)
    monkeypatch.setattr(PagedAttention, "read", reads)
    assert one.answer(prompt(), SAMPLING).tokens == alone()
    assert came == [True]
    assert one.saved_chunks == 3
    assert one.answer(prompt(), SAMPLING).tokens == alone()
    assert one.saved_chunks == 3, "all was found"


def test_twin_a_layer_that_leaves_before_it_is_written_is_stored_wrong(serving, monkeypatch):
    one = serving()
    hooked, wrong = StepHook.before, StepHook.after

    def early(self, component, layer):
        hooked(self, component, layer)
        wrong(self, component, layer)
        one.device.stream("store").record().wait(SECONDS)

    with monkeypatch.context() as patch:
        patch.setattr(StepHook, "before", early)
        patch.setattr(StepHook, "after", lambda self, component, layer: None)
        assert one.answer(prompt(), SAMPLING).tokens == alone()
    assert one.answer(prompt(), SAMPLING).tokens != alone()


def test_a_void_step_stores_nothing_that_has_left(serving, monkeypatch):
    """A prompt that begins as another: its end leaves in a step whose load then fails."""
    one = serving()
    one.answer(prompt(), SAMPLING)
    longer = [*prompt()[: CHUNK * 3], *prompt(CHUNK * 2, seed=7)]
    engine = Engine(model(), num_blocks=64, chunk_tokens=CHUNK, prefix_cache=False)
    right = engine.generate([longer], SAMPLING)[0].tokens
    settle, outcomes = one.cache.settle, []

    def settles(plan, result):
        outcomes.append((plan.kind, result.status.value, result.cause))
        settle(plan, result)
        assert one.cache.flush(timeout=SECONDS)  # the slots are free when it is saved again

    monkeypatch.setattr(one.cache, "settle", settles)
    with monkeypatch.context() as patch:
        broken(patch, LAYERS - 1)
        assert one.answer(longer, SAMPLING).tokens == right
    void = ("save", "failed", "the step that computed it does not count")
    assert outcomes[:2] == [("load", "failed", "OSError: the link is down"), void]
    assert [kind for kind, status, _ in outcomes if status == "ok"] == ["save"]
    assert one.saved_chunks == 5, "it was saved once it counted"
    assert one.answer(longer, SAMPLING).tokens == right


def test_a_step_that_never_ends_holds_no_slot_for_good(serving, monkeypatch):
    one = serving()

    def dies(self, layer, *rest):
        if layer == 2:
            raise RuntimeError("a kernel")

    with monkeypatch.context() as patch:
        patch.setattr(PagedAttention, "read", dies)
        name = one.engine.submit(prompt(), SAMPLING)
        with pytest.raises(RuntimeError, match="a kernel"):
            one.engine.step()
    one.engine.abort(name)
    one.settle()
    assert (one.saved_chunks, in_use(one)) == (0, 0)
    assert one.answer(prompt(), SAMPLING).tokens == alone()
    assert one.saved_chunks == 3


# ------------------------------------------------------------------------- in the worst order


def told(one: Serving, monkeypatch) -> None:
    """Tell the checker what the engine itself reads, layer by layer."""
    hooked = StepHook.before
    (kv,) = one.engine.kv
    device = one.device

    def before(self, component, layer):
        hooked(self, component, layer)
        device.touch(f"layer {layer}", reads=[kv[layer].view(torch.int16).numpy()])

    monkeypatch.setattr(StepHook, "before", before)


def served(seed: int, monkeypatch, *, holds: bool = True) -> tuple[bool, list[Race]]:
    """Serve from DRAM on a schedule; say whether the answer was right, and which races showed."""
    races: list[Race] = []
    device = Checked(ChaosDevice(seed), races.append)
    one = Serving(model(), device=device, groups=LAYERS)
    with closing(one), monkeypatch.context() as patch:
        right = one.answer(prompt(), SAMPLING).tokens == alone()
        told(one, patch)
        if not holds:
            patch.setattr(LayersLanding, "hold", lambda self, component, layer: None)
        answer = one.answer(prompt(), SAMPLING)
        assert answer.finish.stats.hit_tokens == {"dram": CHUNK * 3}
        return right and answer.tokens == alone(), races


SEEDS = range(25)


def test_in_any_order_of_copies_each_layer_is_read_after_its_fence(monkeypatch):
    assert {ORDERS[seed % len(ORDERS)] for seed in SEEDS} == set(ORDERS)
    assert [served(seed, monkeypatch) for seed in SEEDS] == [(True, [])] * len(SEEDS)


def test_twin_layers_that_are_not_waited_for_are_wrong_and_the_checker_says_so(monkeypatch):
    found = [served(seed, monkeypatch, holds=False) for seed in SEEDS]
    assert all(races for _, races in found)
    assert not all(right for right, _ in found)
