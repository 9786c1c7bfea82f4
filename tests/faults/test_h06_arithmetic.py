"""H06: what is offered is whole blocks, leaves a token to compute, and is really stored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice

pytestmark = pytest.mark.everywhere

SHAPES = [(1, 1), (1, 5), (4, 4), (4, 12), (16, 16), (16, 64)]


def rule(length: int, stored: int, computed: int, block: int, chunk: int) -> int:
    """Whole blocks of what is stored of the prompt's own complete chunks.

    Below the prompt's last token, and beyond what is computed.
    """
    usable = min(stored, length // chunk * chunk, (length - 1) // block * block)
    return max(usable - computed, 0)


@pytest.mark.parametrize(("block", "chunk"), SHAPES)
def test_every_length_follows_the_rule(block, chunk):
    """All prompts up to three chunks and a bit, all stored lengths, all computed lengths."""
    geometry = kvtier.Geometry(
        (kvtier.Component(layers=1, heads=1, head_size=2),), "int8", (block,), chunk
    )
    longest = 3 * chunk + block + 1
    tokens = np.arange(longest, dtype=np.int32)
    blocks = list(range(-(-longest // block)))
    kv = np.zeros((1, 2, len(blocks), block, 1, 2), np.uint8)
    namespace = kvtier.Namespace("tiny", geometry)
    with kvtier.open("dram:1MiB", namespace=namespace) as cache:
        device = CpuDevice()
        connector = ReferenceConnector(cache, kv, device)
        for saved in range(0, longest, block):
            connector.save("save", tokens[:saved], blocks)
            while connector.finish("save") and not connector.poll().released:
                connector.wait(1)
            assert cache.flush(timeout=5)
            stored = saved // chunk * chunk
            lengths = range(1, longest + 1) if block > 1 else range(1, longest + 1, 3)
            for length, computed in itertools.product(lengths, range(0, longest, block)):
                if computed >= length:
                    continue
                offer = connector.match("ask", tokens[:length], computed).tokens
                connector.finish("ask")
                assert offer == rule(length, stored, computed, block, chunk), (length, computed)
                assert computed + offer < length
                assert offer == 0 or computed + offer <= stored
                assert offer % block == 0
        connector.close()
        device.close()
        assert cache.figures()["kvtier_leased_parts"] == 0


def test_the_rule_is_that_of_the_scenario():
    """Block 16, chunk 64, all stored: what prompts around the chunks' ends are offered."""
    offers = [rule(n, 256, 0, 16, 64) for n in (63, 64, 65, 127, 128, 129)]
    assert offers == [0, 48, 64, 64, 112, 128]
