"""Grants: what one server wrote down the next one reads, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvtier.daemon import grants as module
from kvtier.daemon.grants import CELLS, Grant, Grants, Who, cells_for, make_grants
from kvtier.daemon.out import first_plan
from kvtier.errors import ConfigError, ProtocolError
from kvtier.memory.arena import Slot
from kvtier.memory.packed import pack_slots
from kvtier.memory.sealed import PAGE_BYTES

ARENA = 77
SESSION, ENGINE = b"s" * 16, b"e" * 16
ME, OTHER = Who(10, 1000), Who(11, 1100)
LONG = bytes(24 * 200_000)


def slots(count: int, first: int = 0) -> list[Slot]:
    return [Slot((first + at) * PAGE_BYTES, PAGE_BYTES, first + at + 1) for at in range(count)]


@pytest.fixture
def fd():
    made = make_grants()
    yield made
    os.close(made)


def opened(fd: int, arena: int = ARENA) -> Grants:
    return Grants(os.dup(fd), arena)


def added(grants: Grants, plan: int, count: int) -> bool:
    return grants.add(plan, SESSION, ENGINE, ME, pack_slots(slots(count, plan)))


def read(fd: int) -> list[Grant]:
    """Open the table as the next server does; return what it finds."""
    grants = opened(fd)
    grants.close()
    return grants.left


def left(fd: int) -> dict[int, list[Slot]]:
    """Return the slots of each plan that the next server finds."""
    return {grant.plan: grant.slots for grant in read(fd)}


@pytest.mark.parametrize("count", [0, 1, 145, 146, 147, 148, 500, 3000])
def test_what_was_granted_is_read_again(fd, count):
    grants = opened(fd)
    assert added(grants, 5, count)
    grants.close()
    (grant,) = read(fd)
    assert (grant.plan, grant.session, grant.engine, grant.who) == (5, SESSION, ENGINE, ME)
    assert grant.slots == slots(count, 5)
    assert grant.ended == ()


def test_each_opening_is_a_generation(fd):
    for number in (1, 2, 3):
        grants = opened(fd)
        assert grants.generation == number
        grants.close()


def test_servers_of_an_arena_that_comes_later_have_other_plans(fd):
    """A rank's word of a plan may come when another supervisor's server listens."""
    now, ids = 100.0, []
    for arena in (1, 2, 3):
        table = make_grants()
        for _ in range(6):  # each an eighth of a second at least
            grants = Grants(os.dup(table), arena, lambda now=now: now)
            ids.append(first_plan(grants.life))
            grants.close()
            now += 0.125
        os.close(table)
    assert len(set(ids)) == len(ids)
    assert first_plan(1 << 62) < 1 << 63


def test_what_was_granted_of_another_arena_is_forgotten(fd):
    grants = opened(fd)
    added(grants, 5, 3)
    grants.enter(ENGINE, ME)
    grants.close()
    grants = opened(fd, ARENA + 1)
    assert (grants.left, grants.members, grants.generation) == ([], [], 2)
    grants.close()
    assert left(fd) == {}


def test_what_was_dropped_is_gone_and_its_cells_are_used_again(fd):
    grants = opened(fd)
    most = 24 * CELLS * PAGE_BYTES
    assert cells_for(bytes(most)) > CELLS
    for plan in range(1, 40):
        assert grants.add(plan, SESSION, ENGINE, ME, LONG)
        grants.drop(plan)
    assert added(grants, 90, 4)
    grants.close()
    assert left(fd) == {90: slots(4, 90)}


def test_a_full_table_refuses_and_keeps_what_it_has(fd):
    grants = opened(fd)
    plan = 0
    while grants.add(plan + 1, SESSION, ENGINE, ME, LONG):
        plan += 1
    long = plan
    while added(grants, plan + 1, 1):
        plan += 1
    grants.drop(plan)
    assert not added(grants, plan, 200), "two cells, and one is free"
    assert added(grants, plan, 1)
    for one in range(1, long + 1):
        grants.drop(one)
    grants.close()
    assert left(fd) == {one: slots(1, one) for one in range(long + 1, plan + 1)}


def test_who_has_ended_a_plan_is_read_again(fd):
    grants = opened(fd)
    added(grants, 5, 300)
    for pid in range(40):
        grants.ended(5, Who(pid, 7))
    grants.close()
    (grant,) = read(fd)
    assert grant.ended == tuple(Who(pid, 7) for pid in range(32)), "the rest are waited for"
    assert grant.slots == slots(300, 5)


def test_members_are_read_again_and_forgotten_one_by_one(fd):
    grants = opened(fd)
    assert grants.enter(ENGINE, ME)
    assert grants.enter(ENGINE, ME)
    assert grants.enter(ENGINE, OTHER)
    grants.remove(ENGINE, ME)
    grants.close()
    grants = opened(fd)
    assert grants.members == [(ENGINE, OTHER)]
    for number in range(module.MEMBERS - 1):
        assert grants.enter(number.to_bytes(16, "little"), ME)
    assert not grants.enter(ENGINE, ME)
    grants.remove(ENGINE, OTHER)
    assert grants.enter(ENGINE, ME)
    grants.close()


def test_an_empty_table_takes_next_to_no_memory(fd):
    grants = opened(fd)
    added(grants, 5, 1000)
    grants.close()
    assert left(fd)
    assert os.fstat(fd).st_blocks * 512 < 1 << 20


def test_nobody_can_change_its_size(fd):
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 5)


@pytest.mark.parametrize("size", [0, 4096])
def test_a_table_of_another_size_is_refused(size):
    fd = os.memfd_create("grants")
    os.ftruncate(fd, size)
    with pytest.raises(ConfigError, match="another size; start the daemon anew"):
        opened(fd)
    os.close(fd)


def test_a_table_of_another_version_is_refused(fd, monkeypatch):
    opened(fd).close()
    monkeypatch.setattr(module, "_VERSION", 9)
    with pytest.raises(ConfigError, match="version 1, not 9; start the daemon anew"):
        opened(fd)


# --------------------------------------------------------------------------- half written, killed


class KilledError(Exception):
    """Raised in place of the end of the process."""


class Mapping:
    """The table's memory, whose writer is killed after so many writes."""

    def __init__(self, inner, writes):
        self.inner, self.writes = inner, writes

    def write(self):
        if not self.writes:
            raise KilledError
        self.writes -= 1

    def __setitem__(self, at, value):
        self.write()
        self.inner[at] = value

    def __getitem__(self, at):
        return self.inner[at]

    def close(self):
        self.inner.close()


@pytest.fixture
def stepped(monkeypatch):
    """Let packing into the table count as a write, too."""

    class Packing:
        def __init__(self, inner):
            self.inner, self.size = inner, inner.size

        def pack_into(self, memory, at, *values):
            if isinstance(memory, Mapping):
                memory.write()
                memory = memory.inner
            self.inner.pack_into(memory, at, *values)

        def unpack_from(self, memory, at=0):
            return self.inner.unpack_from(memory, at)

    for name in ("_HEADER", "_MEMBER", "_NEXT", "_HEAD", "_ENDED"):
        monkeypatch.setattr(module, name, Packing(getattr(module, name)))


def killed_after(fd: int, writes: int, work) -> bool:
    """Do something to the table until so many writes are done; say whether it came to its end."""
    grants = opened(fd)
    grants._map = Mapping(grants._map, writes)
    try:
        work(grants)
    except KilledError:
        return False
    finally:
        grants.close()
    return True


def test_a_grant_is_there_whole_or_not_at_all(stepped):
    """Over cells that were used before, so that what is not yet written is something else's."""
    seen = set()
    for writes in range(100):
        fd = make_grants()
        grants = opened(fd)
        added(grants, 3, 2)
        added(grants, 9, 900)
        grants.drop(9)
        grants.close()
        done = killed_after(fd, writes, lambda grants: added(grants, 5, 500))
        found = left(fd)
        assert found.pop(3) == slots(2, 3)
        assert found in ({}, {5: slots(500, 5)})
        seen.add(len(found))
        os.close(fd)
        if done:
            break
    assert seen == {0, 1}
    assert done


def test_marked_before_it_is_written_it_would_be_half(stepped, monkeypatch):
    add = Grants.add

    def early(self, plan, *rest):
        self._map.inner[module._MARKS_AT + self._free[-cells_for(rest[-1])]] = 1
        return add(self, plan, *rest)

    monkeypatch.setattr(Grants, "add", early)
    fd = make_grants()
    killed_after(fd, 2, lambda grants: added(grants, 5, 500))
    assert left(fd) != {}
    assert left(fd) != {5: slots(500, 5)}
    os.close(fd)


def test_a_member_is_there_whole_or_not_at_all(stepped):
    for writes in range(10):
        fd = make_grants()
        done = killed_after(fd, writes, lambda grants: grants.enter(ENGINE, ME))
        grants = opened(fd)
        assert grants.members == ([(ENGINE, ME)] if done else [])
        grants.close()
        os.close(fd)
        if done:
            return
    raise AssertionError("it never came to its end")


def test_what_a_killed_process_wrote_is_there(fd):
    """The memory is the supervisor's: it does not go with the server."""
    text = (
        "import os, signal, sys\n"
        "from kvtier.daemon.grants import Grants, Who\n"
        f"grants = Grants(int(sys.argv[1]), {ARENA})\n"
        f"grants.add(5, {SESSION!r}, {ENGINE!r}, Who(*{tuple(ME)}), {pack_slots(slots(9, 5))!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, str(fd)], pass_fds=(fd,), check=False, timeout=50
    )
    assert done.returncode == -signal.SIGKILL
    assert left(fd) == {5: slots(9, 5)}


@pytest.mark.parametrize("following", [CELLS + 1, 1])
def test_a_damaged_table_is_one_error(fd, following):
    """Cell 0 is followed by one beyond the last, or by itself."""
    grants = opened(fd)
    added(grants, 5, 3)
    head = grants._at(grants._heads[5][0])
    module._NEXT.pack_into(grants._map, head, following)
    grants.close()
    with pytest.raises(ProtocolError, match="damaged; start the daemon anew"):
        opened(fd)
