"""Every figure that kvtier counts, as one typed table, and the object that counts them.

Names, units and labels follow the Prometheus conventions: base units, ``_total`` for counters.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvtier.errors import MisuseError

_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvtier_{name}_total", "counter", unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvtier_{name}", "gauge", unit, text, labels)


_ROWS: Final = (
    _counter("match_tokens", "tokens", "Tokens of prompts that were matched against the index"),
    _counter("bypassed_matches", "matches", "Matches of a namespace that goes without its cache"),
    _counter("recorded_requests", "requests", "Requests that were written into a recording"),
    _counter("unrecorded_requests", "requests", "Requests that were not, and why", "reason"),
    _counter("hit_tokens", "tokens", "Tokens that were loaded, by the tier they came from", "tier"),
    _counter("refused_fetches", "fetches", "Fetches refused since too much was being read"),
    _counter("refused_pins", "pins", "Pins refused since pins would hold half of DRAM"),
    _counter("refused_prefetches", "prefetches", "Times that a prefetch found too much being read"),
    _counter("refused_holds", "holds", "Leases and plans refused since a client held too much"),
    _counter("saved_chunks", "chunks", "Chunks that were committed to DRAM"),
    _counter("dropped_saves", "chunks", "Chunks that were not saved, and why", "reason"),
    _counter("evicted_parts", "parts", "Parts that left a tier to make room", "tier"),
    _counter("idle_parts", "parts", "Parts that left a tier, not used for its ttl", "tier"),
    _counter("fetched_bytes", "bytes", "Bytes read upward from a tier", "tier"),
    _counter("spilled_bytes", "bytes", "Bytes written down to a tier", "tier"),
    _counter("encoded_bytes", "bytes", "Bytes that a codec encoded on the way down", "tier"),
    _counter("encoded_stored_bytes", "bytes", "Bytes that it made of them", "tier"),
    _counter(
        "unencoded_bytes",
        "bytes",
        "Bytes that a tier with a codec wrote as they are, and why",
        "tier",
        "reason",
    ),
    _counter("decoded_bytes", "bytes", "Bytes that a codec gave back on the way up", "tier"),
    _counter(
        "dropped_spills",
        "parts",
        "Parts that were not written to a tier, and why",
        "tier",
        "reason",
    ),
    _counter("dropped_deletions", "records", "Withdrawn records no more tried to delete", "tier"),
    _counter(
        "corrupt_records", "records", "Records that failed a checksum or named another part", "tier"
    ),
    _counter("newer_records", "records", "Records of a version not read here yet", "tier"),
    _counter("vanished_records", "records", "Records that a tier had, and has no more", "tier"),
    _counter("tier_errors", "calls", "Records or calls that a tier failed", "tier"),
    _counter(
        "tier_faults",
        "records",
        "Records of which something went wrong below a tier, by its cause",
        "tier",
        "reason",
    ),
    _counter("expired_leases", "leases", "Leases that ended by their deadline"),
    _counter("withdrawn_parts", "parts", "Parts taken out of all tiers, and why", "reason"),
    _counter("load_decisions", "matches", "Matches below DRAM, by what was worth it", "choice"),
    _counter("load_seconds", "seconds", "Time of reads upward from a tier", "tier"),
    _counter("load_estimated_seconds", "seconds", "What they were estimated to take", "tier"),
    _counter(
        "load_regret_seconds", "seconds", "Time that computing would have been faster by", "tier"
    ),
    _gauge("prefill_seconds_per_token", "seconds", "Estimate of computing a first token"),
    _gauge("tier_latency_seconds", "seconds", "Estimate of a tier's latency", "tier"),
    _gauge("tier_read_bytes_per_second", "bytes", "Estimate of a tier's speed", "tier"),
    _gauge(
        "codec_bytes_per_second",
        "bytes",
        "Estimate of a codec's speed on one thread",
        "tier",
        "verb",
    ),
    _gauge("tier_capacity_bytes", "bytes", "Budget of a tier that has one", "tier"),
    _gauge("tier_used_bytes", "bytes", "Bytes of the budget in use", "tier"),
    _gauge(
        "tenant_used_bytes",
        "bytes",
        "Bytes of a tier in use by a tenant with a quota",
        "tenant",
        "tier",
    ),
    _gauge("tier_parts", "parts", "Parts in a tier", "tier"),
    _counter(
        "sent_requests", "requests", "Requests sent to a tier's service, by kind", "tier", "kind"
    ),
    _counter("sent_requests_dollars", "dollars", "What they cost, by list prices", "tier"),
    _gauge("pack_residue_parts", "parts", "Parts let go that lie in packs with others", "tier"),
    _gauge("write_budget_bytes", "bytes", "Bytes that may be written to a tier now", "tier"),
    _gauge("leased_parts", "parts", "Parts under a lease, a spill or a copy"),
    _gauge("pinned_parts", "parts", "Parts that pins keep in DRAM"),
    _gauge("quarantined_slots", "slots", "Slots that wait for the fence of an expired plan"),
    _counter("server_restarts", "servers", "Servers of a daemon that ended, or hung", "reason"),
    _gauge("sessions", "sessions", "Clients of a daemon that are connected"),
    _gauge("plans_out", "plans", "Plans of a daemon's clients whose copies have not ended"),
    _gauge("quarantined_bytes", "bytes", "Bytes in plans of clients that are not connected"),
    _gauge("orphan_parts", "parts", "Parts whose parent is in no tier"),
)

TABLE: Final = {row.name: row for row in _ROWS}


class Metrics:
    """Counts by name and labels. Safe from any thread; never blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter. `name` is a row of TABLE without ``kvtier_`` and ``_total``."""
        key = self._key(f"kvtier_{name}_total", labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def counter(self, name: str, **labels: str) -> Callable[[], None]:
        """Return what raises a counter by one, and looks up its name but once; see ``add``."""
        key, lock, values = self._key(f"kvtier_{name}_total", labels), self._lock, self._values

        def add() -> None:
            with lock:
                values[key] = values.get(key, 0) + 1

        return add

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. `name` is a row of TABLE without ``kvtier_``."""
        key = self._key(f"kvtier_{name}", labels)
        with self._lock:
            self._values[key] = value

    def mirror(self, name: str, value: float, **labels: str) -> None:
        """Bring a counter up to what is counted elsewhere, which only rises. See ``add``."""
        key = self._key(f"kvtier_{name}_total", labels)
        with self._lock:
            self._values[key] = max(value, self._values.get(key, 0))

    def get(self, name: str, **labels: str) -> float:
        """Return a counter or gauge by its short name; 0 when it was never touched.

        With labels left out, the sum over them.
        """
        row = TABLE.get(f"kvtier_{name}_total") or TABLE.get(f"kvtier_{name}")
        if row is None or not set(labels) <= set(row.labels):
            raise MisuseError(f"no metric {name!r} with labels {sorted(labels)}")
        want = {row.labels.index(label): value for label, value in labels.items()}
        with self._lock:
            return sum(
                value
                for (key, values), value in self._values.items()
                if key == row.name and all(values[at] == text for at, text in want.items())
            )

    def snapshot(self) -> dict[str, float]:
        """Return all values as ``name{label="value"}`` to number, sorted by name."""
        with self._lock:
            items = sorted(self._values.items())
        return {_series(name, values): value for (name, values), value in items}

    @staticmethod
    def _key(name: str, labels: dict[str, str]) -> tuple[str, tuple[str, ...]]:
        row = TABLE.get(name)
        if row is None or (row.labels != (given := tuple(labels)) and {*row.labels} != {*given}):
            raise MisuseError(f"no metric {name!r} with labels {sorted(labels)}")
        return name, tuple([labels[label] for label in row.labels])


def exposition(figures: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of Prometheus' text format for what ``Metrics.snapshot`` returned.

    Rows that this release does not know, of a daemon of another one, are left out.
    """
    seen: set[str] = set()
    for series, value in figures.items():
        name = series.partition("{")[0]
        row = TABLE.get(name)
        if row is None:
            continue
        if name not in seen:
            seen.add(name)
            yield f"# HELP {name} {row.help}, in {row.unit}"
            yield f"# TYPE {name} {row.kind}"
        yield f"{series} {value!r}"  # all digits: a rate is a difference of large numbers


def parsed(series: str) -> tuple[str, tuple[str, ...]]:
    """Return name and values of the labels of ``name{label="value"}``, as in a snapshot."""
    name, _, labels = series.partition("{")
    return name, tuple(_plain(found[2]) for found in _LABEL.finditer(labels))


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


def _series(name: str, values: tuple[str, ...]) -> str:
    if not values:
        return name
    pairs = zip(TABLE[name].labels, values, strict=True)
    return name + "{" + ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
