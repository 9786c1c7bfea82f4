"""Handles of a server that is no more: its successor honours none of them."""

from __future__ import annotations

import itertools

import pytest

from kvtier.daemon import messages
from kvtier.daemon import sessions as module
from kvtier.errors import MisuseError
from kvtier.testing.small_daemon import SmallDaemon, prompt

SLOTS = 32


def first_plan_of_any(_life: int) -> int:
    return 1


@pytest.fixture
def stale(request, monkeypatch):
    """Return a daemon that was started anew, a client of it, and what that had before.

    With a twin each server counts its handles from one.
    """
    if request.param:
        monkeypatch.setattr(module, "handles", lambda _: itertools.count(1))
        monkeypatch.setattr(module, "first_plan", first_plan_of_any)
    daemon = SmallDaemon(SLOTS)
    client = daemon.client(1)
    desk = client.join()
    client.save("a", 4)
    lease = client.lease("a", 4)
    plan, _ = client.reserve("b", 2)
    client.settle(plan)
    daemon.restart()
    client.connect()
    yield daemon, client, (desk, lease, plan)
    daemon.close()


def names(twin) -> str:
    return "counted from one" if twin else "as it is"


both = pytest.mark.parametrize("stale", [False, True], indirect=True, ids=names)


@both
def test_a_stale_desk_is_refused_with_what_to_do(stale, request):
    _, client, (desk, _, _) = stale
    client.join("another model")
    asked = messages.Match(desk, prompt("a", 4))
    if "counted from one" in request.node.name:
        assert client.ask(asked), "it names another model's"
        return
    with pytest.raises(MisuseError, match=rf"no desk {desk} at this server; say Join"):
        client.ask(asked)


@both
def test_a_stale_lease_ends_nothing_and_gives_nothing(stale, request):
    _, client, (_, lease, _) = stale
    client.join()
    client.save("a", 4)
    now = client.lease("a", 4)
    twin = "counted from one" in request.node.name
    assert (now == lease) is twin
    assert client.ask(messages.Renew(lease, 60.0)).value is twin
    assert bool(client.issue(lease)) is twin
    client.told(messages.Release(lease))
    assert (now in client.session.holdings) is not twin


@both
def test_a_stale_plan_settles_nothing(stale, request):
    daemon, client, (_, _, plan) = stale
    client.join()
    client.save("a", 4)
    now, _ = client.reserve("c", 4)
    client.settle(plan)
    out = daemon.sessions.figures()["kvtier_plans_out"]
    assert out == (0 if "counted from one" in request.node.name else 1)
    assert (now == plan) is ("counted from one" in request.node.name)
