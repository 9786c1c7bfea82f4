"""Leases: they end once, in time, and never while a copy runs."""

from __future__ import annotations

import pytest

from kvtier.catalog.lease import LeaseState
from kvtier.errors import MisuseError
from kvtier.testing.small_catalog import SmallCatalog, chain


@pytest.fixture
def small():
    """Room for four parts."""
    fixture = SmallCatalog(4)
    yield fixture
    fixture.close()


# ---------------------------------------------------------------------------------------- leases


def test_a_lease_ends_at_its_deadline(small):
    parts = chain(4)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    small.clock.now += 1.9
    small.catalog.expire()
    assert lease.state is LeaseState.HELD
    small.clock.now += 0.2
    small.catalog.expire()
    assert lease.state is LeaseState.EXPIRED
    assert small.save(chain(4, seed=1)) == 4
    lease.release()  # a documented no-op
    assert small.metrics.get("expired_leases") == 1


def test_a_plan_issued_in_time_keeps_its_slots_past_the_deadline(small):
    """P4: quarantine, until the copy has reported."""
    parts = chain(4)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    assert small.catalog.issue(lease, 0)
    small.clock.now += 5
    assert small.save(chain(4, seed=1)) == 0
    small.catalog.figures()
    assert small.metrics.get("quarantined_slots") == 4
    small.catalog.settle(lease)
    assert small.save(chain(4, seed=1)) == 4


def test_a_plan_is_refused_after_the_deadline(small):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    small.clock.now += 3
    assert not small.catalog.issue(lease, 0)


def test_releasing_while_a_copy_runs_frees_nothing_until_it_settles(small):
    parts = chain(4)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    small.catalog.issue(lease, 0)
    lease.release()
    assert small.save(chain(1, seed=1)) == 0
    small.catalog.settle(lease)
    assert small.save(chain(1, seed=1)) == 1


def test_releasing_twice_is_misuse_and_harms_nobody(small):
    parts = chain(4)
    small.save(parts)
    first = small.lease(parts, 9.0)
    second = small.lease(parts, 9.0)
    first.release()
    with pytest.raises(MisuseError):
        first.release()
    assert small.save(chain(1, seed=1)) == 0  # the second still holds
    second.release()
    assert small.catalog._index.held_rows == 0


def test_a_lease_that_is_renewed_ends_later(small):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    small.clock.now += 1.5
    assert lease.renew(2.0)
    small.clock.now += 1.5
    small.catalog.expire()
    assert lease.held
    small.clock.now += 0.5
    small.catalog.expire()  # a lease ends at its deadline, not after it
    assert not lease.held


@pytest.mark.parametrize("ended", ["released", "late"])
def test_a_lease_that_has_ended_is_not_renewed(small, ended):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    if ended == "released":
        lease.release()
    else:
        small.clock.now += 3  # nobody has looked at the time since
    deadline = lease.deadline
    assert not lease.renew(9.0)
    assert not lease.held
    assert lease.deadline == deadline
    assert small.catalog._index.held_rows == 0


def test_a_lease_that_ran_out_counts_once_though_its_copy_runs_on(small):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    small.catalog.issue(lease, 0)
    small.clock.now += 3
    for _ in range(2):
        assert small.catalog.expire() == 1
    assert small.metrics.get("expired_leases") == 1
    small.catalog.settle(lease)


def test_a_lease_that_was_released_inside_its_block_is_left_alone_at_its_end(small, monkeypatch):
    """In a forked child too, where nothing else may be done with it."""
    parts = chain(1)
    small.save(parts)
    with small.lease(parts, 2.0) as lease:
        lease.release()
        monkeypatch.setattr(small.catalog, "_pid", -1)


def test_a_lease_is_its_processs(small, monkeypatch):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(small.catalog, "_pid", -1)
        with pytest.raises(MisuseError, match="fork"):
            lease.renew(1.0)
        with pytest.raises(MisuseError, match="fork"):
            lease.release()
    assert lease.held
    lease.release()


def test_the_slots_of_a_lease_are_those_it_held_whenever_they_are_asked_for(small):
    parts = chain(4)
    small.save(parts)
    lease = small.lease(parts, 9.0)
    before = [small.catalog._index.slot(row) for row in lease.rows]
    lease.release()
    assert small.save(chain(4, seed=1)) == 4
    assert [slot for chunk in lease.slots for slot in chunk] == before
    assert lease.slots is lease.slots


def test_settling_what_was_not_issued_is_misuse(small):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 9.0)
    with pytest.raises(MisuseError):
        small.catalog.settle(lease)


def test_ten_thousand_careless_leases_leave_nothing_held():
    """H14: leases that are used, released or forgotten all end."""
    fixture = SmallCatalog(64)
    parts = chain(8)
    fixture.save(parts)
    for turn in range(10_000):
        fixture.clock.now += 0.01
        lease = fixture.lease(parts, 1.0)
        if turn % 3 == 0:
            lease.release()
        elif turn % 3 == 1:
            fixture.catalog.issue(lease, 0)
            fixture.catalog.settle(lease)
    fixture.clock.now += 1.1
    assert fixture.catalog.expire() == 0
    assert fixture.catalog._index.held_rows == 0
    assert fixture.save(chain(64, seed=1)) == 64
    fixture.close()
