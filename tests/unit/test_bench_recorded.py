"""A trace as prompts: what was shared stays shared, lengths are scaled, times are kept."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.bench.recorded import (
    Asked,
    block_tokens,
    different,
    most_found,
    prompt,
    recorded,
)
from kvtier.errors import ConfigError
from kvtier.planning.trace import Trace

SIZE = 16
VOCABULARY = 258


def trace():
    """Return three requests: the second shares a block and a half-hashed end with nobody."""
    made = Trace("t", 512)
    made.add(1000.0, 1024, 320, [1, 2])
    made.add(3000.0, 1536 + 64, 5, [1, 3, 4])
    made.add(5000.0, 700, 40, [1, 9])
    return made


def shaped(**changes):
    given = {
        "size": SIZE,
        "num_prompts": 99,
        "output_len": 8,
        "warmup": 0.0,
        "seconds_per_unit": 1e-3,
        "speed_up": None,
        "request_rate": None,
        "hbm": None,
        "bytes_per_token": None,
    }
    return recorded(trace(), **(given | changes))


def test_lengths_are_scaled_and_answers_are_bounded():
    first, second, third = shaped().asked
    assert [one.tokens for one in (first, second, third)] == [32, 50, 22]
    assert [one.output_len for one in (first, second, third)] == [8, 1, 1]
    assert len(second.blocks) == 4  # what no hash names is a block of its own
    assert shaped(num_prompts=2).num_prompts == 2
    assert shaped(size=64).asked[2].tokens == 88


def test_equal_hashes_are_equal_tokens_and_others_are_not():
    first, second, third = (prompt(one, SIZE, VOCABULARY, 0) for one in shaped().asked)
    assert [len(first), len(second), len(third)] == [32, 50, 22]
    for other in (second, third):
        assert (first[:SIZE] == other[:SIZE]).all()
        assert (first[SIZE : SIZE + 6] != other[SIZE : SIZE + 6]).any()
    assert first.dtype == np.int32
    assert 0 <= first.min() <= first.max() < VOCABULARY
    assert (prompt(shaped().asked[0], SIZE, VOCABULARY, 1) != first).any()


def test_a_seed_below_zero_is_a_seed():
    assert len(prompt(shaped().asked[1], SIZE, VOCABULARY, -1)) == 50


def test_many_blocks_are_all_different():
    whole = prompt(Asked(0.0, list(range(5000)), 5000 * SIZE, 1), SIZE, VOCABULARY, 0)
    assert len({row.tobytes() for row in whole.reshape(5000, SIZE)}) == 5000


def test_a_prompt_is_cut_to_the_context():
    one = shaped().asked[1]
    short = one.cut(41, SIZE)
    assert (short.tokens, len(short.blocks)) == (40, 3)
    assert one.cut(4096, SIZE) == one
    left = prompt(short, SIZE, VOCABULARY, 0)
    assert (left == prompt(one, SIZE, VOCABULARY, 0)[:40]).all()


def test_requests_come_one_by_one_or_at_their_own_pace():
    assert [one.at for one in shaped().asked] == [0.0, 0.0, 0.0]
    assert shaped().rate is None
    assert [one.at for one in shaped(speed_up=4.0).asked] == [0.0, 0.5, 1.0]
    assert [one.at for one in shaped(request_rate=3.0).asked] == [0.0, 0.5, 1.0]
    assert shaped(request_rate=3.0).rate == pytest.approx(3.0)


def test_a_trace_of_one_time_comes_at_equal_distances():
    made = Trace("t", 512)
    for number in range(3):
        made.add(7.0, 512, 1, [number])
    given = {"num_prompts": 9, "output_len": 1, "warmup": 0.0, "seconds_per_unit": 1.0}
    none = {"speed_up": None, "hbm": None, "bytes_per_token": None}
    found = recorded(made, size=SIZE, request_rate=2.0, **given, **none)
    assert [one.at for one in found.asked] == [0.0, 0.5, 1.0]


def test_what_is_possible_is_counted_in_tokens():
    asked = shaped().asked
    assert different(asked) == 6
    assert most_found(asked, SIZE, 0.0) == pytest.approx(100 * 32 / 104, abs=1e-3)


@pytest.mark.parametrize(
    ("scale", "size"), [(None, 16), ("1/32", 16), ("0.125", 64), ("1", 512), ("2", 1024)]
)
def test_a_scale_makes_whole_blocks_of_the_engine(scale, size):
    assert block_tokens(512, scale) == size


@pytest.mark.parametrize("scale", ["1/3", "0", "-1", "1/64", "x", "1/0", "nan"])
def test_another_scale_is_refused(scale):
    with pytest.raises(ConfigError, match="--scale"):
        block_tokens(512, scale)
