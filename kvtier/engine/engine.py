"""A small real decode engine: paged, continuously batched, with a prefix cache of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.connectors.base import Connector, Leaving
from kvtier.engine.compute import Compute, compute_on
from kvtier.engine.drafting import Drafter, Drafting
from kvtier.engine.layers import StepHook
from kvtier.engine.request import (
    Completion,
    Finish,
    Output,
    Request,
    Sampling,
    completion,
    prompt_tokens,
)
from kvtier.engine.runner import AnyModel, Runner
from kvtier.engine.scheduler import Scheduler, Work
from kvtier.engine.spans import Inputs
from kvtier.engine.tables import Pools, for_connector
from kvtier.errors import ConfigError, MisuseError

_WAIT_SECONDS: Final = 0.01
"""How long an idle step waits for the connector: short, so that new requests are seen soon."""


class Engine:
    """Serves requests over one model and one pool of KV blocks. For one thread.

    model: the weights and the forward pass; several engines may share it.
    num_blocks, block_tokens: the size of each component's pool and the tokens of a block.
    num_states: the slots for recurrent states, of which each running request has one.
    chunk_tokens: what the cache below saves at once, the block by default. Recurrent states are
        kept at its multiples, and windows let go of that many tokens at a time.
    step_tokens: the most tokens that a step computes; longer prompts take several steps.
    max_running: the most requests that hold blocks at once.
    prefix_cache: keep the blocks of ended requests findable until they are needed.
    connector: a cache below; also ``connect``, for one that wants to see ``kv`` first.
    kv_dtype: what keys and values are kept in, whatever the model computes in.
    drafter, draft_tokens: guess so many tokens a step, and verify them with the next one.
    ahead: schedule each step before the outputs of the one before it are known.
    device: where it computes, and where weights and ``kv`` lie: "cpu", "cuda", a GPU like "cuda:1",
        or a Compute. A model that lies elsewhere is copied there.
    graphs: record decode steps as CUDA graphs, one for each shape, and replay them; None: on a
        GPU, for models of full attention.
    clock: gives the times in ``Stats``, in seconds.

    Outputs do not depend on any of these, on the batch, or on the caches, except on kv_dtype and
    on the kind of device. Raises ConfigError for sizes out of range, for what does not go
    together, and for a device that is not there or cannot be used.
    """

    def __init__(  # noqa: PLR0913  (the options of an engine)
        self,
        model: AnyModel,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        num_states: int = 64,
        chunk_tokens: int | None = None,
        step_tokens: int = 512,
        max_running: int = 32,
        prefix_cache: bool = True,
        connector: Connector | None = None,
        kv_dtype: torch.dtype = torch.bfloat16,
        drafter: Drafter | None = None,
        draft_tokens: int = 4,
        ahead: bool = False,
        device: str | Compute = "cpu",
        graphs: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check_sizes(
            block_tokens=block_tokens,
            num_states=num_states,
            step_tokens=step_tokens,
            max_running=max_running,
            draft_tokens=draft_tokens,
        )
        chunk = _checked_chunk(chunk_tokens, block_tokens)
        self._compute = compute_on(device) if isinstance(device, str) else device
        self.block_tokens = block_tokens
        self._pools = Pools(
            model.components,
            num_blocks=num_blocks,
            num_states=num_states,
            block_tokens=block_tokens,
            chunk_tokens=chunk,
            prefix_cache=prefix_cache,
        )
        if drafter is not None and (ahead or self._pools.recurrent):
            raise ConfigError(
                "drafts need the outputs of the step before, and go with neither `ahead` nor a "
                "recurrent model, whose state cannot take a rejected token back"
            )
        with self._compute.current():
            self._runner = Runner(
                model,
                num_blocks=num_blocks,
                num_states=num_states,
                block_tokens=block_tokens,
                kv_dtype=kv_dtype,
                compute=self._compute,
                graphs=graphs,
            )
        self.model = self._runner.model
        self._scheduler = Scheduler(
            self._pools,
            step_tokens=step_tokens,
            max_running=max_running,
            drafting=None if drafter is None else Drafting(drafter, draft_tokens),
        )
        self._ahead = ahead
        self._under_way: list[Work] = []
        self._leaving: dict[str, Leaving] = {}
        self._clock = clock
        self._submitted = 0
        self._closed = False
        self._undelivered: list[Output] = []
        self._streams: dict[str, deque[Output]] = {}
        if connector is not None:
            self.connect(connector)

    @property
    def kv(self) -> tuple[torch.Tensor, ...]:
        """For each component of the model its pool, as a Cache binds it.

        [layers, planes, blocks, block tokens, heads, head size], and for a recurrent component
        [layers, planes, slots, heads, head size].
        """
        return self._runner.kv

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self._scheduler.unfinished

    @property
    def idle(self) -> bool:
        """Whether all requests have ended and no copy reads or writes their blocks any more."""
        return not self.unfinished and not self._scheduler.held and not self._under_way

    def connect(self, connector: Connector) -> None:
        """Use a cache below the pool from now on.

        Raises MisuseError if there is one already, or while requests are unfinished.
        """
        if self._scheduler.connector is not None or self.unfinished:
            raise MisuseError("connect one connector, before the first request")
        self._scheduler.connector = connector

    def submit(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        identity: object | None = None,
        inputs: Inputs | None = None,
    ) -> str:
        """Queue a prompt and return the request's id. Does not block.

        identity: what besides its tokens determines the KV (a ``kvtier.Request``), or None.
        inputs: images, embeddings or an adapter, which `identity` must tell from all others.
        Raises ConfigError for a prompt that this model or pool can never serve, MisuseError
        once the engine is closed.
        """
        prompt = self._checked(tokens, sampling)
        request = Request(
            request_id=f"request-{self._submitted}",
            sampling=sampling,
            identity=identity,
            prompt_tokens=len(prompt),
            block_tokens=self.block_tokens,
            submitted=self._clock(),
            inputs=inputs,
        )
        request.append(prompt)
        self._submitted += 1
        self._scheduler.add(request)
        return request.request_id

    def step(self) -> list[Output]:
        """Run one step and return what is new, except of requests that are streamed.

        Blocks for one forward pass. With nothing to compute and a load under way, waits for the
        connector, briefly, and returns an empty list.
        """
        self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def stream(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        identity: object | None = None,
        inputs: Inputs | None = None,
    ) -> Iterator[Output]:
        """Submit a prompt and yield its outputs as they come; the last one carries ``finish``.

        The prompt is checked now and queued at the first ``next``; every ``next`` runs steps as
        needed, which serve all other requests too. Closing the iterator aborts the request.
        """
        self._checked(tokens, sampling)
        return self._follow(tokens, sampling, identity, inputs)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Serve a batch of prompts to their end. Blocks. Completions come in the prompts' order.

        Raises ConfigError, before any of them runs, if one can never be served.
        """
        for prompt in prompts:
            self._checked(prompt, sampling)
        request_ids = [self.submit(prompt, sampling) for prompt in prompts]
        inboxes = [self._streams.setdefault(request_id, deque()) for request_id in request_ids]
        try:
            while not all(inbox and inbox[-1].finish for inbox in inboxes):
                self._advance()
        finally:
            for request_id in request_ids:
                self.abort(request_id)
                del self._streams[request_id]
        return [completion(inbox) for inbox in inboxes]

    def abort(self, request_id: str) -> None:
        """End a request now; its last output says "abort". One that has ended is left alone."""
        request = self._scheduler.find(request_id)
        if request is not None:
            self._scheduler.end(request)
            self._deliver(Output(request_id, None, Finish("abort", request.stats())))

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes in the pool. Running requests keep their blocks."""
        self._pools.reset()

    def close(self) -> None:
        """Abort all requests and close the connector, which waits for its copies, bounded.

        From then on the engine takes no requests. Closing it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        for request_id in self._scheduler.request_ids():
            self.abort(request_id)
        if self._scheduler.connector is not None:
            self._scheduler.connector.close()

    def _advance(self) -> None:
        with self._compute.current():  # what a connector copies comes after that stream's work
            self._one_step()

    def _one_step(self) -> None:
        connector = self._scheduler.connector
        if connector is not None:
            self._scheduler.settle(connector.poll())
        work = self._scheduler.schedule()
        if self._ahead:  # what was just scheduled knows nothing of the step that runs now
            work, self._under_way = self._under_way, work
            self._take(work, self._run(work))
            self._runner.copy(self._scheduler.begin())
        else:
            self._runner.copy(self._scheduler.begin())
            work = work or self._scheduler.under_loads()
            self._take(work, self._run(work))
        if not work and not self._under_way and connector is not None and not self.idle:
            connector.wait(_WAIT_SECONDS)

    def _run(self, work: Sequence[Work]) -> list[list[int]]:
        """Compute a step, and tell the connector how long that took.

        Loads whose layers it reads have settled then, or what it gives for them is void.
        """
        connector = self._scheduler.connector
        if not work or connector is None:
            return self._runner.run(work)
        self._leaving = self._scheduler.leaving(work)
        landing = [one.under for one in work if one.under is not None]
        hook = StepHook(landing, list(self._leaving.values()), self._clock)
        began = self._clock()
        tokens = self._runner.run(work, hook if landing or self._leaving else None)
        spans = [(one.span.start, one.span.start + len(one.span.tokens)) for one in work]
        if not landing or self._compute.device.type == "cpu":  # a GPU's waiting is in its time
            connector.computed(spans, max(self._clock() - began - hook.waited, 0.0))
        if landing:
            for one in landing:
                one.settle()
            self._scheduler.settle(connector.poll())
            self._scheduler.unsettled(work)
        return tokens

    def _take(self, work: Sequence[Work], tokens: Sequence[Sequence[int]]) -> None:
        """Take note of a step's outcome: tokens, what is computed, what can be saved, who ends."""
        now = self._clock() if work else 0.0
        ended: list[tuple[Request, str]] = []
        for item, sampled in zip(work, tokens, strict=True):
            left = self._leaving.pop(item.request.request_id, None)
            if left is not None:
                left.end(good=item.current)
            if item.current:
                reason = self._accept(item, sampled, now)
                self._save(item, sampled)
                if reason is not None:
                    ended.append((item.request, reason))
        # Only now: a slot that is given up may still be written by the step under way.
        for request, reason in ended:
            last = int(request.tokens[-1])
            self._scheduler.end(request)
            self._deliver(Output(request.request_id, last, Finish(reason, request.stats())))

    def _accept(self, item: Work, sampled: Sequence[int], now: float) -> str | None:
        """Append a span's output tokens; say why the request ends, if it does."""
        request = item.request
        request.pending -= bool(sampled)
        request.drafted += len(item.drafts)
        request.accepted += max(len(sampled) - 1, 0)
        for token in sampled:
            reason = request.accept(token, now)
            if reason is not None:
                return reason
            self._deliver(Output(request.request_id, token))
        return None

    def _save(self, item: Work, sampled: Sequence[int]) -> None:
        """Keep what a span computed, but for drafts that were rejected."""
        request, connector = item.request, self._scheduler.connector
        tokens = min(_verified(item, sampled), request.count - item.span.start)
        self._runner.copy(self._scheduler.computed(item, tokens))
        if connector is not None and request.table is not None:
            done = request.tokens[: request.computed]
            places = for_connector(request.table.places)
            connector.save(request.request_id, done, places, request.identity)
        self._scheduler.trim(request)

    def _deliver(self, output: Output) -> None:
        self._streams.get(output.request_id, self._undelivered).append(output)

    def _follow(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        identity: object | None,
        inputs: Inputs | None,
    ) -> Iterator[Output]:
        request_id = self.submit(tokens, sampling, identity, inputs)
        inbox = self._streams.setdefault(request_id, deque())
        try:
            while True:
                while not inbox:
                    self._advance()
                output = inbox.popleft()
                yield output
                if output.finish is not None:
                    return
        finally:
            self.abort(request_id)
            del self._streams[request_id]

    def _checked(self, tokens: Sequence[int], sampling: Sampling) -> NDArray[np.int32]:
        """Return the prompt, int32 [n]; raise ConfigError for one that can never be served."""
        if self._closed:
            raise MisuseError("the engine is closed")
        prompt = prompt_tokens(tokens, self.model.config.vocab_size)
        total, context = len(prompt) + sampling.max_tokens, self.model.config.context_tokens
        asked = f"prompt {len(prompt)} + max_tokens {sampling.max_tokens}"
        if total > context:
            raise ConfigError(f"{asked} exceed the model's context of {context} tokens")
        room = self._runner.num_blocks * self.block_tokens
        if total > room:
            raise ConfigError(f"{asked} exceed the pool of {room} tokens; raise num_blocks")
        return prompt


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")


def _checked_chunk(given: int | None, block_tokens: int) -> int:
    chunk = block_tokens if given is None else given
    if chunk < 1 or chunk % block_tokens:
        raise ConfigError(f"chunk_tokens is {chunk}; it must be a multiple of {block_tokens}")
    return chunk


def _verified(item: Work, sampled: Sequence[int]) -> int:
    """Count the tokens of a span that stand: all but the drafts behind the first wrong one."""
    return len(item.span.tokens) - len(item.drafts) + max(len(sampled) - 1, 0)
