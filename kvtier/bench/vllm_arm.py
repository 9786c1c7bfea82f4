"""``python -m kvtier.bench.vllm_arm THREADS``: one arm of a benchmark, served by vLLM itself.

See ``answering`` for how it is told what to do. Prompts go through vLLM's own engine, in this
process; a cache below it is the one that its connector opens.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvtier.bench.answering import answer_all, build, read_bytes
from kvtier.bench.messages import (
    Build,
    Done,
    Empty,
    LoadModel,
    ModelLoaded,
    Open,
    Plain,
    Replay,
    Reply,
    Request,
    Serve,
    Served,
)
from kvtier.bench.settings import RANDOM
from kvtier.bench.texts import WORDS, encode_words
from kvtier.bench.workloads import Encode
from kvtier.connectors.vllm_checks import check_version
from kvtier.errors import ConfigError, KvtierError, MisuseError

_FLUSH_SECONDS: Final = 120.0
_BLOCK_TOKENS: Final = 32  # vLLM on CPU takes multiples of it
_SPARE_BLOCKS: Final = 16
_NULL_BLOCKS: Final = 2  # vLLM keeps one for itself
_TIERS: Final = ("dram", "lmdb", "s3")
_DTYPE: Final = "float32"  # so that answers can be compared whatever is computed with what
_DTYPE_BYTES: Final = 4
_MOST_STEPS: Final = 100_000
_RANDOM: Final = {
    "vocab_size": WORDS,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,  # far larger than usual: answers depend on the whole prompt
}


class VllmArm:
    """A vLLM with its connector or without, told what to do by messages."""

    def __init__(self) -> None:
        self._vllm: Any = None
        self._loaded: LoadModel | None = None
        self._path = ""  # of the model, or its name at a hub
        self._context = 0
        self._token_bytes = 0
        self._encode: Encode = encode_words
        self._llm: Any = None
        self._count = 0

    def answer(self, request: Request) -> Reply:
        """See ``Answers``."""
        match request:
            case LoadModel():
                return self._load(request)
            case Build():
                return build(request, self._encode)
            case Open():
                self._open(request)
            case Empty():
                self._empty(request)
            case Serve():
                return self._serve(request)
            case Replay() | Plain():
                raise MisuseError("vLLM replays no traces, and is not timed beside plain torch")
        return Done()

    def close(self) -> None:
        """See ``Answers``."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    # ---- the model

    def _load(self, request: LoadModel) -> ModelLoaded:
        """Read a model's configuration; vLLM itself loads it when it is opened."""
        import transformers
        import vllm

        check_version(vllm.__version__)
        self._vllm, self._loaded, self._path = vllm, request, request.model
        try:
            if request.model == RANDOM:
                self._path = _made(Path(request.folder) / RANDOM)
            else:
                tokenizer = transformers.AutoTokenizer.from_pretrained(request.model)
                self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
            config = transformers.AutoConfig.from_pretrained(self._path).get_text_config()
        except (OSError, ValueError) as error:
            cause = str(error).strip().partition("\n")[0]
            raise ConfigError(f"cannot load the model {request.model}: {cause}") from None
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._context = int(config.max_position_embeddings)
        self._token_bytes = 2 * config.num_hidden_layers * heads * size * _DTYPE_BYTES
        return ModelLoaded(
            name=request.model,
            sha256="",
            context_tokens=self._context,
            bytes_per_token=self._token_bytes,
            engine=f"vLLM {self._vllm.__version__}",
        )

    def _open(self, request: Open) -> None:
        """Start vLLM with room for so many tokens."""
        if self._loaded is None:
            raise MisuseError("no model is loaded")
        spare = _SPARE_BLOCKS if request.spare else _NULL_BLOCKS
        blocks = -(-request.tokens // _BLOCK_TOKENS) + spare
        room = blocks * _BLOCK_TOKENS * self._token_bytes
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str((room >> 30) + 1)
        try:
            self._llm = self._vllm.LLM(
                self._path,
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype=_DTYPE,
                block_size=_BLOCK_TOKENS,
                max_model_len=min(self._context, request.tokens),
                num_gpu_blocks_override=blocks,
                enable_prefix_caching=request.prefix_cache,
                kv_transfer_config=self._transfer(request.tiers),
                disable_log_stats=True,
                seed=0,
            )
        except KvtierError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise ConfigError(f"vLLM did not start on {self._loaded.model}: {cause}") from error
        runner = self._core.model_executor.driver_worker.worker.model_runner
        for tensor in runner.kv_caches:
            tensor.zero_()  # an engine's pool is resident: no page fault while it is timed

    def _transfer(self, tiers: list[str]) -> Any:
        """Return how vLLM is told of the connector; None where there are no tiers."""
        if not tiers or self._loaded is None:
            return None
        return self._vllm.config.KVTransferConfig(
            kv_connector="KvtierConnector",
            kv_connector_module_path="kvtier.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tiers": tiers, "chunk_tokens": self._loaded.chunk_tokens},
        )

    # ---- serving

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def _connector(self) -> Any:
        return self._core.scheduler.connector

    def _empty(self, request: Empty) -> None:
        if not request.keeps_hbm:
            self._llm.reset_prefix_cache()
        for tier in request.tiers:
            if self._connector is not None:
                self._connector.cache.clear(tier)

    def _serve(self, request: Serve) -> Served:
        read, before = read_bytes(), self._figures()
        tokens, cached, times = self._answered(request)
        read, after = read_bytes() - read, self._figures()
        self._write_down()
        found = {name: after[name] - before[name] for name in before}
        hits = {tier: count for tier in _TIERS if (count := found.get(f"hit {tier}", 0))}
        own = cached - sum(hits.values())
        later = len(times) - 2
        return Served(
            tokens=tokens,
            ttft_s=times[1] - times[0],
            tpot_s=(times[-1] - times[1]) / later if later else None,
            hits={**hits, "hbm": own} if own else hits,
            recomputed=len(request.tokens) - cached,
            read_bytes=read,
            fetched={tier: found.get(f"fetched {tier}", 0) for tier in _TIERS[1:]},
        )

    def _answered(self, request: Serve) -> tuple[list[int], int, list[float]]:
        """Return the answer, the tokens that were not computed, and when: the start, each token."""
        self._count += 1
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=request.output_len, detokenize=False, ignore_eos=True
        )
        engine, times = self._llm.llm_engine, [time.perf_counter()]
        engine.add_request(str(self._count), {"prompt_token_ids": request.tokens}, params)
        for _ in range(_MOST_STEPS):
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                times += [time.perf_counter()] * (len(tokens) + 1 - len(times))
                if output.finished:
                    return tokens, output.num_cached_tokens, times
        raise KvtierError(f"vLLM has not answered within {_MOST_STEPS} steps")

    def _write_down(self) -> None:
        """Wait for copies and writes, so that no other arm is timed against them."""
        if self._connector is None:
            return
        for _ in range(_MOST_STEPS):
            if not self._connector.has_pending_push_work():
                break
            self._llm.llm_engine.step()
        if not self._connector.cache.flush(timeout=_FLUSH_SECONDS):
            raise KvtierError(f"the tiers did not take what was saved within {_FLUSH_SECONDS:g} s")

    def _figures(self) -> Mapping[str, int]:
        if self._connector is None:
            return {}
        metrics = self._connector.cache.metrics
        hits = {f"hit {tier}": int(metrics.get("hit_tokens", tier=tier)) for tier in _TIERS}
        below = _TIERS[1:]
        read = {f"fetched {tier}": int(metrics.get("fetched_bytes", tier=tier)) for tier in below}
        return hits | read


def _made(folder: Path) -> str:
    """Return the folder of a random model, made there by the first arm that asks."""
    import torch
    import transformers

    if not folder.exists():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_RANDOM))
        model.to(torch.float32).save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Answer until stdin ends."""
    threads = int(sys.argv[1])
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
    )
    import torch

    torch.set_num_threads(threads)
    answer_all(VllmArm())


if __name__ == "__main__":
    main()
