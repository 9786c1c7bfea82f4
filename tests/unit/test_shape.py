"""The shape of a chunk: its parts on so many ranks, and what a prefix of some length needs."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError
from kvtier.identity.geometry import (
    Component,
    Geometry,
    Needs,
    component_shards,
    stage_layers,
)
from kvtier.identity.record import PartName
from kvtier.identity.shape import NO_PARENT, chunk_shape

FULL = Component(4, 4, 8)
WINDOW = Component(6, 4, 8, name="window", needs=Needs.TRAILING, window=100)
STATE = Component(3, 2, 50, planes=1, name="state", needs=Needs.LAST)
LATENT = Component(5, 1, 72, planes=1, name="latent", replicated=True)


def geometry(*components: Component) -> Geometry:
    return Geometry(components, "bfloat16", block_tokens=(16,), chunk_tokens=64)


def test_a_chunk_of_one_component_is_one_part():
    shape = chunk_shape(geometry(FULL))
    assert shape.names == (PartName(),)
    assert shape.nbytes == (4 * 2 * 4 * 8 * 2 * 64,)
    assert shape.above == shape.always == (0,)
    assert shape.plain
    assert shape.needed(640, 3) == (0,)


def test_every_rank_has_its_heads_and_layers():
    shape = chunk_shape(geometry(FULL), shards=2, stages=2)
    assert shape.names == tuple(PartName(0, t, 2, p, 2) for p in (0, 1) for t in (0, 1))
    assert sum(shape.nbytes) == geometry(FULL).bytes_per_token * 64
    assert shape.plain


def test_the_first_stages_take_the_layers_that_are_left():
    assert [list(stage_layers(WINDOW, stage, 4)) for stage in range(4)] == [
        [0, 1],
        [2, 3],
        [4],
        [5],
    ]
    nbytes = chunk_shape(geometry(WINDOW), stages=4).nbytes
    assert nbytes[0] == nbytes[1] == 2 * nbytes[2] == 2 * nbytes[3]
    with pytest.raises(ConfigError, match="3 layers of component 'state' do not fill 4 stages"):
        chunk_shape(geometry(STATE), stages=4)


def test_what_every_rank_holds_is_stored_once():
    """H23: an MLA latent is the same for any number of ranks, so engines of any size share it."""
    shapes = [chunk_shape(geometry(LATENT), shards) for shards in (1, 4, 8)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert chunk_shape(geometry(FULL), 2) != chunk_shape(geometry(FULL), 4)


def test_ranks_beyond_the_heads_share_them():
    assert [component_shards(FULL, ranks) for ranks in (1, 2, 4, 8, 12)] == [1, 2, 4, 4, 4]
    for ranks in (3, 6):
        with pytest.raises(ConfigError, match=f"4 heads .* spread over {ranks} ranks"):
            component_shards(FULL, ranks)


def test_a_state_is_one_whatever_the_chunk():
    shape = chunk_shape(geometry(FULL, STATE))
    assert shape.nbytes[1] == 3 * 1 * 2 * 50 * 2
    assert geometry(FULL, STATE).bytes_per_token == geometry(FULL).bytes_per_token


def test_windows_and_states_hang_under_what_every_chunk_has():
    shape = chunk_shape(geometry(WINDOW, FULL, STATE), shards=2)
    kinds = [part.component for part in shape.names]
    assert kinds == [0, 0, 1, 1, 2, 2]
    assert shape.above == (2, 2, 2, 3, 2, 2)
    assert chunk_shape(geometry(WINDOW, STATE)).above == (NO_PARENT, NO_PARENT)


@pytest.mark.parametrize(
    ("tokens", "chunk", "needed"),
    [
        (640, 9, (0, 1, 2)),  # the last: window and state
        (640, 8, (0, 1)),  # tokens 540.. are in the window
        (640, 7, (0,)),
        (624, 9, (0, 1)),  # no state is stored at 624
        (624, 8, (0, 1)),
        (612, 8, (0, 1)),
        (676, 8, (0,)),  # tokens 576.. begin the next chunk
    ],
)
def test_a_prefix_needs_its_windows_and_the_state_at_its_end(tokens, chunk, needed):
    assert chunk_shape(geometry(FULL, WINDOW, STATE)).needed(tokens, chunk) == needed
