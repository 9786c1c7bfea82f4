"""The seat: one engine's cache in this process, which its scheduler and its worker share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kvtier.cache import Cache
from kvtier.device.cpu import CpuDevice
from kvtier.errors import ConfigError

__all__ = ["Seat", "take_seat"]

_seats: Final[dict[str, Seat]] = {}
_lock: Final = threading.Lock()


class Seat:
    """A cache, and how the worker's last plans have ended.

    ended: of plans that no step of the engine will report any more, why each failed, or "".
    """

    def __init__(self, engine: str, cache: Cache) -> None:
        self.cache = cache
        self.device = CpuDevice()
        self.ended: dict[int, str] = {}
        self.roles: set[str] = set()
        self._engine = engine

    def leave(self, role: str) -> None:
        """Give up a role. With the last one the cache is closed. Blocks then, bounded."""
        with _lock:
            if role not in self.roles:
                return
            self.roles.discard(role)
            if self.roles:
                return
            _seats.pop(self._engine, None)
        self.device.close()
        self.cache.close()


def take_seat(engine: str, role: str, opened: Callable[[], Cache], digest: bytes) -> Seat:
    """Take a role of an engine; the first one opens its cache. Blocks while it opens.

    engine: vLLM's id of it; digest: of the namespace that this role derives.
    Raises ConfigError when a role is taken, or two roles see different models.
    """
    with _lock:
        seat = _seats.get(engine)
        if seat is None:
            seat = _seats[engine] = Seat(engine, opened())
        if role in seat.roles:
            raise ConfigError(
                f"two kvtier connectors in engine {engine}: name one, with all its tiers"
            )
        if seat.cache.namespace.digest != digest:
            raise ConfigError(
                f"vLLM's scheduler and worker describe the KV of this model differently "
                f"(namespaces {seat.cache.namespace.digest.hex()[:16]} and {digest.hex()[:16]}), "
                f"as where layers share KV; such a model cannot be cached"
            )
        seat.roles.add(role)
        return seat
