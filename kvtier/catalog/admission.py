"""Admission: which of the parts that are offered to a tier it takes. On the flow loop."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvtier.identity.record import RecordId
from kvtier.tiers.tier import Tier

_SEEN_NAMES: Final = 1 << 16


class Admission:
    """That of one tier, by its mode.

    ``through`` takes all; ``second-touch`` what was offered before, since only what is used is
    offered again; ``auto`` all while the write budget lasts, and by second touch when it is short;
    ``on-evict`` nothing of what is offered, but what DRAM is about to give up: what is still there
    when the cache is closed is not written. What is taken brings along the ancestors that the tier
    lacks.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._seen: OrderedDict[RecordId, None] = OrderedDict()

    @property
    def runs_ahead(self) -> bool:
        """Whether what DRAM is about to give up is to be offered."""
        return self._tier.admission == "on-evict"

    @property
    def counts_uses(self) -> bool:
        """Whether what is used again has to be offered. May be asked from any thread."""
        mode = self._tier.admission
        return mode == "second-touch" or (mode == "auto" and self._tier.writes.short)

    def admits(self, name: RecordId) -> bool:
        """Say whether the tier takes a part that is offered."""
        mode = self._tier.admission
        if mode in ("through", "on-evict"):
            return mode == "through"
        again = self._touched(name)
        return again or (mode == "auto" and not self._tier.writes.short)

    def _touched(self, name: RecordId) -> bool:
        """Say whether the part was offered before."""
        if name in self._seen:
            return True
        if len(self._seen) >= _SEEN_NAMES:
            self._seen.popitem(last=False)
        self._seen[name] = None
        return False
