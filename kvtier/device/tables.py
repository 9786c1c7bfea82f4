"""Tables of copies that groups of planes share: uploaded once, lent until the call has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import chain

from kvtier.device.spread import Spread
from kvtier.device.staging import Stage, Staged
from kvtier.device.turns import TABLE_PLANES, TABLE_RUNS

Launch = Callable[[range, range, int], None]
"""Launches the kernel on some runs and planes of a table, on a grid."""


class Tables(contextlib.ExitStack):
    """Tables of what several groups have other planes of: lent until a call has ended.

    planned: the groups. By the whole: direct: what launches the kernel on its table; staged: what
    of it lies together; grouped: how all groups are staged, and what launches the kernel. None: it
    has no table.
    """

    def __init__(
        self,
        planned: Sequence[Sequence[Spread]],
        room: int,
        upload: Callable[[Spread], contextlib.AbstractContextManager[Launch]],
    ) -> None:
        super().__init__()
        self.direct: dict[int, Callable[[range, int], None] | None] = {}
        self.staged: dict[int, Staged] = {}
        self.grouped: dict[int, tuple[Stage, Launch] | None] = {}
        self._planned = planned
        self._room = room
        self._upload = upload

    def lend(self, spread: Spread) -> Launch | None:
        """Upload a table; None where there is no room for it, or for more of them."""
        fits = len(spread.planes[0]) <= TABLE_PLANES and len(spread.runs) <= TABLE_RUNS
        if not fits or not self._room:
            return None
        self._room -= 1
        return self.enter_context(self._upload(spread))

    def groups(self, whole: Spread) -> list[range]:
        """Return which planes of it each group has."""
        each = chain.from_iterable(self._planned)
        return [planes_of(one) for one in each if one.whole is whole]


def planes_of(spread: Spread) -> range:
    """Return which planes of the whole it has."""
    return range(spread.at, spread.at + len(spread.planes[0]))
