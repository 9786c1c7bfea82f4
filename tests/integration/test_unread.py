"""What of a namespace could not be read while it was listed is not taken for all of it."""

from __future__ import annotations

import pytest

from kvtier.errors import Unavailable
from kvtier.identity.record import Header
from kvtier.storage_backends import s3
from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.files_folder import Folder
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.records import make_record
from kvtier.testing.toy import CHUNK, dram, opened, prompt

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

TOKENS = 20 * CHUNK + 1


@pytest.fixture
def proxy(s3_server):
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def spoilt(s3_url, s3_server, s3_objects, proxy):
    """Return a host, six packs of another one, and a way to let one of them fail to be read."""
    writer = opened(dram(100), s3_url)
    for seed in range(3):
        writer.save(f"{seed}", prompt(TOKENS, seed))
    writer.close()
    one = s3_objects.listed()[0]
    toy = opened(dram(8), s3_url.replace(s3_server.endpoint, proxy.endpoint))
    yield toy, lambda fault: proxy.inject(fault, f"/{one}", other=b"?" * 1000)
    toy.close()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LESS])
def test_a_purge_says_that_it_could_not_read_all_and_takes_what_it_could(spoilt, s3_objects, fault):
    toy, fails = spoilt
    fails(fault)
    removed = toy.cache.purge(timeout=20)
    assert (removed.unconfirmed, removed.unlisted) == (0, ("s3",))
    assert len(s3_objects.listed()) == 1
    fails(Fault.NONE)
    assert toy.cache.purge(timeout=20).unlisted == ()
    assert s3_objects.listed() == []


def test_twin_taken_for_absent_it_would_stay_and_the_purge_be_called_whole(
    spoilt, s3_objects, monkeypatch
):
    def taken(lots, read, _):
        return (one for lot in lots for one in read(lot) if isinstance(one, Header))

    monkeypatch.setattr(s3, "headers_of", taken)
    toy, fails = spoilt
    fails(Fault.LESS)
    assert toy.cache.purge(timeout=20).unlisted == ()
    assert len(s3_objects.listed()) == 1


def test_what_a_directory_fails_to_read_is_said_after_all_else(tmp_path):
    records = [make_record(number, 1000) for number in range(4)]
    bad = records[1].header.id.hex()[:64]
    failures = [1]

    class Failing(Folder):
        def look(self, name: str) -> int:
            if bad in name and failures:
                raise OSError(5, "EIO")
            return super().look(name)

    store = FilesStore(tmp_path / "kv", None, folder=Failing)
    store.write_many(records)
    with pytest.raises(Unavailable, match="1 records could not be read; try again"):
        list(store.scan())
    failures.clear()
    assert len(list(store.scan())) == 4
    store.close()
