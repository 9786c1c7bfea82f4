"""Both halves of vLLM's connector over a real cache, without vLLM: its requests are stand-ins.

What real vLLM makes of it is in tests/engines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvtier
from kvtier.connectors import reference, vllm_worker
from kvtier.connectors.vllm_scheduler import SchedulerSide
from kvtier.connectors.vllm_seat import take_seat
from kvtier.connectors.vllm_step import Ended
from kvtier.copyplan import CopyPlan
from kvtier.desk import Match
from kvtier.device import cpu
from kvtier.errors import ConfigError
from kvtier.testing.vllm_steps import BLOCK, BLOCKS, FULL, SLIDING, VllmSteps
from kvtier.transfer import CopyTransfer


@pytest.fixture
def plain() -> Iterator[VllmSteps]:
    found = VllmSteps(FULL)
    yield found
    found.close()


@pytest.fixture
def hybrid() -> Iterator[VllmSteps]:
    found = VllmSteps(FULL, SLIDING)
    yield found
    found.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


# ---------------------------------------------------------------------------------- save and load


def test_what_one_request_saved_another_loads(plain: VllmSteps):
    first = plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    second = plain.request("b", prompt(200))
    assert plain.scheduler.match(second, 0) == (192, True)
    assert plain.load(second, list(range(20, 33))) == {}
    assert plain.holds(second, range(12), first)


def test_a_prompt_of_whole_chunks_leaves_vllm_its_last_block(plain: VllmSteps):
    plain.serve("a", prompt(128), list(range(1, 9)))
    plain.settle()
    assert plain.scheduler.match(plain.request("b", prompt(128)), 0) == (112, True)


def test_tokens_that_vllm_has_are_not_offered_again(plain: VllmSteps):
    first = plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    second = plain.request("b", prompt(200))
    assert plain.scheduler.match(second, 96) == (96, True)
    table = list(range(20, 33))
    plain.allot(second, table)
    plain.scheduler.allocated(second, SimpleNamespace(get_block_ids=lambda: (table,)), 96)
    while "b" not in plain.step()[0]:
        pass
    assert plain.holds(second, range(6, 12), first)
    assert not plain.kv["group0.0"][20:26].any()


def test_each_token_is_converted_once(plain: VllmSteps):
    class Counted(list):
        seen = 0

        def __getitem__(self, which):
            found = super().__getitem__(which)
            Counted.seen += len(found)
            return found

    tokens = Counted(prompt(200))
    request = plain.request("a", tokens)
    for _ in range(3):
        plain.scheduler.match(request, 0)
    tokens += prompt(56, 1)
    request.num_tokens = 256
    plain.allot(request, list(range(1, 17)))
    plain.step(a=256)
    assert Counted.seen == 256


@pytest.mark.parametrize("more", [{"cache_salt": "x"}, {"skip_reading_prefix_cache": True}])
def test_who_must_not_see_it_is_offered_nothing(plain: VllmSteps, more):
    plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    assert plain.scheduler.match(plain.request("b", prompt(200), **more), 0) == (0, False)


def test_tokens_that_are_not_known_yet_are_not_saved(plain: VllmSteps):
    """With asynchronous scheduling, vLLM counts a token before it has been sampled."""
    request = plain.request("a", prompt(127))
    plain.allot(request, list(range(1, 9)))
    plain.scheduler._serve(request)
    plain.step(a=128)
    plain.settle()
    assert plain.scheduler.match(plain.request("b", prompt(127)), 0) == (64, True)


def test_a_daemon_that_answers_late_is_asked_again(plain: VllmSteps, monkeypatch):
    plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    match = plain.cache.match
    second, third = (plain.request(name, prompt(200)) for name in "bc")
    monkeypatch.setattr(plain.cache, "match", lambda it, **_: Match(it, 0, pending=True))
    assert plain.scheduler.match(second, 0) == (None, False)
    assert plain.scheduler.match(third, 0) == (None, False)
    monkeypatch.setattr(plain.cache, "match", match)
    assert plain.scheduler.match(second, 0) == (192, True)
    monkeypatch.setattr(plain.cache, "match", lambda it, **_: Match(it, 0, pending=True))
    now = reference.monotonic() + reference._FETCH_SECONDS
    monkeypatch.setattr(reference, "monotonic", lambda: now)
    assert plain.scheduler.match(third, 0) == (0, False)


# ------------------------------------------------------------------------ blocks that are reused


class Gate:
    """Holds every copy back until somebody waits for one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        copy, result = cpu._copy, CopyTransfer.result

        def late(*which, **how) -> None:
            self.open.wait(20)
            copy(*which, **how)

        def waited(transfer: CopyTransfer, timeout: float):
            if timeout > 1:
                self.open.set()
            return result(transfer, timeout)

        patch.setattr(cpu, "_copy", late)
        patch.setattr(CopyTransfer, "result", waited)


def saved_before_reuse(vllm: VllmSteps, patch: pytest.MonkeyPatch) -> bool:
    """End a request while its save is under way; say whether the next one spoils it."""
    gate = Gate(patch)
    first = vllm.serve("a", prompt(128), list(range(1, 9)))
    vllm.scheduler.finish(first)
    vllm.serve("b", prompt(63, 1), [5, 6, 7, 8])
    gate.open.set()
    vllm.settle()
    third = vllm.request("c", [*prompt(128), 1])
    vllm.load(third, list(range(20, 29)))
    return vllm.holds(third, range(8), first)


def test_a_block_is_not_overwritten_while_a_save_reads_it(plain: VllmSteps, monkeypatch):
    assert saved_before_reuse(plain, monkeypatch)


def test_without_the_fence_it_is(plain: VllmSteps, monkeypatch):
    monkeypatch.setattr(SchedulerSide, "_reused", lambda *_: [])
    assert not saved_before_reuse(plain, monkeypatch)


def offered_after_a_save_that_hangs(vllm: VllmSteps, patch: pytest.MonkeyPatch) -> int:
    """Write the blocks of a save that takes too long; return how much of it is offered then."""
    patch.setattr(vllm_worker, "_SLOW_SECONDS", 0.01)
    gate = Gate(patch)
    first = vllm.serve("a", prompt(128), list(range(1, 9)))
    vllm.scheduler.finish(first)
    vllm.serve("b", prompt(63, 1), [5, 6, 7, 8])
    vllm.serve("c", prompt(63, 2), [5, 6, 7, 8])
    gate.open.set()
    vllm.settle()
    return vllm.scheduler.match(vllm.request("d", [*prompt(128), 1]), 0)[0]


def test_a_step_waits_for_no_save_that_hangs_and_such_a_one_comes_to_nothing(
    plain: VllmSteps, monkeypatch, caplog
):
    assert offered_after_a_save_that_hangs(plain, monkeypatch) == 0
    assert caplog.text.count("a save is dropped") == 1


def test_without_that_word_it_would_be_offered(plain: VllmSteps, monkeypatch):
    monkeypatch.setattr(vllm_worker, "_OVERTAKEN", "")
    assert offered_after_a_save_that_hangs(plain, monkeypatch) == 128


def test_a_save_holds_up_no_step_that_leaves_its_blocks_alone(plain: VllmSteps, monkeypatch):
    gate = Gate(monkeypatch)
    plain.serve("a", prompt(128), list(range(1, 9)))
    plain.serve("b", prompt(63, 1), [20, 21, 22, 23])
    assert not gate.open.is_set()
    gate.open.set()


# -------------------------------------------------------------------------------------- failures


def test_a_failed_load_names_its_blocks_and_is_not_tried_again(plain: VllmSteps, monkeypatch):
    plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()

    def fails(*which, **how) -> None:
        raise OSError("broken")

    monkeypatch.setattr(cpu, "_copy", fails)
    second = plain.request("b", prompt(200))
    assert plain.load(second, list(range(20, 33))) == {"b": tuple(range(20, 32))}
    assert plain.scheduler.match(second, 0) == (0, False)
    monkeypatch.undo()
    assert plain.scheduler.match(plain.request("c", prompt(200)), 0) == (192, True)


def test_without_that_it_would_be_tried_for_ever(plain: VllmSteps, monkeypatch):
    plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()

    def fails(*which, **how) -> None:
        raise OSError("broken")

    monkeypatch.setattr(cpu, "_copy", fails)
    second = plain.request("b", prompt(200))
    for _ in range(3):
        assert plain.load(second, list(range(20, 33)))
        plain.scheduler._served["b"].failed = False


def test_a_load_that_is_too_late_fails_as_a_whole(plain: VllmSteps, monkeypatch):
    plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    monkeypatch.setattr(plain.cache, "plan_load", lambda *_, **__: None)
    second = plain.request("b", prompt(200))
    assert plain.load(second, list(range(20, 33))) == {"b": tuple(range(20, 32))}
    assert plain.scheduler.match(second, 0) == (0, False)


def test_a_plan_that_does_not_fit_fails_its_load(plain: VllmSteps):
    plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    second = plain.request("b", prompt(200))
    table = [*range(20, 31), BLOCKS, 33]
    assert set(plain.load(second, table)) == {"b"}
    plain.settle()
    assert plain.cache.figures()["kvtier_leased_parts"] == 0


def test_a_request_that_ends_while_it_loads_is_still_reported(plain: VllmSteps, monkeypatch):
    plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    gate = Gate(monkeypatch)
    second = plain.request("b", prompt(200))
    offered, _ = plain.scheduler.match(second, 0)
    blocks = SimpleNamespace(get_block_ids=lambda: (list(range(20, 33)),))
    plain.scheduler.allocated(second, blocks, offered)
    assert plain.step() == (set(), {})
    plain.scheduler.finish(second)
    gate.open.set()
    while "b" not in plain.step()[0]:
        pass
    assert not plain.scheduler.busy
    assert plain.cache.figures()["kvtier_leased_parts"] == 0


# --------------------------------------------------------------------------------------- windows


def test_windows_are_restored_where_they_reach(hybrid: VllmSteps):
    first = hybrid.serve("a", prompt(200), list(range(1, 14)), list(range(14, 27)))
    hybrid.settle()
    second = hybrid.request("b", prompt(200))
    sliding = [0] * 8 + list(range(50, 55))  # 192 tokens: the window reaches back to 128
    assert hybrid.load(second, list(range(30, 43)), sliding) == {}
    assert hybrid.holds(second, range(12), first)
    assert not hybrid.kv["group1.0"][0].any()


def test_what_a_window_left_behind_is_not_saved(hybrid: VllmSteps):
    """vLLM has block 0 in its place, which any request writes to."""
    sliding = [0, 0, 0, 0, *range(50, 59)]
    hybrid.serve("a", prompt(200), list(range(1, 14)), sliding)
    plans = [part for one in hybrid.worker._saves for part in hybrid.scheduler._blocks[one]]
    assert plans
    assert 0 not in plans
    hybrid.settle()
    assert hybrid.scheduler.match(hybrid.request("b", prompt(200)), 0) == (192, True)
    assert hybrid.scheduler.match(hybrid.request("c", prompt(100)), 0) == (0, False)


def test_without_the_mark_block_0_is(hybrid: VllmSteps, monkeypatch):
    monkeypatch.setattr(SchedulerSide, "_present", lambda _, tables: list(tables))
    hybrid.serve("a", prompt(200), list(range(1, 14)), [0, 0, 0, 0, *range(50, 59)])
    assert 0 in [part for blocks in hybrid.scheduler._blocks.values() for part in blocks]
    hybrid.settle()


# ------------------------------------------------------------------------------ the seat, the KV


def test_one_cache_is_opened_for_both_roles_and_closed_with_the_last(plain: VllmSteps):
    opened = []

    def opening() -> kvtier.Cache:
        opened.append(kvtier.open("dram:1MiB", namespace=plain.namespace))
        return opened[-1]

    digest = plain.namespace.digest
    worker = take_seat("e", "WORKER", opening, digest)
    assert take_seat("e", "SCHEDULER", opening, digest) is worker
    with pytest.raises(ConfigError, match="two kvtier connectors in engine e"):
        take_seat("e", "WORKER", opening, digest)
    worker.leave("WORKER")
    opened[0].match([1])
    worker.leave("SCHEDULER")
    assert len(opened) == 1
    assert opened[0]._closed
    assert take_seat("e", "WORKER", opening, digest) is not worker
    with pytest.raises(ConfigError, match="describe the KV of this model differently"):
        take_seat("e", "SCHEDULER", opening, bytes(32))
    for seat in (worker, take_seat("e", "SCHEDULER", opening, digest)):
        assert len(opened) == 2
        seat.leave("WORKER")
        seat.leave("SCHEDULER")
    assert opened[1]._closed


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BLOCKS, BLOCK, 1, 20).transpose(1, 2)[..., :16],
        torch.zeros(BLOCKS, 2, 1, BLOCK, 16)[:, 0],
    ],
    ids=["padded inside", "layers inside a block"],
)
def test_pages_that_are_not_in_one_piece_are_refused(plain: VllmSteps, tensor):
    with pytest.raises(ConfigError, match=r"group0.0: a block's .* bytes apart.*LBHNC"):
        plain.worker.bind({**plain.kv, "group0.0": tensor})


def test_the_order_inside_a_block_does_not_matter(plain: VllmSteps):
    heads_last = torch.zeros(BLOCKS, BLOCK, 1, 16).transpose(1, 2)
    plain.worker.bind(dict.fromkeys(plain.kv, heads_last))


def test_a_plan_has_ended_when_all_ranks_say_so():
    two = Ended({1: [""], 2: ["broken"]}).aggregate(Ended({1: [""], 3: [""]}))
    assert two.causes == {1: ["", ""], 2: ["broken"], 3: [""]}
    steps = VllmSteps(FULL)
    steps.serve("a", prompt(200), list(range(1, 14)))
    steps.settle()
    steps.scheduler._ranks = 2
    request = steps.request("b", prompt(200))
    offered, _ = steps.scheduler.match(request, 0)
    blocks = SimpleNamespace(get_block_ids=lambda: (list(range(20, 33)),))
    steps.scheduler.allocated(request, blocks, offered)
    (number,) = steps.scheduler._loading
    steps.scheduler.ended(Ended({number: ["broken"]}))
    assert steps.scheduler.busy
    assert steps.cache.figures()["kvtier_leased_parts"] > 0
    steps.scheduler.ended(Ended({number: [""]}))
    assert not steps.scheduler.busy
    assert steps.scheduler.match(request, 0) == (0, False)
    assert steps.cache.figures()["kvtier_leased_parts"] == 0
    steps.close()


def test_plans_cross_as_bytes(plain: VllmSteps):
    request = plain.request("a", prompt(64))
    plain.allot(request, [1, 2, 3, 4])
    plain.scheduler._serve(request)
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 64},
        kv_connector_block_state=SimpleNamespace(get_block_ids=plain.tables.get),
    )
    (data,) = plain.scheduler.step(output).saves
    plan = CopyPlan.decode(data)
    assert (plan.kind, plan.parts[0].blocks) == ("save", (1, 2, 3, 4))
    plain.scheduler.ended(Ended({plan.id: ["not executed"]}))
