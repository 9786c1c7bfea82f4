"""What is committed to the index together, and what is known of a name before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab import Segment
from kvtier.storage_backends.slab_index import Entry


@dataclass(slots=True, eq=False)
class Batch:
    """What is committed together.

    since: when it began, in seconds. operations: by name, in order of writing, the entry to put,
    or None to delete. releases: slots to free afterwards. bytes: of the slots written. cause:
    why it failed.
    """

    since: float = 0.0
    operations: dict[RecordId, Entry | None] = field(default_factory=dict)
    releases: list[tuple[Segment, int]] = field(default_factory=list)
    dirty: dict[Segment, None] = field(default_factory=dict)
    bytes: int = 0
    settled: bool = False
    failed: bool = False
    cause: str = ""


class Known(NamedTuple):
    """What a look-up found of names that are to be written.

    indexed: what the index has of each, after so many commits: true until the next one.
    """

    names: Sequence[RecordId]
    indexed: list[Entry | None]
    commits: int
