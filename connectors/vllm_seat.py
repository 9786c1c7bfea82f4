"""The seat: one engine's cache in this process, which its scheduler and its worker share.

Where workers are in processes of their own, the cache is a daemon's: one that the tiers name, or
else one that the scheduler starts, which ends with it. Workers find its memory by the engine's id.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from kvtier.cache import Cache, open_cache
from kvtier.copier import Pages
from kvtier.daemon.address import SCHEME, parse_address
from kvtier.daemon.worker import Worker
from kvtier.device.base import Device
from kvtier.errors import ConfigError, MisuseError
from kvtier.identity.namespace import Namespace

_log = logging.getLogger("kvtier")
_BIND_SECONDS: Final = 30.0

_seats: Final[dict[str, Seat]] = {}
_lock: Final = threading.Lock()


class Seat:
    """A cache, and how the worker's last plans have ended.

    given: None where the engine does without a cache. ended: of plans that no step of the engine
    will report any more, why each failed, or "".
    """

    def __init__(self, engine: str, given: Cache | None) -> None:
        self.given = given
        self.ended: dict[int, str] = {}
        self.roles: set[str] = set()
        self._engine = engine

    @property
    def cache(self) -> Cache:
        """Its cache. Raises MisuseError where it has none."""
        if self.given is None:
            raise MisuseError("this engine runs without a cache: its daemon was not there at start")
        return self.given

    def leave(self, role: str) -> None:
        """Give up a role. With the last one the cache is closed. Blocks then, bounded."""
        with _lock:
            if role not in self.roles:
                return
            self.roles.discard(role)
            if self.roles:
                return
            _seats.pop(self._engine, None)
        if self.given is not None:
            self.given.close()


def take_seat(engine: str, role: str, opened: Callable[[], Cache | None], digest: bytes) -> Seat:
    """Take a role of an engine; the first one opens its cache, if it has one. Blocks meanwhile.

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
        known = digest if seat.given is None else seat.given.namespace.digest
        if known != digest:
            raise ConfigError(
                f"vLLM's scheduler and worker describe the KV of this model differently "
                f"(namespaces {known.hex()[:16]} and {digest.hex()[:16]}), "
                f"as where layers share KV; such a model cannot be cached"
            )
        seat.roles.add(role)
        return seat


def open_or_absent(
    tiers: Sequence[str], namespace: Namespace, engine: str, shards: int, *, apart: bool
) -> Cache | None:
    """Open a daemon's cache; None, and a line in the log, where that does not work. Blocks."""
    parse_address(tiers[0])  # what is wrong with the name itself is not forgiven
    try:
        return open_for(tiers, namespace, engine, shards, apart=apart)
    except ConfigError as error:
        _log.warning("vLLM runs without a cache until it is started anew: %s", error)
        return None


def open_for(
    tiers: Sequence[str], namespace: Namespace, engine: str, shards: int, *, apart: bool
) -> Cache:
    """Open an engine's cache; a daemon's where its ranks are apart. Blocks."""
    if not apart:
        return open_cache(*tiers, namespace=namespace)
    if tiers[0].startswith(SCHEME):
        named = [f"{tiers[0]}{'&' if '?' in tiers[0] else '?'}engine={engine}", *tiers[1:]]
        return open_cache(*named, namespace=namespace, shards=shards)
    return open_cache(*tiers, namespace=namespace, shards=shards, own_process=True, engine=engine)


# ------------------------------------------------------------------------------ a worker's memory


class Place(Protocol):
    """Where a rank's plans are executed."""

    def check(self, tensors: Any, device: Device) -> None:
        """Raise ConfigError for KV that is not of the geometry, or not the device's."""
        ...

    def pages(self, tensors: Any, device: Device) -> Pages:
        """Bind the KV. Blocks until the cache is there, bounded; raises ConfigError then."""
        ...

    def ended(self, plan: int) -> None:
        """Note that this rank copies a plan no more."""
        ...

    def close(self, causes: Mapping[int, str]) -> None:
        """Leave. causes: of plans that no step will report."""
        ...


class SharedPlace:
    """See Place. In the scheduler's process."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def check(self, tensors: Any, device: Device) -> None:
        """See Place."""
        self.pages(tensors, device)

    def pages(self, tensors: Any, device: Device) -> Pages:
        """See Place."""
        return self._seat.cache.bind(tensors, device)

    def ended(self, plan: int) -> None:
        """See Place. The scheduler hears of it by the step's output."""

    def close(self, causes: Mapping[int, str]) -> None:
        """See Place."""
        self._seat.ended.update(causes)
        self._seat.leave("WORKER")


class ApartPlace:
    """See Place. In a process of its own, on the memory of the engine's daemon.

    vLLM shows a worker its KV before there is a scheduler, which starts the daemon: so memory is
    bound with the first plan. rank: of tensor parallelism, and of how many.
    """

    def __init__(
        self, tiers: Sequence[str], namespace: Namespace, engine: str, rank: tuple[int, int]
    ) -> None:
        path = parse_address(tiers[0]).path if tiers[0].startswith(SCHEME) else None
        self._worker = Worker(engine, path)
        self._geometry = namespace.geometry
        self._rank = (*rank, 0, 1)
        self._patience = _BIND_SECONDS

    def check(self, tensors: Any, device: Device) -> None:
        """See Place."""
        Pages(self._geometry, self._worker.arena, tensors, device, self._rank)

    def pages(self, tensors: Any, device: Device) -> Pages:
        """See Place. Waits for the cache once: vLLM stands still meanwhile, for each plan anew."""
        seconds, self._patience = self._patience, 0.0
        return self._worker.bind(self._geometry, tensors, device, rank=self._rank, timeout=seconds)

    def ended(self, plan: int) -> None:
        """See Place. The daemon hears of it, too."""
        with contextlib.suppress(MisuseError):  # never bound: no daemon waits for its word
            self._worker.ended(plan)

    def close(self, causes: Mapping[int, str]) -> None:
        """See Place."""
        del causes
        self._worker.close()
