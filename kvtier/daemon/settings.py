"""What a server is told when it starts, and what it tells its supervisor."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvtier.catalog.owners import Quota
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.recorder import Recording


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A principal's daemon. tiers: URLs, DRAM first.

    uid: the principal's, who alone may connect, beside the daemon's own user. share: of the
    arena, what one session may hold at most. record: where requests of all clients are recorded.
    """

    tiers: tuple[str, ...]
    uid: int
    share: float = 0.5
    quotas: dict[str, Quota] = {}
    record: Recording | None = None

    def config(self) -> Config:
        """Return them parsed. Raises ConfigError."""
        return replace(Config.from_urls(list(self.tiers)), quotas=self.quotas)

    def encode(self) -> bytes:
        """Return them as bytes for ``decode``. Raises ConfigError for what is no text."""
        try:
            return msgspec.json.encode(self)
        except UnicodeEncodeError as error:
            bad = error.object
            raise ConfigError(f"{bad!r} names no directory: some of it is no UTF-8") from error

    @classmethod
    def decode(cls, data: bytes) -> Settings:
        """Read what ``encode`` gave."""
        return msgspec.json.decode(data, type=cls)


class Ails(msgspec.Struct, frozen=True, tag=True):
    """What a server does not serve, and why, by tier; nothing when all is well again."""

    troubles: dict[str, str]


class Down(msgspec.Struct, frozen=True):
    """A server has ended, by itself or because it hung; another is started. No server says so."""

    why: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """A server serves, or cannot: wrong says why. tiers: their names, DRAM first."""

    generation: int = 0
    server: int = 0
    tiers: tuple[str, ...] = ()
    wrong: str = ""
