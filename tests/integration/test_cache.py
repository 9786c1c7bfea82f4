"""A Cache end to end, with real blocks, a real arena and a real NVMe directory."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import numpy as np
import pytest

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.copyplan import CopyPlan
from kvtier.device.cpu import CpuDevice
from kvtier.errors import ConfigError, MisuseError
from kvtier.transfer import CopyResult, CopyStatus

BLOCK, CHUNK = 16, 64
GEOMETRY = kvtier.Geometry(
    (kvtier.Component(layers=2, heads=2, head_size=8),), block_tokens=(BLOCK,), chunk_tokens=CHUNK
)
CHUNK_BYTES = GEOMETRY.bytes_per_token * CHUNK
NAMESPACE = kvtier.Namespace("tiny", GEOMETRY)
BLOCKS = 256


class Toy:
    """An engine of numpy blocks: its KV of a block is a pattern of the tokens before it."""

    def __init__(self, cache: kvtier.Cache) -> None:
        self.kv = np.zeros((2, 2, BLOCKS, BLOCK, 2, 8), np.uint16)
        self.cache = cache
        self.device = CpuDevice()
        self.connector = ReferenceConnector(cache, self.kv, self.device)

    def compute(self, tokens: np.ndarray, blocks: range) -> None:
        for index, block in enumerate(blocks):
            self.kv[:, :, block] = pattern(tokens[: (index + 1) * BLOCK])

    def save(self, name: str, tokens: np.ndarray, first_block: int = 0) -> None:
        blocks = range(first_block, first_block + len(tokens) // BLOCK)
        self.compute(tokens, blocks)
        self.connector.save(name, tokens, list(blocks))
        if self.connector.finish(name):
            self.until(lambda update: name in update.released)
        assert self.cache.flush(timeout=20)

    def load(self, name: str, tokens: np.ndarray, computed: int = 0, first_block: int = 128):
        """Load what is offered into fresh blocks; return offered, Loaded, and whether exact."""
        match = self.connector.match(name, tokens, computed)
        while match.pending:
            self.connector.wait(5)
            match = self.connector.match(name, tokens, computed)
        if not match.tokens:
            self.connector.finish(name)
            return match.tokens, None, True
        self.kv[:, :, first_block:] = 0xABAB
        blocks = list(range(first_block, first_block + match.tokens // BLOCK))
        self.connector.load(name, blocks)
        loaded = self.until(lambda update: update.loaded).loaded[0]
        self.connector.finish(name)
        exact = all(
            np.array_equal(
                self.kv[:, :, block],
                np.broadcast_to(
                    pattern(tokens[: computed + (index + 1) * BLOCK]), (2, 2, BLOCK, 2, 8)
                ),
            )
            for index, block in enumerate(blocks[: loaded.tokens // BLOCK])
        )
        untouched = bool((self.kv[:, :, first_block + match.tokens // BLOCK :] == 0xABAB).all())
        return match.tokens, loaded, exact and untouched

    def until(self, wanted):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            update = self.connector.poll()
            if wanted(update):
                return update
            self.connector.wait(1)
        raise TimeoutError

    def close(self) -> None:
        self.connector.close()
        self.cache.close()
        self.device.close()


def pattern(tokens: np.ndarray) -> np.ndarray:
    """Return KV of one block that depends on every token up to its end."""
    seed = int.from_bytes(tokens.astype("<i4").tobytes()[-8:], "little") + int(tokens.sum())
    return np.random.default_rng(seed).integers(0, 1 << 16, (2, 2, BLOCK, 2, 8), np.uint16)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


def opened(*urls: str, namespace: kvtier.Namespace = NAMESPACE, **more) -> Toy:
    return Toy(kvtier.open(*urls, namespace=namespace, **more))


def dram(chunks: int) -> str:
    return f"dram:{chunks * CHUNK_BYTES}B"


@pytest.fixture
def toy():
    one = opened(dram(32))
    yield one
    one.close()


@pytest.fixture
def folder(tmp_path):
    return f"lmdb:{tmp_path}/kv?capacity=64MiB"


# ------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize(
    ("length", "offered"), [(63, 0), (64, 48), (65, 64), (127, 64), (128, 112), (129, 128)]
)
def test_the_offer_is_whole_blocks_below_the_prompt(toy, length, offered):
    """H06: at least one token is left to compute, and no half block is offered."""
    tokens = prompt(256)
    toy.save("a", tokens)
    got, loaded, exact = toy.load("b", tokens[:length])
    assert got == offered
    assert exact
    assert loaded is None or loaded.tokens == offered


@pytest.mark.parametrize("computed", [16, 48, 64, 80, 128, 176])
def test_a_load_begins_where_the_engine_has_no_blocks(toy, computed):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    offered, loaded, exact = toy.load("b", tokens, computed)
    assert offered == loaded.tokens == 256 - computed
    assert exact


def test_scattered_blocks_are_saved_and_loaded_exactly(toy):
    tokens = prompt(129)
    order = [5, 90, 17, 18, 19, 3, 77, 40]
    for index, block in enumerate(order):
        toy.kv[:, :, block] = pattern(tokens[: (index + 1) * BLOCK])
    toy.connector.save("a", tokens[:128], order)
    toy.connector.finish("a")
    toy.until(lambda update: "a" in update.released)
    toy.cache.flush(timeout=20)
    offered, _, exact = toy.load("b", tokens, first_block=128)
    assert (offered, exact) == (128, True)


def test_another_identity_shares_nothing(toy):
    """H08: adapter and salt separate; the same adapter hits."""
    tokens = prompt(129)
    request = kvtier.Request(adapter=b"A" * 32)
    toy.compute(tokens, range(8))
    toy.connector.save("a", tokens, list(range(8)), request)
    toy.connector.finish("a")
    toy.until(lambda update: "a" in update.released)
    toy.cache.flush(timeout=20)
    for other in (None, kvtier.Request(adapter=b"B" * 32), kvtier.Request(salt=b"x")):
        assert toy.connector.match(f"m{other}", tokens, 0, other).tokens == 0
    assert toy.connector.match("same", tokens, 0, request).tokens == 128
    toy.connector.finish("same")


def test_each_chunk_is_saved_once(toy):
    tokens = prompt(256)
    toy.compute(tokens, range(16))
    for length in range(16, 257, 16):  # chunked prefill, then decode
        toy.connector.save("a", tokens[:length], list(range(length // BLOCK)))
    toy.connector.finish("a")
    toy.until(lambda update: "a" in update.released)
    toy.cache.flush(timeout=20)
    toy.save("again", tokens)
    assert toy.cache.metrics.get("saved_chunks") == 4
    assert toy.load("b", tokens)[2]


# --------------------------------------------------------------------------------- slower tiers


def test_a_new_process_would_find_everything_on_disk(folder):
    """H20: reopened, all chunks hit, and saving them again writes nothing."""
    tokens = prompt(1025)
    first = opened(dram(32), folder)
    first.save("a", tokens[:1024])
    first.close()
    second = opened(dram(32), folder)
    offered, loaded, exact = second.load("b", tokens)
    assert (offered, exact) == (1024, True)
    assert loaded.tiers == {"lmdb": 1024}
    second.save("c", tokens[:1024])
    assert second.cache.metrics.get("spilled_bytes", tier="lmdb") == 0
    assert second.load("d", tokens)[1].tiers == {"dram": 1024}
    second.close()


def test_dram_smaller_than_the_prompt_gives_its_head(folder):
    tokens = prompt(1025)
    first = opened(dram(32), folder)
    first.save("a", tokens[:1024])
    first.close()
    second = opened(dram(4), folder)
    offered, loaded, exact = second.load("b", tokens)
    assert (offered, loaded.tokens, exact) == (4 * CHUNK, 4 * CHUNK, True)
    second.close()


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "2"},
        {"quantisation": "int8"},
        {"tenant": "b"},
        {"geometry": kvtier.Geometry(GEOMETRY.components, "float16", (BLOCK,), CHUNK)},
        {"geometry": kvtier.Geometry(GEOMETRY.components, "bfloat16", (BLOCK,), CHUNK, "other")},
    ],
)
def test_another_namespace_in_the_same_directory_never_meets_this_one(folder, change):
    """H03: equal sizes, equal tokens, another identity: no hit, and both live on."""
    tokens = prompt(257)
    first = opened(dram(8), folder)
    first.save("a", tokens[:256])
    first.close()
    fields = {"model": "tiny", "geometry": GEOMETRY, **change}
    other = opened(dram(8), folder, namespace=kvtier.Namespace(**fields))
    assert other.load("b", tokens)[0] == 0
    other.save("c", tokens[:256])
    other.close()
    again = opened(dram(8), folder)
    assert again.load("d", tokens)[:2][0] == 256
    again.close()


def test_evicted_from_dram_and_fetched_again(folder):
    one = opened(dram(8), folder)
    many = [prompt(513, seed) for seed in range(4)]
    for index, tokens in enumerate(many):
        one.save(str(index), tokens[:512])
    for index, tokens in enumerate(many):
        offered, _, exact = one.load(f"b{index}", tokens)
        assert (offered, exact) == (512, True)
    assert one.cache.metrics.get("fetched_bytes", tier="lmdb") >= 3 * 8 * CHUNK_BYTES
    one.close()


def test_a_full_directory_keeps_heads_and_stays_exact(tmp_path):
    capacity = 3 << 20  # 480 chunks of 12 KiB with their headers do not fit
    one = opened(dram(16), f"lmdb:{tmp_path}/kv?capacity={capacity}B")
    for seed in range(60):
        one.save(f"s{seed}", prompt(512, seed))
    used = sum(
        file.stat().st_blocks * 512 for file in (tmp_path / "kv").rglob("*") if file.is_file()
    )
    assert used <= capacity
    offers = [one.load(f"l{seed}", np.append(prompt(512, seed), 1)) for seed in range(60)]
    assert all(exact for _, _, exact in offers)
    assert sum(offered for offered, _, _ in offers) >= 40 * CHUNK
    assert one.cache.metrics.get("evicted_parts", tier="lmdb") > 0
    one.close()


# ------------------------------------------------------------------------------- holds and time


def test_a_full_arena_answers_at_once_and_recovers(folder):
    """H11: every slot leased, so a fetch gives nothing, quickly; a release heals it."""
    one = opened(dram(4), folder)
    first, second = prompt(257, 1), prompt(257, 2)
    one.save("a", first[:256])
    one.save("b", second[:256])
    match = one.cache.match(first)
    lease = one.cache.fetch(match, timeout=5, deadline=60).result(5)
    assert lease.chunks == 4
    begin, used = time.monotonic(), time.process_time()
    assert one.cache.fetch(one.cache.match(second), timeout=0.2, deadline=60).result(5) is None
    assert time.monotonic() - begin < 2
    assert time.process_time() - used < 0.5
    lease.release()
    assert one.load("c", second)[0] == 256
    one.close()


def test_a_request_that_never_loads_frees_its_lease_when_it_ends(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    for turn in range(200):
        assert toy.connector.match(f"r{turn}", tokens, 0).tokens == 256
        toy.connector.finish(f"r{turn}")
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


def test_blocks_are_kept_while_a_save_reads_them(toy):
    """H15: a preempted request's blocks are not for others until its save is done."""
    tokens = prompt(257)
    toy.compute(tokens, range(16))
    gate = threading.Event()
    toy.device.stream("store").enqueue(lambda: gate.wait(10))
    toy.connector.save("a", tokens[:256], list(range(16)))
    assert toy.connector.finish("a")
    assert toy.connector.poll().released == ()
    gate.set()
    toy.until(lambda update: update.released == ("a",))
    toy.cache.flush(timeout=20)
    assert toy.load("b", tokens)[2]


def test_reusing_blocks_too_early_would_store_the_wrong_bytes(toy):
    """The twin: what `finish` returning True is for."""
    tokens = prompt(257)
    toy.compute(tokens, range(16))
    gate = threading.Event()
    toy.device.stream("store").enqueue(lambda: gate.wait(10))
    toy.connector.save("a", tokens[:256], list(range(16)))
    toy.connector.finish("a")
    toy.kv[:, :, :16] = 7  # another request writes before `released`
    gate.set()
    toy.until(lambda update: update.released == ("a",))
    toy.cache.flush(timeout=20)
    assert not toy.load("b", tokens)[2]


def test_an_aborted_load_reports_its_blocks_once(toy):
    """H16: aborted while loading, the blocks come back exactly once, after the copy."""
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    gate = threading.Event()
    toy.device.stream("load").enqueue(lambda: gate.wait(10))
    assert toy.connector.match("b", tokens, 0).tokens == 256
    toy.connector.load("b", list(range(128, 144)))
    assert toy.connector.finish("b")
    assert toy.connector.poll() == type(toy.connector.poll())()
    gate.set()
    update = toy.until(lambda update: update.released)
    assert update.released == ("b",)
    assert update.loaded == ()
    assert toy.connector.poll().released == ()
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


def test_a_failed_copy_is_a_load_of_nothing(toy, monkeypatch):
    """H02: a copy that fails is reported, and claims no block."""
    tokens = prompt(257)
    toy.save("a", tokens[:256])

    def broken(*_args, **_kwargs):
        raise OSError("the link is down")

    monkeypatch.setattr("kvtier.device.cpu._copy", broken)
    assert toy.connector.match("b", tokens, 0).tokens == 256
    toy.connector.load("b", list(range(128, 144)))
    assert toy.until(lambda update: update.loaded).loaded[0].tokens == 0
    toy.connector.finish("b")
    monkeypatch.undo()
    assert toy.load("c", tokens)[2]


def test_a_failed_gather_is_never_stored(toy, monkeypatch):
    """H01: what did not copy is not visible, and can be saved again."""
    tokens = prompt(257)

    def broken(*_args, **_kwargs):
        raise OSError("the link is down")

    monkeypatch.setattr("kvtier.device.cpu._copy", broken)
    toy.save("a", tokens[:256])
    monkeypatch.undo()
    assert toy.load("b", tokens)[0] == 0
    toy.save("c", tokens[:256])
    assert toy.load("d", tokens)[2]


# -------------------------------------------------------------------------------- plans, misuse


def test_a_plan_crosses_as_bytes_and_is_settled_once(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    match = toy.cache.match(tokens)
    lease = toy.cache.lease(match, deadline=5)
    plan = toy.cache.plan_load(lease, list(range(128, 144)))
    again = CopyPlan.decode(bytes(plan))
    assert again == plan
    pages = toy.cache.bind(toy.kv, toy.device)
    result = pages.execute(again, after=()).result(5)
    assert result == CopyResult(CopyStatus.OK, 256)
    toy.cache.settle(again, result)
    with pytest.raises(MisuseError):
        toy.cache.settle(again, result)
    lease.release()
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


def test_a_plan_that_timed_out_is_not_settled(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    lease = toy.cache.lease(toy.cache.match(tokens), deadline=5)
    plan = toy.cache.plan_load(lease, list(range(128, 144)))
    with pytest.raises(MisuseError, match="not ended"):
        toy.cache.settle(plan, CopyResult(CopyStatus.TIMEOUT))
    toy.cache.settle(plan, CopyResult(CopyStatus.FAILED))
    lease.release()


def test_loading_more_than_was_leased_is_misuse(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    lease = toy.cache.lease(toy.cache.match(tokens), deadline=5)
    for blocks, start in ((17, None), (4, 8), (4, 208)):
        with pytest.raises(MisuseError):
            toy.cache.plan_load(lease, list(range(blocks)), start=start)
    lease.release()


def test_after_close_every_call_says_so(toy):
    toy.cache.close()
    with pytest.raises(MisuseError, match="closed"):
        toy.cache.match(prompt(100))
    toy.cache.close()


def test_a_child_process_cannot_use_its_parents_cache(toy):
    """H24: a clear error in the child, and no harm to the parent."""
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    with contextlib.suppress(DeprecationWarning):
        child = os.fork()
    if not child:
        code = 1
        try:
            toy.cache.match(tokens)
        except MisuseError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert toy.load("b", tokens)[2]


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        (["dram:1KiB"], "below one chunk"),
        (["dram:900TiB"], "available"),
        (["lmdb:/somewhere?capacity=1GiB"], "begins with one dram"),
        (["dram:1MiB", "lmbd:/x?capacity=1GiB"], "did you mean 'lmdb'"),
        (["dram:1MiB", "lmdb:/proc/nowhere?capacity=1GiB"], "/proc"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing_open(urls, words):
    with pytest.raises(ConfigError, match=words):
        kvtier.open(*urls, namespace=NAMESPACE)


def test_blocks_of_another_shape_are_refused(toy):
    for shape in ((2, 2, 8, 32, 2, 8), (2, 2, 8, 16, 2, 4), (3, 2, 8, 16, 2, 8)):
        with pytest.raises(ConfigError):
            toy.cache.bind(np.zeros(shape, np.uint16), toy.device)
