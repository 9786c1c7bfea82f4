"""Busy: how much that takes a while is under way, for each process and for all together."""

from __future__ import annotations

import threading
from collections import Counter

from kvtier.daemon.grants import Who


class Busy:
    """A count with two limits. Safe from any thread.

    By process, and not by session, since what a session began may outlast it. each: of one
    process; most: of all. What keeps much memory weighs more than one.
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

    def begin(self, who: Who, weight: int = 1) -> bool:
        """Count so much more in; False where that would be too much."""
        with self._lock:
            if self._all + weight > self.most or self._count[who] + weight > self.each:
                return False
            self._count[who] += weight
            self._all += weight
            return True

    def end(self, who: Who, weight: int = 1) -> None:
        """Count it out."""
        with self._lock:
            self._all -= weight
            self._count[who] -= weight
            if not self._count[who]:
                del self._count[who]
