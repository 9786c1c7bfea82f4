"""Namespace and Request: every field separates, none can imitate another."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from kvtier.errors import ConfigError
from kvtier.identity import namespace as module
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.namespace import Namespace, Request, Span, root_key

GEOMETRY = Geometry((Component(2, 2, 8),))
BASE = Namespace("m", GEOMETRY)
# What two engines may differ in although every size is the same.
CHANGES = {
    "model": "n",
    "geometry": [
        Geometry((Component(2, 2, 8),), layout="HND"),
        Geometry((Component(2, 2, 8),), dtype="float16"),
        Geometry((Component(4, 2, 4),)),
        Geometry((Component(2, 2, 16),), dtype="float8_e4m3"),
        Geometry((Component(2, 2, 8),), block_tokens=(32,)),
    ],
    "revision": "r",
    "config_digest": b"c",
    "quantisation": "awq",
    "kv_scales": "sha256:1",
    "draft": "d",
    "tenant": "t",
}
SPAN = Span(0, 4, b"d" * 16)


def test_every_field_of_a_namespace_changes_the_digest():
    fields = {field.name for field in dataclasses.fields(Namespace)}
    assert fields == {*CHANGES, "secret"}, "a new field needs a line here"
    seen = {BASE.digest}
    for name, values in CHANGES.items():
        for value in values if isinstance(values, list) else [values]:
            other = dataclasses.replace(BASE, **{name: value})
            assert other.digest not in seen, name
            assert root_key(other, Request()) != root_key(BASE, Request())
            seen.add(other.digest)


@pytest.mark.parametrize("name", sorted({*CHANGES} - {"geometry"}))
def test_a_field_left_out_would_show(monkeypatch, name: str):
    """The twin: an encoding that forgets a field lets two engines meet."""
    real = module._fields
    value = CHANGES[name] if isinstance(CHANGES[name], bytes) else CHANGES[name].encode()
    monkeypatch.setattr(
        module,
        "_fields",
        lambda values: real(b"" if one in (value, b"m") else one for one in values),
    )
    other = dataclasses.replace(BASE, **{name: CHANGES[name]})
    assert other.digest == dataclasses.replace(BASE).digest


def test_equal_namespaces_are_equal_in_every_process():
    assert dataclasses.replace(BASE).digest == BASE.digest
    assert len(BASE.digest) == 32
    assert Namespace("m", Geometry((Component(2, 2, 8),))) == BASE


def test_the_format_version_is_in_the_digest(monkeypatch):
    monkeypatch.setattr(module, "FORMAT_VERSION", 2)
    assert dataclasses.replace(BASE).digest != BASE.digest


def test_bytes_that_move_between_fields_never_collide():
    words = ["", "a", "ab", "b", "\0", "a\0", "\x01\0\0\0\0\0\0\0a"]
    names = ["revision", "quantisation", "kv_scales", "draft", "tenant"]
    found = {
        dataclasses.replace(
            BASE, **dict(zip(names, chosen, strict=True)), config_digest=digest
        ).digest
        for chosen in itertools.product(words, repeat=len(names))
        for digest in (b"", b"a")
    }
    assert len(found) == 2 * len(words) ** len(names)


def test_without_lengths_they_would(monkeypatch):
    monkeypatch.setattr(module, "_fields", b"".join)
    one = dataclasses.replace(BASE, revision="ab")
    other = dataclasses.replace(BASE, revision="a", quantisation="b")
    assert one.digest == other.digest


def test_bytes_that_move_between_adapter_and_salt_never_collide():
    words = [b"", b"a", b"ab", b"b", b"\0", b"\x01\0\0\0\0\0\0\0a"]
    roots = {root_key(BASE, Request(a, b)) for a, b in itertools.product(words, words)}
    assert len(roots) == len(words) ** 2


def test_the_secret_separates_tenants_and_is_not_shown():
    secrets = [b"", b"\0", b"a", b"a\0", b"b", b"x" * 64, b"x" * 65, b"x" * 200]
    spaces = [dataclasses.replace(BASE, secret=secret) for secret in secrets]
    assert len({root_key(space, Request()) for space in spaces}) == len(secrets)
    assert {space.digest for space in spaces} == {BASE.digest}, "records must not tell of it"
    assert "secret" not in repr(dataclasses.replace(BASE, secret=b"hush"))


def test_a_bare_hmac_key_would_let_some_secrets_meet(monkeypatch):
    class Bare:
        """sha256 that hands the secret through, as HMAC without it would get it."""

        def __init__(self, data: bytes) -> None:
            self.data = data

        def digest(self) -> bytes:
            return self.data

    one, other = (dataclasses.replace(BASE, secret=secret) for secret in (b"a", b"a\0"))
    monkeypatch.setattr(module.hashlib, "sha256", Bare)
    assert root_key(one, Request()) == root_key(other, Request())


def test_keys_cannot_be_guessed_without_the_secret():
    """Who knows prompt and namespace, but not the secret, gets another root."""
    mine = dataclasses.replace(BASE, secret=b"s" * 32)
    assert root_key(mine, Request()) != root_key(BASE, Request())


@pytest.mark.parametrize("name", ["calibrated", "Calibrated"])
def test_scales_calibrated_at_run_time_are_refused(name: str):
    with pytest.raises(ConfigError, match="fixed scales"):
        dataclasses.replace(BASE, kv_scales=name)


def test_a_namespace_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="model"):
        Namespace("", GEOMETRY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Request(adapter="lora-a"),
        lambda: Request(salt="user"),
        lambda: Span(0, 4, "0123456789abcdef"),
        lambda: dataclasses.replace(BASE, secret="hush"),
        lambda: dataclasses.replace(BASE, config_digest="00"),
    ],
)
def test_a_name_where_a_digest_is_meant_is_refused(make):
    with pytest.raises(ConfigError, match="must be bytes, not str"):
        make()


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 4), (5, 4)])
def test_a_span_of_no_tokens_is_refused(start: int, stop: int):
    with pytest.raises(ConfigError, match="start < stop"):
        Span(start, stop, b"d" * 32)


@pytest.mark.parametrize("bits", [0, 16, 64, 120])
def test_a_cut_digest_is_refused(bits: int):
    with pytest.raises(ConfigError, match="full digest"):
        Span(0, 4, b"d" * (bits // 8))


def test_requests_are_values():
    assert Request(b"a", b"s", (SPAN,)) == Request(b"a", b"s", (Span(0, 4, b"d" * 16),))
    assert len({Request(), Request(b"a"), Request(salt=b"a")}) == 3
