"""What the lossless codec saves and costs: on real KV, and over a link to a real S3 server.

    python benchmarks/codec.py [--rounds N] [--only codec|link] [--json FILE] [--plot FILE.png]

The KV is SmolLM2-135M's of Python's documentation, in bfloat16, in chunks of 256 tokens. In every
round each contender has its turn.

codec  one thread: the codec, zstd at level 1 on the plain bytes, and a copy; and what each makes of
       the bytes, beside what the order-0 entropy of the upper bytes bounds
link   prompts of 8 common chunks and one of their own: one host saves four, another, which has
       none, loads them, with codec=raw, lossless and auto; over links of 50 and 200 MB/s, and over
       none but the loopback. Bytes are those on the link, times what all four took in sum
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import zstandard
from plot import kept, option
from slow_link import SlowLink

import kvtier
from kvtier.bench.models import BLOCK_TOKENS
from kvtier.codecs.known import LOSSLESS, RAW
from kvtier.connectors.base import Update
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.testing.real_kv import RealKv, real_kv
from kvtier.testing.seaweed import SeaweedServer

CHUNK = 256
BLOCKS = CHUNK // BLOCK_TOKENS
COMMON, PROMPTS = 8, 4
CHUNKS = COMMON + PROMPTS
CODECS = ("raw", "lossless", "auto")
LINKS = {"50MB/s": 50e6, "200MB/s": 200e6, "loopback": 0.0}

Found = dict[str, list[float]]


def main() -> None:
    """Measure, print a line a figure, and write them all down."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--only", choices=("codec", "link"))
    option(arguments)
    options = arguments.parse_args()
    found: Found = {}
    real = real_kv(CHUNKS, CHUNK)
    if options.only != "link":
        codec(real, options.rounds, found)
    if options.only != "codec":
        with SeaweedServer() as server:
            os.environ.update(server.env())
            server.create_bucket("bench")
            for name, speed in LINKS.items():
                with link(server, speed) as endpoint:
                    links(name, endpoint, real, options.rounds, found)
    for name, values in found.items():
        print(
            f"{name:44} {statistics.median(values):9.3f}   ({min(values):.3f} to {max(values):.3f})"
        )
    panels = {
        "GB/s of a core": "all.codec.*.gb_per_s",
        "times smaller": "all.codec.ratio.*",
        "saving over a link, s": "all.link.*.save_s",
        "loading, s": "all.link.*.load_s",
    }
    kept(report(found), options, panels)


def report(found: Found) -> dict[str, Any]:
    """Return medians and what was seen of each."""
    medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
    return {
        "median": medians,
        "all": {name: [round(v, 4) for v in all_] for name, all_ in found.items()},
    }


# ----------------------------------------------------------------------------------------- codec


def codec(real: RealKv, rounds: int, found: Found) -> None:
    """Encode and decode chunks, each contender in its turn."""
    chunks = [np.frombuffer(real.chunk(number), np.uint8) for number in range(COMMON)]
    size = chunks[0].nbytes
    into = [np.zeros(size, np.uint8) for _ in chunks]
    stored = [
        one[: LOSSLESS.encode(raw.data, one.data)] for raw, one in zip(chunks, into, strict=True)
    ]
    ready = [one.copy() for one in stored]
    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    plain = [packer.compress(raw.data) for raw in chunks]
    out = np.zeros(size, np.uint8)
    space = np.zeros(size, np.uint8)

    def decode(one: np.ndarray) -> None:
        if not LOSSLESS.decode(one.data, out.data):
            raise AssertionError("it was not decoded")

    contenders: dict[str, tuple[Sequence[Any], Callable[[Any], object]]] = {
        "encode lossless": (chunks, lambda raw: LOSSLESS.encode(raw.data, space.data)),
        "encode zstd-1": (chunks, lambda raw: packer.compress(raw.data)),
        "decode lossless": (ready, decode),
        "decode zstd-1": (plain, unpacker.decompress),
        "memcpy": (chunks, lambda raw: RAW.encode(raw.data, space.data)),
    }
    for _ in range(rounds + 1):
        for name, (items, call) in contenders.items():
            began = time.perf_counter()
            for item in items:
                call(item)
            took = time.perf_counter() - began
            found.setdefault(f"codec.{name}.gb_per_s", []).append(size * len(items) / took / 1e9)
    for name in contenders:
        del found[f"codec.{name}.gb_per_s"][0]  # the first one finds its memory
    for raw, one, other in zip(chunks, ready, plain, strict=True):
        decode(one)
        if not np.array_equal(out, raw):
            raise AssertionError("other bytes came back")
        found.setdefault("codec.ratio.lossless", []).append(size / len(one))
        found.setdefault("codec.ratio.zstd-1", []).append(size / len(other))
        found.setdefault("codec.ratio.bound", []).append(16 / (8 + entropy(raw[1::2])))
        of_bound = (size / len(one)) / found["codec.ratio.bound"][-1]
        found.setdefault("codec.ratio.of_bound", []).append(of_bound)


def entropy(plane: np.ndarray) -> float:
    """Return the order-0 entropy of bytes, in bits each."""
    counts = np.bincount(plane, minlength=256)
    share = counts[counts > 0] / len(plane)
    return float(-(share * np.log2(share)).sum())


# ------------------------------------------------------------------------------------------ link


class Host:
    """A cache, and an engine of numpy blocks whose KV of a text is known."""

    def __init__(self, url: str, namespace: kvtier.Namespace, like: np.ndarray) -> None:
        nbytes = like[:, :, :BLOCKS].nbytes
        self.cache = kvtier.open(f"dram:{4 * CHUNKS * nbytes}B", url, namespace=namespace)
        self.kv = np.zeros_like(
            like, shape=(*like.shape[:2], (COMMON + 1) * BLOCKS, *like.shape[3:])
        )
        self.device = CpuDevice()
        self.connector = ReferenceConnector(self.cache, self.kv, self.device)
        self._serial = 0

    def save(self, tokens: np.ndarray, kv: np.ndarray) -> None:
        """Save what a prompt has, and wait until DRAM has it."""
        name = self._name()
        self.kv[:] = kv
        self.connector.save(name, tokens, list(range(len(tokens) // BLOCK_TOKENS)))
        if self.connector.finish(name):
            self._until(lambda update: name in update.released)

    def load(self, tokens: np.ndarray, kv: np.ndarray) -> None:
        """Load all of a prompt, and compare it."""
        name = self._name()
        match = self.connector.match(name, tokens, 0)
        while match.pending:
            self.connector.wait(5)
            match = self.connector.match(name, tokens, 0)
        self.kv[:] = 0
        self.connector.load(name, list(range(match.tokens // BLOCK_TOKENS)))
        loaded = self._until(lambda update: update.loaded).loaded[0]
        self.connector.finish(name)
        if loaded.tokens != kv.shape[2] * BLOCK_TOKENS or not np.array_equal(self.kv, kv):
            raise AssertionError(f"{loaded} is not what was saved")

    def _name(self) -> str:
        self._serial += 1
        return f"request-{self._serial}"

    def _until(self, wanted: Callable[[Update], object]) -> Update:
        deadline = time.monotonic() + 60
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


@contextlib.contextmanager
def link(
    server: SeaweedServer, speed: float
) -> Iterator[tuple[str, Callable[[], tuple[int, int]]]]:
    """Yield the way to a server, and what counts its bytes."""
    if not speed:
        yield server.endpoint, lambda: (0, 0)
        return
    with SlowLink(server.port, speed) as slow:
        yield slow.endpoint, slow.sent


def links(
    name: str,
    way: tuple[str, Callable[[], tuple[int, int]]],
    real: RealKv,
    rounds: int,
    found: Found,
) -> None:
    """Save and load prompts with each codec in turn; the first round lets `auto` measure."""
    endpoint, sent = way
    kv, namespace = real
    prompts = [
        np.concatenate((kv[:, :, : COMMON * BLOCKS], kv[:, :, at : at + BLOCKS]), axis=2)
        for at in range(COMMON * BLOCKS, CHUNKS * BLOCKS, BLOCKS)
    ]
    hosts: dict[str, list[Host]] = {}
    for codec_name in CODECS:
        place = f"s3://bench/{name.replace('/', '-')}/{codec_name}/records"
        url = f"{place}?capacity=unbounded&admission=through&endpoint={endpoint}&codec={codec_name}"
        hosts[codec_name] = [Host(url, namespace, kv) for _ in range(2)]
    try:
        for number in range(rounds + 1):
            for turn in range(len(CODECS)):
                codec_name = CODECS[(number + turn) % len(CODECS)]
                seen = saved_and_loaded(*hosts[codec_name], prompts, number, sent)
                if number:
                    for what, value in seen.items():
                        found.setdefault(f"link.{name}.{codec_name}.{what}", []).append(value)
    finally:
        for pair in hosts.values():
            for host in pair:
                host.close()


def saved_and_loaded(
    one: Host,
    other: Host,
    prompts: Sequence[np.ndarray],
    number: int,
    sent: Callable[[], tuple[int, int]],
) -> dict[str, float]:
    """Save prompts that nobody has seen at one host, load them at another; return what it took."""
    common = np.random.default_rng(number).integers(0, 49_000, COMMON * CHUNK)
    texts = [
        np.concatenate((common, np.full(CHUNK, at), [0])).astype(np.int32)
        for at in range(len(prompts))
    ]
    before = sent()
    began = time.perf_counter()
    for tokens, kv in zip(texts, prompts, strict=True):
        one.save(tokens, kv)
    if not one.cache.flush(timeout=120):
        raise TimeoutError("it was not written down")
    saved, between = time.perf_counter() - began, sent()
    began = time.perf_counter()
    for tokens, kv in zip(texts, prompts, strict=True):
        other.load(tokens, kv)
    loaded, after = time.perf_counter() - began, sent()
    for host in (one, other):
        host.cache.clear("dram", timeout=60)
    return {
        "save_s": saved,
        "load_s": loaded,
        "up_mb": (between[0] - before[0]) / 1e6,
        "down_mb": (after[1] - between[1]) / 1e6,
    }


if __name__ == "__main__":
    main()
