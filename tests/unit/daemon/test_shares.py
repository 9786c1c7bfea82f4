"""How much one client of a daemon may have; the others do not notice."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.daemon import answers, holds, messages, prompts, sessions
from kvtier.daemon.grants import Grants
from kvtier.daemon.holds import Holds
from kvtier.errors import ConfigError, MisuseError
from kvtier.identity.shape import chunk_shape
from kvtier.testing.small_daemon import CHUNK, GEOMETRY, PART_BYTES, SLOTS, SmallDaemon, prompt

HALF = SLOTS // 2
SHAPE = chunk_shape(GEOMETRY)


def charged(client) -> int:
    return client.daemon.sessions._outs.charged(client.token) // PART_BYTES


def refusals(daemon) -> int:
    return int(daemon.depot.metrics.get("refused_holds"))


# ------------------------------------------------------------------------------ half of the arena


def test_a_client_holds_half_of_the_arena_at_most_by_leases(daemon, client):
    client.save("a", 6)
    assert client.lease("a", 6)
    assert client.lease("a", 2)
    assert charged(client) == HALF
    assert client.lease("a", 1) == 0
    assert refusals(daemon) == 1
    other = daemon.client(2)
    other.join()
    assert other.lease("a", 6)


def test_a_client_holds_half_of_the_arena_at_most_by_saves(daemon, client):
    plan, refused = client.reserve("a", HALF + 3)
    assert plan
    assert (len(client.slots), refused) == (HALF, 3)
    assert client.reserve("b", 2) == (0, 2)
    assert daemon.depot.metrics.get("dropped_saves", reason="busy") == 5
    assert daemon.depot.arena.slots_in_use == HALF
    other = daemon.client(2)
    other.join()
    assert other.reserve("b", HALF)[1] == 0
    client.settle(plan)
    client.ask(messages.Flush(client.desk, 5.0))
    assert client.match("a", HALF + 3) == HALF
    assert charged(client) == 0


def test_without_a_limit_it_would_take_all(daemon, client, monkeypatch):
    monkeypatch.setattr(Holds, "_spare", lambda *_: 1 << 60)
    client.reserve("a", SLOTS)
    other = daemon.client(2)
    other.join()
    assert other.reserve("b", 1) == (0, 1)


def test_the_one_client_of_a_private_daemon_may_have_all():
    daemon = SmallDaemon(SLOTS, share=1.0)
    try:
        client = daemon.client(1)
        client.join()
        assert client.reserve("a", SLOTS)[1] == 0
    finally:
        daemon.close()


def test_a_lease_and_its_plans_count_once_and_as_long_as_either(client):
    client.save("a", 4)
    lease = client.lease("a", 4)
    plans = [client.issue(lease), client.issue(lease)]
    assert charged(client) == 4
    client.told(messages.Release(lease))
    assert charged(client) == 4
    for plan in plans:
        assert charged(client) == 4
        client.settle(plan)
    assert charged(client) == 0


def test_what_went_out_before_a_break_counts_after_it(daemon, client):
    client.reserve("a", HALF)
    client.disconnect()
    client.connect()
    client.join()
    assert charged(client) == HALF
    assert client.reserve("b", 1) == (0, 1)


def test_a_pin_counts_while_plans_of_it_are_out(daemon, client):
    client.save("a", 6)
    fields = (6 * CHUNK, 6, False, 0, 5.0, 1000.0, True)
    pinned = client.ask(messages.Fetch(client.desk, prompt("a", 6), *fields)).lease
    assert charged(client) == 0
    plan = client.issue(pinned)
    assert charged(client) == 6
    client.settle(plan)
    assert charged(client) == 0
    client.save("b", 3)
    assert client.lease("b", 3)
    assert client.issue(pinned) == 0


def test_one_fetch_that_brings_too_much_is_none(daemon, client):
    client.save("a", 6)
    assert client.lease("a", 4)
    fields = (6 * CHUNK, 6, False, 0, 5.0, 1000.0, False)
    assert client.ask(messages.Fetch(client.desk, prompt("a", 6), *fields)).lease == 0
    assert daemon.sessions.figures()["kvtier_leased_parts"] == 4


def test_a_client_has_half_of_the_grants_at_most(daemon, client, monkeypatch):
    monkeypatch.setattr(client.daemon.sessions._holds, "_most_cells", 3)
    client.save("a", 1)
    lease = client.lease("a", 1)
    assert all(client.issue(lease) for _ in range(3))
    assert client.issue(lease) == 0
    assert client.reserve("b", 1) == (0, 1)
    assert refusals(daemon) == 1


@pytest.mark.parametrize("kind", ["load", "save"])
def test_a_full_table_of_grants_is_a_miss_and_leaves_nothing(daemon, client, monkeypatch, kind):
    client.save("a", 2)
    lease = client.lease("a", 2)
    monkeypatch.setattr(Grants, "add", lambda *_: False)
    if kind == "load":
        assert client.issue(lease) == 0
    else:
        assert client.reserve("b", 2) == (0, 2)
    client.told(messages.Release(lease))
    daemon.depot.flush(5.0)
    assert daemon.sessions.figures()["kvtier_leased_parts"] == 0
    assert daemon.depot.arena.slots_in_use == 2
    assert charged(client) == 0


# ---------------------------------------------------------------------------------------- counts


def test_a_client_has_so_many_leases(client, monkeypatch):
    monkeypatch.setattr(holds, "_LEASES", 3)
    client.save("a", 1)
    leases = [client.lease("a", 1) for _ in range(4)]
    assert [bool(lease) for lease in leases] == [True, True, True, False]
    client.told(messages.Release(leases[0]))
    assert client.lease("a", 1)


def test_a_client_has_so_many_desks(client):
    for _ in range(63):
        client.join()
    with pytest.raises(ConfigError, match="64 caches at most"):
        client.join()
    assert client.ask(messages.Leave(client.desk)).value
    assert client.join()


def stuck(monkeypatch, depot):
    """Let what waits for writes wait until the end."""

    async def never() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(depot.moves, "drained", never)


def test_a_process_waits_for_so_much_at_a_time(daemon, client, monkeypatch):
    """What was answered as late goes on, and so it counts."""
    stuck(monkeypatch, daemon.depot)
    for _ in range(64):
        assert client.told(messages.Flush(client.desk, 50.0)) == []
        assert not client.ask(messages.Flush(client.desk, 0.0)).value
    again = daemon.client(1, "another session")
    again.join()
    with pytest.raises(MisuseError, match="128 calls of one process that wait are as many"):
        again.told(messages.Flush(again.desk, 50.0))
    with pytest.raises(MisuseError, match="128 calls"):
        again.told(messages.Explain(again.desk, prompt("a", 1)))
    assert not again.ask(messages.Leave(again.desk)).value, "it leaves all the same"
    assert again.session.desks == {}
    monkeypatch.undo()
    other = daemon.client(2)
    other.join()
    assert other.ask(messages.Flush(other.desk, 5.0)).value, "nobody waits behind them"


def test_counted_by_session_they_would_pile_up(daemon, client, monkeypatch):
    monkeypatch.setattr("kvtier.daemon.busy.Busy.begin", lambda *_: True)
    stuck(monkeypatch, daemon.depot)
    for _ in range(200):
        assert not client.ask(messages.Flush(client.desk, 0.0)).value
    assert len(daemon.sessions._calls._errands._going) == 200
    monkeypatch.undo()


def test_what_has_ended_counts_no_more(daemon, client):
    for _ in range(300):
        assert client.ask(messages.Flush(client.desk, 5.0)).value
        client.ask(messages.Explain(client.desk, prompt("a", 1)))
    assert client.ask(messages.Flush(client.desk, 5.0)).value
    assert len(daemon.sessions._calls._errands.busy) == 0


def test_long_prompts_weigh_more_while_they_are_under_way(daemon, client, monkeypatch):
    """Their names take memory for as long as a fetch lasts."""
    monkeypatch.setattr(prompts, "_LIGHT", 4)
    monkeypatch.setattr(daemon.sessions._holds._busy, "each", 5)

    async def never(*_, **__):
        await asyncio.sleep(60)

    monkeypatch.setattr(daemon.depot.moves, "fetch", never)

    def fetch(chunks):
        fields = (CHUNK, 1, False, 0, 5.0, 1000.0, False)
        return client.told(messages.Fetch(client.desk, prompt("a", chunks), *fields))

    assert fetch(12) == []
    assert [one.lease for one in fetch(7)] == [0]
    assert fetch(3) == []
    assert len(daemon.sessions._holds._busy) == 5
    assert prompts.weight(client.session.prompts.prefix(1, SHAPE, 1, prompt("a", 12))) == 4


@pytest.mark.parametrize("limit", ["each", "most"])
def test_so_much_is_fetched_at_a_time(daemon, client, monkeypatch, limit):
    monkeypatch.setattr(daemon.sessions._holds._busy, limit, 2)
    client.save("a", 2)

    async def never(*_, **__):
        await asyncio.sleep(60)

    monkeypatch.setattr(daemon.depot.moves, "fetch", never)
    fields = (2 * CHUNK, 2, False, 0, 5.0, 1000.0, False)
    fetch = messages.Fetch(client.desk, prompt("a", 2), *fields)
    assert client.told(fetch) == client.told(fetch) == []
    client.disconnect()
    client.connect()
    fetch.desk = client.join()
    assert [one.lease for one in client.told(fetch)] == [0]
    prefetch = messages.Prefetch(client.desk, prompt("a", 2), 2 * CHUNK, 2, False, 5.0)
    assert client.told(prefetch) == [answers.Count(0)]


@pytest.mark.parametrize(
    ("limit", "most"),
    [("_CONNECTIONS", 4), ("_SESSIONS", 4), ("_SESSIONS_OF_ONE", 4), ("_CONNECTIONS_OF_ONE", 1)],
)
def test_there_are_so_many_sessions_and_connections(daemon, client, monkeypatch, limit, most):
    monkeypatch.setattr(sessions, limit, most)
    others = [client] if limit == "_CONNECTIONS_OF_ONE" else []
    pids = [1] * 3 if limit == "_SESSIONS_OF_ONE" else [11, 12, 13]
    others = others or [daemon.client(pid, f"{at}") for at, pid in enumerate(pids)]
    with pytest.raises(ConfigError, match=r"as many as this daemon takes .* close some"):
        client.connect() if len(others) == 1 else daemon.client(1, "one more")
    if limit == "_SESSIONS_OF_ONE":
        daemon.client(14)
    others[-1].disconnect()
    if len(others) == 1:
        others[-1].connect()
    else:
        daemon.client(1, "one more")


def test_a_process_serves_so_many_engines(daemon, monkeypatch):
    monkeypatch.setattr(sessions, "_ENGINES_OF_ONE", 2)
    for engine in ("a", "b"):
        daemon.client(5, engine, engine=engine, role="worker")
    with pytest.raises(ConfigError, match="process 5 serves too many engines"):
        daemon.client(5, "c", engine="c", role="worker")
    assert len(daemon.sessions._all) == 2
    daemon.client(6, "c", engine="c", role="worker")
