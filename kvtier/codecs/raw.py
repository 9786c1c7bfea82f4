"""Raw: bytes as they are."""

from __future__ import annotations

import numpy as np

from kvtier.identity.record import CODEC_RAW


class Raw:
    """Copies. See Codec."""

    name = "raw"
    number = CODEC_RAW
    element_bytes = 0

    def encode(self, raw: memoryview, into: memoryview) -> int:
        """See Codec."""
        if len(into) < len(raw):
            return 0
        _copy(into[: len(raw)], raw)
        return len(raw)

    def decode(self, stored: memoryview, into: memoryview) -> bool:
        """See Codec. Costs nothing where the bytes are in their place already."""
        if len(stored) != len(into):
            return False
        _copy(into, stored)
        return True


def _copy(into: memoryview, source: memoryview) -> None:
    target, data = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
    if target.ctypes.data != data.ctypes.data:
        np.copyto(target, data)
