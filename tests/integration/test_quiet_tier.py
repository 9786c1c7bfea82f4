"""What a cache wrote last is durable soon after, though nothing more is asked of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.testing.toy import CHUNK, Toy, opened, prompt
from kvtier.testing.waiting import until
from kvtier.testing.with_parent import with_parent
from kvtier.tiers.tier import Tier

TOKENS = prompt(2 * CHUNK + 1)
SECONDS = 20.0

SAVE = """
import sys, threading
from kvtier.testing.toy import CHUNK, opened, prompt
toy = opened("dram:1MiB", sys.argv[1])
toy.save("r", prompt(2 * CHUNK + 1))
print("saved", flush=True)
threading.Event().wait()
"""


def url(folder: Path) -> str:
    return f"lmdb:{folder / 'kv'}?capacity=64MiB"


def entries(folder: Path) -> int:
    """Return how many records another process has committed."""
    index = str(folder / "kv" / "index.lmdb")
    with lmdb.Environment(index, subdir=False, readonly=True, lock=False) as env:
        return int(env.stat()["entries"])


def test_what_was_saved_outlives_a_kill_a_moment_later(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE, url(tmp_path)]
    with subprocess.Popen(with_parent(command), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "saved\n"
            until(lambda: entries(tmp_path) == 2)
        finally:
            process.kill()
    toy = opened("dram:1MiB", url(tmp_path))
    tokens, _, exact = toy.load("again", TOKENS)
    toy.close()
    assert (tokens, exact) == (2 * CHUNK, True)


def uncommitted(toy: Toy) -> Any:
    return toy.cache._desk.depot.tiers[1].store._ledger.pending.operations


@pytest.mark.parametrize("deletes", [False, True])
def test_writes_and_deletions_are_committed_without_another_call(
    tmp_path: Path, *, deletes: bool
) -> None:
    toy = opened("dram:1MiB", url(tmp_path))
    toy.save("r", TOKENS)
    if deletes:
        until(lambda: not uncommitted(toy))
        toy.cache.invalidate(TOKENS, timeout=SECONDS)
    until(lambda: not uncommitted(toy))
    toy.close()


def test_without_that_call_they_would_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[Tier] = []

    def settle(tier: Tier) -> None:
        rounds.append(tier)

    monkeypatch.setattr(Tier, "settle", settle)
    toy = opened("dram:1MiB", url(tmp_path))
    toy.save("r", TOKENS)
    until(lambda: len(rounds) > 8)  # two seconds
    assert uncommitted(toy)
    toy.close()
