"""Plans: which slots go to which blocks. Plain data out of leases and reservations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, Literal, cast

from kvtier.catalog.lease import Lease
from kvtier.checks import check_kind, check_whole
from kvtier.copyplan import PLAN_VERSION, CopyPlan, PlanPart
from kvtier.desk import Desk, Issued
from kvtier.errors import MisuseError
from kvtier.identity.geometry import Geometry, Needs
from kvtier.identity.record import PartName, split_record_id
from kvtier.memory.arena import Slot
from kvtier.prefix import Namer, Prefix
from kvtier.retention import Retention, terms
from kvtier.transfer import CopyResult, CopyStatus

ABSENT: Final = -1
"""In a block table: the engine has no such block, or needs none."""

BlockTable = Sequence[int] | Sequence[Sequence[int]]
"""Block ids in token order, for all components or one sequence for each of them."""

_TABLE: Final = "a block table (of an array, its tolist())"


class Plans:
    """The plans of one Cache that are out. Safe from any thread."""

    def __init__(self, desk: Desk, geometry: Geometry, namer: Namer) -> None:
        self._desk = desk
        self._shape = shape = namer.shape
        self._states = [one.needs is Needs.LAST for one in geometry.components]
        self._chunk = shape.chunk_tokens
        self._block = shape.block_tokens
        self._out: dict[tuple[int, int], Issued] = {}  # by arena and id

    def __len__(self) -> int:
        """Plans that have not been settled."""
        return len(self._out)

    def load(self, lease: Lease, into: BlockTable, start: int | None) -> CopyPlan | None:
        """See ``Cache.plan_load``."""
        begin = lease.first * self._chunk
        start = begin if start is None else start
        check_whole("the first token of a load", start)
        tables = self._tables(into)
        name = next(itertools.chain.from_iterable(lease.names), None)
        if name is not None and split_record_id(name)[1] not in self._shape.names:
            raise MisuseError("this lease is of a cache with other shards, stages or components")
        stop = self._stop(lease, tables, start)
        plan = self._desk.issue(lease)
        if not plan:
            return None
        parts: list[PlanPart] = []
        for chunk, (names, slots) in enumerate(
            zip(lease.names, lease.slots, strict=True), lease.first
        ):
            for name, slot in zip(names, slots, strict=True):
                which = split_record_id(name)[1]
                table = tables[which.component]
                parts += self._loaded(chunk, which, slot, table, (start, stop))
        return self._new(plan, "load", parts, lease, stop - start)

    def save(
        self, prefix: Prefix, tables: BlockTable, first: int, retention: Sequence[Retention]
    ) -> CopyPlan | None:
        """See ``Cache.plan_save``."""
        per_component = self._tables(tables)
        self._check_length(per_component, len(prefix.names))
        kept = terms(retention, len(prefix.names), self._chunk)
        places = [
            [
                at
                for at, name in enumerate(self._shape.names)
                if ABSENT not in self._blocks(per_component, name, chunk)
            ]
            for chunk in range(first, len(prefix.names))
        ]
        plan, taken, _ = self._desk.reserve(prefix, first, places, kept)
        if not taken:
            return None
        parts = []
        for part, slot in taken:
            name = split_record_id(part.name)[1]
            blocks = tuple(self._blocks(per_component, name, part.depth))
            parts.append(PlanPart(*slot, *name, first_token=0, blocks=blocks))
        tokens = len({part.depth for part, _ in taken}) * self._chunk
        return self._new(plan, "save", parts, taken, tokens)

    def settled(self, plan: CopyPlan, result: CopyResult) -> Issued:
        """Take a plan back whose copies have ended; return what it held."""
        if result.status is CopyStatus.TIMEOUT:
            raise MisuseError("a copy that has not ended cannot be settled")
        issued = self._out.pop((plan.arena, plan.id), None)
        if issued is None:
            raise MisuseError(f"plan {plan.id} was not issued here, or was settled before")
        return issued

    def _new(
        self,
        number: int,
        kind: Literal["load", "save"],
        parts: list[PlanPart],
        issued: Issued,
        tokens: int,
    ) -> CopyPlan:
        arena = self._desk.arena_of(issued)
        plan = CopyPlan(PLAN_VERSION, number, kind, arena, tokens, tuple(parts))
        self._out[arena, number] = issued
        return plan

    # ---- block tables

    def _tables(self, given: BlockTable) -> list[Sequence[int]]:
        """Return one table for each component."""
        count = len(self._states)
        check_kind(_TABLE, given, Sequence)
        kinds = set(map(type, given))
        if kinds <= {int} and not (count > 1 and any(self._states)):
            return [cast("Sequence[int]", given)] * count
        each = cast("Sequence[Sequence[int]]", given)
        if int in kinds or len(each) != count:
            share = "" if any(self._states) else ", or share one"
            raise MisuseError(f"{count} components need one block table each{share}")
        for table in each:
            check_kind(_TABLE, table, Sequence)
            for kind in set(map(type, table)) - {int}:
                raise MisuseError(f"{_TABLE} has ids of type int, not {kind.__name__}")
        return list(each)

    def _stop(self, lease: Lease, tables: list[Sequence[int]], start: int) -> int:
        """Return where a load into these tables ends. Raises MisuseError where it does not fit."""
        begin, end = lease.first * self._chunk, (lease.first + lease.chunks) * self._chunk
        lengths = [len(t) for t, state in zip(tables, self._states, strict=True) if not state]
        stop = start + lengths[0] * self._block if lengths else lease.tokens
        if start < begin or start % self._block or stop > end or len(set(lengths)) > 1:
            raise MisuseError(
                f"tokens {start}..{stop} are not blocks of the leased tokens {begin}..{end}"
            )
        if not self._shape.plain and stop != lease.tokens:
            raise MisuseError(
                f"a model with windows or states is loaded up to the lease's {lease.tokens} "
                f"tokens, not up to {stop}"
            )
        places = (t for t, state in zip(tables, self._states, strict=True) if state)
        if any(len(table) != 1 for table in places):
            raise MisuseError("a load of states takes the one place that the state goes to")
        return stop

    def _check_length(self, tables: list[Sequence[int]], chunks: int) -> None:
        for table, state in zip(tables, self._states, strict=True):
            need = chunks if state else chunks * (self._chunk // self._block)
            if len(table) < need:
                what = "states" if state else "blocks"
                raise MisuseError(
                    f"{len(table)} {what} do not hold {chunks} chunks, which need {need}"
                )

    def _blocks(self, tables: list[Sequence[int]], name: PartName, chunk: int) -> Sequence[int]:
        """Return the blocks of a part of a chunk, or the place of its state."""
        table = tables[name.component]
        if self._states[name.component]:
            return table[chunk : chunk + 1]
        count = self._chunk // self._block
        return table[chunk * count : (chunk + 1) * count]

    def _loaded(
        self, chunk: int, name: PartName, slot: Slot, table: Sequence[int], span: tuple[int, int]
    ) -> Iterator[PlanPart]:
        """Yield the copies of one part: a run of blocks each, without those that are absent."""
        if self._states[name.component]:
            yield PlanPart(*slot, *name, first_token=0, blocks=tuple(table))
            return
        begin, (start, stop) = chunk * self._chunk, span
        low, high = max(start, begin), min(stop, begin + self._chunk)
        run: list[int] = []
        for token in range(low, high, self._block):
            block = table[(token - start) // self._block]
            if block != ABSENT:
                run.append(block)
            if run and (block == ABSENT or token + self._block >= high):
                first = token - begin - (len(run) - (block != ABSENT)) * self._block
                yield PlanPart(*slot, *name, first_token=first, blocks=tuple(run))
                run = []
