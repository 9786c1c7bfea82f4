"""H05, H15: copies are ordered after what wrote and what still reads, also under preemption.

A device that does its work as late, and in as odd an order, as its streams and fences allow.
"""

from __future__ import annotations

import contextlib
import random
from functools import partial

import numpy as np
import pytest

from kvtier import flow
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.chaos import ORDERS, ChaosDevice
from kvtier.device.race import Checked, CheckedStream
from kvtier.identity.record import checksum
from kvtier.testing.toy import BLOCK, CHUNK, pattern, prompt
from kvtier.transfer import CopyResult, CopyStatus, CopyTransfer

pytestmark = pytest.mark.everywhere

BLOCKS = 40
POISON = 0xABAB
SEEDS = range(25)
LATE = range(40, 50)  # of which some free blocks at a bad moment, in each order

# ---------------------------------------------------------------------------------- the engine


class Request:
    def __init__(self, name, tokens, blocks) -> None:
        self.name, self.tokens, self.blocks = name, tokens, blocks
        self.start = None  # computed tokens, once they are known
        self.saved = False


class Engine:
    """Requests on few blocks, ended at any moment. wrong: blocks whose KV was not theirs."""

    def __init__(self, cache, device, seed) -> None:
        self.rng, self.device, self.cache = random.Random(seed), device, cache
        self.kv = np.zeros((2, 2, BLOCKS, BLOCK, 2, 8), np.uint16)
        self.connector = ReferenceConnector(cache, self.kv, device, groups=2)
        self.free = list(range(BLOCKS))
        self.running: list[Request] = []
        self.kept: dict[str, list[int]] = {}
        self.preempted: list[tuple[str, np.ndarray]] = []
        self.careless = False
        self.wrong = self.looked = self.loads = self.count = 0

    def step(self) -> None:
        inner = getattr(self.device, "inner", self.device)
        inner.idle()
        acts = (self.admit, self.compute, self.compute, self.poll, self.wait, self.end)
        self.rng.choice(acts)()

    def admit(self) -> None:
        """Admit a new request, or one that was preempted, under the name that it had."""
        again = self.preempted and self.rng.random() < 0.5
        name, tokens = self.preempted.pop(0) if again else self._new()
        need = -(-len(tokens) // BLOCK)
        if need > len(self.free):
            return
        self.rng.shuffle(self.free)
        request = Request(name, tokens, [self.free.pop() for _ in range(need)])
        offer = self.connector.match(request.name, tokens, 0)
        assert not offer.pending
        # Whoever had the blocks before may still write them: a load has to come after that.
        self.launch("a former owner's write", partial(self._fill, request.blocks), request.blocks)
        if offer.tokens:
            self.connector.load(request.name, request.blocks[: offer.tokens // BLOCK])
            self.loads += 1
        else:
            request.start = 0
        self.running.append(request)

    def compute(self) -> None:
        """Compute what a request lacks, attend over all of it, and save it."""
        ready = [one for one in self.running if one.start is not None and not one.saved]
        if not ready:
            return
        request = self.rng.choice(ready)
        whole = len(request.tokens) // BLOCK
        for index in range(request.start // BLOCK, whole):
            blocks = request.blocks[index : index + 1]
            self.launch("a write", partial(self._write, request, index), blocks)
        self.launch("attention", partial(self._look, request, whole), (), request.blocks[:whole])
        self.connector.save(request.name, request.tokens[: whole * BLOCK], request.blocks)
        request.saved = True

    def poll(self) -> None:
        update = self.connector.poll()
        assert self.cache.flush(timeout=20)  # so that a seed is one course
        for loaded in update.loaded:
            (request,) = (one for one in self.running if one.name == loaded.request_id)
            request.start = loaded.tokens
        for name in update.released:
            self.free += self.kept.pop(name)

    def wait(self) -> None:
        if self.connector._copying:
            self.connector.wait(1)

    def end(self) -> None:
        """End any request: finished, aborted or preempted, in whatever state it is."""
        if not self.running:
            return
        request = self.running.pop(self.rng.randrange(len(self.running)))
        if self.rng.random() < 0.5:
            self.preempted.append((request.name, request.tokens))
        keep = self.connector.finish(request.name)
        kept = self.kept.setdefault(request.name, []) if keep else self.free
        if self.careless:
            kept = self.free
        kept += request.blocks

    def launch(self, name, work, writes=(), reads=()) -> None:
        """Enqueue work on the compute stream, and say which blocks it touches."""
        stream = self.device.compute
        if isinstance(stream, CheckedStream):
            writes, reads = ([self.kv[:, :, block] for block in part] for part in (writes, reads))
            stream.declare(name, writes=writes, reads=reads)
            stream = stream.inner
        stream.enqueue(work)

    def finish(self) -> None:
        while self.running:
            self.end()
        self.device.close()
        self.poll()
        self.connector.close()

    def _new(self):
        self.count += 1
        length = self.rng.randrange(17, 4 * CHUNK + 2)
        return f"r{self.count}", prompt(length, self.rng.randrange(3))

    def _fill(self, blocks) -> None:
        self.kv[:, :, blocks] = POISON

    def _write(self, request, index) -> None:
        self.kv[:, :, request.blocks[index]] = pattern(request.tokens[: (index + 1) * BLOCK])

    def _look(self, request, whole) -> None:
        for index in range(whole):
            self.looked += 1
            expected = pattern(request.tokens[: (index + 1) * BLOCK])
            self.wrong += not np.array_equal(self.kv[:, :, request.blocks[index]], expected)


def wrong_blocks(engines, seed, mode, *, careless=False, unordered=(), races=None) -> int:
    """Run some hundred steps; return how many blocks an engine has seen that were not right.

    races: gets what a checker around the device finds.

    careless: blocks are freed though ``finish`` said to keep them. unordered: streams whose
    copies do not wait.
    """
    toy = engines(chunks=10)
    device = ChaosDevice(seed, mode)
    if races is not None:
        device = Checked(device, races.append)
    engine = Engine(toy.cache, device, seed)
    engine.careless = careless
    for role in unordered:
        copies = {"load": "scatter", "store": "gather"}[role]
        setattr(device, copies, partial(unfenced, getattr(device, copies)))
    with contextlib.nullcontext() if races is None else told_of_seals(device, toy.cache):
        for _ in range(300):
            engine.step()
        engine.finish()
    assert engine.looked > 20
    assert engine.loads > 2
    assert not engine.kept
    assert len(engine.free) == BLOCKS
    engines.close(toy)
    return engine.wrong


@contextlib.contextmanager
def told_of_seals(device, cache):
    """Tell a checker of the checksums that threads of the cache take of slots, and when.

    A seal comes after the settling of its plan, and whoever has waited for all comes after it.
    """
    settle, flush, settled, sealed = cache.settle, cache.flush, [{}], []

    def settles(plan, result):
        settled[0] = device.sent()
        settle(plan, result)

    def seals(data):
        device.received(settled[0])
        device.touch("seal", reads=[np.frombuffer(data, np.uint8)])
        sealed.append(device.sent())
        return checksum(data)

    def flushes(timeout):
        done = flush(timeout=timeout)
        for clock in sealed:
            device.received(clock)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "checksum", seals)
        patch.setattr(cache, "settle", settles)
        patch.setattr(cache, "flush", flushes)
        yield
    assert sealed


def unfenced(copy, stream, copies, after):
    return copy(stream, copies, ())


@pytest.mark.parametrize("mode", ORDERS)
def test_in_any_order_that_the_fences_allow_every_block_is_right(engines, mode):
    assert [wrong_blocks(engines, seed, mode) for seed in SEEDS] == [0] * len(SEEDS)


@pytest.mark.parametrize("role", ["load", "store"])
def test_without_its_fence_a_copy_is_wrong(engines, role):
    """The twin of H05: the store reads before the compute has written, the load under it."""
    assert any(wrong_blocks(engines, s, "starve compute", unordered=(role,)) for s in SEEDS)


@pytest.mark.parametrize("mode", ["lazy", "starve store"])
def test_blocks_freed_before_their_release_are_stored_under_the_old_key(engines, mode):
    """The twin of H15."""
    assert any(wrong_blocks(engines, seed, mode, careless=True) for seed in LATE)


checked = pytest.mark.inside("the checker is told of the cache's own threads")


@checked
@pytest.mark.parametrize("mode", ORDERS)
def test_a_checker_finds_a_fence_between_every_two_copies_and_before_every_seal(engines, mode):
    races = []
    assert not any(wrong_blocks(engines, seed, mode, races=races) for seed in SEEDS[:5])
    assert races == []


@checked
@pytest.mark.parametrize("role", ["load", "store"])
def test_a_checker_finds_copies_without_a_fence_on_every_schedule(engines, role):
    """The twin, and no byte has to be wrong for it."""
    for seed in SEEDS[:5]:
        races = []
        wrong_blocks(engines, seed, "random", unordered=(role,), races=races)
        assert races


@checked
def test_a_checker_finds_blocks_that_are_freed_too_early(engines):
    for seed in SEEDS[:5]:
        races = []
        wrong_blocks(engines, seed, "lazy", careless=True, races=races)
        assert races


@checked
def test_a_checker_finds_seals_of_copies_that_nobody_waited_for(engines, monkeypatch):
    """The twin of the seals: every copy counts as done as soon as it is asked for."""
    monkeypatch.setattr(
        CopyTransfer, "_look", lambda self, timeout: CopyResult(CopyStatus.OK, self._tokens)
    )
    for seed in SEEDS[:5]:
        races = []
        wrong_blocks(engines, seed, "random", races=races)
        assert [race for race in races if race.second.startswith("seal by thread")]
