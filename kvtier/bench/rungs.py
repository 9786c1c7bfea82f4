"""The rungs of a machine's memory hierarchy: what one copy in memory takes, and what each tier."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

import kvtier
from kvtier.catalog.lease import Lease
from kvtier.codecs.known import LOSSLESS
from kvtier.config import hidden, parse_tier
from kvtier.errors import ConfigError
from kvtier.prefix import Prefix
from kvtier.testing.records import kv_like
from kvtier.transfer import CopyResult, CopyStatus
from kvtier.units import format_bytes

_BLOCK: Final = 16
_GEOMETRY: Final = kvtier.Geometry(
    (kvtier.Component(layers=32, heads=8, head_size=128),),
    block_tokens=(_BLOCK,),
    chunk_tokens=_BLOCK,
)
_CHUNK_BYTES: Final = _GEOMETRY.bytes_per_token * _BLOCK  # 2 MiB
_CHUNKS: Final = 32
_TRIES: Final = 5
_SECONDS: Final = 60.0
_COPIED: Final = 64 << 20
_ENCODED: Final = 16 << 20


class Rung(msgspec.Struct, frozen=True):
    """What a place for KV takes. Of parts of 2 MiB; latency in seconds, rates in bytes a second."""

    tier: str
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


def memcpy() -> Rung:
    """Return what copying within memory takes, with one thread."""
    source, target = np.ones(_COPIED, np.uint8), np.zeros(_COPIED, np.uint8)
    took = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        np.copyto(target, source)
        took.append(time.perf_counter() - began)
    rate = _COPIED / statistics.median(took)
    return Rung("memcpy", 0.0, rate, rate)


class CodecRung(NamedTuple):
    """What the lossless codec takes of a core: raw bytes a second, and the part of them saved."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    saved: float

    @property
    def pays_below(self) -> float:
        """Bytes a second of a thread's link, down and up alike, below which it saves time."""
        return 2 * self.saved / (1 / self.encode_bytes_per_s + 1 / self.decode_bytes_per_s)


def codec() -> CodecRung:
    """Return what the lossless codec takes of what looks like bfloat16 KV, by CPU time."""
    raw = kv_like(1, _ENCODED)
    into = memoryview(bytearray(_ENCODED))
    took: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        began = time.thread_time()
        count = LOSSLESS.encode(raw, into)
        between = time.thread_time()
        LOSSLESS.decode(into[:count], into)  # in place, as a tier does it
        took.append((between - began, time.thread_time() - between))
    encode, decode = (_ENCODED / statistics.median(one) for one in zip(*took, strict=True))
    return CodecRung(encode, decode, 1 - count / _ENCODED)


def tier_rung(url: str) -> Rung:
    """Write 64 MiB into a tier and read it back; what was written is deleted.

    url: as ``kvtier.open`` takes it. Blocks for seconds. Raises ConfigError when the tier cannot
    be used, or does not give back what it took.
    """
    tier = parse_tier(url)
    scheme, least = tier.scheme, 2 * _CHUNKS * _CHUNK_BYTES
    if scheme == "dram":
        raise ConfigError("dram is what tiers are read into; name one below it")
    if tier.capacity is not None and tier.capacity < least:
        raise ConfigError(
            f"a {scheme} tier of {format_bytes(tier.capacity)} is too small for what is written to "
            f"measure it; give it {format_bytes(least)} at least"
        )
    given = url.partition("?")[2]
    more = [
        option
        # What is written is not KV: a codec would make too much of it.
        for option in ("admission=through", "write_budget=unlimited", "codec=raw")
        if option.partition("=")[0] not in given
    ]
    name = f"kvtier doctor {os.getpid()}"
    with kvtier.open(
        f"dram:{4 * _CHUNKS * _CHUNK_BYTES}B",
        "&".join([url, *more]),
        namespace=kvtier.Namespace(name, _GEOMETRY),
    ) as cache:
        check_served(cache)
        try:
            return _measured(cache, hidden(url), scheme)
        finally:
            _removed(cache, hidden(url))


def check_served(cache: kvtier.Cache) -> None:
    """Refuse to measure a cache of which a tier is not served. Raises ConfigError."""
    for tier, why in cache.health().troubles.items():
        raise ConfigError(f"{tier} cannot be measured: {why}")


def _removed(cache: kvtier.Cache, url: str) -> None:
    try:
        cache.purge(timeout=_SECONDS)
    except TimeoutError as error:
        raise ConfigError(
            f"{url} did not delete within {_SECONDS:.0f} s what was written to it; see whether its "
            "server or its disk hangs"
        ) from error


def _measured(cache: kvtier.Cache, url: str, tier: str) -> Rung:
    prompt = np.arange(_CHUNKS * _BLOCK + 1, dtype=np.int32)
    prefix = cache.prefix(prompt)
    began = time.perf_counter()
    plan = cache.plan_save(prefix, list(range(_CHUNKS)))
    if plan is not None:
        cache.settle(plan, CopyResult(CopyStatus.OK, plan.tokens))
    cache.flush(timeout=_SECONDS)
    wrote = time.perf_counter() - began
    one = statistics.median(_read(cache, prefix, number, number + 1) for number in range(_TRIES))
    took = _read(cache, prefix, 0, _CHUNKS)
    if not one or not took:
        raise ConfigError(f"{url} does not give back what was written to it; see its server's log")
    rest = (_CHUNKS - 1) * _CHUNK_BYTES
    rate = rest / (took - one) if took > one else _CHUNKS * _CHUNK_BYTES / took
    latency = max(one - _CHUNK_BYTES / rate, 0.0)
    return Rung(tier, latency, rate, _CHUNKS * _CHUNK_BYTES / wrote)


def _read(cache: kvtier.Cache, prefix: Prefix, first: int, stop: int) -> float:
    """Return the seconds that reading chunks [first, stop) takes; 0 when they do not come."""
    cache.clear("dram")
    match = cache.match(prefix.head(prefix.tokens[: stop * _BLOCK + 1], stop))
    if match.chunks < stop:
        return 0.0
    began = time.perf_counter()
    lease: Lease | None = cache.fetch(
        match, timeout=_SECONDS, deadline=_SECONDS, first=first
    ).result(_SECONDS)
    took = time.perf_counter() - began
    if lease is None:
        return 0.0
    with lease:
        return took if lease.chunks == stop - first else 0.0


def keep(rungs: list[Rung], path: Path) -> None:
    """Write rungs for ``Cache.seed``. Raises ConfigError where that cannot be done."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(rungs), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}); name another file") from error
