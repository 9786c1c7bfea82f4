"""Decode steps that are recorded and replayed: the same answers, and nothing stale in them."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kvtier.engine import Engine, Sampling, Span, prompt_lookup
from kvtier.engine import decode as decode_module
from kvtier.engine import graphs as graphs_module
from kvtier.engine import hybrid as hybrid_module
from kvtier.engine import model as model_module
from kvtier.engine.decode import DecodeShape, shape_for
from kvtier.engine.graphs import DecodeGraphs
from kvtier.engine.hybrid import Kind
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.serving import prompt, small_hybrid, small_model
from kvtier.testing.tape import Tape, TapeCompute

GREEDY = Sampling(max_tokens=12)
LENGTHS = (1, 15, 16, 17, 70, 130)


PROMPTS = [prompt(length, length) for length in LENGTHS]


def answers(compute="cpu", sampling=GREEDY, prompts=PROMPTS, **options):
    engine = Engine(small_model(), num_blocks=80, device=compute, **options)
    found = [one.tokens for one in engine.generate(prompts, sampling)]
    return found, engine._runner.graphs


def pool() -> torch.Tensor:
    (component,) = small_model().components
    shape = (component.layers, 2, 80, 16, component.heads, component.head_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def decodes(ends: list[int]) -> list[Span]:
    """Return the next token of requests of such lengths, each in blocks of its own."""
    spans, block = [], 1
    for end in ends:
        blocks = -(-end // 16)
        spans.append(Span([end % 97], end - 1, [list(range(block, block + blocks))]))
        block += blocks
    return spans


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("options", [{}, {"step_tokens": 7}, {"max_running": 3}, {"ahead": True}])
def test_answers_with_graphs_are_those_without(temperature, options):
    sampling = Sampling(12, temperature=temperature, seed=7)
    plain, none = answers(sampling=sampling, **options)
    recorded, graphs = answers(TapeCompute(), sampling, **options)
    assert recorded == plain
    assert none is None
    assert graphs.replayed > graphs.captured > 0


def test_logits_and_pool_are_the_same_bit_for_bit_for_every_number_of_requests():
    model, ours, theirs = small_model(), pool(), pool()
    graphs = DecodeGraphs(model, [theirs], TapeCompute())
    for ends in ([1], [16, 17], [40, 3, 128], [5] * 7, [200, 90, 33, 16, 512, 1, 2, 3, 4]):
        spans = decodes(ends)
        expected, found = model.forward(spans, [ours]), graphs.logits(spans)
        assert torch.equal(found, expected)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert graphs.captured == 5  # 1, 2, 4, 8 and 16 rows


def test_more_keys_than_a_request_has_change_no_bits():
    model, ours, theirs = small_model(), pool(), pool()
    graphs = DecodeGraphs(model, [theirs], TapeCompute())
    spans = decodes([513, 20])  # the second sees one tile of keys when it is alone
    assert torch.equal(graphs.logits(spans), model.forward(spans, [ours]))
    assert shape_for(spans) == DecodeShape(2, 1024)


def test_stale_bytes_behind_a_context_are_never_read():
    model, clean, dirty = small_model(), pool(), pool().fill_(torch.nan)
    spans = decodes([21])
    dirty[:, :, 1:3] = clean[:, :, 1:3]
    dirty[:, :, 2, 5:] = torch.nan
    found = DecodeGraphs(model, [dirty], TapeCompute()).logits(spans)
    assert torch.equal(found, model.forward(spans, [clean]))


def test_a_recording_serves_other_requests_of_its_shape():
    model, ours, theirs = small_model(), pool(), pool()
    graphs = DecodeGraphs(model, [theirs], TapeCompute())
    for ends in ([9, 40], [100, 7], [1, 64], [300, 200]):
        spans = decodes(ends)
        assert torch.equal(graphs.logits(spans), model.forward(spans, [ours]))
    assert graphs.captured == 1
    assert graphs.replayed == 4


# ------------------------------------------------------------------- windows, and MLA's latents

HYBRIDS = (
    (Kind.FULL, Kind.WINDOW),
    (Kind.WINDOW, Kind.LATENT, Kind.FULL),
    (Kind.LATENT,),
    (Kind.RECURRENT, Kind.FULL, Kind.RECURRENT),
    (Kind.RECURRENT,),
)


def hybrid_answers(kinds, compute="cpu"):
    """Serve prompts that begin alike, so that blocks before a window are gone, or never came."""
    model = small_hybrid(kinds, 32)
    options = {"num_blocks": 80, "chunk_tokens": 32, "device": compute}
    engine = Engine(model, **options)
    found = [one.tokens for one in engine.generate(PROMPTS, GREEDY)]
    again = [one.tokens for one in engine.generate(PROMPTS[3:], GREEDY)]
    return found + again, engine._runner.graphs


@pytest.mark.parametrize("kinds", HYBRIDS, ids=lambda kinds: "-".join(one.value for one in kinds))
def test_answers_of_hybrid_models_with_graphs_are_those_without(kinds):
    plain, none = hybrid_answers(kinds)
    recorded, graphs = hybrid_answers(kinds, TapeCompute())
    assert recorded == plain
    assert none is None
    assert graphs.replayed > graphs.captured > 0


def same_logits() -> bool:
    """Say whether a recording gives the bits of a forward pass, each component by its own table."""
    model, pools = small_hybrid(HYBRIDS[0], 32), []
    generator = torch.Generator().manual_seed(0)
    for one in model.components:
        shape = (one.layers, one.planes, 80, 16, one.heads, one.head_size)
        pools.append(torch.randn(shape, generator=generator).to(torch.bfloat16))
    spans = decodes([70, 3, 130])
    for span in spans:
        (table,) = span.tables
        gone = max(span.end - 32, 0) // 16  # the window has left these behind
        span.tables.append([-1] * gone + [79 - block for block in table[gone:]])
    ours, theirs = [one.clone() for one in pools], [one.clone() for one in pools]
    found = DecodeGraphs(model, theirs, TapeCompute()).logits(spans)
    right = torch.equal(found, model.forward(spans, ours))
    return right and all(map(torch.equal, ours, theirs))


def test_each_component_is_read_by_its_own_table_as_far_as_it_sees():
    assert same_logits()


@pytest.mark.parametrize("forgotten", ["window", "component"])
def test_a_recording_without_the_window_or_of_another_table_is_noticed(monkeypatch, forgotten):
    class Careless(decode_module.DecodeAttention):
        def __init__(self, config, numbers, keys, kv, dtype, component, window):
            component, window = (0, window) if forgotten == "component" else (component, 0)
            super().__init__(config, numbers, keys, kv, dtype, component, window)

    monkeypatch.setattr(hybrid_module, "DecodeAttention", Careless)
    assert not same_logits()


# ------------------------------------------------------------------------------ recurrent states


def with_states():
    """Return a model with recurrent layers, and pools for it with anything in them."""
    model = small_hybrid((Kind.RECURRENT, Kind.FULL), 32)
    generator, pools = torch.Generator().manual_seed(0), []
    for one in model.components:
        places = (6,) if one.name == "recurrent" else (80, 16)
        shape = (one.layers, one.planes, *places, one.heads, one.head_size)
        pools.append(torch.randn(shape, generator=generator).to(torch.bfloat16))
    return model, pools


def decodes_with_states(ends):
    """Return decodes; each has the slot of its number."""
    spans = decodes(ends)
    for number, span in enumerate(spans):
        span.tables.insert(0, [5 - number])
    return spans


def same_states(steps=([1, 70, 3], [2, 71, 4], [40, 9], [1])) -> bool:
    """Say whether recordings move states on as forward passes do, once a step, and give their bits.

    A request of one token begins with zeros, whatever is there.
    """
    model, pools = with_states()
    ours, theirs = [one.clone() for one in pools], [one.clone() for one in pools]
    graphs, right = DecodeGraphs(model, theirs, TapeCompute()), True
    for ends in steps:
        spans = decodes_with_states(ends)
        right &= torch.equal(graphs.logits(spans), model.forward(spans, ours))
        right &= all(map(torch.equal, ours, theirs))
    return right and graphs.replayed > graphs.captured


def test_a_recording_moves_states_on_once_as_a_forward_pass_does():
    assert same_states()


def test_a_recording_that_fails_leaves_states_where_they_were():
    """Else the step, tried again, would begin with states that are a token ahead."""

    class Short(TapeCompute):
        def capture(self, step):
            step()
            raise torch.OutOfMemoryError("of the GPU")

    model, pools = with_states()
    theirs = [one.clone() for one in pools]
    with pytest.raises(torch.OutOfMemoryError):
        DecodeGraphs(model, theirs, Short()).logits(decodes_with_states([2, 71]))
    assert torch.equal(theirs[0], pools[0])
    assert not torch.equal(theirs[1], pools[1]), "it ran: KV is written again, and is the same"


def test_states_that_recording_moves_on_are_noticed(monkeypatch):
    monkeypatch.setattr(graphs_module, "_kept", lambda states: contextlib.nullcontext())
    assert not same_states()


@pytest.mark.parametrize("forgotten", ["zeros", "slots"])
def test_states_of_others_are_noticed(monkeypatch, forgotten):
    class Careless(hybrid_module.DecodeRecurrence):
        def __init__(self, slots, positions, kv, size):
            positions = positions + 1 if forgotten == "zeros" else positions
            super().__init__(slots if forgotten == "zeros" else slots - 1, positions, kv, size)

    monkeypatch.setattr(hybrid_module, "DecodeRecurrence", Careless)
    assert not same_states()


# ------------------------------------------------------------------------- what would be stale


class Forgets(TapeCompute):
    """Numbers come into the fixed memory for a recording only, not for a replay."""

    def upload(self, numbers, into):
        if not into.any():
            super().upload(numbers, into)


def test_numbers_that_do_not_reach_their_memory_are_noticed():
    plain, _ = answers()
    stale, graphs = answers(Forgets())
    assert graphs.replayed > graphs.captured
    assert stale != plain


def test_a_step_that_keeps_what_it_was_recorded_with_is_noticed(monkeypatch):
    """The mask of the first request's length, say, made on the host before the recording."""

    made = {}

    class Baked(decode_module.DecodeAttention):
        def __init__(self, config, numbers, keys, kv, dtype):
            super().__init__(config, numbers, keys, kv, dtype)
            kept = made.setdefault((len(numbers), keys), (self._mask, self._beyond))
            self._mask, self._beyond = (one.clone() for one in kept)

    plain, _ = answers()
    monkeypatch.setattr(model_module, "DecodeAttention", Baked)
    assert answers(TapeCompute())[0] != plain


def test_logits_elsewhere_than_in_the_fixed_memory_are_noticed(monkeypatch):
    """A step that binds a new tensor leaves the first one's content to whoever replays it."""
    model, theirs = small_model(), pool()
    graphs = DecodeGraphs(model, [theirs], TapeCompute())
    first = graphs.logits(decodes([9])).clone()
    (step,) = graphs._steps.values()
    step._logits = step._logits.clone()
    assert torch.equal(graphs.logits(decodes([40])), first)
    assert not torch.equal(model.forward(decodes([40]), [pool()]), first)


def test_what_a_graph_cannot_record_is_refused():
    there = torch.zeros(3)
    for step in (there.sum().item, lambda: torch.tensor([1.0]), lambda: bool(there.any())):
        with pytest.raises(MisuseError, match="cannot be recorded: it needs the host"), Tape():
            step()


def test_a_tape_is_played_without_the_steps_python():
    given, out, calls = torch.tensor([1.0, 2.0]), torch.zeros(2), []

    def step():
        calls.append(len(calls))
        out.copy_((given * 2)[[0, 0]] if len(calls) > 5 else given * 2 + 1)

    tape = TapeCompute().capture(step)
    given.copy_(torch.tensor([5.0, 7.0]))
    tape.replay()
    assert out.tolist() == [11.0, 15.0]
    assert len(calls) == 2


# ------------------------------------------------------------------------------ what has a shape


def test_shapes_are_few():
    seen = {shape_for(decodes([end] * count)) for end in range(1, 40) for count in range(1, 33)}
    assert seen == {DecodeShape(1 << power, 512) for power in range(6)}


@pytest.mark.parametrize(
    "span",
    [
        Span([1, 2], 3, [[0]]),
        Span([1], 3, [[0]], logits=0),
        Span([1], 3, [[0]], inputs=lambda hidden, position: hidden),
        Span([1], 1 << 16, [list(range(1 << 13))]),
    ],
    ids=["several tokens", "no logits", "inputs", "too long"],
)
def test_other_steps_have_none(span):
    assert shape_for([*decodes([5]), span]) is None
    assert DecodeGraphs(small_model(), [pool()], TapeCompute()).logits([span]) is None


def test_drafts_are_computed_without_graphs():
    talk = [[1, 2, 3, 4] * 8]
    plain, _ = answers(prompts=talk)
    found, _ = answers(TapeCompute(), prompts=talk, drafter=prompt_lookup)
    assert found == plain


def test_recordings_are_bounded(monkeypatch):
    monkeypatch.setattr(graphs_module, "_MOST_GRAPHS", 2)
    model, ours, theirs = small_model(), pool(), pool()
    graphs = DecodeGraphs(model, [theirs], TapeCompute())
    for count in (1, 2, 4, 1, 1, 2):
        spans = decodes([30 + count] * count)
        assert torch.equal(graphs.logits(spans), model.forward(spans, [ours]))
        assert len(graphs._steps) <= 2
    assert graphs.captured == 5


def test_a_decode_step_brings_back_its_tokens_and_no_more():
    compute = TapeCompute()
    engine = Engine(small_model(), num_blocks=80, device=compute, prefix_cache=False)
    engine.generate(PROMPTS[:2], Sampling(8))
    assert set(compute.downloads) == {2 * 8}  # an int64 for each request, once a step
    assert len(compute.downloads) == 8
    compute.downloads.clear()
    engine.generate(PROMPTS[:2], Sampling(8, temperature=1.0))
    assert set(compute.downloads) == {2 * 8, 2 * 97 * 4}  # and the rows that are drawn from


# --------------------------------------------------------------------------------- what is refused


def test_graphs_where_there_are_none_are_refused():
    with pytest.raises(ConfigError, match="recorded on a GPU, not on cpu: leave them out"):
        Engine(small_model(), num_blocks=8, graphs=True)

    class Others:
        """A model of another's, with a forward pass and no more."""

        def __init__(self, model):
            self.config, self.components = model.config, model.components
            self.forward, self.copy_states = model.forward, model.copy_states

    with pytest.raises(ConfigError, match="Others has no decode step to record: leave them out"):
        Engine(Others(small_model()), num_blocks=8, device=TapeCompute(), graphs=True)
    engine = Engine(Others(small_model()), num_blocks=8, device=TapeCompute())
    assert engine._runner.graphs is None
    assert answers(TapeCompute(), graphs=False)[1] is None
