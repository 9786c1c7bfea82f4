"""``python -m kvtier.bench.arm THREADS``: one arm of a benchmark, in a process of its own.

See ``answering`` for how it is told what to do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Final

import msgspec
import torch

import kvtier
from kvtier.bench.answering import answer_all, build, read_bytes
from kvtier.bench.messages import (
    Build,
    Built,
    Done,
    Empty,
    LoadModel,
    ModelLoaded,
    Open,
    Plain,
    PlainTook,
    Replay,
    Replayed,
    Reply,
    Request,
    Serve,
    Served,
)
from kvtier.bench.models import BLOCK_TOKENS, BenchModel, load_model
from kvtier.bench.recorded import Asked, prompt
from kvtier.bench.rungs import check_served
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.base import Device
from kvtier.device.chaos import ChaosDevice
from kvtier.device.named import device_named
from kvtier.device.race import Checked
from kvtier.engine import Engine, Model, Sampling, Stats, plain_prefill
from kvtier.errors import KvtierError, MisuseError

_CHAOS_GROUPS: Final = 8
_FLUSH_SECONDS: Final = 120.0
_SPARE_BLOCKS: Final = 16


class Arm:
    """A model, an engine and perhaps a cache, told what to do by messages."""

    def __init__(self) -> None:
        self._loaded: BenchModel | None = None
        self._engine: Engine | None = None
        self._cache: kvtier.Cache | None = None
        self._device: Device | None = None

    def answer(self, request: Request) -> Reply:
        """Do what a request says. Blocks. Raises KvtierError for what its sender got wrong."""
        match request:
            case LoadModel():
                return self._load(request)
            case Build():
                return self._build(request)
            case Open():
                self._open(request)
            case Empty():
                self._empty(request)
            case Serve():
                return self._serve(request)
            case Replay():
                return self._replay(request)
            case Plain():
                return self._plain(request.tokens)
        return Done()

    def close(self) -> None:
        """Write down what waits, and let go of everything. Blocks."""
        if self._engine is not None:
            self._engine.close()
        if self._cache is not None:
            self._cache.close()
        if self._device is not None:
            self._device.close()

    def _load(self, request: LoadModel) -> ModelLoaded:
        self._loaded = load_model(request)
        namespace = self._loaded.namespace
        return ModelLoaded(
            name=namespace.model,
            sha256=namespace.revision,
            context_tokens=self._loaded.model.config.context_tokens,
            bytes_per_token=namespace.geometry.bytes_per_token,
        )

    def _build(self, request: Build) -> Built:
        return build(request, self._model().encode)

    def _open(self, request: Open) -> None:
        loaded = self._model()
        if request.tiers:
            self._cache = kvtier.open(*request.tiers, namespace=loaded.namespace)
            check_served(self._cache)
        self._engine = Engine(
            loaded.model,
            num_blocks=-(-request.tokens // BLOCK_TOKENS) + _SPARE_BLOCKS * request.spare,
            block_tokens=BLOCK_TOKENS,
            prefix_cache=request.prefix_cache,
            clock=loaded.clock,
            device=request.device,
        )
        if isinstance(self._engine.model, Model):
            self._loaded = loaded._replace(model=self._engine.model)  # once, where it computes
        if request.device == "cpu":
            self._engine.kv[0].fill_(0)  # resident, as an engine's is: no page fault while timed
        if self._cache is not None:
            chaos = request.chaos
            named = device_named(request.device)
            self._device = named if chaos is None else Checked(ChaosDevice(chaos))
            # What a tier takes is the question here, also where it takes longer than computing.
            # An odd order is the odder the more groups of layers there are.
            connector = ReferenceConnector(
                self._cache,
                self._engine.kv,
                self._device,
                always=True,
                groups=None if chaos is None else _CHAOS_GROUPS,
            )
            self._engine.connect(connector)

    def _empty(self, request: Empty) -> None:
        if not request.keeps_hbm:
            self._running().reset_prefix_cache()
        for tier in request.tiers:
            if self._cache is not None:
                self._cache.clear(tier)

    def _serve(self, request: Serve) -> Served:
        engine = self._running()
        read, fetched = read_bytes(), self._fetched()
        [answer] = engine.generate([request.tokens], Sampling(max_tokens=request.output_len))
        read, fetched_now = read_bytes() - read, self._fetched()
        self._write_down(engine)
        stats = answer.finish.stats
        return _served(
            list(answer.tokens),
            stats,
            stats.submitted,
            read,
            {tier: fetched_now[tier] - count for tier, count in fetched.items()},
        )

    def _replay(self, request: Replay) -> Replayed:
        engine = self._running()
        read, fetched = read_bytes(), self._fetched()
        began, ended, served = self._followed(engine, request)
        read, fetched_now = read_bytes() - read, self._fetched()
        self._write_down(engine)
        served[-1] = msgspec.structs.replace(
            served[-1],
            read_bytes=read,
            fetched={tier: fetched_now[tier] - count for tier, count in fetched.items()},
        )
        return Replayed(served, ended - began)

    def _followed(self, engine: Engine, request: Replay) -> tuple[float, float, list[Served]]:
        """Serve requests as they arrive; return the first arrival, the end, and what came of them.

        A request waits from its arrival on, also while the step before it goes on.
        """
        loaded, vocabulary = self._model(), self._model().model.config.vocab_size
        size, seed = request.block_tokens, request.seed
        prompts = [prompt(one, size, vocabulary, seed).tolist() for one in request.asked]
        answers: dict[str, tuple[int, Asked, list[int]]] = {}
        served: list[Served | None] = [None] * len(prompts)
        began = ended = loaded.clock()
        coming = 0
        while coming < len(prompts) or engine.unfinished:
            while coming < len(prompts) and loaded.clock() - began >= request.asked[coming].at:
                one = request.asked[coming]
                name = engine.submit(prompts[coming], Sampling(max_tokens=one.output_len))
                answers[name] = (coming, one, [])
                coming += 1
            if not engine.unfinished:
                loaded.wait(began + request.asked[coming].at - loaded.clock())
                continue
            for output in engine.step():
                number, one, tokens = answers[output.request_id]
                if output.token is not None:
                    tokens.append(output.token)
                if output.finish is not None:
                    stats = output.finish.stats
                    served[number] = _served(tokens, stats, began + one.at, 0, {})
                    ended = max(ended, stats.last_token or ended)
        return began, ended, [one for one in served if one is not None]

    def _write_down(self, engine: Engine) -> None:
        """Wait for copies and writes, so that no other arm is timed against them."""
        while not engine.idle:
            engine.step()
        if self._cache is not None and not self._cache.flush(timeout=_FLUSH_SECONDS):
            raise KvtierError(f"the tiers did not take what was saved within {_FLUSH_SECONDS:g} s")

    def _fetched(self) -> dict[str, int]:
        if self._cache is None:
            return {}
        metrics = self._cache.metrics
        return {tier: int(metrics.get("fetched_bytes", tier=tier)) for tier in ("lmdb", "s3")}

    def _plain(self, tokens: list[int]) -> PlainTook:
        model = self._model().model
        if not isinstance(model, Model):
            raise MisuseError("a clock is not timed beside plain torch")
        begin = time.perf_counter()
        plain_prefill(model, tokens).cpu()  # so that it is done
        return PlainTook(time.perf_counter() - begin)

    def _model(self) -> BenchModel:
        if self._loaded is None:
            raise MisuseError("no model is loaded")
        return self._loaded

    def _running(self) -> Engine:
        if self._engine is None:
            raise MisuseError("no engine is open")
        return self._engine


def _served(
    tokens: list[int], stats: Stats, arrived: float, read: int, fetched: Mapping[str, int]
) -> Served:
    first, last = stats.first_token or 0.0, stats.last_token or 0.0
    later = len(tokens) - 1
    return Served(
        tokens=tokens,
        ttft_s=first - arrived,
        tpot_s=(last - first) / later if later else None,
        hits=stats.hit_tokens,
        recomputed=stats.recomputed_tokens,
        read_bytes=read,
        fetched=fetched,
    )


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(int(sys.argv[1]))
    # Not use_deterministic_algorithms: that imports torch's compiler, for more than a second.
    torch.set_deterministic_debug_mode("error")
    answer_all(Arm())


if __name__ == "__main__":
    main()
