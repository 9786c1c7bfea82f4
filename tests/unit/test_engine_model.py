"""The forward pass: close to plain torch, and the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier.engine import Model, ModelConfig, Span, plain_prefill, random_weights
from kvtier.engine import attention as attention_module
from kvtier.engine import model as model_module
from kvtier.errors import ConfigError

BLOCK = 16
TOKENS = np.random.default_rng(0).integers(0, 97, 700).tolist()
TABLE = [list(range(1, 46))]
SHAPES = {
    "three queries a KV head": {"heads": 6, "kv_heads": 2, "head_size": 16},
    "one query a KV head": {"heads": 3, "kv_heads": 3, "head_size": 32},
    "one KV head": {"heads": 4, "kv_heads": 1, "head_size": 64},
    "odd widths": {"heads": 2, "kv_heads": 1, "head_size": 18, "hidden_size": 36},
}


def tiny(**shape: int) -> Model:
    sizes = {"hidden_size": 48, "intermediate_size": 80, **shape}
    config = ModelConfig(vocab_size=97, layers=2, context_tokens=1024, **sizes)
    return Model(random_weights(config, seed=1))


def pool(model: Model, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    config = model.config
    shape = (config.layers, 2, 60, BLOCK, config.kv_heads, config.head_size)
    return torch.zeros(shape, dtype=dtype)


def logits_in_chunks(model: Model, sizes: list[int], kv: torch.Tensor) -> torch.Tensor:
    """Return the logits of each chunk's last token."""
    found, start = [], 0
    for size in sizes:
        tokens = TOKENS[start : start + size]
        found.append(model.forward([Span(tokens, start, TABLE)], [kv]))
        start += size
    return torch.cat(found)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def model(request) -> Model:
    torch.set_num_threads(1)
    return tiny(**request.param)


def test_logits_are_close_to_plain_torch(model):
    paged = model.forward([Span(TOKENS, 0, TABLE, logits=50)], [pool(model, torch.float32)])
    plain = plain_prefill(model, TOKENS, logits=50)
    torch.testing.assert_close(paged, plain, rtol=1e-3, atol=1e-3 * float(plain.std()))


def test_chunks_of_any_size_give_the_same_bits(model):
    whole_kv, cut_kv = pool(model), pool(model)
    whole = model.forward([Span(TOKENS, 0, TABLE, logits=len(TOKENS))], [whole_kv])
    sizes = [1, 7, 31, 32, 33, 100, 1, 1, 306, 1, 3, 184]
    cut = logits_in_chunks(model, sizes, cut_kv)
    assert sum(sizes) == len(TOKENS)
    assert torch.equal(cut, whole[np.cumsum(sizes) - 1])
    assert torch.equal(cut_kv, whole_kv)


def test_neighbours_in_a_step_change_no_bits(model):
    kv = pool(model)
    model.forward([Span(TOKENS[:600], 0, TABLE)], [kv])
    alone = model.forward([Span(TOKENS[600:620], 600, TABLE)], [kv])
    others = [Span(TOKENS[:13], 0, [[50]]), Span(TOKENS[:1], 0, [[51]])]
    rest = Span(TOKENS[5:30], 0, [[52, 53]])
    batch = model.forward([*others, Span(TOKENS[600:620], 600, TABLE), rest], [kv])
    assert torch.equal(batch[2], alone[0])


def test_blocks_may_lie_anywhere(model):
    table = [np.random.default_rng(2).permutation(60)[: len(TABLE[0])].tolist()]
    found = model.forward([Span(TOKENS, 0, table)], [pool(model)])
    assert torch.equal(found, model.forward([Span(TOKENS, 0, TABLE)], [pool(model)]))


def test_stale_bytes_behind_the_context_are_never_read(model):
    dirty = pool(model).fill_(torch.nan)
    found = model.forward([Span(TOKENS[:21], 0, TABLE)], [dirty])
    assert torch.equal(found, model.forward([Span(TOKENS[:21], 0, TABLE)], [pool(model)]))


def test_logits_depend_on_the_kv(model):
    kv = pool(model)
    model.forward([Span(TOKENS[:64], 0, TABLE)], [kv])
    right = model.forward([Span(TOKENS[64:65], 64, TABLE)], [kv])
    kv[:, :, TABLE[0][1]] = 0
    assert not torch.allclose(
        model.forward([Span(TOKENS[64:65], 64, TABLE)], [kv]), right, atol=0.1
    )


def test_two_threads_give_the_same_bits_too(model):
    torch.set_num_threads(2)
    try:
        whole = model.forward([Span(TOKENS[:300], 0, TABLE, logits=300)], [pool(model)])
        cut = logits_in_chunks(model, [1, 30, 32, 200, 1, 36], pool(model))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(cut, whole[[0, 30, 62, 262, 263, 299]])


def test_the_bfloat16_model_has_reproducible_bits():
    model = Model(tiny(**SHAPES["three queries a KV head"]).weights.to(torch.bfloat16))
    whole = model.forward([Span(TOKENS, 0, TABLE, logits=len(TOKENS))], [pool(model)])
    sizes = [1, 7, 31, 32, 33, 595, 1]
    assert torch.equal(logits_in_chunks(model, sizes, pool(model)), whole[np.cumsum(sizes) - 1])


def test_twin_without_padded_row_tiles_the_bits_differ(monkeypatch):
    """One row goes through another kernel than many: why rows are padded."""
    model = tiny(**SHAPES["three queries a KV head"])
    whole = model.forward([Span(TOKENS, 0, TABLE, logits=len(TOKENS))], [pool(model)])
    monkeypatch.setattr(model_module, "_padded", lambda count, _tile: count)
    cut = logits_in_chunks(model, [40, 1, 1, 1], pool(model))
    assert not torch.equal(cut, whole[[39, 40, 41, 42]])
    torch.testing.assert_close(cut, whole[[39, 40, 41, 42]], rtol=0.1, atol=0.5)


def test_twin_with_key_tiles_of_another_size_than_the_kernels_the_bits_differ(monkeypatch):
    """Keys padded to less than the kernel's block would be summed in runs of varying length."""
    monkeypatch.setattr(attention_module, "KEY_TILE", 1)
    model = tiny(**SHAPES["three queries a KV head"])
    whole = model.forward([Span(TOKENS, 0, TABLE, logits=len(TOKENS))], [pool(model)])
    sizes = [1] * 60
    cut = logits_in_chunks(model, sizes, pool(model))
    assert not torch.equal(cut, whole[:60])


def test_no_logits_are_computed_where_none_are_asked_for(model):
    spans = [Span(TOKENS[:40], 0, TABLE, logits=0), Span(TOKENS[:3], 0, [[50]], logits=2)]
    assert model.forward(spans[:1], [pool(model)]).shape == (0, 97)
    assert model.forward(spans, [pool(model)]).shape == (2, 97)


@pytest.mark.parametrize(
    "wrong", [{"heads": 5}, {"head_size": 15}, {"kv_heads": 0}, {"vocab_size": -1}]
)
def test_impossible_shapes_are_refused(wrong):
    shape = {
        "vocab_size": 9,
        "layers": 1,
        "hidden_size": 8,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 4,
        "intermediate_size": 8,
        "context_tokens": 32,
    }
    with pytest.raises(ConfigError, match=next(iter(wrong)).split("_", maxsplit=1)[0]):
        ModelConfig(**{**shape, **wrong})
