"""The Mooncake store on a real master: the contract, owners that die, and what is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvtier.errors import ConfigError, StoreError, Unavailable
from kvtier.storage_backends.mooncake import MooncakeStore
from kvtier.testing.mooncake_master import MooncakeMaster
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.testing.store_suite import StoreSuite
from kvtier.testing.toy import dram, opened, prompt
from kvtier.testing.with_parent import with_parent
from kvtier.tiers.store import Status

pytestmark = pytest.mark.server

MIB = 1 << 20
OWNER = """
import sys
from kvtier.storage_backends.mooncake import MooncakeStore
store = MooncakeStore.open(sys.argv[1], None, {"segment": 64 << 20, "host": "127.0.0.1"})
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    """Return a running master, or say that Mooncake is not installed."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "3")
    one = MooncakeMaster()
    try:
        one.__enter__()
    except ConfigError as absent:
        pytest.skip(str(absent))
    yield one
    one.close()


@pytest.fixture(scope="module")
def pool(master) -> Iterator[MooncakeStore]:
    """Return a store whose process gives the pool its memory: what tests share."""
    given = {"segment": 96 * MIB, "admin_port": master.admin_port}
    one = MooncakeStore.open(master.location, None, given)
    first = make_record(0, 1)
    one.write_many([first])  # the client library opens some descriptors when first needed
    assert is_exact(*fetch(one, first.header.id, 1))
    yield one
    one.close()


class TestContract(StoreSuite):
    """One client for all tests: joining and leaving the pool takes it half a second."""

    @pytest.fixture(autouse=True)
    def _at(self, pool: MooncakeStore) -> None:
        self.pool = pool
        pool._client.remove_all(True)

    def open_store(self) -> MooncakeStore:
        return MooncakeStore(self.pool._client, self.pool._place)

    def teardown_method(self) -> None:
        """Leave the pool's client to the next test."""

    def test_closes_twice(self) -> None:
        """It says so afterwards."""
        store = self.open_store()
        store._client = Closing()
        store.close()
        store.close()
        assert store._client.times == 1
        with pytest.raises(StoreError, match="closed"):
            store.contains_many([make_record(1, 1).header.id])


class Closing:
    times = 0

    def close(self) -> None:
        self.times += 1


@pytest.fixture
def owner(master, pool, root) -> Iterator[subprocess.Popen[bytes]]:
    """Return another process that has given the pool memory."""
    command = with_parent([sys.executable, "-c", OWNER, master.location])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
    ) as process:
        while process.stdout.readline() != b"ready\n":
            assert process.poll() is None
        yield process
        process.kill()


def test_what_lies_with_an_owner_that_dies_is_a_miss_and_its_name_can_be_written_again(pool, owner):
    pool._client.remove_all(True)
    records = [make_record(number, MIB) for number in range(60)]
    assert pool.write_many(records) == [Status.OK] * 60
    before = [is_exact(*fetch(pool, one.header.id, MIB)) for one in records]
    assert all(before)
    owner.kill()
    owner.wait()
    found = []
    for one in records:
        try:
            found.append(fetch(pool, one.header.id, MIB))
        except Unavailable:
            found.append(None)
    lost = [one for one in found if one is None or one[0].status is not Status.OK]
    assert 0 < len(lost) < 60
    assert all(is_exact(*one) for one in found if one and one[0].status is Status.OK)
    pool._client.remove_all(True)


def test_a_full_pool_says_so_and_goes_on_reading(pool):
    pool._client.remove_all(True)
    records = [make_record(number, 8 * MIB) for number in range(16)]
    found = pool.write_many(records)
    assert found[0] is Status.OK
    assert Status.FULL in found
    assert set(found) <= {Status.OK, Status.FULL}
    read = fetch(pool, records[0].header.id, 8 * MIB)
    assert is_exact(*read) or read[0].status is Status.ABSENT
    pool._client.remove_all(True)


def test_a_cache_loads_what_it_saved(master, pool):
    url = (
        f"mooncake:{master.location}?capacity=64MiB&admission=through"
        f"&admin_port={master.admin_port}"
    )
    tokens = prompt(400)
    one, other = opened(dram(32), url), opened(dram(32), url)
    try:
        one.save("a", tokens)
        got, loaded, exact = other.load("b", tokens)
    finally:
        one.close()
        other.close()
    assert (got, loaded.tokens, exact) == (384, 384, True)


# ------------------------------------------------------------------------------- what is refused


def cause(location: str, **options) -> str:
    with pytest.raises(ConfigError) as refused:
        MooncakeStore.open(location, None, options)
    return str(refused.value)


@pytest.mark.parametrize("location", ["", "//", "host:1", "//host:x", "//host:1/path"])
def test_a_malformed_location_is_refused(location):
    assert "write the tier like mooncake://host:50051" in cause(location)


def test_credentials_are_refused_and_not_repeated():
    assert "hunter2" not in cause("//user:hunter2@host")


def test_nobody_there_is_said_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        assert "start mooncake_master" in cause(f"//127.0.0.1:{unused.getsockname()[1]}")


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with socket.create_server(("127.0.0.1", 0)) as door:
        said = cause(f"//127.0.0.1:{door.getsockname()[1]}")
    assert "pip install mooncake-transfer-engine-non-cuda" in said
    assert "libibverbs1" in said
