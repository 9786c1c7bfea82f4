"""A small real decode engine: paged, continuously batched, with a prefix cache of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.connectors.base import Connector
from kvtier.engine.blocks import BlockPool
from kvtier.engine.model import Model
from kvtier.engine.request import Completion, Finish, Output, Request, Sampling
from kvtier.engine.sampler import sample
from kvtier.engine.scheduler import Scheduler
from kvtier.errors import ConfigError, MisuseError

__all__ = ["Engine"]

_WAIT_SECONDS: Final = 0.01
"""How long an idle step waits for the connector: short, so that new requests are seen soon."""


class Engine:
    """Serves requests over one model and one pool of KV blocks. For one thread.

    model: the weights and the forward pass; several engines may share it.
    num_blocks, block_tokens: the pool's size and the tokens of a block.
    step_tokens: the most tokens that a step computes; longer prompts take several steps.
    max_running: the most requests that hold blocks at once.
    prefix_cache: keep the blocks of ended requests findable until they are needed.
    connector: a cache below; also ``connect``, for one that wants to see ``kv`` first.
    kv_dtype: what keys and values are kept in, whatever the model computes in.
    clock: gives the times in ``Stats``, in seconds.

    Outputs do not depend on any of these, on the batch, or on the caches, except on kv_dtype.
    Raises ConfigError for sizes out of range.
    """

    def __init__(  # noqa: PLR0913  (the options of an engine)
        self,
        model: Model,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        step_tokens: int = 512,
        max_running: int = 32,
        prefix_cache: bool = True,
        connector: Connector | None = None,
        kv_dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        limits = {
            "block_tokens": block_tokens,
            "step_tokens": step_tokens,
            "max_running": max_running,
        }
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if kv_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(f"kv_dtype {kv_dtype} is not one of bfloat16, float16, float32")
        config = model.config
        self.model = model
        self.block_tokens = block_tokens
        self._pool = BlockPool(num_blocks, prefix_cache=prefix_cache)
        self.kv = torch.zeros(
            (config.layers, 2, num_blocks, block_tokens, config.kv_heads, config.head_size),
            dtype=kv_dtype,
        )
        self._scheduler = Scheduler(self._pool, step_tokens=step_tokens, max_running=max_running)
        self._clock = clock
        self._submitted = 0
        self._closed = False
        self._undelivered: list[Output] = []
        self._streams: dict[str, deque[Output]] = {}
        if connector is not None:
            self.connect(connector)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self._scheduler.unfinished

    @property
    def idle(self) -> bool:
        """Whether all requests have ended and no copy reads or writes their blocks any more."""
        return not self.unfinished and not self._scheduler.held

    def connect(self, connector: Connector) -> None:
        """Use a cache below the pool from now on.

        Raises MisuseError if there is one already, or while requests are unfinished.
        """
        if self._scheduler.connector is not None or self.unfinished:
            raise MisuseError("connect one connector, before the first request")
        self._scheduler.connector = connector

    def submit(
        self, tokens: Sequence[int], sampling: Sampling, identity: object | None = None
    ) -> str:
        """Queue a prompt and return the request's id. Does not block.

        identity: what besides its tokens determines the KV (a ``kvtier.Request``), or None.
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
        self, tokens: Sequence[int], sampling: Sampling, identity: object | None = None
    ) -> Iterator[Output]:
        """Submit a prompt and yield its outputs as they come; the last one carries ``finish``.

        The prompt is checked now and queued at the first ``next``; every ``next`` runs steps as
        needed, which serve all other requests too. Closing the iterator aborts the request.
        """
        self._checked(tokens, sampling)
        return self._follow(tokens, sampling, identity)

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
        return [_completion(inbox) for inbox in inboxes]

    def abort(self, request_id: str) -> None:
        """End a request now; its last output says "abort". One that has ended is left alone."""
        request = self._scheduler.find(request_id)
        if request is not None:
            self._scheduler.end(request)
            self._deliver(Output(request_id, None, Finish("abort", request.stats())))

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes in the pool. Running requests keep their blocks."""
        self._pool.reset()

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
        connector = self._scheduler.connector
        if connector is not None:
            self._scheduler.settle(connector.poll())
        work = self._scheduler.schedule()
        if not work:
            if connector is not None and not self.idle:
                connector.wait(_WAIT_SECONDS)
            return
        logits = iter(self.model.forward([span for _, span in work], self.kv).numpy())
        now = self._clock()
        for request, span in work:
            self._scheduler.computed(request, len(span.tokens))
            if connector is not None:
                done = request.tokens[: request.computed]
                connector.save(request.request_id, done, span.blocks, request.identity)
            if span.logits:
                self._accept(request, next(logits), now)

    def _accept(self, request: Request, logits: NDArray[np.float32], now: float) -> None:
        token = sample(logits, request.sampling, request.generated)
        reason = request.accept(token, now)
        if reason is not None:
            self._scheduler.end(request)
        finish = None if reason is None else Finish(reason, request.stats())
        self._deliver(Output(request.request_id, token, finish))

    def _deliver(self, output: Output) -> None:
        self._streams.get(output.request_id, self._undelivered).append(output)

    def _follow(
        self, tokens: Sequence[int], sampling: Sampling, identity: object | None
    ) -> Iterator[Output]:
        request_id = self.submit(tokens, sampling, identity)
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
        prompt = np.asarray(tokens)
        if prompt.ndim != 1:
            raise ConfigError(f"a prompt is one list of token ids, not {prompt.ndim}-dimensional")
        if not len(prompt):
            raise ConfigError("the prompt is empty; give at least one token")
        if prompt.dtype.kind not in "iu":
            raise ConfigError(f"the prompt holds {prompt.dtype} values; token ids are integers")
        vocab = self.model.config.vocab_size
        if prompt.min() < 0 or prompt.max() >= vocab:
            raise ConfigError(f"a token id lies outside the vocabulary, 0 to {vocab - 1}")
        total, context = len(prompt) + sampling.max_tokens, self.model.config.context_tokens
        asked = f"prompt {len(prompt)} + max_tokens {sampling.max_tokens}"
        if total > context:
            raise ConfigError(f"{asked} exceed the model's context of {context} tokens")
        room = self._pool.num_blocks * self.block_tokens
        if total > room:
            raise ConfigError(f"{asked} exceed the pool of {room} tokens; raise num_blocks")
        return prompt.astype(np.int32)


def _completion(outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    if last.finish is None:
        raise MisuseError(f"{last.request_id} has not ended")
    tokens = tuple(output.token for output in outputs if output.token is not None)
    return Completion(last.request_id, tokens, last.finish)
