"""What of a tier's calls goes into the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.identity.record import NEWER_REMEDY
from kvtier.metrics import Metrics
from kvtier.tiers.exact import Fetched, Wanted
from kvtier.tiers.store import CountingStore, PaidStore, Status, Store


class Tally:
    """One tier's. Used on the flow loop, but for `requests`."""

    def __init__(self, name: str, store: Store, metrics: Metrics) -> None:
        self._name = name
        self._store = store
        self._metrics = metrics
        self._faults: dict[str, int] = {}  # of the Store's, what is in the metrics already

    def fetched(self, out: Sequence[Fetched], wanted: Sequence[Wanted]) -> list[str]:
        """Count what came of a read; return what is to be warned of."""
        warnings: list[str] = []
        nbytes = decoded = 0
        for one, record in zip(out, wanted, strict=True):
            if one.status is Status.OK:
                nbytes += record.raw_bytes
                decoded += record.raw_bytes * one.decoded
            elif warning := self._missed(one):
                warnings.append(warning)
        for name, count in (("fetched_bytes", nbytes), ("decoded_bytes", decoded)):
            if count:
                self._metrics.add(name, count, tier=self._name)
        return warnings

    def _missed(self, one: Fetched) -> str:
        if one.unknown:
            self._metrics.add("tier_faults", tier=self._name, reason="unknown codec")
            return (
                f"a record has the codec {one.unknown}, which is not known here: another kvtier "
                "wrote it, or one with a plug-in, to be named by codec="
            )
        if one.status is Status.CORRUPT:
            self._metrics.add("corrupt_records", tier=self._name)
            return "a record is corrupt; it is dropped"
        if one.status is Status.NEWER:
            self._metrics.add("newer_records", tier=self._name)
            return f"a record is of a newer version than this kvtier reads: {NEWER_REMEDY}"
        if one.status is Status.ABSENT:  # it was asked for since it was there
            self._metrics.add("vanished_records", tier=self._name)
        return ""

    def faults(self) -> None:
        """Bring what the Store counted into the metrics."""
        counts = self._store.causes.counts() if isinstance(self._store, CountingStore) else {}
        for cause, count in counts.items():
            self._metrics.add(
                "tier_faults", count - self._faults.get(cause, 0), tier=self._name, reason=cause
            )
        self._faults = counts

    def requests(self) -> None:
        """Set what the Store has sent, and what that costs. From any thread."""
        if not isinstance(self._store, PaidStore):
            return
        counts, prices = self._store.requests.counts(), self._store.prices
        for kind, count in counts.items():
            self._metrics.mirror("sent_requests", count, tier=self._name, kind=kind)
        dollars = sum(prices.get(kind, 0.0) * count for kind, count in counts.items())
        self._metrics.mirror("sent_requests_dollars", dollars, tier=self._name)
