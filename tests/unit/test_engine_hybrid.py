"""Models of several kinds of layer: close to plain torch, and the same bits however cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvtier.engine import HybridConfig, Kind, Span
from kvtier.engine.latent import LatentWeights
from kvtier.engine.recurrent import GATE_ROOT
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Component, Needs
from kvtier.testing.serving import small_hybrid

BLOCK = 16
TOKENS = np.random.default_rng(0).integers(0, 97, 700).tolist()
WINDOW = 40
MIXES = [
    (Kind.WINDOW, Kind.WINDOW),
    (Kind.LATENT, Kind.LATENT),
    (Kind.RECURRENT, Kind.RECURRENT),
    (Kind.FULL, Kind.WINDOW),
    (Kind.LATENT, Kind.RECURRENT, Kind.WINDOW, Kind.FULL),
]
every_mix = pytest.mark.parametrize(
    "kinds", MIXES, ids=lambda kinds: "-".join(kind.value for kind in kinds)
)


def model(kinds):
    torch.set_num_threads(1)
    return small_hybrid(tuple(kinds), WINDOW)


def pools(found, dtype=torch.bfloat16):
    def shape(one):
        places = (3,) if one.needs is Needs.LAST else (60, BLOCK)
        return (one.layers, one.planes, *places, one.heads, one.head_size)

    return [torch.zeros(shape(one), dtype=dtype) for one in found.components]


def tables(found):
    blocks = list(range(1, 46))
    return [[2] if one.needs is Needs.LAST else blocks for one in found.components]


def in_chunks(found, sizes, kv):
    logits, start = [], 0
    for size in sizes:
        span = Span(TOKENS[start : start + size], start, tables(found))
        logits.append(found.forward([span], kv))
        start += size
    return torch.cat(logits)


# ------------------------------------------------------------------------------------ plain torch


def turned(x, base=10_000.0):
    """Turn heads [tokens, heads, size] as RoPE does, rotate-half."""
    count, _, size = x.shape
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    angle = torch.outer(torch.arange(count, dtype=torch.float64), base**-exponents)[:, None]
    cos, sin = angle.cos().float(), angle.sin().float()
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def attended(query, key, value, window=0):
    """Attend causally; all [tokens, heads, size]."""
    count = len(query)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    distance = torch.arange(count)[:, None] - torch.arange(count)
    hidden = (distance < 0) | ((distance >= window) if window else False)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def mixed_by(found, kind, projected):
    count, sizes = len(projected), found.config
    if kind is Kind.RECURRENT:
        width = sizes.query_size
        query, key, value = projected[:, : 3 * width].view(count, 3, sizes.heads, -1).unbind(1)
        gates = projected[:, 3 * width :].sigmoid() ** (1 / GATE_ROOT)
        state, rows = torch.zeros(sizes.heads, sizes.head_size, sizes.head_size), []
        for q, k, v, gate in zip(query, key, value, gates, strict=True):
            state = gate[:, None, None] * state + torch.einsum("hd,he->hde", k / 4, v)
            rows.append(torch.einsum("hd,hde->he", q, state))
        return functional.rms_norm(torch.stack(rows), (sizes.head_size,)).flatten(1)
    if kind is Kind.LATENT:
        rank = found.shape.latent_rank
        heads = projected.view(count, sizes.heads + 1, -1)
        latent = functional.rms_norm(heads[:, -1:, :rank], (rank,))
        kept = torch.cat((latent, turned(heads[:, -1:, rank:])), dim=-1)
        query = torch.cat((heads[:, :-1, :rank], turned(heads[:, :-1, rank:])), dim=-1)
        kept = kept.expand(-1, sizes.heads, -1)
        return attended(query, kept, kept).flatten(1)
    query, key, value = projected.split((sizes.query_size, sizes.kv_size, sizes.kv_size), dim=1)
    group = sizes.heads // sizes.kv_heads
    key, value = (
        each.view(count, sizes.kv_heads, -1).repeat_interleave(group, 1) for each in (key, value)
    )
    window = WINDOW if kind is Kind.WINDOW else 0
    query = turned(query.view(count, sizes.heads, -1))
    return attended(query, turned(key), value, window).flatten(1)


def plain(found, tokens, last):
    hidden = found.weights.embedding[torch.as_tensor(tokens)]

    def norm(x, weight):
        return functional.rms_norm(x, weight.shape, weight, 1e-5)

    for kind, layer in zip(found.shape.kinds, found.weights.layers, strict=True):
        projected = norm(hidden, layer.attention_norm) @ layer.qkv.t()
        hidden = hidden + mixed_by(found, kind, projected) @ layer.attention_out.t()
        gate, up = (norm(hidden, layer.ffn_norm) @ layer.gate_up.t()).chunk(2, dim=1)
        hidden = hidden + (functional.silu(gate) * up) @ layer.down.t()
    return norm(hidden[-last:], found.weights.norm) @ found.weights.head.t()


@every_mix
def test_logits_are_close_to_plain_torch(kinds):
    found = model(kinds)
    span = Span(TOKENS[:600], 0, tables(found), logits=50)
    paged = found.forward([span], pools(found, torch.float32))
    expected = plain(found, TOKENS[:600], 50)
    torch.testing.assert_close(paged, expected, rtol=1e-3, atol=2e-3 * float(expected.std()))


def test_folded_latent_attention_is_that_of_the_paper():
    """Keys and values projected up for each head, as written there."""
    draw = torch.Generator().manual_seed(1)
    heads, size, rank, rope, hidden, count = 3, 8, 12, 4, 20, 9

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    one = LatentWeights(
        query=random(heads * (size + rope), hidden),
        down=random(rank + rope, hidden),
        up_keys=random(heads, size, rank),
        up_values=random(heads, size, rank),
        out=random(hidden, heads * size),
    )
    inputs = random(count, hidden)
    query = (inputs @ one.query.t()).view(count, heads, size + rope)
    latent, shared = (inputs @ one.down.t()).split((rank, rope), dim=1)
    keys = torch.einsum("hdr,nr->nhd", one.up_keys, latent)
    keys = torch.cat((keys, shared[:, None].expand(-1, heads, -1)), dim=-1)
    values = torch.einsum("hdr,nr->nhd", one.up_values, latent)
    expected = attended(query, keys, values).flatten(1) @ one.out.t()

    into, out = one.folded()
    seen = (inputs @ into.t()).view(count, heads + 1, rank + rope)
    kept = seen[:, -1:].expand(-1, heads, -1)
    found = attended(seen[:, :-1], kept, kept).flatten(1) @ out.t()
    torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------------------ reproducible bits


@every_mix
def test_chunks_of_any_size_give_the_same_bits(kinds):
    found = model(kinds)
    whole_kv, cut_kv = pools(found), pools(found)
    span = Span(TOKENS, 0, tables(found), logits=len(TOKENS))
    whole = found.forward([span], whole_kv)
    sizes = [1, 7, 31, 32, 33, 100, 1, 1, 306, 1, 3, 184]
    cut = in_chunks(found, sizes, cut_kv)
    assert torch.equal(cut, whole[np.cumsum(sizes) - 1])
    assert all(map(torch.equal, cut_kv, whole_kv))


@every_mix
def test_neighbours_in_a_step_change_no_bits(kinds):
    found = model(kinds)
    kv = pools(found)
    found.forward([Span(TOKENS[:600], 0, tables(found))], kv)
    before = [each.clone() for each in kv]
    span = Span(TOKENS[600:620], 600, tables(found))
    alone = found.forward([span], kv)
    for each, was in zip(kv, before, strict=True):
        each.copy_(was)
    other = [[1] if one.needs is Needs.LAST else [50] for one in found.components]
    last = [[0] if one.needs is Needs.LAST else [52, 53] for one in found.components]
    batch = [Span(TOKENS[:13], 0, other), span, Span(TOKENS[5:30], 0, last)]
    assert torch.equal(found.forward(batch, kv)[1], alone[0])


@every_mix
def test_what_a_window_has_passed_is_never_read(kinds):
    """Neither the block that was there, nor a table's mark that none is."""
    found = model(kinds)
    kv = pools(found)
    found.forward([Span(TOKENS[:600], 0, tables(found))], kv)
    before = [each.clone() for each in kv]
    expected = found.forward([Span(TOKENS[600:640], 600, tables(found))], kv)
    passed = (600 - WINDOW + 1) // BLOCK
    short = tables(found)
    for number, (one, each) in enumerate(zip(found.components, before, strict=True)):
        if one.needs is Needs.TRAILING:
            each[:, :, : 1 + passed] = torch.nan
            short[number] = [-1] * passed + short[number][passed:]
    assert torch.equal(found.forward([Span(TOKENS[600:640], 600, short)], before), expected)


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.LATENT, Kind.RECURRENT])
def test_logits_depend_on_what_is_kept(kind):
    found = model((kind, kind))
    kv = pools(found)
    found.forward([Span(TOKENS[:64], 0, tables(found))], kv)
    right = found.forward([Span(TOKENS[64:65], 64, tables(found))], kv)
    for each in kv:
        each[:, :, 2 if kind is Kind.RECURRENT else 4] = 0
    wrong = found.forward([Span(TOKENS[64:65], 64, tables(found))], kv)
    assert not torch.allclose(wrong, right, atol=0.1)


def test_a_state_at_position_zero_begins_from_nothing():
    found = model((Kind.RECURRENT, Kind.RECURRENT))
    dirty = [each.fill_(torch.nan) for each in pools(found)]
    span = Span(TOKENS[:21], 0, tables(found))
    assert torch.equal(found.forward([span], dirty), found.forward([span], pools(found)))


# ------------------------------------------------------------------------------------------ shape


def test_each_kind_is_a_component():
    found = model((Kind.LATENT, Kind.RECURRENT, Kind.WINDOW, Kind.FULL))
    assert found.components == (
        Component(1, 1, 32, 1, "latent", replicated=True),
        Component(1, 4, 256, 1, "recurrent", Needs.LAST),
        Component(1, 2, 16, 2, "window", Needs.TRAILING, WINDOW),
        Component(1, 2, 16, 2, "attention"),
    )


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"kinds": (Kind.FULL,)}, "2 layers"),
        ({"window": 0}, "window"),
        ({"rope_size": 3}, "even rope_size"),
        ({"latent_rank": 0}, "latent_rank"),
    ],
)
def test_impossible_shapes_are_refused(wrong, cause):
    sizes = model((Kind.WINDOW, Kind.WINDOW)).config
    with pytest.raises(ConfigError, match=cause):
        HybridConfig(**{"sizes": sizes, "kinds": (Kind.FULL, Kind.FULL), **wrong})
