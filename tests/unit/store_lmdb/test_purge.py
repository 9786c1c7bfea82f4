"""A namespace taken out of a directory that nobody has open."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest

from kvtier.clock import monotonic
from kvtier.errors import ConfigError
from kvtier.identity.record import Header
from kvtier.storage_backends.slab_repair import purge, verify
from kvtier.testing.records import NAMESPACE, fetch, is_exact, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
OK, ABSENT = Status.OK, Status.ABSENT
ALIKE = NAMESPACE[:6] + hashlib.sha256(b"alike").digest()[6:]


def quiet(text: str, done: int, count: int) -> None:
    assert text
    assert 0 <= done <= count


def namespaces(store: Any) -> list[bytes]:
    return sorted(header.namespace for header in store.scan())


@pytest.fixture
def filled(opened: Any) -> Any:
    """Return an opener with a closed store: two namespaces whose digests begin alike."""
    store = opened(64 * MIB)
    store.write_many([make_record(n, 5000) for n in range(30)])
    store.write_many([make_record(n, 7000, namespace=ALIKE) for n in range(20)])
    store.close()
    return opened


def test_one_namespace_goes_and_the_others_stay(filled: Any) -> None:
    purged = purge(filled.folder, ALIKE.hex(), quiet)
    assert (purged.namespace, purged.removed) == (ALIKE.hex(), 20)
    assert purged.stored_bytes == 140_000
    assert verify(filled.folder, quiet, monotonic, repair=False).whole
    store = filled(64 * MIB)
    assert namespaces(store) == [NAMESPACE] * 30
    for number in range(30):
        assert is_exact(*fetch(store, make_record(number, 5000).header.id, 5000))
    gone = [make_record(n, 7000, namespace=ALIKE).header.id for n in range(20)]
    assert store.contains_many(gone) == [ABSENT] * 20
    assert store.write_many([make_record(1, 7000, namespace=ALIKE)]) == [OK]


def test_more_than_one_commit(opened: Any) -> None:
    store = opened(64 * MIB)
    store.write_many([make_record(n, 10) for n in range(5000)])
    store.close()
    assert purge(opened.folder, NAMESPACE.hex(), quiet).removed == 5000
    assert namespaces(opened(64 * MIB)) == []


def test_digits_that_are_enough_are_enough(filled: Any) -> None:
    assert purge(filled.folder, ALIKE.hex()[:13].upper(), quiet).namespace == ALIKE.hex()


def test_digits_that_two_namespaces_have_are_refused(filled: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"2 namespaces begin with .*; give more digits"
    ) as refused:
        purge(filled.folder, ALIKE.hex()[:12], quiet)
    assert NAMESPACE.hex() in str(refused.value)
    assert ALIKE.hex() in str(refused.value)
    assert len(namespaces(filled(64 * MIB))) == 50


def test_a_namespace_that_is_not_there(filled: Any) -> None:
    absent = hashlib.sha256(b"absent").hexdigest()
    assert purge(filled.folder, absent, quiet).removed == 0
    with pytest.raises(ConfigError, match=r"no namespace in .* begins with .*; see kvtier inspect"):
        purge(filled.folder, absent[:20], quiet)
    (filled.folder / "index.lmdb").unlink()
    assert purge(filled.folder, absent, quiet).removed == 0


@pytest.mark.parametrize("digest", ["", "1234567", "x" * 64, "0" * 65, "0x12345678", "acme corp"])
def test_what_is_no_digest_is_refused(filled: Any, digest: str) -> None:
    with pytest.raises(ConfigError, match="is no namespace's digest: give its 64 hex digits"):
        purge(filled.folder, digest, quiet)


def test_an_open_directory_is_refused(filled: Any) -> None:
    store = filled(64 * MIB)
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}, and cannot be cha"):
        purge(filled.folder, ALIKE.hex(), quiet)
    assert len(namespaces(store)) == 50
    store.close()
    assert purge(filled.folder, ALIKE.hex(), quiet).removed == 20


def test_a_damaged_index_is_refused(filled: Any) -> None:
    os.truncate(filled.folder / "index.lmdb", 5000)
    with pytest.raises(ConfigError, match=r"is damaged \(truncated\); repair it first: kvtier ver"):
        purge(filled.folder, ALIKE.hex(), quiet)


def test_a_record_that_names_another_is_nobodys(filled: Any, monkeypatch: Any) -> None:
    real = Header.unpack
    victim = make_record(3, 7000, namespace=ALIKE).header

    def other(data: bytes) -> Header:
        header = real(data)
        return make_record(4, 7000, namespace=ALIKE).header if header == victim else header

    monkeypatch.setattr(Header, "unpack", other)
    assert purge(filled.folder, ALIKE.hex(), quiet).removed == 19
