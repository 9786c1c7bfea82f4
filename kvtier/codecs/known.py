"""The codecs that this process reads, by their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvtier.codecs.base import Codec
from kvtier.codecs.lossless import Lossless
from kvtier.codecs.raw import Raw

RAW: Final = Raw()
LOSSLESS: Final = Lossless()

_known: dict[int, Codec] = {codec.number: codec for codec in (RAW, LOSSLESS)}
KNOWN: Final[Mapping[int, Codec]] = MappingProxyType(_known)
"""The built-in ones, and plug-ins that a tier's URL named. A record of any other number is a miss:
its bytes are never guessed at, and it makes nobody load a plug-in."""


def add(codec: Codec) -> None:
    """Read what this codec wrote, too, from now on."""
    _known[codec.number] = codec
