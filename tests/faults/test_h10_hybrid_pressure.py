"""H10, H04: under pressure, and over restarts, every model keeps what it can go on from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtier
from kvtier.identity.record import PartName
from kvtier.testing.toy import BLOCK, CHUNK, prompt

CHUNKS = 6
SYSTEM = prompt(2 * CHUNK, 100)
# Conversations on one system prompt, and others that share nothing with them.
PROMPTS = [np.concatenate([SYSTEM, prompt(4 * CHUNK, seed)]) for seed in range(3)]
PROMPTS += [prompt(CHUNKS * CHUNK, 200 + seed) for seed in range(2)]
ALL = kvtier.Component(layers=2, heads=1, head_size=8, name="full")
NEAR = kvtier.Component(
    layers=2, heads=1, head_size=8, name="near", needs=kvtier.Needs.TRAILING, window=CHUNK + BLOCK
)
STATE = kvtier.Component(
    layers=2, heads=1, head_size=16, planes=1, name="state", needs=kvtier.Needs.LAST
)
MODELS = {
    "full": (ALL,),
    "full and near": (ALL, NEAR),
    "near alone": (NEAR,),
    "full and state": (ALL, STATE),
    "near and state": (NEAR, STATE),
}


def asked(index):
    return np.append(PROMPTS[index], 1).astype(np.int32)


OPS = st.lists(
    st.tuples(st.sampled_from(["save", "save", "load", "clear", "reopen"]), st.integers(0, 4)),
    min_size=5,
    max_size=16,
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=OPS, dram=st.integers(2, 10), room=st.integers(2, 14))
@pytest.mark.parametrize("model", MODELS)
def test_whatever_has_room_is_exact_and_nothing_is_kept_that_cannot_be_used(
    new_ranks, new_disk, model, ops, dram, room
):
    """Room for some chunks in dram and below; every load is exact, and no part is an orphan."""
    geometry = kvtier.Geometry(MODELS[model], block_tokens=(BLOCK,), chunk_tokens=CHUNK)
    disk = new_disk()
    sizes = [geometry.part_bytes(PartName(at)) for at in range(len(geometry.components))]
    capacity = room * sum(map(disk.footprint, sizes))

    def opened():
        return new_ranks(geometry, store=disk, capacity=capacity, chunks=dram, most=CHUNKS)

    ranks = opened()
    for verb, index in ops:
        if verb == "save":
            ranks.save(PROMPTS[index])
        elif verb == "load":
            ranks.load(asked(index))
        elif verb == "clear":
            ranks.cache.clear("dram")
        else:
            ranks.close()
            ranks = opened()
        used = sum(disk.footprint(header.stored_bytes) for header in disk.scan())
        assert used <= capacity
        assert ranks.cache.figures()["kvtier_orphan_parts"] == 0
        told = ranks.cache.explain(asked(index))
        assert told.usable == ranks.cache.match(asked(index)).tokens, "and why is told of the rest"
        assert told.end.why
    last = ops[-1][1]
    ranks.save(PROMPTS[last])
    if dram >= CHUNKS + 2 and ALL in MODELS[model]:  # the others' chunks do not protect each other
        assert ranks.load(asked(last)) == CHUNKS * CHUNK, "there was room for all of it"
    ranks.close()
