"""H07, H08: what is not in the token ids, images and adapters, keeps prompts apart all the same."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtier
from kvtier.testing.toy import BLOCK, CHUNK, prompt

pytestmark = pytest.mark.everywhere

CHUNKS = 6
TOKENS = CHUNKS * CHUNK
PROMPT = prompt(TOKENS + 1)


class Engine:
    """An engine whose KV shows which content it was computed from."""

    def __init__(self, toy) -> None:
        self.toy = toy
        self.names = map(str, itertools.count())

    def store(self, request, mark):
        name = next(self.names)
        self.toy.kv[:, :, : TOKENS // BLOCK] = mark
        self.toy.connector.save(name, PROMPT[:TOKENS], list(range(TOKENS // BLOCK)), request)
        if self.toy.connector.finish(name):
            self.toy.until(lambda update: name in update.released)
        assert self.toy.cache.flush(timeout=20)

    def marks(self, request):
        """Load what is offered; return for each chunk the content that its KV shows."""
        name, connector = next(self.names), self.toy.connector
        offer = connector.match(name, PROMPT, 0, request)
        while offer.pending:
            connector.wait(20)
            offer = connector.match(name, PROMPT, 0, request)
        if not offer.tokens:
            connector.finish(name)
            return []
        connector.load(name, list(range(128, 128 + offer.tokens // BLOCK)))
        assert self.toy.until(lambda update: update.loaded).loaded[0].tokens == offer.tokens
        connector.finish(name)
        loaded = self.toy.kv[:, :, 128 : 128 + offer.tokens // BLOCK]
        return [
            int(np.unique(loaded[:, :, at : at + CHUNK // BLOCK]).item())
            for at in range(0, offer.tokens // BLOCK, CHUNK // BLOCK)
        ]


@pytest.fixture
def engine(engines, lmdb):
    return Engine(engines(lmdb, chunks=24))


# ------------------------------------------------------------------------------------- H07: images


def digest_like(digest: bytes, same_bits: int) -> bytes:
    """Return another digest that ends with the same bits."""
    keep = same_bits // 8
    return hashlib.sha256(digest).digest()[: len(digest) - keep] + digest[len(digest) - keep :]


@pytest.mark.parametrize("bits", [0, 16, 64, 248])
@pytest.mark.parametrize("first", [0, 1, 63, 64, 65, 200, 383])
def test_another_image_in_the_same_place_hits_only_the_text_before_it(engine, first, bits):
    one = hashlib.sha256(b"cat").digest()
    cat = kvtier.Request(spans=(kvtier.Span(first, first + 40, one),))
    dog = kvtier.Request(spans=(kvtier.Span(first, first + 40, digest_like(one, bits)),))
    engine.store(cat, 1)
    before = first // CHUNK
    assert engine.marks(dog) == [1] * before
    engine.store(dog, 2)
    assert engine.marks(dog) == [1] * before + [2] * (CHUNKS - before)
    assert engine.marks(cat) == [1] * CHUNKS
    assert engine.marks(None) == [1] * before, "and text alone is a third thing"


IMAGES = [hashlib.sha256(bytes([n])).digest() for n in range(3)]
SPANS = st.lists(
    st.builds(
        lambda start, size, image: kvtier.Span(start, start + size, IMAGES[image]),
        st.integers(0, TOKENS - 1),
        st.integers(1, 130),
        st.integers(0, 2),
    ),
    max_size=3,
).map(tuple)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=SPANS, other=SPANS)
def test_two_prompts_share_exactly_what_shows_the_same_images(engine, one, other):
    """Any spans, overlapping, repeated, across chunks, beyond the end, in any order."""

    def shown(spans, chunk):
        stop = (chunk + 1) * CHUNK
        return sorted((s.start, s.stop, s.digest) for s in spans if s.start < stop)

    salt = hashlib.sha256(repr((one, other)).encode()).digest()  # examples must not meet
    same = next((n for n in range(CHUNKS) if shown(one, n) != shown(other, n)), CHUNKS)
    engine.store(kvtier.Request(salt=salt, spans=one), 1)
    assert engine.marks(kvtier.Request(salt=salt, spans=other)) == [1] * same
    assert engine.marks(kvtier.Request(salt=salt, spans=one[::-1])) == [1] * CHUNKS


# ----------------------------------------------------------------------------------- H08: adapters

A, B = hashlib.sha256(b"A").digest(), hashlib.sha256(b"B").digest()
IDENTITIES = {
    "base": None,
    "A": kvtier.Request(adapter=A),
    "B": kvtier.Request(adapter=B),
    "A with B's end": kvtier.Request(adapter=A[:16] + B[16:]),
    "A as a salt": kvtier.Request(salt=A),
    "A salted": kvtier.Request(adapter=A, salt=b"user"),
    "A, an image": kvtier.Request(adapter=A, spans=(kvtier.Span(0, 9, B),)),
}


def test_adapters_never_meet_and_come_back_after_a_restart(engines, lmdb):
    engine = Engine(engines(lmdb, chunks=64))
    for mark, request in enumerate(IDENTITIES.values()):
        assert engine.marks(request) == [], "nobody's KV is another's"
        engine.store(request, mark)
    for mark, request in enumerate(IDENTITIES.values()):
        assert engine.marks(request) == [mark] * CHUNKS
    engines.close(engine.toy)
    again = Engine(engines(lmdb, chunks=64))
    for mark, request in enumerate(IDENTITIES.values()):
        assert again.marks(request) == [mark] * CHUNKS, "loaded again, an adapter hits its own"


def test_an_adapter_by_its_name_is_refused():
    """Two adapters may have one name; the digest of what is in them is what counts."""
    with pytest.raises(kvtier.ConfigError, match="must be bytes"):
        kvtier.Request(adapter="my-lora")
