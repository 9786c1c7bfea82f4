"""The recorder under a simulated loop: whatever the disk does, each request is accounted for."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from kvtier.identity.shape import chunk_shape
from kvtier.metrics import Metrics
from kvtier.prefix import Namer
from kvtier.recorder import Recorder, Recording
from kvtier.testing.simconditions import Conditions
from kvtier.testing.simflow import SimFlow
from kvtier.testing.simloop import simulate
from kvtier.testing.toy import CHUNK, GEOMETRY, NAMESPACE

NAMER = Namer(NAMESPACE, chunk_shape(GEOMETRY, 1, 1))
PROMPTS = [NAMER.prefix(np.full(3 * CHUNK, n, np.int32), None, None) for n in range(60)]
SEEDS = range(40)


def recorded(path, seed: int, conditions: Conditions) -> tuple[int, dict[str, float], float]:
    """Record prompts at random moments; return lines, metrics, and how long closing took."""
    metrics, took = Metrics(), []

    async def main(loop):
        chance = loop.rng("prompts")
        flow = SimFlow(loop)
        recorder = Recorder(Recording(str(path), 1 << 16), flow, metrics, loop.time, 0.0)
        for prefix in PROMPTS:
            began = loop.time()
            recorder.note(prefix)
            assert loop.time() == began  # memory only, whatever the disk does
            await asyncio.sleep(chance.choice((0.0, 0.01, 0.3)))
        began = loop.time()
        recorder.close()
        took.append(loop.time() - began)
        flow.close()

    simulate(main, seed, conditions)
    lines = [line for one in path.parent.glob("r*") for line in one.read_text().splitlines()]
    assert all(json.loads(line)["hash_ids"] for line in lines)
    return len(lines), metrics.snapshot(), took[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_is_written_once_or_counted(tmp_path, seed):
    slow = Conditions(slow_rate=0.2, slow_seconds=(0.1, 3.0), daemons=("_run",))
    lines, figures, took = recorded(tmp_path / "r", seed, slow)
    written = figures.pop("kvtier_recorded_requests_total", 0)
    assert written + sum(figures.values()) == len(PROMPTS)
    assert written <= lines <= len(PROMPTS)  # one that was given up may yet be written
    assert took <= 5.5


def test_a_disk_that_hangs_holds_nobody_up(tmp_path):
    hangs = Conditions(slow_rate=1.0, slow_seconds=(1e3, 2e3), daemons=("_run",))
    _, figures, took = recorded(tmp_path / "r", 1, hangs)
    assert figures == {'kvtier_unrecorded_requests_total{reason="closed"}': len(PROMPTS)}
    assert took <= 5.5
