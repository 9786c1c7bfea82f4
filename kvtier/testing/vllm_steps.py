"""vLLM's part in a step, for tests without vLLM: requests, blocks, and the order of calls.

Its KV depends on all tokens before, so that a block in the wrong place shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

import kvtier
from kvtier.connectors.vllm_scheduler import SchedulerSide
from kvtier.connectors.vllm_seat import ApartPlace, Place, Seat, SharedPlace, open_for
from kvtier.connectors.vllm_worker import WorkerSide

BLOCK, CHUNK, BLOCKS, WINDOW = 16, 64, 64, 64
FULL = kvtier.Component(2, 1, 16, planes=1, name="group0")
SLIDING = kvtier.Component(
    2, 1, 16, planes=1, name="group1", needs=kvtier.Needs.TRAILING, window=WINDOW
)


class VllmSteps:
    """Both halves of the connector over a cache of their own, driven step by step.

    engine: where it is given, the worker finds a daemon's memory by it, as if it were apart; the
    daemon is that of `tiers`, or one that starts here.
    """

    def __init__(
        self,
        *components: kvtier.Component,
        tiers: Sequence[str] = ("dram:4MiB",),
        engine: str = "",
    ) -> None:
        geometry = kvtier.Geometry(components, "float32", (BLOCK,), CHUNK)
        self.namespace = kvtier.Namespace("tiny", geometry)
        names = [[f"{one.name}.{n}" for n in range(one.layers)] for one in components]
        groups = [SimpleNamespace(layer_names=one) for one in names]
        shape = (BLOCKS, 1, BLOCK, 16)
        self.kv = {name: torch.zeros(shape) for group in names for name in group}
        self.place: Place | None = None
        if engine:  # a worker is there, with its KV, before the scheduler is
            self.place = ApartPlace(tiers, self.namespace, engine, (0, 1))
            self._work(groups)
        self.cache = open_for(tiers, self.namespace, engine, 1, apart=bool(engine))
        self.seat = Seat(engine or "engine", self.cache)
        self.seat.roles.add("SCHEDULER")
        if self.place is None:
            self.place = SharedPlace(self.seat)
            self._work(groups)
        self.scheduler = SchedulerSide(self.cache)
        self.tables: dict[str, list[list[int]]] = {}
        self.groups = len(components)

    def _work(self, groups: list[SimpleNamespace]) -> None:
        kv = SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)
        assert self.place is not None
        self.worker = WorkerSide(self.place, kv)
        self.worker.bind(self.kv)

    def request(self, name: str, tokens: Sequence[int], **more: Any) -> SimpleNamespace:
        """Return a request as vLLM has it. more: what is not as usual."""
        plain: dict[str, Any] = {
            "lora_request": None,
            "cache_salt": None,
            "mm_features": [],
            "prompt_embeds": None,
            "resumable": False,
            "skip_reading_prefix_cache": False,
        }
        return SimpleNamespace(
            request_id=name,
            all_token_ids=tokens,
            prompt=tuple(tokens),
            num_tokens=len(tokens),
            num_computed_tokens=0,
            **{**plain, **more},
        )

    def allot(self, request: SimpleNamespace, *tables: list[int]) -> None:
        """Give a request its blocks, by group of layers; 0 for one that is gone."""
        self.tables[request.request_id] = list(tables)

    def compute(self, request: SimpleNamespace, start: int = 0) -> None:
        """Fill a request's blocks from a token on with what depends on it alone."""
        for at, name in enumerate(self.kv):
            table = self.tables[request.request_id][at * self.groups // len(self.kv)]
            for place in range(start // BLOCK, len(table)):
                if table[place]:
                    self.kv[name][table[place]] = self.content(request, name, place)

    def content(self, request: SimpleNamespace, name: str, place: int) -> torch.Tensor:
        """Return the KV of one block of a request in one layer."""
        seed = zlib.crc32(repr((request.prompt[: (place + 1) * BLOCK], name)).encode())
        return torch.rand((1, BLOCK, 16), generator=torch.Generator().manual_seed(seed))

    def step(self, **scheduled: int) -> tuple[set[str], dict[str, tuple[int, ...]]]:
        """Go through one step that computes so many tokens of each request named."""
        served = self.scheduler._served
        new = [
            SimpleNamespace(
                num_computed_tokens=served[name].request.num_computed_tokens,
                block_ids=self.tables[name],
            )
            for name in scheduled
        ]
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None]),
            kv_connector_block_state=SimpleNamespace(get_block_ids=self.tables.get),
        )
        plans = self.scheduler.step(output)
        self.worker.before(plans)
        for name in scheduled:
            self.compute(served[name].request, served[name].request.num_computed_tokens)
        self.worker.load(plans)
        self.worker.save(plans)
        arrived, failed = self.worker.arrived(idle=not scheduled)
        for name, tokens in scheduled.items():
            served[name].request.num_computed_tokens += tokens
        report = self.worker.report()
        if report is not None:
            self.scheduler.ended(report)
        return arrived, failed

    def settle(self) -> None:
        """Step until all copies are reported, and what they saved can be found."""
        for transfer in list(self.worker._saves.values()):
            transfer.result(20)
        while self.scheduler.busy:
            self.step()
        assert self.cache.flush(timeout=20)

    def serve(
        self, name: str, tokens: Sequence[int], *tables: list[int], **more: Any
    ) -> SimpleNamespace:
        """Serve a request in one step, without a look at what is stored."""
        request = self.request(name, tokens, **more)
        self.allot(request, *tables)
        self.scheduler._serve(request)
        self.step(**{name: len(tokens)})
        return request

    def load(self, request: SimpleNamespace, *tables: list[int]) -> dict[str, tuple[int, ...]]:
        """Load what is offered; return what failed."""
        offered, later = self.scheduler.match(request, 0)
        while offered is None:  # as a daemon's answer on a busy machine, which vLLM asks for again
            self.step()
            offered, later = self.scheduler.match(request, 0)
        assert offered and later, "nothing is offered"  # noqa: PT018
        self.allot(request, *tables)
        blocks = SimpleNamespace(get_block_ids=lambda: tuple(tables))
        self.scheduler.allocated(request, blocks, offered)
        arrived, failed = self.step()
        while request.request_id not in arrived:
            arrived, failed = self.step()
        return failed

    def holds(self, request: SimpleNamespace, places: range, like: SimpleNamespace) -> bool:
        """Say whether a request's blocks, where it has any, are as another's were computed."""
        return all(
            torch.equal(self.kv[name][table[place]], self.content(like, name, place))
            for at, name in enumerate(self.kv)
            for table in [self.tables[request.request_id][at * self.groups // len(self.kv)]]
            for place in places
            if table[place]
        )

    def close(self) -> None:
        """Close both halves, and the cache."""
        self.worker.close()
        self.scheduler.close()
        self.seat.leave("SCHEDULER")
