"""A codec below real caches: what one host encodes another reads, whatever its own codec is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import SLOT_CHARGE, encoded_stride_of, stride_of
from kvtier.testing import toy as module
from kvtier.testing.records import kv_like
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, Toy, dram, opened, prompt
from kvtier.testing.valkey_server import ValkeyServer

CHUNKS = 20
TOKENS = prompt(CHUNKS * CHUNK + 1)
BOTH = list(itertools.product(["raw", "lossless"], repeat=2))
SHARED = ["files", "s3", "valkey"]
LONG = kvtier.Namespace(
    "tiny", kvtier.Geometry(module.GEOMETRY.components, block_tokens=(16,), chunk_tokens=512)
)
HALF = kvtier.Geometry(module.GEOMETRY.components, "float16", (16,), CHUNK)
FLOAT8 = kvtier.Geometry(
    (kvtier.Component(layers=2, heads=2, head_size=16),), "float8_e4m3", (16,), CHUNK
)


@pytest.fixture(autouse=True)
def _numbers_of_a_model(monkeypatch) -> None:
    """Let the toy engine compute what looks like KV, and not like noise."""
    noise = module.pattern

    def pattern(tokens):
        seed = int.from_bytes(noise(tokens).tobytes()[:4], "little")
        data = kv_like(seed, 2 * 2 * 16 * 2 * 8 * 2)
        return np.frombuffer(data, "<u2").reshape(2, 2, 16, 2, 8)

    monkeypatch.setattr(module, "pattern", pattern)


@pytest.fixture(params=SHARED)
def shared(request, tmp_path) -> Iterator[str]:
    """Return the URL of a tier that hosts share."""
    if request.param == "files":
        yield f"files:{tmp_path}/shared?capacity=64MiB&admission=through"
    elif request.param == "s3":
        request.getfixturevalue("s3_credentials")
        server = request.getfixturevalue("s3_server")
        where = request.getfixturevalue("s3_location")
        yield f"s3:{where}?capacity=1GiB&admission=through&endpoint={server.endpoint}"
    else:
        server = ValkeyServer(maxmemory="64mb")
        try:
            server.__enter__()
        except ConfigError as absent:
            pytest.skip(str(absent))
        yield f"valkey:{server.location}?capacity=64MiB&admission=through"
        server.close()


@pytest.fixture
def host() -> Iterator[Callable[..., Toy]]:
    """Return a function that opens a host, which is closed at the end."""
    toys: list[Toy] = []

    def opened_at(url: str, **more) -> Toy:
        toys.append(opened(dram(2 * CHUNKS), url, **more))
        return toys[-1]

    yield opened_at
    for toy in toys:
        toy.close()


def counted(toy: Toy, name: str, **labels: str) -> float:
    return toy.cache.metrics.get(name, **labels)


def codecs(folder) -> dict[str, int]:
    """Return what `kvtier inspect` says of the records in a directory."""
    (found,) = LmdbSlabStore.survey(str(folder), lambda *_: None).namespaces
    return dict(found.codecs)


@pytest.mark.server
@pytest.mark.parametrize(("wrote", "reads"), BOTH)
def test_hosts_of_any_codec_read_what_hosts_of_any_codec_wrote(host, shared, wrote, reads):
    one = host(f"{shared}&codec={wrote}")
    one.save("a", TOKENS)
    raw = CHUNKS * CHUNK_BYTES
    encoded = wrote == "lossless"
    assert counted(one, "encoded_bytes") == (raw if encoded else 0)
    assert (counted(one, "spilled_bytes") < 0.8 * raw) == encoded
    other = host(f"{shared}&codec={reads}")
    offered, loaded, exact = other.load("b", TOKENS)
    assert (offered, loaded.tokens, exact) == (CHUNKS * CHUNK, CHUNKS * CHUNK, True)
    assert counted(other, "decoded_bytes") == (raw if encoded else 0)
    assert counted(other, "tier_errors") == counted(other, "corrupt_records") == 0


@pytest.mark.server
def test_two_hosts_of_different_codecs_write_the_same_and_both_read_on(host, shared):
    one, other = host(f"{shared}&codec=lossless"), host(f"{shared}&codec=raw")
    for toy in (one, other, one):
        toy.save("a", TOKENS)
        toy.cache.clear("dram", timeout=20)
        assert one.load("b", TOKENS)[::2] == (CHUNKS * CHUNK, True)
        one.cache.clear("dram", timeout=20)


@pytest.mark.server
def test_a_shared_tier_begins_with_measuring_its_link(host, shared):
    toy = host(shared)
    toy.save("a", TOKENS)
    assert counted(toy, "unencoded_bytes", reason="link") > 0
    assert host(shared).load("b", TOKENS)[::2] == (CHUNKS * CHUNK, True)


def test_a_disk_keeps_more_for_its_capacity_with_a_codec(host, tmp_path):
    kept, found = {}, {}
    for codec in ("raw", "lossless"):
        url = f"lmdb:{tmp_path}/{codec}?capacity=64MiB&admission=through&codec={codec}"
        toy = host(url, namespace=LONG)
        toy.save("a", TOKENS)
        kept[codec] = toy.cache.figures()['kvtier_tier_used_bytes{tier="lmdb"}']
        toy.cache.clear("dram", timeout=20)
        assert toy.load("b", TOKENS)[::2] == (1024, True)
        toy.close()
        plain = url.replace(f"&codec={codec}", "")  # a disk is raw if nothing is said
        again = host(plain, namespace=LONG)
        used = again.cache.figures()['kvtier_tier_used_bytes{tier="lmdb"}']
        assert used == kept[codec], "counted alike when it is listed"
        assert again.load("c", TOKENS)[::2] == (1024, True)
        again.save("d", prompt(513, 9))
        assert counted(again, "encoded_bytes") == 0
        again.close()
        found[codec] = codecs(tmp_path / codec)
    assert found == {"raw": {"raw": 3}, "lossless": {"lossless-1": 2, "raw": 1}}
    slots = {"raw": stride_of(1 << 16), "lossless": encoded_stride_of(49_000)}
    assert {codec: used // 2 - SLOT_CHARGE for codec, used in kept.items()} == slots


@pytest.mark.parametrize(
    ("geometry", "encodes"),
    [pytest.param(HALF, True, id="float16"), pytest.param(FLOAT8, False, id="float8")],
)
def test_only_elements_of_sixteen_bits_are_encoded(host, tmp_path, geometry, encodes):
    url = f"files:{tmp_path}/shared?capacity=64MiB&admission=through&codec=lossless"
    toy = host(url, namespace=kvtier.Namespace("tiny", geometry))
    toy.save("a", TOKENS)
    raw = CHUNKS * CHUNK_BYTES
    assert counted(toy, "encoded_bytes") == (raw if encodes else 0)
    why = counted(toy, "unencoded_bytes", reason="elements")
    assert why == (0 if encodes else raw)


def test_a_cache_that_joins_has_its_own_elements(host, tmp_path):
    url = f"files:{tmp_path}/shared?capacity=64MiB&admission=through&codec=lossless"
    toy = host(url, namespace=kvtier.Namespace("narrow", FLOAT8))
    wide = Toy(toy.cache.share(module.NAMESPACE))
    try:
        wide.save("a", TOKENS)
        assert counted(toy, "encoded_bytes") == CHUNKS * CHUNK_BYTES
    finally:
        wide.close()


def test_a_codec_that_there_is_not_is_an_error_that_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="lossless"):
        kvtier.open(
            dram(8), f"files:{tmp_path}/x?capacity=1GiB&codec=losless", namespace=module.NAMESPACE
        )
    with pytest.raises(ConfigError, match="codec"):
        kvtier.open(
            dram(8), f"files:{tmp_path}/x?capacity=1GiB&codek=raw", namespace=module.NAMESPACE
        )
