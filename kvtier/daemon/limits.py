"""What clients may take of a server."""

from __future__ import annotations

import resource
from typing import Final

_OWN_DESCRIPTORS: Final = 256  # tiers, arena, pools


class Limits:
    """What clients may take together, and each by itself. Bytes, connections, seconds.

    connections: fewer where the system allows fewer descriptors. unread: what waits for one
    client when an answer comes on top; total: for all together, and of frames not yet whole.
    seconds: until Hello has come, and until a frame that began is whole.
    """

    def __init__(
        self,
        connections: int = 10_000,
        unread: int = 8 << 20,
        total: int = 256 << 20,
        seconds: float = 5.0,
    ) -> None:
        self.connections = connections
        self.unread = unread
        self.total = total
        self.seconds = seconds


def descriptors() -> int:
    """Return how many descriptors this process may have for clients; it asks for more first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max((1 << 20 if hard == resource.RLIM_INFINITY else hard) - _OWN_DESCRIPTORS, 2)
