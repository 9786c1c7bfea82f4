"""The sizes of the tiers under a trace, from what was given or from the trace itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.bench.messages import ModelLoaded
from kvtier.bench.recorded import Asked
from kvtier.bench.replaying import _sizes
from kvtier.errors import ConfigError

PART = 16 * 256
LOADED = ModelLoaded("random", "", 2048, 256)
ASKED = [Asked(0.0, [number, number + 1], 30, 2) for number in range(100)]


def sizes(hbm=None, dram=None, disk=None, per_token=None):
    shape = SimpleNamespace(block_tokens=16, block_size=512, hbm=hbm, bytes_per_token=per_token)
    return _sizes(SimpleNamespace(dram=dram, disk=disk), shape, ASKED, LOADED)


def test_by_default_each_tier_holds_twice_the_one_above():
    hbm, dram, disk = sizes()
    assert (hbm, dram) == (101 // 8 * PART, 101 // 4 * PART)
    assert disk >= 101 // 2 * 2 * PART


def test_sizes_are_bytes_of_the_model_that_serves():
    assert sizes(hbm=10 * PART, dram=20 * PART + 1)[:2] == (10 * PART, 20 * PART)


def test_sizes_for_another_model_hold_as_many_blocks():
    per_token = 320 << 10
    hbm, dram, _ = sizes(hbm=3 * 512 * per_token, dram=7 * 512 * per_token, per_token=per_token)
    assert (hbm, dram) == (3 * PART, 7 * PART)


@pytest.mark.parametrize(("given", "said"), [("hbm", "--hbm"), ("dram", "--dram")])
def test_a_tier_without_room_for_a_prompt_is_refused(given, said):
    with pytest.raises(ConfigError, match=f"{said} has room for 1 blocks of the trace"):
        sizes(**{given: PART})
