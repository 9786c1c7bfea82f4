"""Keys under Hypothesis: they follow the text, grow with the prompt, and never meet by accident."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.keys import as_tokens, chunk_keys
from kvtier.identity.namespace import Namespace, Request, Span, root_key

ROOT = b"r" * 32
GEOMETRY = Geometry((Component(1, 1, 1),))
TOKENS = st.lists(st.integers(0, 3) | st.integers(0, 2**31 - 1), max_size=40)
CHUNKS = st.integers(1, 9)
DIGESTS = st.sampled_from([b"a" * 16, b"a" * 15 + b"b", b"b" + b"a" * 15, b"a" * 32])
SPANS = st.lists(
    st.builds(lambda start, n, d: Span(start, start + n, d), st.integers(0, 40), CHUNKS, DIGESTS),
    max_size=5,
).map(tuple)


def by_the_text(tokens: list[int], size: int, spans: tuple[Span, ...]) -> list[bytes]:
    """Hash chunk by chunk, looking at every span for every chunk."""
    found, parent = [], ROOT
    for start in range(0, len(tokens) // size * size, size):
        data = parent + struct.pack(f"<{size}i", *tokens[start : start + size])
        inside = sorted(
            (span.start - start, span.stop - start, span.digest)
            for span in spans
            if span.start < start + size and span.stop > start
        )
        for first, last, digest in inside:
            data += struct.pack("<qqQ", first, last, len(digest)) + digest
        parent = hashlib.sha256(data).digest()
        found.append(parent)
    return found


@given(TOKENS, CHUNKS, SPANS)
def test_keys_follow_the_text(tokens: list[int], size: int, spans: tuple[Span, ...]):
    assert chunk_keys(ROOT, as_tokens(tokens), size, spans) == by_the_text(tokens, size, spans)


@given(TOKENS, CHUNKS, SPANS, st.data())
def test_a_prompt_that_grows_keeps_its_keys(
    tokens: list[int], size: int, spans: tuple[Span, ...], data: st.DataObject
):
    """However it grows, and whatever of it was known: one list of keys."""
    whole = chunk_keys(ROOT, as_tokens(tokens), size, spans)
    known: list[bytes] = []
    for stop in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        known = chunk_keys(ROOT, as_tokens(tokens[:stop]), size, spans, known=known)
        assert known == whole[: stop // size]
    assert chunk_keys(ROOT, as_tokens(tokens), size, spans, known=known) == whole


@given(TOKENS, TOKENS, CHUNKS, SPANS, SPANS)
def test_two_prompts_share_a_key_only_if_all_before_it_is_the_same(
    one: list[int],
    other: list[int],
    size: int,
    spans: tuple[Span, ...],
    other_spans: tuple[Span, ...],
):
    def identity(tokens: list[int], spans: tuple[Span, ...], stop: int) -> object:
        overlapping = [span for span in spans if span.start < stop]
        return tokens[:stop], sorted((s.start, s.stop, s.digest) for s in overlapping)

    pairs = zip(
        chunk_keys(ROOT, as_tokens(one), size, spans),
        chunk_keys(ROOT, as_tokens(other), size, other_spans),
        strict=False,
    )
    for index, (left, right) in enumerate(pairs):
        stop = (index + 1) * size
        same = identity(one, spans, stop) == identity(other, other_spans, stop)
        assert (left == right) == same


@given(TOKENS)
def test_every_integer_array_means_the_same_tokens(tokens: list[int]):
    expected = as_tokens(tokens)
    assert expected.dtype == np.int32
    assert expected.tolist() == tokens
    for kind in (np.int32, np.int64, np.uint32, np.uint64, ">i4"):
        assert np.array_equal(as_tokens(np.array(tokens, kind)), expected)


IDENTITIES = st.tuples(*[st.binary(max_size=9)] * 3)


@given(IDENTITIES, IDENTITIES)
def test_roots_meet_only_if_adapter_salt_and_secret_do(one, other):
    def root(adapter: bytes, salt: bytes, secret: bytes) -> bytes:
        return root_key(Namespace("m", GEOMETRY, secret=secret), Request(adapter, salt))

    assert (root(*one) == root(*other)) == (one == other)
