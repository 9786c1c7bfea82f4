"""CopyPlan: what one rank's Copier must do, as plain data that crosses processes.

Encoded with MessagePack, as arrays; ``bytes(plan)`` writes it and ``CopyPlan.decode`` reads it,
checking every value. It names places in an arena, never memory addresses.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvtier.errors import ProtocolError

PLAN_VERSION: Final = 2
_MAX_BYTES: Final = 64 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]


class PlanPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Copy of some tokens of one part, or of one state.

    offset, nbytes, serial: the slot. component to stages: the part. first_token: within the
    chunk, a multiple of the block; blocks: the engine's block ids, in token order, or the id of
    the one place of a state.
    """

    offset: _Count
    nbytes: _Count
    serial: _Count
    component: _Count
    shard: _Count
    shards: _Count
    stage: _Count
    stages: _Count
    first_token: _Count
    blocks: tuple[_Count, ...]


class CopyPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One load or save of one request. `id` is the issuing cache's, `arena` its arena's.

    tokens: that a load makes valid, from its first, or whose parts a save keeps.
    """

    version: int
    id: _Count
    kind: Literal["load", "save"]
    arena: _Count
    tokens: _Count
    parts: tuple[PlanPart, ...]

    def __bytes__(self) -> bytes:
        """Return the plan as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> CopyPlan:
        """Read a plan. Raises ProtocolError for anything else, however malformed."""
        if len(data) > _MAX_BYTES:
            raise ProtocolError(f"a plan of {len(data)} bytes; at most {_MAX_BYTES} are read")
        try:
            plan = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"not a copy plan of version {PLAN_VERSION}: {error}") from error
        if plan.version != PLAN_VERSION:
            raise ProtocolError(f"plan version {plan.version}; this kvtier reads {PLAN_VERSION}")
        return plan
