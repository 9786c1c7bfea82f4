"""What of a tier does not work: of each kind of call, why the last ones in a row have failed.

The breaker leaves a disk in use that takes no write, and reads well. Whoever asks how a tier is
hears of it here.
"""

from __future__ import annotations

from typing import Final

IN_A_ROW: Final = 5


class Ailments:
    """One tier's. Calls of a kind are counted until one of them works."""

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}
        self._cause: dict[str, str] = {}

    def works(self, verb: str) -> None:
        """Note that a call of this kind has worked."""
        self._failed.pop(verb, None)

    def fails(self, verb: str, cause: str) -> None:
        """Note that one has failed."""
        self._cause[verb] = cause  # first: whoever asks does so from any thread
        self._failed[verb] = self._failed.get(verb, 0) + 1

    def trouble(self, least: int = IN_A_ROW) -> str:
        """Return what does not work, `least` times in a row, and why; nothing while all does."""
        ails = [verb for verb, count in tuple(self._failed.items()) if count >= least]
        return "; ".join(f"{verb}: {self._cause[verb]}" for verb in sorted(ails))
