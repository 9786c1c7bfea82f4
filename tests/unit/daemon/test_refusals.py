"""What a daemon's client is refused: models, prompts, and what no sound client says."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from kvtier.daemon import answers, calls, messages, prompts
from kvtier.daemon.holds import Holds
from kvtier.daemon.process import Process
from kvtier.daemon.prompts import Recall
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.shape import chunk_shape
from kvtier.testing.small_daemon import CHUNK, GEOMETRY, Client, prompt

# ------------------------------------------------------------------------------------------ join


def joined(client, components, shards=1, stages=1):
    geometry = Geometry(components, dtype="int8", block_tokens=(CHUNK,), chunk_tokens=CHUNK)
    return client.join("other", geometry=geometry, shards=shards, stages=stages)


@pytest.mark.parametrize(
    ("components", "shards", "stages"),
    [
        ((Component(1 << 16, 0xFFFF, 1),), 0xFFFF, 0xFFFF),
        ((Component(64, 64, 1),), 64, 64),
        (tuple(Component(1, 1, 1, name=str(at)) for at in range(4097)), 1, 1),
    ],
)
def test_a_chunk_of_too_many_parts_is_refused_before_they_are_named(
    client, monkeypatch, components, shards, stages
):
    monkeypatch.setattr(calls, "MOST_PARTS", 4095)
    monkeypatch.setattr(calls, "chunk_shape", None)
    with pytest.raises(ConfigError, match=r"a chunk of \d+ parts .* takes 4095 at most"):
        joined(client, components, shards, stages)
    assert len(client.session.desks) == 1


def test_a_model_whose_chunk_does_not_fit_is_refused(daemon, client):
    with pytest.raises(ConfigError, match="below one chunk"):
        joined(client, (Component(1 << 20, 1 << 20, 1 << 20),))
    client.save("a", 1)
    with pytest.raises(ConfigError, match=r"cut for smaller ones; .* or clear dram"):
        joined(client, (Component(2, 1, 128),))
    assert client.ask(messages.Clear(client.desk, "dram", 5.0)).value
    assert joined(client, (Component(2, 1, 128),))


def test_heads_that_do_not_go_into_the_ranks_are_refused(client):
    with pytest.raises(ConfigError, match="cannot be spread over 5 ranks"):
        joined(client, (Component(1, 2, 8),), shards=5)


def test_ranks_that_would_share_nothing_are_refused_with_both_numbers(daemon, client):
    heads = (Component(1, 2, 8),)
    assert joined(client, heads)
    other = daemon.client(2)
    caches = daemon.depot._caches
    with pytest.raises(ConfigError, match=r"in 1 shards and 1 stages; .* with 2 shards and 1 stag"):
        joined(other, heads, shards=2)
    assert daemon.depot._caches == caches
    assert joined(other, heads)


def test_ranks_of_which_all_hold_the_same_share_it(daemon, client):
    latent = (Component(1, 1, 8, planes=1, replicated=True),)
    assert joined(client, latent)
    assert joined(daemon.client(2), latent, shards=2)


def test_without_that_check_they_are_not(daemon, client, monkeypatch):
    monkeypatch.setattr(calls.Calls, "_check_ranks", lambda *_: None)
    heads = (Component(1, 2, 8),)
    assert joined(client, heads)
    assert joined(daemon.client(2), heads, shards=2)


def test_more_namespaces_than_can_be_told_apart_are_refused(daemon, client, monkeypatch):
    monkeypatch.setattr(daemon.depot.catalog, "owner", lambda *_: 0)
    caches = daemon.depot._caches
    with pytest.raises(ConfigError, match="too many namespaces"):
        client.join("another")
    assert daemon.depot._caches == caches


# --------------------------------------------------------------------------------------- prompts


def short(text: str, chunks: int):
    return prompt(text, chunks, keys=b"")


def test_keys_are_sent_once(client):
    client.save("a", 3)
    assert client.told(messages.Match(client.desk, short("a", 3)))[0].known == 3
    assert client.told(messages.Match(client.desk, short("a", 2))) == [answers.Resend()]
    assert client.told(messages.Match(client.desk, prompt("a", 0)))[0].tokens == 0
    longer = prompt("a", 3, tokens=3 * CHUNK + 5, keys=b"")
    assert client.told(messages.Match(client.desk, longer))[0].known == 3


def test_each_desk_and_each_session_has_its_own(daemon, client):
    client.save("a", 3)
    desk = client.desk
    client.join("another")
    assert client.told(messages.Match(client.desk, short("a", 3))) == [answers.Resend()]
    client.disconnect()
    client.connect()
    client.join()
    assert client.desk != desk
    assert client.told(messages.Match(client.desk, short("a", 3))) == [answers.Resend()]


def test_other_keys_under_the_same_last_one_are_what_counts(client):
    client.save("a", 3)
    true, false = prompt("a", 3), prompt("b", 3)
    mixed = false.keys[:64] + true.keys[64:]
    sent = prompt("a", 3, keys=mixed)
    assert client.told(messages.Match(client.desk, sent))[0].known == 0
    assert client.told(messages.Match(client.desk, true))[0].known == 3


def test_what_is_remembered_is_bounded(monkeypatch):
    recall = Recall(most=40_000)
    one, other = recall.of(b"one"), recall.of(b"other")
    shape = chunk_shape(GEOMETRY)
    for at in range(300):
        assert one.prefix(1, shape, 1, prompt(f"{at}", 2)) is not None
    assert recall.nbytes == one.nbytes <= 40_000
    assert one.prefix(1, shape, 1, short("299", 2)) is not None
    assert one.prefix(1, shape, 1, short("0", 2)) is None
    other.prefix(1, shape, 1, prompt("mine", 20))
    assert other.prefix(1, shape, 1, short("mine", 20)) is not None, "who has most forgets"
    monkeypatch.setattr(prompts, "_SESSION_BYTES", 5000)
    other.prefix(1, shape, 1, prompt("large", 100))
    assert other.prefix(1, shape, 1, short("large", 100)) is None
    monkeypatch.setattr(prompts, "_PROMPTS", 3)
    for at in range(5):
        other.prefix(1, shape, 1, prompt(f"{at}", 1))
    found = [other.prefix(1, shape, 1, short(f"{at}", 1)) is not None for at in range(5)]
    assert found == [False, False, True, True, True]
    for token in (b"one", b"other", b"nobody"):
        recall.forget(token)
    assert recall.nbytes == 0
    assert one.nbytes == other.nbytes == 0


def keys(*which: int) -> bytes:
    return b"".join(bytes([one]) * 32 for one in which)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": 3 * CHUNK - 1}, "have not 3 chunks"),
        ({"tokens": 4 * CHUNK}, "have not 3 chunks"),
        ({"tokens": (1 << 63) - 1}, "have not 3 chunks"),
        ({"keys": keys(1, 2)}, "are not the keys of 3 chunks"),
        ({"keys": keys(1, 2, 3)[:-1]}, "are not the keys of 3 chunks"),
        ({"keys": keys(1, 2, 4), "last": keys(3)}, "are not the keys of 3 chunks"),
        ({"keys": keys(3, 1, 3), "last": keys(3)}, "two chunks of a prompt have one key"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(client, changes, why):
    with pytest.raises(ProtocolError, match=why):
        client.told(messages.Match(client.desk, prompt("a", 3, **changes)))


def test_a_prompt_without_chunks_has_no_keys(client):
    with pytest.raises(ProtocolError, match="are not the keys of 0 chunks"):
        client.told(messages.Match(client.desk, prompt("a", 0, keys=keys(1))))


def test_a_prompt_of_too_many_parts_is_refused(client, monkeypatch):
    monkeypatch.setattr(prompts, "MOST_NAMES", 3)
    assert client.match("a", 3) == 0
    with pytest.raises(MisuseError, match="takes 3 parts of a prompt at most"):
        client.match("b", 4)


# ----------------------------------------------------------------------- what no sound client says


def reserved(first=0, places=None, kept=()):
    return lambda desk: messages.Reserve(desk, prompt("a", 3), first, places, list(kept))


NAN = math.nan


@pytest.mark.parametrize(
    "message",
    [
        lambda _: answers.Resend(),
        lambda _: messages.Hello(bytes(16), "", "scheduler"),
        lambda desk: messages.Lease(desk, prompt("a", 3), 4 * CHUNK, 0, 5.0),
        lambda desk: messages.Fetch(desk, prompt("a", 3), CHUNK, 4, False, 0, 5.0, 5.0, False),
        lambda desk: messages.Prefetch(desk, prompt("a", 3), 1 << 62, 0, False, 5.0),
        lambda desk: messages.Loaded(desk, prompt("a", 3), {"hbm": 1}, 0),
        lambda desk: messages.Loaded(desk, prompt("a", 3), {"dram": 50}, 0),
        reserved(places=[[0]] * 4),
        reserved(first=9, places=[[0]]),
        reserved(first=2, places=[[0]] * 2),
        reserved(places=[[1]]),
        reserved(places=[[0, 0]]),
        reserved(kept=[(0, 1.0)] * 2),
        reserved(kept=[(0, 0.0)] * 3),
        reserved(kept=[(0, NAN)] * 3),
    ],
)
def test_it_is_a_protocol_error(client, message):
    with pytest.raises(ProtocolError):
        client.told(message(client.desk))
    assert client.daemon.depot.arena.slots_in_use == 0


@pytest.mark.parametrize(
    "message",
    [
        lambda _: messages.Match(7, prompt("a", 3)),
        lambda desk: messages.Lease(desk, prompt("a", 3), CHUNK, 0, 0.0),
        lambda desk: messages.Lease(desk, prompt("a", 3), CHUNK, 0, NAN),
        lambda desk: messages.Fetch(desk, prompt("a", 3), CHUNK, 1, False, 0, 5.0, NAN, False),
        lambda desk: messages.Fetch(desk, prompt("a", 3), CHUNK, 1, False, 0, NAN, 5.0, False),
        lambda desk: messages.Prefetch(desk, prompt("a", 3), CHUNK, 1, False, NAN),
        lambda desk: messages.Flush(desk, NAN),
        lambda desk: messages.Invalidate(desk, prompt("a", 3), 0, NAN),
    ],
)
def test_it_is_misuse(client, message):
    with pytest.raises(MisuseError):
        client.told(message(client.desk))
    server = client.daemon.sessions
    assert len(server._holds._busy) == len(server._calls._errands.busy) == 0


def test_a_tier_that_is_not_there_is_named_with_those_that_are(client):
    with pytest.raises(ConfigError, match="no tier 'hbm'; this cache has dram"):
        client.told(messages.Clear(client.desk, "hbm", 5.0))


def test_asked_beyond_what_a_prompt_has_is_a_miss(client):
    client.save("a", 3)
    assert client.ask(messages.Lease(client.desk, prompt("a", 3), 2 * CHUNK, 9, 5.0)).lease == 0
    fields = (0, 3, True, 9, 5.0, 5.0, False)
    assert client.ask(messages.Fetch(client.desk, prompt("a", 3), *fields)).lease == 0
    assert client.ask(messages.Invalidate(client.desk, prompt("a", 3), 9, 0.0)).parts == 0
    assert client.told(messages.Release(12345)) == []
    assert client.issue(12345) == 0


def test_a_defect_of_ours_is_a_refusal_and_a_word_in_the_log(client, monkeypatch, caplog):
    monkeypatch.setattr(Holds, "lease", lambda *_: 1 // 0)
    with pytest.raises(MisuseError, match=r"failed at it \(ZeroDivisionError\); see its log"):
        client.lease("a", 1)
    assert "a Lease failed" in caplog.text


# ----------------------------------------------------------------------------------------- hello


def test_a_session_is_one_processs(daemon, client):
    for _ in range(2):
        with pytest.raises(ProtocolError, match="session is process 1's"):
            Client(daemon, daemon.process(2), client.token, "", "scheduler")
        if client.session.connections:
            client.reserve("a", 1)
            client.disconnect()  # its plan is out still
    daemon.kill(1)
    Client(daemon, daemon.process(2), client.token, "", "scheduler")


@pytest.mark.parametrize(("engine", "role"), [("other", "scheduler"), ("", "worker")])
def test_a_session_has_one_engine_and_one_role(daemon, client, engine, role):
    with pytest.raises(ProtocolError, match="one engine and one role"):
        Client(daemon, client.process, client.token, engine, role)


def test_a_process_that_has_ended_says_no_hello(daemon):
    daemon.process(5).dead = True
    with pytest.raises(ProtocolError, match="process 5, which says Hello, has ended"):
        daemon.client(5)


def test_a_worker_asks_nothing(daemon, client):
    worker = daemon.client(2, role="worker")
    with pytest.raises(ProtocolError, match="a worker says no Join; its scheduler does"):
        worker.join()
    assert worker.ask(messages.Figures()).figures["kvtier_sessions"] == 2


def test_nobody_comes_once_it_ends(daemon, client):
    client.save("a", 2)
    daemon.sessions.close()
    daemon.sessions.close()
    with pytest.raises(ConfigError, match="the daemon ends"):
        daemon.client(2)
    with pytest.raises(MisuseError, match="has ended"):
        client.match("a", 2)
    client.disconnect()
    daemon.sessions.died(client.process)
    assert daemon.depot.arena.closed


def test_a_process_that_cannot_be_seen_is_refused(monkeypatch):
    """Those of another container all have the number 0 here, and would be taken for one."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "pos:\t0\nPid:\t0\n")
    pidfd = os.pidfd_open(os.getpid())
    with pytest.raises(ProtocolError, match="in the daemon's pid namespace"):
        Process.of(pidfd, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)
