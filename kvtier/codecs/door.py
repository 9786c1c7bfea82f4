"""The door: codecs by the names under which they are installed.

A plug-in is what an entry point of the group ``kvtier.codecs`` names: called without arguments it
makes a Codec. Its number is 0x8000 or above, so that it is never one that kvtier takes itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.clock import monotonic
from kvtier.codecs.base import Codec
from kvtier.codecs.known import KNOWN, LOSSLESS, add
from kvtier.errors import ConfigError, unknown
from kvtier.events import Reporter
from kvtier.identity.record import FIRST_PLUG_IN

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_GROUP: Final = "kvtier.codecs"
_BUILT_IN: Final = ("auto", "raw", "lossless")
_MOST: Final = 0xFFFF  # that a record's header has room for
_TRIED: Final = 1 << 15  # elements
_report = Reporter(monotonic)


def codec_types() -> dict[str, EntryPoint]:
    """Return the plug-ins that are installed, by name, without loading them."""
    from importlib.metadata import entry_points  # 20 ms, which `import kvtier` need not take

    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def check_codec(name: str) -> None:
    """Raise ConfigError for a codec that is not installed, naming the nearest."""
    if name not in _BUILT_IN and name not in (types := codec_types()):
        raise unknown("codec", name, (*_BUILT_IN, *types))


@functools.cache
def load_codec(name: str) -> Codec:
    """Return what a tier of that codec encodes by; its records are read from now on.

    Raises ConfigError for one that is not installed, cannot be loaded, or is none.
    """
    check_codec(name)
    if name in _BUILT_IN:
        return LOSSLESS
    try:
        codec: Codec = codec_types()[name].load()()
        fault = _fault(codec)
    except Exception as error:  # a stranger's code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"codec {name!r} cannot be loaded: {cause}") from error
    if fault:
        raise ConfigError(f"codec {name!r} {fault}: see kvtier.codecs.base")
    add(guarded := _Guarded(codec))
    return guarded


def _fault(codec: Codec) -> str:
    """Say what is wrong with a codec; nothing if it does what a codec does."""
    number, taken = codec.number, KNOWN.get(codec.number)
    if type(number) is not int or not FIRST_PLUG_IN <= number <= _MOST:
        return f"has the number {number!r}, which is not from {FIRST_PLUG_IN:#x} to {_MOST:#x}"
    if taken is not None:
        return f"has the number {number:#x} of {taken.name!r}"
    if type(codec.element_bytes) is not int or codec.element_bytes < 0:
        return f"is for elements of {codec.element_bytes!r} bytes"
    raw = np.sin(np.arange(_TRIED, dtype="<f4")).view("<u2")[1::2].tobytes()  # as bfloat16
    into = memoryview(bytearray(len(raw)))
    count = codec.encode(memoryview(raw), into)
    if not 0 <= count <= len(raw) or (count and not codec.decode(into[:count], into)):
        return f"takes {count} bytes for {len(raw)}, and does not decode them"
    return "" if not count or into == raw else "does not give back what it was given"


class _Guarded:
    """A stranger's codec, of which what it raises is told, and is no more than a miss."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name, self.number = str(codec.name), codec.number
        self.element_bytes = codec.element_bytes

    def encode(self, raw: memoryview, into: memoryview) -> int:
        """See Codec."""
        try:
            count = self._codec.encode(raw, into)
        except Exception as error:  # noqa: BLE001  (a plug-in may raise anything; P2)
            _report.warn(f"codec {self.name}", f"encode: {type(error).__name__}: {error}")
            return 0
        return count if 0 <= count <= len(into) else 0

    def decode(self, stored: memoryview, into: memoryview) -> bool:
        """See Codec."""
        try:
            return self._codec.decode(stored, into)
        except Exception as error:  # noqa: BLE001  (a plug-in may raise anything; P2)
            _report.warn(f"codec {self.name}", f"decode: {type(error).__name__}: {error}")
            return False
