"""Who is who: adapters, salts, images and embeddings, in the answers as in the cache."""

from __future__ import annotations

import functools
import hashlib

import pytest
import torch

import kvtier
from kvtier.engine import Engine, Sampling
from kvtier.testing.serving import Serving, one_model, prompt, servings

SAMPLING = Sampling(max_tokens=8)
HIDDEN = 48


@pytest.fixture
def serving():
    """Open engines with caches, closed at the end of the test."""
    with servings() as open_one:
        yield functools.partial(open_one, one_model())


class Image:
    """Rows of an image encoder, in the place of tokens [start, start + 20)."""

    def __init__(self, start: int, seed: int) -> None:
        self.start = start
        self.rows = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(seed))

    def __call__(self, row, position):
        return self.rows[position - self.start] if 0 <= position - self.start < 20 else row

    @property
    def identity(self) -> kvtier.Request:
        digest = hashlib.sha256(self.rows.numpy().tobytes()).digest()
        return kvtier.Request(spans=(kvtier.Span(self.start, self.start + 20, digest),))


class Adapter:
    """A low-rank change of the embedding layer (LoRA, arXiv 2106.09685)."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.down, self.up = torch.randn(2, 4, HIDDEN, generator=draw)

    def __call__(self, row, position):
        return row + (self.down @ row) @ self.up / HIDDEN

    @property
    def identity(self) -> kvtier.Request:
        weights = self.down.numpy().tobytes() + self.up.numpy().tobytes()
        return kvtier.Request(adapter=hashlib.sha256(weights).digest())


def alone(tokens, inputs):
    engine = Engine(one_model(), num_blocks=64, prefix_cache=False)
    return tuple(output.token for output in engine.stream(tokens, SAMPLING, None, inputs))


KINDS = [
    [Image(100, 1), Image(100, 2), Image(110, 1)],
    [Adapter(1), Adapter(2)],
]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=["images", "adapters"])
def test_each_gets_its_own_answer_again(serving, kind, prefix_cache):
    """Also under another name: content loaded a second time hits what the first left."""
    one = serving(prefix_cache=prefix_cache, step_tokens=50)
    right = [alone(prompt(257), each) for each in kind]
    assert len(set(right)) == len(kind)
    for turn in range(2):
        for each, answer in zip(kind, right, strict=True):
            found = one.answer(prompt(257), SAMPLING, each.identity, each)
            assert found.tokens == answer
            assert sum(found.finish.stats.hit_tokens.values()) == 256 or not turn


@pytest.mark.parametrize("kind", KINDS, ids=["images", "adapters"])
def test_twin_without_their_identity_one_gets_the_answer_of_the_other(serving, kind):
    one = serving()
    first, second, *_ = kind
    assert one.answer(prompt(257), SAMPLING, None, first).tokens == alone(prompt(257), first)
    assert one.answer(prompt(257), SAMPLING, None, second).tokens != alone(prompt(257), second)


def hits(one: Serving, tokens: list[int], identity: kvtier.Request | None) -> int:
    stats = one.answer(tokens, Sampling(1), identity).finish.stats
    return sum(stats.hit_tokens.values())


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_adapters_and_salts_share_nothing(serving, prefix_cache):
    """H08: by content, not by name; each hits its own, also after the others came."""
    one = serving(prefix_cache=prefix_cache)
    identities = [
        None,
        kvtier.Request(adapter=b"A" * 32),
        kvtier.Request(adapter=b"B" * 32),
        kvtier.Request(salt=b"A" * 32),
        kvtier.Request(adapter=b"A" * 32, salt=b"x"),
    ]
    assert [hits(one, prompt(129), each) for each in identities] == [0] * 5
    assert [hits(one, prompt(129), each) for each in identities] == [128] * 5


@pytest.mark.parametrize("shared_bits", [16, 64, 248])
def test_images_with_digests_that_end_alike_share_only_the_text_before(serving, shared_bits):
    """H07: the full digest counts, and only where the image is."""
    one = serving()
    size = shared_bits // 8
    digests = [bytes([number]) * (32 - size) + b"z" * size for number in (1, 2)]
    first, second = (kvtier.Request(spans=(kvtier.Span(100, 120, digest),)) for digest in digests)
    assert hits(one, prompt(257), first) == 0
    assert hits(one, prompt(257), second) == 64
    assert hits(one, prompt(257), first) == 256
    assert hits(one, prompt(257), None) == 64
    moved = kvtier.Request(spans=(kvtier.Span(101, 121, digests[0]),))
    assert hits(one, prompt(257), moved) == 64


def test_embeddings_count_with_every_one_of_their_spans(serving):
    one = serving()
    spans = tuple(kvtier.Span(at, at + 10, bytes([at]) * 32) for at in (70, 140))
    assert hits(one, prompt(257), kvtier.Request(spans=spans)) == 0
    assert hits(one, prompt(257), kvtier.Request(spans=spans[:1])) == 128
    assert hits(one, prompt(257), kvtier.Request(spans=spans[::-1])) == 256
