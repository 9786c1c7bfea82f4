"""Real engines on daemons: two on one, and one with ranks of its own; everybody may be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Sampling, random_hybrid
from kvtier.testing.daemon import running
from kvtier.testing.ranked import RANKS, SHAPE, Ranks
from kvtier.testing.served import Served
from kvtier.testing.serving import CHUNK
from kvtier.testing.torch_forks import TorchForks
from kvtier.testing.waiting import until

SAMPLING = Sampling(max_tokens=8)
SEED = 1
SECONDS = 20
_numbers = itertools.count()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def asked(engine: Served, tokens: list[int]):
    engine.ask(tokens)
    return engine.answer()


# ------------------------------------------------------------------------ two engines, one daemon


@pytest.fixture(scope="module")
def plain(torch_forks):
    """Return what an engine answers without a cache."""
    with Served(torch_forks, "") as engine:
        known = {}

        def answer(tokens: list[int]) -> list[int]:
            key = tuple(tokens)
            if key not in known:
                known[key] = asked(engine, tokens)[0]
            return known[key]

        yield answer


def test_an_engine_hits_what_another_one_prefilled(torch_forks, plain):
    talk = prompt(200)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(running("dram:4MiB")).url + "?patience=5s"
        one, two = (stack.enter_context(Served(torch_forks, url)) for _ in range(2))
        assert asked(one, talk) == (plain(talk), {})
        assert asked(two, talk) == (plain(talk), {"dram": 192})
        one.process.kill()  # what it saved stays
        assert asked(two, prompt(200, 5)) == (plain(prompt(200, 5)), {})
        with Served(torch_forks, url) as three:
            assert asked(three, prompt(200, 5)) == (plain(prompt(200, 5)), {"dram": 192})


def test_answers_stay_the_same_while_the_server_is_killed(torch_forks, plain, tmp_path):
    """What NVMe has is hit again when it is back; DRAM's content is gone."""
    talk = prompt(200)
    with (
        running("dram:4MiB", f"lmdb:{tmp_path}/kv?capacity=64MiB") as daemon,
        Served(torch_forks, daemon.url) as one,
        Served(torch_forks, daemon.url) as two,
    ):
        assert asked(one, talk) == (plain(talk), {})
        for number in range(3):
            before = daemon.server_pid()
            fresh = prompt(300, 100 + number)
            one.ask(fresh)  # while it dies
            killed(before)
            assert one.answer()[0] == plain(fresh)
            until(lambda before=before: daemon.server_pid() not in (0, before))
            found = {}
            end = time.monotonic() + SECONDS
            while not found and time.monotonic() < end:
                tokens, found = asked(two, talk)
                assert tokens == plain(talk)
            assert found in ({"lmdb": 192}, {"dram": 192})


def test_answers_stay_the_same_when_the_supervisor_is_killed(torch_forks, plain, tmp_path):
    """The engine goes on without a cache, lets the memory go, and takes the next daemon's."""
    talk, path = prompt(200), tmp_path / "s"

    def loaded(engine: Served):
        answer, tiers = asked(engine, talk)
        assert answer == plain(talk)
        return tiers

    with running("dram:4MiB", path=path) as daemon, Served(torch_forks, daemon.url) as one:
        assert asked(one, talk) == (plain(talk), {})
        killed(daemon.supervisor_pid)
        assert asked(one, talk)[0] == plain(talk)
        until(lambda: not arenas(one.process.pid))
        assert asked(one, talk) == (plain(talk), {})
        with running("dram:4MiB", path=path):
            until(lambda: arenas(one.process.pid))
            # The memory is mapped before the session is up: the first answers may be misses yet.
            until(lambda: loaded(one) == {"dram": 192})
            assert len(arenas(one.process.pid)) == 1


def arenas(pid: int) -> set[str]:
    """Return the arenas that a process has mapped, by their inodes."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:kvtier-arena" in line}


# --------------------------------------------------------------- one engine, two ranks, a daemon


class Tandem:
    """An engine whose ranks are processes of their own, on a private daemon or another's."""

    def __init__(self, forks: TorchForks, *urls: str, own: bool = True) -> None:
        self.forks = forks
        geometry = kvtier.Geometry(random_hybrid(SHAPE, SEED).components, chunk_tokens=CHUNK)
        self.engine_id = f"tandem-{os.getpid()}-{next(_numbers)}"
        self.path = "" if own else urls[0].removeprefix("unix:")
        namespace = kvtier.Namespace("small", geometry)
        if own:
            options = {"own_process": True, "engine": self.engine_id}
            self.cache = kvtier.open(*urls, namespace=namespace, shards=RANKS, **options)
        else:
            url = f"{urls[0]}?engine={self.engine_id}&patience=5s"
            self.cache = kvtier.open(url, namespace=namespace, shards=RANKS)
        self.device = CpuDevice()
        self.ranks = self.start()
        self.engine = self.connected()

    def start(self) -> Ranks:
        sizes = {"num_blocks": 64, "num_states": 16}
        where = {"engine": self.engine_id, "path": self.path}
        return Ranks(SHAPE, SEED, self.cache, forks=self.forks, **where, **sizes)

    def connected(self) -> Engine:
        engine = Engine(
            self.ranks, chunk_tokens=CHUNK, num_blocks=64, num_states=16, prefix_cache=False
        )
        pages = self.ranks.pages
        engine.connect(ReferenceConnector(self.cache, None, self.device, pages=pages, always=True))
        return engine

    def finish(self) -> None:
        while not self.engine.idle:
            self.engine.step()

    def answer(self, tokens: list[int]):
        (completion,) = self.engine.generate([tokens], SAMPLING)
        self.finish()
        self.cache.flush(timeout=SECONDS)
        return completion.tokens, completion.finish.stats.hit_tokens

    def close(self) -> None:
        self.ranks.close()
        self.cache.close()
        self.device.close()


def figures(tandem: Tandem) -> dict[str, float]:
    return tandem.cache.figures()


@pytest.fixture(scope="module")
def right(torch_forks):
    """Return what the ranks answer to a prompt when nothing is cached."""
    with contextlib.closing(Tandem(torch_forks, "dram:16MiB")) as tandem:
        known = {}
        tandem.cache.bypass = True

        def answer(tokens: list[int]):
            key = tuple(tokens)
            if key not in known:
                known[key], hits = tandem.answer(tokens)
                assert not hits
            return known[key]

        yield answer


def test_ranks_find_the_private_daemon_by_the_engines_id(torch_forks, right):
    talks = [prompt(n, n) for n in (5, 64, 200)]
    with contextlib.closing(Tandem(torch_forks, "dram:16MiB")) as tandem:
        assert [tandem.answer(talk) for talk in talks] == [(right(talk), {}) for talk in talks]
        hits = [{}, {}, {"dram": 192}]  # of 64 tokens the last is computed
        assert [tandem.answer(talk) for talk in talks] == [
            (right(talk), hit) for talk, hit in zip(talks, hits, strict=True)
        ]


def test_ranks_of_two_engines_share_one_daemon(torch_forks, right):
    talk = prompt(200)
    with running("dram:16MiB") as daemon, contextlib.ExitStack() as stack:
        one, two = (
            stack.enter_context(contextlib.closing(Tandem(torch_forks, daemon.url, own=False)))
            for _ in range(2)
        )
        assert one.answer(talk) == (right(talk), {})
        assert two.answer(talk) == (right(talk), {"dram": 192})


def test_a_rank_killed_in_mid_plan_leaves_nothing_behind(torch_forks, right):
    """It is stopped, so that its copies cannot run, is sent a plan, and dies with it."""
    talk = prompt(200)
    with contextlib.closing(Tandem(torch_forks, "dram:16MiB")) as tandem:
        assert tandem.answer(talk) == (right(talk), {})
        victim = tandem.ranks.processes[1]
        os.kill(victim.pid, signal.SIGSTOP)
        tandem.engine.submit(talk, SAMPLING)
        out = []
        for _ in range(100):  # steps that wait for the load
            tandem.engine.step()
            out.append(figures(tandem)["kvtier_plans_out"])
            if out[-1]:
                break
        assert out[-1] == 1, "a plan is out, and held up"
        victim.kill()
        with pytest.raises(OSError, match=r"rank . does not answer"):
            tandem.finish()
        tandem.engine.close()
        until(lambda: not figures(tandem)["kvtier_plans_out"])
        assert figures(tandem)["kvtier_leased_parts"] == 0
        tandem.ranks.close()
        tandem.ranks = tandem.start()
        tandem.engine = tandem.connected()
        assert tandem.answer(talk) == (right(talk), {"dram": 192})


def test_ranks_go_on_when_the_server_is_killed(torch_forks, right, tmp_path):
    talk = prompt(200)
    with (
        running("dram:16MiB", f"lmdb:{tmp_path}/kv?capacity=64MiB") as daemon,
        contextlib.closing(Tandem(torch_forks, daemon.url, own=False)) as tandem,
    ):
        assert tandem.answer(talk) == (right(talk), {})
        for seed in range(2):
            before = daemon.server_pid()
            killed(before)
            assert tandem.answer(prompt(200, seed))[0] == right(prompt(200, seed))
            until(lambda before=before: daemon.server_pid() not in (0, before))
            found = {}
            end = time.monotonic() + SECONDS
            while not found and time.monotonic() < end:
                tokens, found = tandem.answer(talk)
                assert tokens == right(talk)
            assert found


def test_ranks_go_on_without_a_supervisor(torch_forks, right):
    talk = prompt(200)
    right(talk)
    others = arenas(os.getpid())
    with (
        running("dram:16MiB") as daemon,
        contextlib.closing(Tandem(torch_forks, daemon.url, own=False)) as tandem,
    ):
        assert tandem.answer(talk) == (right(talk), {})
        killed(daemon.supervisor_pid)
        assert tandem.answer(talk)[0] == right(talk)
        ranks = [process.pid for process in tandem.ranks.processes]
        until(lambda: not any(map(arenas, ranks)) and arenas(os.getpid()) == others)
        assert tandem.answer(talk) == (right(talk), {})
