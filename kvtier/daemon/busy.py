"""Busy: how much that takes a while is under way, for each process and for all together."""

from __future__ import annotations

import threading
from collections import Counter

from kvtier.daemon.grants import Who

__all__ = ["Busy"]


class Busy:
    """A count with two limits. Safe from any thread.

    By process, and not by session, since what a session began may outlast it. each: of one
    process; most: of all.
    """

    def __init__(self, each: int, most: int) -> None:
        self.each = each
        self.most = most
        self._lock = threading.Lock()
        self._count: Counter[Who] = Counter()
        self._all = 0

    def __len__(self) -> int:
        """What is under way."""
        return self._all

    def begin(self, who: Who) -> bool:
        """Count one more in; False where that would be too much."""
        with self._lock:
            if self._all >= self.most or self._count[who] >= self.each:
                return False
            self._count[who] += 1
            self._all += 1
            return True

    def end(self, who: Who) -> None:
        """Count one out."""
        with self._lock:
            self._all -= 1
            self._count[who] -= 1
            if not self._count[who]:
                del self._count[who]
