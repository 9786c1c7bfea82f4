"""The codecs that this kvtier reads, by their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvtier.codecs.base import Codec
from kvtier.codecs.lossless import Lossless
from kvtier.codecs.raw import Raw

__all__ = ["KNOWN", "LOSSLESS", "RAW"]

RAW: Final = Raw()
LOSSLESS: Final = Lossless()

KNOWN: Final[Mapping[int, Codec]] = MappingProxyType(
    {codec.number: codec for codec in (RAW, LOSSLESS)}
)
"""A record of any other number is a miss: its bytes are never guessed at."""
