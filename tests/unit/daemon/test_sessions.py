"""Sessions: what a daemon's clients hold ends with them, and what they may still write does not."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.daemon import messages
from kvtier.daemon.calls import Calls
from kvtier.daemon.holds import Holds
from kvtier.errors import MisuseError
from kvtier.memory.packed import unpack_slots
from kvtier.seams import Future
from kvtier.testing.small_daemon import CHUNK, PART_BYTES, SLOTS, prompt


def another(daemon, pid=2, **fields):
    made = daemon.client(pid, **fields)
    made.join()
    return made


def held(daemon) -> int:
    """Count the parts that leases and plans hold."""
    return int(daemon.sessions.figures()["kvtier_leased_parts"])


def handed_out(client, text="other") -> list:
    """Let a client save as much as it gets; return those slots."""
    client.reserve(text, SLOTS)
    return client.slots


# ----------------------------------------------------------------------------------- the first use


def test_what_is_saved_is_matched_leased_and_loaded(client):
    assert client.save("a", 4) == 0
    saved = client.slots
    assert client.match("a", 6) == 4
    lease = client.lease("a", 4)
    assert client.slots == saved
    plan = client.issue(lease)
    client.settle(plan)
    client.told(messages.Release(lease))
    assert held(client.daemon) == 0


def test_another_client_finds_what_one_has_saved(daemon, client):
    client.save("a", 4)
    assert another(daemon).match("a", 4) == 4


def test_a_save_that_is_not_whole_is_not_there(client):
    client.save("a", 4, ok=False)
    assert client.match("a", 4) == 0
    assert client.daemon.depot.arena.slots_in_use == 0


def test_keys_of_another_namespace_are_of_no_use(daemon, client):
    """No sound client has them. Whoever does may map the arena all the same: it is one user's."""
    client.save("a", 4)
    other = daemon.client(2)
    other.join(model="another")
    with pytest.raises(MisuseError, match="of another cache"):
        other.issue(other.lease("a", 4))


def test_a_part_of_a_chunk_is_saved_where_its_places_say_so(client):
    answer = client.ask(messages.Reserve(client.desk, prompt("a", 3), 1, [[0], []], []))
    assert (answer.plan, answer.refused) == (0, 1), "its parent is nowhere"
    client.save("a", 1)
    answer = client.ask(messages.Reserve(client.desk, prompt("a", 3), 1, [[0], []], []))
    assert (answer.chunks, answer.places) == (b"\1\0\0\0", b"\0\0\0\0")
    assert len(unpack_slots(answer.slots)) == 1


def test_what_is_kept_for_a_time_is_gone_after_it(daemon, client):
    kept = [(5, 10.0), (5, float("inf"))]
    answer = client.ask(messages.Reserve(client.desk, prompt("a", 2), 0, None, kept))
    client.settle(answer.plan)
    client.ask(messages.Flush(client.desk, 5.0))
    assert client.match("a", 2) == 2
    daemon.clock.now += 11
    daemon.depot.catalog.withdraw_due()
    assert client.match("a", 2) == 0


def test_operators_ask_what_they_ask_in_process(daemon, client):
    client.save("a", 3)
    told = client.ask(messages.Explain(client.desk, prompt("a", 4))).explanation
    assert told.usable == 3 * CHUNK
    assert client.ask(messages.Bypass(client.desk, True)).value
    assert client.match("a", 3) == 0
    assert not client.ask(messages.Bypass(client.desk, False)).value
    assert not client.ask(messages.Bypass(client.desk, None)).value
    removed = client.ask(messages.Invalidate(client.desk, prompt("a", 3), 2, 0.0))
    assert (removed.parts, removed.unconfirmed, removed.unlisted) == (1, 0, ())
    assert client.match("a", 3) == 2
    digest = daemon.depot.catalog._owners.digests[1]
    assert client.ask(messages.Purge(client.desk, digest, 5.0)).parts == 2
    client.save("a", 3)
    assert client.ask(messages.Clear(client.desk, "dram", 5.0)).value
    assert client.match("a", 3) == 0
    assert client.ask(messages.Figures()).figures["kvtier_sessions"] == 1
    client.told(messages.Loaded(client.desk, prompt("a", 3), {"dram": 32}, 0))
    assert daemon.depot.metrics.get("hit_tokens", tier="dram") == 32


def test_a_flush_that_takes_longer_says_so(client, monkeypatch):
    async def never() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(client.daemon.depot.moves, "drained", never)
    assert client.ask(messages.Flush(client.desk, 0.01)).value is False
    monkeypatch.undo()  # or the daemon waits at its end, too


# --------------------------------------------------------------------------------- leases and pins


def test_a_lease_ends_with_the_last_connection(daemon, client):
    client.save("a", 4)
    client.connect()
    assert client.lease("a", 4)
    client.disconnect()
    assert held(daemon) == 4, "one of two has closed"
    client.disconnect()
    assert held(daemon) == 0
    assert len(handed_out(another(daemon))) == 8


def test_not_let_go_it_would_stay_for_its_time(daemon, client, monkeypatch):
    monkeypatch.setattr(Calls, "let_go", lambda *_: None)
    client.save("a", 4)
    client.lease("a", 4)
    client.disconnect()
    assert held(daemon) == 4
    monkeypatch.undo()
    daemon.sessions._calls.let_go(client.session)


def test_a_lease_ends_when_its_process_is_dead(daemon, client):
    client.save("a", 4)
    client.lease("a", 4)
    daemon.kill(1)
    assert held(daemon) == 0
    with pytest.raises(MisuseError, match="has ended; say Hello again"):
        client.told(messages.Figures())
    client.disconnect()
    assert daemon.sessions._connections == 0


def test_a_lease_ends_at_its_deadline(daemon, client):
    client.save("a", 4)
    lease = client.lease("a", 4, seconds=5)
    assert client.ask(messages.Renew(lease, 20.0)).value
    daemon.clock.now += 10
    assert client.issue(lease)
    daemon.clock.now += 20
    assert client.issue(lease) == 0
    assert not client.ask(messages.Renew(lease, 20.0)).value
    client.told(messages.Release(lease))


def test_what_has_ended_is_charged_no_more(daemon, client):
    client.save("a", 4)
    client.lease("a", 4, seconds=5)
    assert daemon.sessions._outs.charged(client.token) == 4 * PART_BYTES
    daemon.clock.now += 10
    daemon.depot.catalog.expire()
    daemon.sessions.tick()
    assert daemon.sessions._outs.charged(client.token) == 0
    assert not client.session.holdings


def test_never_looked_at_it_would_be_charged_for_ever(daemon, client, monkeypatch):
    monkeypatch.setattr(Holds, "look_at", lambda *_: None)
    client.save("a", 4)
    client.lease("a", 4, seconds=5)
    daemon.clock.now += 10
    daemon.depot.catalog.expire()
    daemon.sessions.tick()
    assert daemon.sessions._outs.charged(client.token) == 4 * PART_BYTES


def pin(client, text, chunks):
    fields = (chunks * CHUNK, chunks, False, 0, 5.0, 1000.0, True)
    return client.ask(messages.Fetch(client.desk, prompt(text, chunks), *fields)).lease


@pytest.mark.parametrize("end", ["unpin", "leave", "disconnect"])
def test_a_pin_ends_with_its_desk_or_its_session(daemon, client, end):
    client.save("a", 4)
    assert pin(client, "a", 4)
    assert daemon.sessions.figures()["kvtier_pinned_parts"] == 4
    assert daemon.sessions._outs.charged(client.token) == 0, "pins have a limit of their own"
    if end == "unpin":
        assert client.ask(messages.Unpin(client.desk)).value
    elif end == "leave":
        assert client.ask(messages.Leave(client.desk)).value
    else:
        client.disconnect()
    assert daemon.sessions.figures()["kvtier_pinned_parts"] == 0
    assert held(daemon) == 0


def test_a_lease_ends_with_its_desk(daemon, client):
    client.save("a", 4)
    client.lease("a", 4)
    assert client.ask(messages.Leave(client.desk)).value
    assert held(daemon) == 0
    with pytest.raises(MisuseError, match="no desk"):
        client.match("a", 4)


@pytest.mark.parametrize("end", ["disconnect", "leave"])
def test_what_a_fetch_brings_for_nobody_is_released(daemon, client, end):
    client.save("a", 4)
    late = daemon.depot.flow
    asked = []

    class Slow:
        """A flow on which the fetch is still under way."""

        def spawn(self, work):
            asked.append(work)
            return done

        def __getattr__(self, name):
            return getattr(late, name)

    done: Future = Future()
    daemon.depot.flow = Slow()
    replies = []
    fields = (4 * CHUNK, 4, False, 0, 5.0, 1000.0, False)
    message = messages.Fetch(client.desk, prompt("a", 4), *fields)
    daemon.sessions.handle(client.session, message, replies.append)
    daemon.depot.flow = late
    if end == "disconnect":
        client.disconnect()
    else:
        client.ask(messages.Leave(client.desk))
    assert replies == []
    done.set_result(late.spawn(asked[0]).result(20))
    assert [one.lease for one in replies] == [0]
    assert held(daemon) == 0
    assert len(daemon.sessions._holds._busy) == 0
