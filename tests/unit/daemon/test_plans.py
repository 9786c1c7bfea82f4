"""Plans that went out: nobody gets their slots while a process may still copy from or to them."""

from __future__ import annotations

import os
import struct

import pytest

from kvtier.daemon import messages
from kvtier.daemon import out as outs
from kvtier.daemon.grants import Grants
from kvtier.daemon.out import Outs
from kvtier.errors import ProtocolError
from kvtier.memory.sealed import sealed_memory
from kvtier.testing.small_daemon import PART_BYTES, SLOTS, prompt

SCHEDULER, RANK, OTHER_RANK, STRANGER = 1, 2, 3, 9


@pytest.fixture
def client(daemon):
    made = daemon.client(SCHEDULER, engine="engine")
    made.join()
    return made


def worker(daemon, pid=RANK, engine="engine"):
    return daemon.client(pid, engine=engine, role="worker")


def first(daemon, pid, engine="engine") -> int:
    """Return from which plan on a rank that comes now may copy."""
    return daemon.sessions.first_plan(worker(daemon, pid, engine).session)


def out(daemon) -> int:
    return int(daemon.sessions.figures()["kvtier_plans_out"])


def quarantined(daemon) -> int:
    return int(daemon.sessions.figures()["kvtier_quarantined_bytes"])


def got_by_another(daemon) -> set[int]:
    """Let another client reserve all that it gets, twice its cap; return where that lies."""
    places: set[int] = set()
    clients = [daemon.client(STRANGER, f"{number}") for number in range(3)]
    for number, other in enumerate(clients):
        other.join()
        other.reserve(f"other {number}", SLOTS)
        places.update(slot.offset for slot in other.slots)
    for other in clients:
        other.told(messages.Resume(b""))
        other.disconnect()
    daemon.depot.flush(5.0)
    return places


def places(client) -> set[int]:
    return {slot.offset for slot in client.slots}


@pytest.fixture(params=["load", "save"])
def plan(request, client):
    """Return a plan of four slots that is out; their client knows them as `slots`."""
    if request.param == "save":
        return client.reserve("a", 4)[0]
    client.save("a", 4)
    return client.issue(client.lease("a", 4))


# ------------------------------------------------------------------------------- held until it ends


@pytest.mark.parametrize("connected", [True, False])
def test_slots_of_a_plan_are_nobody_elses_until_it_is_settled(daemon, client, plan, connected):
    daemon.clock.now += 1000  # no deadline ends it
    daemon.depot.catalog.expire()
    if not connected:
        client.disconnect()
        assert quarantined(daemon) == 4 * PART_BYTES
    assert not got_by_another(daemon) & places(client)
    if not connected:
        client.connect()
    client.settle(plan)
    assert out(daemon) == 0
    daemon.depot.flush(5.0)
    assert got_by_another(daemon) & places(client)


def test_without_that_they_would_be_given_away_under_it(daemon, client, monkeypatch):
    monkeypatch.setattr(Outs, "add", lambda _, out, __: out.end(False) or True)
    client.reserve("a", 4)
    daemon.depot.flush(5.0)
    assert got_by_another(daemon) & places(client)


def test_a_plan_of_another_session_is_not_settled(daemon, client, plan):
    other = daemon.client(STRANGER, "other")
    other.join()
    other.settle(plan)
    assert out(daemon) == 1


def test_settled_twice_is_settled_once(daemon, client, plan):
    client.settle(plan)
    client.settle(plan, ok=False)
    client.settle(12345)
    assert out(daemon) == 0


def test_a_plan_ends_with_its_process(daemon, client, plan):
    daemon.kill(SCHEDULER)
    assert out(daemon) == 0
    assert daemon.sessions._outs.charged(client.token) == 0
    daemon.depot.flush(5.0)
    assert got_by_another(daemon) & places(client)


def test_what_a_dead_client_was_saving_is_not_there(daemon, client):
    client.reserve("a", 4)
    daemon.kill(SCHEDULER)
    daemon.depot.flush(5.0)
    assert daemon.client(STRANGER).join()
    assert daemon.depot.arena.slots_in_use == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("end", ["ended", "died"])
def test_a_plan_lasts_as_long_as_a_rank_may_execute_it(daemon, client, plan, late, end):
    """A rank that attaches after the plan went out may be told of it all the same."""
    ranks = [worker(daemon, RANK), worker(daemon, OTHER_RANK)]
    if not late:
        client.settle(plan)
        plan, _ = client.reserve("b", 2)
    daemon.kill(SCHEDULER)
    for rank in ranks:
        assert out(daemon) == 1
        assert not got_by_another(daemon) & places(client)
        if end == "died":
            daemon.kill(rank.process.pid)
        else:
            rank.ended(plan)
            rank.ended(plan)
    assert out(daemon) == 0


def test_a_rank_that_comes_when_a_plan_has_ended_does_not_execute_it(daemon, client, plan):
    """The plan is on its way to it still; the slots are others' already."""
    assert first(daemon, RANK) <= plan
    daemon.kill(RANK)
    assert out(daemon) == 1
    daemon.kill(SCHEDULER)
    assert out(daemon) == 0
    daemon.depot.flush(5.0)  # a save is taken back in the background
    assert got_by_another(daemon) & places(client)
    assert first(daemon, OTHER_RANK) > plan
    assert first(daemon, 77, "another") <= plan


def test_nor_does_one_that_comes_after_a_restart(daemon, client, plan):
    first(daemon, RANK)
    daemon.restart()
    assert first(daemon, OTHER_RANK) > plan


def test_engines_that_are_over_are_forgotten_all_together(daemon, client, plan, monkeypatch):
    monkeypatch.setattr(outs, "_MOST_OVER", 0)
    daemon.kill(SCHEDULER)
    assert not daemon.sessions._outs._over
    assert first(daemon, RANK, "another") > plan


def test_a_rank_that_has_closed_may_still_execute(daemon, client, plan):
    rank = worker(daemon)
    rank.disconnect()
    daemon.kill(SCHEDULER)
    assert out(daemon) == 1
    daemon.kill(RANK)
    assert out(daemon) == 0


def test_ranks_forgotten_it_would_end_under_them(daemon, client, plan, monkeypatch):
    monkeypatch.setattr(Outs, "enter", lambda *_: True)
    worker(daemon)
    daemon.kill(SCHEDULER)
    assert out(daemon) == 0


def test_ranks_that_have_ended_do_not_end_what_their_scheduler_will_settle(daemon, client):
    """One of them may live in the scheduler's own process."""
    ranks = [worker(daemon, SCHEDULER), worker(daemon, RANK)]
    plan, _ = client.reserve("a", 4)
    for rank in ranks:
        rank.ended(plan)
    assert out(daemon) == 1
    client.settle(plan)
    client.ask(messages.Flush(client.desk, 5.0))
    assert client.match("a", 4) == 4


def test_another_engines_rank_ends_nothing(daemon, client, plan):
    stranger = worker(daemon, STRANGER, engine="another")
    rank = worker(daemon)
    daemon.kill(SCHEDULER)
    stranger.ended(plan)
    assert out(daemon) == 1
    rank.ended(plan)
    assert out(daemon) == 0


# ------------------------------------------------------------------------------ after a break


def standing(*plans: int) -> bytes:
    return struct.pack(f"<{len(plans)}Q", *plans)


def test_a_client_that_comes_back_says_which_plans_stand(daemon, client):
    client.save("a", 4)
    lease = client.lease("a", 4)
    plans = [client.issue(lease), client.issue(lease), client.reserve("b", 2)[0]]
    client.told(messages.Resume(standing(plans[1])))
    assert list(daemon.sessions._outs._all) == [plans[1]]
    assert not client.session.desks
    assert not client.session.holdings
    with pytest.raises(ProtocolError, match="are no plans"):
        client.told(messages.Resume(b"1234567"))
    client.settle(plans[1])
    assert out(daemon) == 0


# ------------------------------------------------------------------------------------ a restart


@pytest.fixture
def old(daemon, client, plan):
    """Return the plan, once the server was started anew, and its client is back."""
    mine = client.slots
    daemon.restart()
    client.connect()
    client.join()
    client.slots = mine
    return plan


def test_a_new_server_keeps_what_the_one_before_had_granted(daemon, client, old):
    assert daemon.generation == 2
    assert out(daemon) == 1
    assert quarantined(daemon) == 0, "its client is connected"
    assert daemon.sessions._outs.charged(client.token) == 4 * PART_BYTES
    assert daemon.depot.arena.slots_in_use == 4
    assert [process.pid for process in daemon.sessions.watched()] == [SCHEDULER]
    assert not got_by_another(daemon) & places(client)
    assert client.match("a", 4) == 0, "the index begins anew"


def test_not_written_down_they_would_be_given_away(daemon, client, monkeypatch):
    monkeypatch.setattr(Grants, "add", lambda *_: True)
    monkeypatch.setattr(Grants, "drop", lambda *_: None)
    client.reserve("a", 4)
    daemon.restart()
    assert got_by_another(daemon) & places(client)


def test_it_is_written_down_before_anybody_hears_of_it(daemon, client):
    seen = []

    def reply(answer):
        seen.append((answer, list(daemon.grants._heads)))

    message = messages.Reserve(client.desk, prompt("a", 4), 0, None, [])
    daemon.sessions.handle(client.session, message, reply)
    ((answer, written),) = seen
    assert written == [answer.plan]


@pytest.mark.parametrize("end", ["settled", "failed", "killed", "resumed"])
def test_what_was_granted_before_ends_as_other_plans_do(daemon, client, old, end):
    if end == "killed":
        daemon.kill(SCHEDULER)
    elif end == "resumed":
        client.told(messages.Resume(b""))
    else:
        client.settle(old, ok=end == "settled")
    assert out(daemon) == 0
    assert daemon.depot.arena.slots_in_use == 0
    assert daemon.sessions._outs.charged(client.token) == 0
    assert got_by_another(daemon) & places(client)
    daemon.restart()
    assert out(daemon) == 0


def test_a_process_that_has_ended_meanwhile_is_not_waited_for(daemon, client, plan):
    del daemon._processes[SCHEDULER]
    daemon.restart()
    assert out(daemon) == 0
    assert daemon.sessions.watched() == []
    assert daemon.depot.arena.slots_in_use == 0


def test_a_number_that_another_process_has_now_is_not_waited_for(daemon, client, plan):
    daemon._processes[SCHEDULER].start_time += 1
    daemon.restart()
    assert out(daemon) == 0


def test_ranks_are_remembered_across_restarts(daemon, client, plan):
    """Also what one of them had ended before the first, and who joined after it."""
    first = worker(daemon, RANK)
    first.ended(plan)
    daemon.restart()
    second = worker(daemon, OTHER_RANK)
    daemon.restart()
    assert {one.pid for one in daemon.sessions.watched()} == {SCHEDULER, RANK, OTHER_RANK}
    daemon.kill(SCHEDULER)
    assert out(daemon) == 1
    second.connect()
    second.ended(plan)
    assert out(daemon) == 0


def test_two_plans_of_one_slot_keep_it_until_both_have_ended(daemon, client):
    client.save("a", 4)
    lease = client.lease("a", 4)
    plans = [client.issue(lease), client.issue(client.lease("a", 2))]
    daemon.restart()
    assert daemon.depot.arena.slots_in_use == 4
    client.connect()
    client.settle(plans[0])
    assert daemon.depot.arena.slots_in_use == 2
    client.settle(plans[1])
    assert daemon.depot.arena.slots_in_use == 0


def test_no_handle_of_an_earlier_server_names_another_ones(daemon, client, plan):
    desk = client.desk
    daemon.restart()
    client.connect()
    assert client.join() > desk
    client.save("a", 4)
    new_lease = client.lease("a", 4)
    new = client.issue(new_lease)
    assert {new_lease >> 40, client.desk >> 40} == {2}
    assert (new >> outs.PLAN_BITS) - (plan >> outs.PLAN_BITS) == 1


def test_the_slots_of_an_earlier_server_are_whole_again_for_larger_parts(daemon, client, old):
    """Extents are cut around them, and anew once they are free."""
    client.settle(old)
    assert client.ask(messages.Leave(client.desk)).value
    daemon.depot.arena.cut_for([SLOTS * PART_BYTES])
    assert daemon.depot.arena.allocate(SLOTS * PART_BYTES)


def test_grants_of_an_arena_that_is_gone_hold_nothing(daemon, client, plan):
    """As when the daemon takes new memory."""
    fresh = sealed_memory(SLOTS * PART_BYTES)
    daemon.sessions.close()
    os.close(daemon._arena)
    daemon._arena = fresh
    daemon._start()
    assert out(daemon) == 0
    assert daemon.generation == 2
