"""H03: engines whose bytes mean something else share a directory and never meet in it."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

import kvtier
from kvtier.identity import namespace as module
from kvtier.testing.toy import BLOCK, CHUNK, GEOMETRY, NAMESPACE, Toy, prompt
from kvtier.transfer import CopyResult, CopyStatus

TOKENS = 4 * CHUNK


def geometry(**changes):
    (component,) = GEOMETRY.components
    inner = {name: changes.pop(name) for name in tuple(changes) if hasattr(component, name)}
    changes["components"] = (dataclasses.replace(component, **inner),)
    return dataclasses.replace(NAMESPACE, geometry=dataclasses.replace(GEOMETRY, **changes))


# Each has as many bytes in a chunk as the toy engine's own, and chunks of the same tokens.
OTHERS = {
    "layout": geometry(layout="HND"),
    "dtype": geometry(dtype="float16"),
    "fp8 of twice the head": geometry(dtype="float8_e4m3", head_size=16),
    "int8 of twice the heads": geometry(dtype="int8", heads=4),
    "block": geometry(block_tokens=(32,)),
    "blocks": geometry(block_tokens=(16, 32)),
    "layers for heads": geometry(layers=4, heads=1),
    "planes for layers": geometry(layers=4, planes=1),
    "heads for head size": geometry(heads=4, head_size=4),
    "name": geometry(name="latent"),
    "model": dataclasses.replace(NAMESPACE, model="tiny2"),
    "revision": dataclasses.replace(NAMESPACE, revision="2"),
    "configuration": dataclasses.replace(NAMESPACE, config_digest=b"\1" * 32),
    "weights": dataclasses.replace(NAMESPACE, quantisation="awq"),
    "scales": dataclasses.replace(NAMESPACE, kv_scales="sha256:1"),
    "draft": dataclasses.replace(NAMESPACE, draft="eagle"),
    "tenant": dataclasses.replace(NAMESPACE, tenant="b"),
    "secret": dataclasses.replace(NAMESPACE, secret=b"s" * 32),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a directory that one engine has filled, and closed."""
    folder = tmp_path_factory.mktemp("kv") / "kv"
    toy = Toy(kvtier.open("dram:1MiB", f"lmdb:{folder}?capacity=64MiB", namespace=NAMESPACE))
    toy.save("one", prompt(TOKENS))
    toy.close()
    return folder


def asked(cache, tokens):
    """Return what an engine of any shape is offered of a prompt."""
    return cache.match(tokens).tokens


@pytest.mark.parametrize("name", OTHERS)
def test_equal_sizes_under_another_identity_never_hit(engines, stored, tmp_path, name):
    other, tokens = OTHERS[name], prompt(TOKENS + 1)
    assert other.geometry.bytes_per_token == GEOMETRY.bytes_per_token
    shutil.copytree(stored, tmp_path / "kv")
    urls = ("dram:1MiB", f"lmdb:{tmp_path}/kv?capacity=64MiB")
    with kvtier.open(*urls, namespace=other) as cache:
        assert cache.figures()['kvtier_tier_parts{tier="lmdb"}'] == 4, "they are there"
        assert asked(cache, tokens) == 0
        plan = cache.plan_save(cache.prefix(tokens), list(range(TOKENS // BLOCK)))
        assert len(plan.parts) == 4, "each chunk is saved under a name of its own"
        cache.settle(plan, CopyResult(CopyStatus.OK))
        assert cache.flush(timeout=20)
        assert asked(cache, tokens) == TOKENS
    again = engines(urls[1])
    assert again.cache.figures()['kvtier_tier_parts{tier="lmdb"}'] == 8, "both live on"
    assert again.load("two", tokens)[::2] == (TOKENS, True)
    engines.close(again)
    with kvtier.open(*urls, namespace=other) as cache:
        assert asked(cache, tokens) == TOKENS, "and the other's survive the first's restart"


@pytest.mark.parametrize("shards", [2, 4])
def test_another_number_of_ranks_never_hits(stored, tmp_path, shards):
    tokens = prompt(TOKENS + 1)
    shutil.copytree(stored, tmp_path / "kv")
    urls = ("dram:1MiB", f"lmdb:{tmp_path}/kv?capacity=64MiB")
    with kvtier.open(*urls, namespace=geometry(heads=4, head_size=4), shards=shards) as cache:
        assert asked(cache, tokens) == 0
    with kvtier.open(*urls, namespace=NAMESPACE, shards=2) as cache:
        assert asked(cache, tokens) == 0
    with kvtier.open(*urls, namespace=NAMESPACE) as cache:
        assert asked(cache, tokens) == TOKENS


def test_another_version_of_the_derivation_starts_cold(engines, stored, tmp_path, monkeypatch):
    tokens = prompt(TOKENS + 1)
    shutil.copytree(stored, tmp_path / "kv")
    url = f"lmdb:{tmp_path}/kv?capacity=64MiB"
    monkeypatch.setattr(module, "FORMAT_VERSION", 99)
    newer = engines(url, namespace=dataclasses.replace(NAMESPACE))
    assert newer.load("one", tokens)[0] == 0
    engines.close(newer)
    monkeypatch.undo()
    assert engines(url).load("two", tokens)[::2] == (TOKENS, True)


def test_without_the_layout_in_the_digest_they_would_meet(engines, stored, tmp_path, monkeypatch):
    """The twin: the layout forgotten, the other engine is served bytes in the wrong order."""
    tokens, encoding = prompt(TOKENS + 1), kvtier.Geometry.encoding
    shutil.copytree(stored, tmp_path / "kv")

    def forgetful(shape):
        return encoding(dataclasses.replace(shape, layout=GEOMETRY.layout))

    monkeypatch.setattr(kvtier.Geometry, "encoding", forgetful)
    namespace = dataclasses.replace(OTHERS["layout"])  # a new one: the encoding is remembered
    other = engines(f"lmdb:{tmp_path}/kv?capacity=64MiB", namespace=namespace)
    assert other.load("one", tokens)[0] == TOKENS
