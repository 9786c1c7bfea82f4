"""From timed requests to a report: the arithmetic of a benchmark, and what is wrong with it."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import statistics
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvtier.bench.messages import Served
from kvtier.gpus import gpu_title

_MS: Final = 1e3
_PACKAGES: Final = ("kvtier", "torch", "numpy", "lmdb", "boto3")

_OVERHEAD: Final = 0.05
_SLACK_BYTES: Final = 1 << 18
_RECORD_BYTES: Final = 2 * 4096
"""How much more than the payload the system may count: a part of it, some bytes, and of each
record a page for its header and one to fill up."""

_FETCH_SECONDS: Final = 5.0  # what the reference connector gives a fetch
_HANG_SECONDS: Final = 5.0


class Sample(NamedTuple):
    """One timed request. expected: prompt tokens that its arm must take from its tier, at least.

    s3_bytes: body bytes that the S3 server counted meanwhile; None where nobody counts.
    """

    served: Served
    expected: int = 0
    s3_bytes: int | None = None


class Summary(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p99: float


class Ratio(msgspec.Struct, frozen=True):
    """A ratio of paired measurements: the median, and how far the pairs spread."""

    median: float
    low: float
    high: float
    pairs: int


class ArmReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one arm did over its timed requests.

    disk_read_bytes: counted by the kernel for the arm's process. s3_sent_bytes: counted by the
    S3 server. claimed_bytes: what the cache says that it fetched, by tier.
    hit_rate, hit_rates: percent of the prompt tokens of the requests whose times count, in all
    and by tier. The ratios of `no-reuse` are of pairs
    with the recompute arm's same request. cold_ttft_ms: of documents that are read for the first
    time. ttft_each_ms: of every request whose time counts, in their order.
    """

    name: str
    requests: int
    ttft_ms: Summary
    tpot_ms: Summary | None
    hit_tokens: Mapping[str, int]
    recomputed_tokens: int
    hit_rate: float
    hit_rates: Mapping[str, float]
    tokens_sha256: str
    disk_read_bytes: int
    claimed_bytes: Mapping[str, int]
    s3_sent_bytes: int | None = None
    times_sooner_than_recompute: float | None = None
    ttft_over_hbm: float | None = None
    output_tokens_per_s: float | None = None
    ttft_over_recompute: Ratio | None = None
    throughput_over_recompute: Ratio | None = None
    cold_ttft_ms: Summary | None = None
    requests_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    ttft_each_ms: list[float] = []
    details: list[Served] | None = None


class Machine(msgspec.Struct, frozen=True):
    """What it ran on. gpu: that models computed on; empty where that was the CPU."""

    cpu: str
    cores: int
    system: str
    python: str
    packages: Mapping[str, str]
    gpu: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run.

    engine: what served, where that was another than kvtier's own. denominator: what the hit rates
    are of. capacities: bytes by tier, where they decide about hits. cut_prompts: that were longer
    than the model's context. ceiling: of a trace, the hit rate of a cache without bounds.
    prefill_over_plain_torch: how fast the engine's prefill is next to plain torch. spoilt: in bad
    weather, how many requests to the bucket met which fault.
    """

    workload: str
    model: str
    model_sha256: str
    args: Mapping[str, object]
    machine: Machine
    arms: list[ArmReport]
    problems: list[str]
    seconds: float
    denominator: str
    bytes_per_token: int
    engine: str = ""
    capacities: Mapping[str, int] = {}
    cut_prompts: int = 0
    ceiling: float | None = None
    prefill_over_plain_torch: float | None = None
    prefill_over_plain_torch_spread: Ratio | None = None
    spoilt: Mapping[str, int] = {}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, linear between the two nearest values."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def summary(seconds: Sequence[float]) -> Summary:
    """Summarise durations, in milliseconds to four decimals."""
    values = (statistics.fmean(seconds), percentile(seconds, 50), percentile(seconds, 99))
    return Summary(*(round(value * _MS, 4) for value in values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the median, least and largest of above[i] / below[i]."""
    pairs = [one / other for one, other in zip(above, below, strict=True)]
    return Ratio(
        round(statistics.median(pairs), 4), round(min(pairs), 4), round(max(pairs), 4), len(pairs)
    )


def digest(answers: Sequence[Sequence[int]]) -> str:
    """Return the sha256 of all output token ids, as little-endian int32, request by request."""
    ids = [token for answer in answers for token in answer]
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def arm_report(
    name: str, samples: Mapping[str, Sequence[Sample]], *, timed: slice, details: bool
) -> ArmReport:
    """Report on one arm. timed: which of its samples the durations are taken from."""
    mine = samples[name]
    hits: Counter[str] = Counter()
    claimed: Counter[str] = Counter()
    for sample in mine:
        hits.update(sample.served.hits)
        claimed.update(sample.served.fetched)
    counted = [sample.s3_bytes for sample in mine if sample.s3_bytes is not None]
    tpot = [sample.served.tpot_s for sample in mine if sample.served.tpot_s is not None]
    found: Counter[str] = Counter()
    for sample in mine[timed]:
        found.update(sample.served.hits)
    asked = found.total() + sum(sample.served.recomputed for sample in mine[timed])
    return ArmReport(
        name=name,
        requests=len(mine),
        ttft_ms=summary(_ttft(mine[timed])),
        tpot_ms=summary(tpot) if tpot else None,
        hit_tokens=+hits,
        recomputed_tokens=sum(sample.served.recomputed for sample in mine),
        hit_rate=_percent(found.total(), asked),
        hit_rates={tier: _percent(count, asked) for tier, count in found.items()},
        tokens_sha256=digest([sample.served.tokens for sample in mine]),
        disk_read_bytes=sum(sample.served.read_bytes for sample in mine),
        claimed_bytes=+claimed,
        s3_sent_bytes=sum(counted) if counted else None,
        times_sooner_than_recompute=_times(samples, "recompute", name, timed),
        ttft_over_hbm=_times(samples, name, "hbm", timed),
        ttft_each_ms=[round(seconds * _MS, 4) for seconds in _ttft(mine[timed])],
        details=[sample.served for sample in mine] if details else None,
    )


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 3) if whole else 0.0


def with_cold(arm: ArmReport, samples: Sequence[Sample]) -> ArmReport:
    """Add the time to first token of the samples that nothing can have been cached for."""
    return msgspec.structs.replace(arm, cold_ttft_ms=summary(_ttft(samples)))


def with_throughput(arm: ArmReport, seconds: float) -> ArmReport:
    """Add how much an arm served in `seconds`."""
    tokens = sum(arm.hit_tokens.values()) + arm.recomputed_tokens
    return msgspec.structs.replace(
        arm,
        requests_per_s=round(arm.requests / seconds, 4),
        prompt_tokens_per_s=round(tokens / seconds, 1),
    )


def problems(
    arms: Sequence[ArmReport],
    samples: Mapping[str, Sequence[Sample]],
    allowed: Mapping[str, Collection[str]],
) -> list[str]:
    """Say which answers differ, and which hits did not come from where they should.

    allowed: the tiers that an arm may take anything from.
    """
    found = []
    digests = Counter(arm.tokens_sha256 for arm in arms)
    common = digests.most_common(1)[0][0]
    reference = next((arm for arm in arms if arm.name == "recompute"), None)
    right = reference.tokens_sha256 if reference else common
    for arm in arms:
        if arm.tokens_sha256 != right:
            wrong = f"{arm.tokens_sha256[:12]}, not {right[:12]}"
            found.append(f"arm {arm.name} answers differently: its tokens hash to {wrong}")
        tiers = allowed.get(arm.name, ())
        rightly = " or ".join(tiers) or arm.name
        for number, sample in enumerate(samples[arm.name]):
            hits = sample.served.hits
            if sum(hits.get(tier, 0) for tier in tiers) < sample.expected or hits.keys() - set(
                tiers
            ):
                said = ", ".join(f"{count} from {tier}" for tier, count in hits.items())
                found.append(
                    f"arm {arm.name}, request {number}: of its tokens came {said or 'none'} from "
                    f"a cache; {sample.expected} should have come from {rightly}"
                )
                break
    return found


def hung(samples: Mapping[str, Sequence[Sample]], chaos: str) -> list[str]:
    """Say which requests of the arm in bad weather took far longer than recomputing all.

    A fetch may take its time first, and then all is computed; more than five seconds on top of
    that is a hang.
    """
    slowest = max(
        sample.served.ttft_s for arm, of_arm in samples.items() if arm != chaos for sample in of_arm
    )
    most = slowest + _FETCH_SECONDS + _HANG_SECONDS
    return [
        f"arm {chaos}, request {number} hung: its first token took {sample.served.ttft_s:.1f} s, "
        f"and {slowest:.1f} s at most elsewhere"
        for number, sample in enumerate(samples[chaos])
        if sample.served.ttft_s > most
    ]


def miscounted(arm: ArmReport, part: int) -> list[str]:
    """Say where what an arm claims to have fetched is not what the system counted.

    part: bytes of one record's payload. The system counts more: headers, and the index.
    """
    found = []
    for tier, counted in (("lmdb", arm.disk_read_bytes), ("s3", arm.s3_sent_bytes)):
        claimed = arm.claimed_bytes.get(tier, 0)
        records = -(-claimed // part)
        most = claimed * (1 + _OVERHEAD) + records * _RECORD_BYTES + _SLACK_BYTES
        if claimed and counted is not None and not claimed <= counted <= most:
            found.append(
                f"arm {arm.name}: {tier} claims to have read {claimed} bytes, and the system "
                f"counted {counted}"
            )
    return found


def machine(device: str = "cpu") -> Machine:
    """Look at the machine. device: where models compute, as ``check_device`` takes it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Machine(
        cpu=models[0] if models else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        system=platform.platform(),
        python=platform.python_version(),
        packages={name: version(name) for name in _PACKAGES},
        gpu=gpu_title(device),
    )


def against_recompute(arm: ArmReport, samples: Mapping[str, Sequence[Sample]]) -> ArmReport:
    """Add how an arm's requests compare, one by one, with the recompute arm's."""
    mine, other = samples[arm.name], samples.get("recompute")
    rates = [_rate(sample) for sample in mine]
    added: dict[str, object] = {"output_tokens_per_s": round(percentile(rates, 50), 4)}
    if other is not None and arm.name != "recompute":
        added["ttft_over_recompute"] = ratio(_ttft(mine), _ttft(other))
        slower = [_rate(sample) for sample in other]
        added["throughput_over_recompute"] = ratio(rates, slower)
    return msgspec.structs.replace(arm, **added)


def _rate(sample: Sample) -> float:
    """Return output tokens per second of a request, from its submission to its last token."""
    served = sample.served
    later = len(served.tokens) - 1
    return (later + 1) / (served.ttft_s + later * (served.tpot_s or 0.0))


def _ttft(samples: Sequence[Sample]) -> list[float]:
    return [sample.served.ttft_s for sample in samples]


def _times(
    samples: Mapping[str, Sequence[Sample]], above: str, below: str, timed: slice
) -> float | None:
    """Return how many times the median TTFT of one arm is that of another, if both ran."""
    if above not in samples or below not in samples:
        return None
    ttft = [percentile(_ttft(samples[name][timed]), 50) for name in (above, below)]
    return round(ttft[0] / ttft[1], 4)
