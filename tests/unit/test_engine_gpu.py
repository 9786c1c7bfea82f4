"""The engine on a real GPU: the same bits however work is cut, and wherever KV comes from."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from kvtier.device.torch_driver import cuda_device
from kvtier.engine import Engine, Model, Sampling, Span
from kvtier.engine.compute import CudaCompute
from kvtier.engine.graphs import DecodeGraphs
from kvtier.engine.hybrid import Kind
from kvtier.testing.device_answers import answers
from kvtier.testing.serving import small_hybrid, small_model

pytestmark = pytest.mark.gpu

TOKENS = np.random.default_rng(0).integers(0, 97, 700).tolist()
PROMPTS = [TOKENS[:length] for length in (5, 70, 100, 600)]
TABLE = [list(range(1, 46))]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def compute():
    return CudaCompute(0)


@pytest.fixture(params=DTYPES, ids=str)
def model(request, compute):
    return Model(small_model().weights.to(request.param)).to(compute.device)


def pool(model):
    (one,) = model.components
    shape = (one.layers, 2, 60, 16, one.heads, one.head_size)
    return torch.zeros(shape, dtype=torch.bfloat16, device=model.device)


def test_chunks_of_any_size_give_the_same_bits(model):
    whole_kv, cut_kv = pool(model), pool(model)
    whole = model.forward([Span(TOKENS, 0, TABLE, logits=len(TOKENS))], [whole_kv])
    sizes, start, found = [1, 7, 31, 32, 33, 100, 1, 1, 306, 1, 3, 184], 0, []
    for size in sizes:
        found.append(model.forward([Span(TOKENS[start : start + size], start, TABLE)], [cut_kv]))
        start += size
    assert torch.equal(torch.cat(found), whole[np.cumsum(sizes) - 1])
    assert torch.equal(cut_kv, whole_kv)


def test_neighbours_in_a_step_change_no_bits(model):
    kv = pool(model)
    model.forward([Span(TOKENS[:600], 0, TABLE)], [kv])
    last = Span(TOKENS[600:620], 600, TABLE)
    alone = model.forward([last], [kv])
    others = [Span(TOKENS[:13], 0, [[50]]), Span(TOKENS[:1], 0, [[51]])]
    batch = model.forward([*others, last, Span(TOKENS[5:30], 0, [[52, 53]])], [kv])
    assert torch.equal(batch[2], alone[0])


def test_stale_bytes_behind_the_context_are_never_read(model):
    dirty = pool(model).fill_(torch.nan)
    found = model.forward([Span(TOKENS[:21], 0, TABLE)], [dirty])
    assert torch.equal(found, model.forward([Span(TOKENS[:21], 0, TABLE)], [pool(model)]))


def test_logits_are_close_to_those_of_the_cpu():
    on_cpu, there = small_model(), small_model().to(torch.device("cuda", 0))
    expected = on_cpu.forward([Span(TOKENS, 0, TABLE, logits=50)], [pool(on_cpu)])
    found = there.forward([Span(TOKENS, 0, TABLE, logits=50)], [pool(there)]).cpu()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.std()))


def test_a_replayed_step_has_the_bits_of_one_that_is_not(model, compute):
    with compute.current():
        ours, theirs = pool(model).normal_(), pool(model)
        theirs.copy_(ours)
        graphs = DecodeGraphs(model, [theirs], compute)
        for ends in ([9], [40], [100, 7], [1, 64], [513, 20], [5] * 7):
            blocks = iter(range(1, 60))
            spans = [
                Span([end % 97], end - 1, [[next(blocks) for _ in range(-(-end // 16))]])
                for end in ends
            ]
            expected = model.forward(spans, [ours])
            assert torch.equal(graphs.logits(spans), expected)
            assert torch.equal(ours, theirs)
    assert graphs.captured < graphs.replayed


def test_numbers_that_do_not_reach_their_memory_are_noticed():
    class Forgets(CudaCompute):
        def upload(self, numbers, into):
            if not into.any():
                super().upload(numbers, into)

    found = [
        [one.tokens for one in engine.generate(PROMPTS, Sampling(8))]
        for engine in (
            Engine(small_model(), num_blocks=128, device=on) for on in (CudaCompute(0), Forgets(0))
        )
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kinds", [(), (Kind.FULL, Kind.WINDOW, Kind.LATENT, Kind.RECURRENT)])
def test_answers_are_the_same_cold_and_from_either_cache(kinds, temperature):
    small = small_hybrid(kinds, 40) if kinds else small_model()
    sampling = Sampling(8, temperature=temperature, seed=3)
    with closing(cuda_device()) as device:
        plain = answers(small, PROMPTS, sampling, device, device="cuda", graphs=False)
        assert plain.same
        assert plain.hits["loaded"]["dram"] > 0
        graphs = answers(small, PROMPTS, sampling, device, device="cuda")
        assert graphs.same
        assert graphs.cold == plain.cold
        assert graphs.replayed > 0


def test_the_engine_computes_on_a_stream_of_its_own(compute):
    with compute.current():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
    engine = Engine(small_model(), num_blocks=8, device=compute)
    assert {one.device for one in engine.kv} == {torch.device("cuda", 0)}
