"""The Codec contract: fewer bytes for a tier, and exactly the same bytes back."""

from __future__ import annotations

from typing import Protocol


class Codec(Protocol):
    """One way to write bytes down. What it cannot make smaller is stored raw, by whoever asks.

    name: what people call it, with its version. number: what a record's header calls it, kind in
    the high byte and version in the low one: whoever changes the format counts it up.
    element_bytes: of the elements that it is for; 0 for any bytes.

    Methods may be called from any thread, and from several at once: they keep no memory but
    scratch of a few MiB a thread. They block for as long as the bytes take, mostly without the
    interpreter lock. Buffers are contiguous, of format "B", at any address.
    """

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def number(self) -> int:
        """What a record's header calls it."""
        ...

    @property
    def element_bytes(self) -> int:
        """Of the elements that it is for; 0 for any bytes."""
        ...

    def encode(self, raw: memoryview, into: memoryview) -> int:
        """Write `raw` into `into`; return how many bytes that took.

        0 when it does not fit there, which is how a caller says what is worth it.
        """
        ...

    def decode(self, stored: memoryview, into: memoryview) -> bool:
        """Fill all of `into` with what was encoded as `stored`; say whether that could be.

        stored: hostile, and in its own memory or the beginning of `into`. Not a byte more than
        `into` holds is made of it, but whether they are the right ones only a checksum tells.
        """
        ...
