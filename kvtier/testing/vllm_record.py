"""What vLLM's scheduler said to the connector, written down, and said again without vLLM.

A record is compressed JSON: where it comes from, the geometry, each request's tokens, and the
calls in their order. A request's state goes with each call, as vLLM had it then.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import kvtier
from kvtier.clock import monotonic
from kvtier.connectors.vllm_scheduler import SchedulerSide
from kvtier.connectors.vllm_step import Ended, StepPlans
from kvtier.copyplan import CopyPlan
from kvtier.identity.namespace import Namespace

_VERSION: Final = 1


class Recorder:
    """Notes all calls on a live connector, the scheduler's, from now on.

    For models of one group of layers, and requests without adapters.
    """

    def __init__(self, connector: Any) -> None:
        side = connector._side
        self._geometry = connector.cache.geometry
        self._requests: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        self._calls: list[list[Any]] = []
        for name in ("match", "allocated", "step", "ended", "finish"):
            noted, real = getattr(self, f"_{name}"), getattr(side, name)
            setattr(side, name, self._both(noted, real))

    def record(self, **source: str) -> dict[str, Any]:
        """Return all that was noted, as plain data. source: says where it comes from."""
        (component,) = self._geometry.components
        return {
            "version": _VERSION,
            **source,
            "geometry": {
                "layers": component.layers,
                "heads": component.heads,
                "head_size": component.head_size,
                "dtype": self._geometry.dtype,
                "block_tokens": self._geometry.block_tokens[0],
                "chunk_tokens": self._geometry.chunk_tokens,
            },
            "requests": [list(one.all_token_ids) for one in self._requests.values()],
            "calls": self._calls,
        }

    @staticmethod
    def _both(noted: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            return noted(real, *words)

        return call

    def _number(self, request: Any) -> int:
        name = request.request_id
        self._requests[name] = request
        return self._numbers.setdefault(name, len(self._numbers))

    def _match(self, real: Callable[..., Any], request: Any, computed: int) -> Any:
        found = real(request, computed)
        self._calls.append(["match", self._number(request), request.num_tokens, computed, found[0]])
        return found

    def _allocated(self, real: Callable[..., Any], request: Any, blocks: Any, tokens: int) -> None:
        real(request, blocks, tokens)
        (ids,) = blocks.get_block_ids()
        self._calls.append(["allocated", self._number(request), list(ids), tokens])

    def _finish(self, real: Callable[..., Any], request: Any) -> None:
        real(request)
        self._calls.append(["finish", self._number(request)])

    def _ended(self, real: Callable[..., Any], report: Ended) -> None:
        real(report)
        self._calls.append(["ended", list(report.causes.items())])

    def _step(self, real: Callable[..., Any], output: Any) -> StepPlans:
        states = []
        for name, tokens in output.num_scheduled_tokens.items():
            request = self._requests[name]
            state = (request.num_computed_tokens, request.num_tokens)
            states.append([self._numbers[name], tokens, *state])
        asked: list[Any] = []
        get = output.kv_connector_block_state.get_block_ids

        def noted(name: str) -> Any:
            tables = get(name)
            asked.append([self._numbers[name], list(tables[0])])
            return tables

        words = vars(output) | {"kv_connector_block_state": SimpleNamespace(get_block_ids=noted)}
        plans: StepPlans = real(SimpleNamespace(**words))
        new = [
            [one.num_computed_tokens, list(one.block_ids[0])] for one in output.scheduled_new_reqs
        ]
        more = [
            list(tables[0]) if tables else None
            for tables in output.scheduled_cached_reqs.new_block_ids
        ]
        made = _made(plans)
        self._calls.append(["step", states, new, more, asked, made, plans.reused])
        return plans


class Replay:
    """Says a record to a connector over a cache of its own, as fast as it can.

    made, recorded: the plans of the connector, and those of the one that was recorded: for each
    its kind and its blocks. step_seconds: how long it took for each step, with how many requests
    in it; asking apart in `request_seconds`. tiny: with next to no bytes in a block.
    """

    def __init__(self, record: Mapping[str, Any], *, tiny: bool = False) -> None:
        self.made: list[list[Any]] = []
        self.recorded: list[list[Any]] = []
        self.step_seconds: list[tuple[int, float]] = []
        self.request_seconds: list[float] = []
        self._calls = record["calls"]
        self._requests = [_request(str(at), ids) for at, ids in enumerate(record["requests"])]
        self._plans: dict[int, int] = {}  # numbers of the record: those of here
        self._spent = 0.0
        self._count = 0
        shape = record["geometry"]
        sizes = [1 if tiny else int(shape[name]) for name in ("layers", "heads", "head_size")]
        layers, heads, size = sizes
        geometry = kvtier.Geometry(
            (kvtier.Component(layers, heads, size, planes=1),),
            shape["dtype"],
            (shape["block_tokens"],),
            shape["chunk_tokens"],
        )
        self._cache = kvtier.open(
            "dram:8MiB" if tiny else "dram:256MiB", namespace=Namespace("recorded", geometry)
        )
        self._side = SchedulerSide(self._cache)

    def run(self) -> None:
        """Make all calls, in their order; then close the cache."""
        try:
            for kind, *words in self._calls:
                getattr(self, f"_{kind}")(*words)
        finally:
            self._side.close()
            self._cache.close()

    def _timed(self, call: Callable[..., Any], *words: Any) -> Any:
        begin = monotonic()
        try:
            return call(*words)
        finally:
            self._spent += monotonic() - begin

    def _match(self, number: int, tokens: int, computed: int, found: int | None) -> None:
        if found:  # what it found had been published by then
            assert self._cache.flush(timeout=20)
        request = self._requests[number]
        request.num_tokens = tokens
        begin = monotonic()
        self._side.match(request, computed)
        self.request_seconds.append(monotonic() - begin)

    def _allocated(self, number: int, ids: list[int], tokens: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
        self._side.allocated(self._requests[number], blocks, tokens)

    def _finish(self, number: int) -> None:
        self._side.finish(self._requests[number])

    def _ended(self, causes: list[tuple[int, list[str]]]) -> None:
        report = Ended({self._plans[plan]: list(said) for plan, said in causes})
        self._timed(self._side.ended, report)

    def _step(
        self,
        states: list[tuple[int, int, int, int]],
        new: list[tuple[int, list[int]]],
        more: list[list[int] | None],
        asked: list[tuple[int, list[int]]],
        made: list[list[Any]],
        reused: list[int],
    ) -> None:
        self.step_seconds.append((self._count, self._spent))
        self._count, self._spent = len(states), 0.0
        for number, _, computed, tokens in states:
            request = self._requests[number]
            request.num_computed_tokens, request.num_tokens = computed, tokens
        tables = {str(number): (ids,) for number, ids in asked}
        output = SimpleNamespace(
            num_scheduled_tokens={str(number): tokens for number, tokens, *_ in states},
            scheduled_new_reqs=[
                SimpleNamespace(num_computed_tokens=computed, block_ids=(ids,))
                for computed, ids in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                new_block_ids=[(ids,) if ids else None for ids in more]
            ),
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.__getitem__),
        )
        plans = self._timed(self._side.step, output)
        found = _made(plans)
        self._plans.update(zip((one[0] for one in made), (one[0] for one in found), strict=False))
        self.made += [one[1:] for one in found]
        self.recorded += [one[1:] for one in made]
        if reused:
            self.made.append(["reused", sorted(plans.reused)])
            self.recorded.append(["reused", sorted(self._plans[one] for one in reused)])


def _made(plans: StepPlans) -> list[list[Any]]:
    """Return a step's plans: number, kind, and blocks."""
    decoded = [CopyPlan.decode(data) for data in (*(data for _, data in plans.loads), *plans.saves)]
    return [[p.id, p.kind, [block for part in p.parts for block in part.blocks]] for p in decoded]


def _request(name: str, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        all_token_ids=tokens,
        num_tokens=0,
        num_computed_tokens=0,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        resumable=False,
        skip_reading_prefix_cache=False,
    )


@contextlib.contextmanager
def without_connector(scheduler: Any) -> Iterator[None]:
    """Take the connector out of an idle vLLM, all in one process, and put it back in the end."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    connector, worker = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = connector, worker


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write a record; the same one gives the same bytes."""
    data = json.dumps(record, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, mtime=0))


def read_record(path: Path) -> dict[str, Any]:
    """Read a record. Raises ValueError for one of another version."""
    record: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    if record["version"] != _VERSION:
        raise ValueError(f"{path} is a record of version {record['version']}, not {_VERSION}")
    return record
