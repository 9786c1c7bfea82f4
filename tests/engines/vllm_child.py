"""One process of real vLLM: it runs one script and writes down what it saw.

usage: vllm_child.py JSON, with model, tiers (none: no connector), script, options and the file
to write. What a script returns is compared by ``run.py``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)

import numpy as np
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest

from kvtier.connectors import vllm_figures
from kvtier.device import cpu

CHUNK, BLOCK = 64, 32
vllm_figures._SECONDS = 0.1
Answers = list[list[int]]


class Engine:
    """vLLM with or without the connector, and prompts that are the same in every process."""

    def __init__(self, model: str, tiers: list[str], options: dict[str, Any], setting: Any) -> None:
        transfer = None
        if tiers:
            extra = {"tiers": tiers, "chunk_tokens": CHUNK, **setting.get("extra", {})}
            ours = {
                "kv_connector": "KvtierConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": setting.get("policy", "recompute"),
                "kv_connector_extra_config": extra,
            }
            if "beside" in setting:  # another connector, and one that has both in it
                other = {"kv_connector": setting["beside"], "kv_role": "kv_both"}
                both = {"connectors": [ours, other]}
                ours = {
                    **other,
                    "kv_connector": "MultiConnector",
                    "kv_connector_extra_config": both,
                }
            transfer = KVTransferConfig(**ours)
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=480,
            max_num_seqs=8,
            block_size=BLOCK,
            seed=0,
            kv_transfer_config=transfer,
            disable_log_stats=False,
            **options,
        )
        drawn = random.Random(1)
        self.prompts = [[drawn.randrange(3, 1024) for _ in range(n)] for n in (300, 200, 256)]
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.adapters: list[str] = setting.get("adapters", [])
        self.daemon = int(setting.get("daemon", 0))  # its supervisor's process

    def answer(
        self, tokens: int = 16, lora: LoRARequest | None = None, **which: Any
    ) -> tuple[Answers, list[int]]:
        """Return the answers, and how many tokens of each prompt vLLM did not compute."""
        given = [{"prompt_token_ids": one, **which} for one in self.prompts]
        found = self.llm.generate(given, sampling(tokens), use_tqdm=False, lora_request=lora)
        return [list(o.outputs[0].token_ids) for o in found], [o.num_cached_tokens for o in found]

    def reset(self) -> None:
        """Empty vLLM's own cache."""
        assert self.llm.reset_prefix_cache()

    def figure(self, name: str, **labels: str) -> float:
        return self.connector.cache.metrics.get(name, **labels)

    def count(self, name: str) -> float:
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def step_until(self, done: Callable[[], bool]) -> None:
        """Step, up to a number that no healthy engine needs."""
        for _ in range(20_000):
            if done():
                return
            self.llm.llm_engine.step()
        raise AssertionError("the engine makes no progress")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False, ignore_eos=True)


def starts(answers: Answers) -> Answers:
    """What is compared between processes: other batches may round later tokens otherwise."""
    return [one[:6] for one in answers]


@contextmanager
def loads(before: Callable[[], None]) -> Iterator[None]:
    """Do something before each copy into vLLM's blocks, on the thread that copies."""
    real = cpu._copy

    def copy(one: Any, *, into_slot: bool) -> None:
        if not into_slot:
            before()
        real(one, into_slot=into_slot)

    cpu._copy = copy
    try:
        yield
    finally:
        cpu._copy = real


# -------------------------------------------------------------------------------------- scripts


def script_none(engine: Engine) -> dict[str, Any]:
    """Answer without a connector; the second time from vLLM's own cache."""
    answers, _ = engine.answer()
    again, cached = engine.answer()
    return {"answers": starts(answers), "own hit": again == answers and min(cached) >= 128}


def script_memory(engine: Engine) -> dict[str, Any]:
    """All that one process shows with DRAM alone."""
    cold, none = engine.answer()
    found: dict[str, Any] = {"answers": starts(cold), "cold": sum(none) == 0}
    own, cached = engine.answer()
    found["own hit"] = own == cold and min(cached) >= 128
    before = engine.figure("hit_tokens")
    engine.reset()
    warm, cached = engine.answer()
    hits = engine.figure("hit_tokens") - before
    found["hit"] = warm == cold and hits == sum(cached) and cached[0] == 256
    # The third prompt is whole chunks: all but its last block is loaded.
    found["full prompt"] = warm[2] == cold[2] and cached[2] == 224
    found["salt"] = _salted(engine, cold)
    found["abort"] = _aborted(engine, cold)
    found["failed loads"] = _failed(engine, cold)
    found["figures"] = _exported(engine)
    found["emptied"] = _emptied(engine, cold)
    engine.reset()
    arena = engine.connector.cache._desk.arena.memory
    arena.view(np.float32)[:] = np.random.default_rng(2).standard_normal(len(arena) // 4)
    noisy, cached = engine.answer()
    found["noise"] = min(cached) > 0 and all(a != b for a, b in zip(noisy, cold, strict=True))
    return found


def _salted(engine: Engine, cold: Answers) -> bool:
    """Another salt is another cache; the second time its own."""
    engine.reset()
    first, none = engine.answer(cache_salt="someone")
    engine.reset()
    second, cached = engine.answer(cache_salt="someone")
    return first == second == cold and sum(none) == 0 and min(cached) >= 128


def _aborted(engine: Engine, cold: Answers) -> bool:
    """End a request while its load is under way, and another while it is computed."""
    engine.reset()
    free = engine.free_blocks()
    gate = threading.Event()
    serving = engine.llm.llm_engine
    with loads(gate.wait):
        name = serving.add_request("a", {"prompt_token_ids": engine.prompts[0]}, sampling(8))
        side = engine.connector._side
        engine.step_until(lambda: bool(side._loading))
        serving.step()
        held = engine.free_blocks() < free
        serving.abort_request([name or "a"], internal=True)
        gate.set()
        engine.step_until(lambda: not engine.scheduler.requests and not side.busy)
    other = [7, *engine.prompts[1]]
    name = serving.add_request("b", {"prompt_token_ids": other}, sampling(64))
    engine.step_until(lambda: bool(engine.scheduler.running))
    serving.abort_request([name or "b"], internal=True)
    engine.step_until(lambda: not engine.scheduler.requests and not side.busy)
    engine.reset()
    answers, _ = engine.answer()
    return held and answers == cold and not side._served and engine.free_blocks() == free


def _failed(engine: Engine, cold: Answers) -> bool:
    """Fail every copy into vLLM's blocks: all is computed, once, and nothing goes round."""
    tried: set[int] = set()

    def broken() -> None:
        tried.update(engine.connector._scheduler._loading)
        raise OSError("a copy fails, on purpose")

    engine.reset()
    with loads(broken):
        answers, _ = engine.answer()
    engine.reset()
    healed, cached = engine.answer()
    once = len(tried) == len(engine.prompts)  # none is tried again
    return answers == healed == cold and once and min(cached) >= 128


def _emptied(engine: Engine, cold: Answers) -> bool:
    """Empty all tiers while a request waits for blocks: it is offered nothing any more."""
    engine.reset()
    serving = engine.llm.llm_engine
    name = serving.add_request("e", {"prompt_token_ids": engine.prompts[0]}, sampling(8))
    (waits,) = engine.scheduler.requests.values()
    offered, _ = engine.connector.get_num_new_matched_tokens(waits, 0)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    void = engine.connector.get_num_new_matched_tokens(waits, 0) == (0, False)
    serving.abort_request([name or "e"], internal=True)
    engine.step_until(lambda: not engine.scheduler.requests)
    answers, none = engine.answer()
    return offered >= 256 and void and answers == cold and sum(none) == 0


def _exported(engine: Engine) -> bool:
    """Find what kvtier has counted among vLLM's own metrics, as Prometheus is told it."""
    wanted = {name: engine.figure(name) for name in ("hit_tokens", "saved_chunks", "tier_parts")}

    def there() -> bool:
        if engine.llm.llm_engine.has_unfinished_requests():
            return False
        if all(engine.count(f"vllm:kvtier_{name}") == wanted[name] for name in wanted):
            return True
        # Figures come with a step's output.
        engine.llm.llm_engine.add_request("f", {"prompt_token_ids": [5, 6]}, sampling(1))
        return False

    engine.step_until(there)
    return wanted["hit_tokens"] > 0


def script_fill(engine: Engine) -> dict[str, Any]:
    """Save, and leave when all is on disk."""
    answers, _ = engine.answer()
    flushed = engine.connector.cache.flush(timeout=30)
    return {"answers": starts(answers), "flushed": flushed}


def script_restart(engine: Engine) -> dict[str, Any]:
    """Answer from what another process left on disk."""
    answers, cached = engine.answer()
    hits = engine.figure("hit_tokens", tier="lmdb")
    return {
        "answers": starts(answers),
        "cached": sum(cached),
        "hits": hits,
        "corrupt": engine.figure("corrupt_records"),
    }


def script_warm(engine: Engine) -> dict[str, Any]:
    """Answer, empty vLLM's own cache, and answer from kvtier's."""
    cold, none = engine.answer()
    engine.reset()
    warm, cached = engine.answer()
    return {"answers": starts(cold), "warm": warm == cold, "none": sum(none), "cached": cached}


def script_found(engine: Engine) -> dict[str, Any]:
    """Answer from what another vLLM has left with the daemon."""
    answers, cached = engine.answer()
    return {"answers": starts(answers), "cached": cached}


def script_absent(engine: Engine) -> dict[str, Any]:
    """Answer where there is no daemon, and never was one."""
    cold, _ = engine.answer()
    engine.reset()
    again, cached = engine.answer()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    return {"answers": starts(cold), "again": again == cold, "cached": sum(cached)}


def script_killed(engine: Engine) -> dict[str, Any]:
    """Have the daemon killed under requests that save, load and wait; then go on without it."""
    cold, _ = engine.answer()
    engine.reset()
    serving = engine.llm.llm_engine
    prompts = [*engine.prompts, *([9, *one] for one in engine.prompts)]
    for at, one in enumerate(prompts):
        serving.add_request(f"r{at}", {"prompt_token_ids": one}, sampling(16))
    ended: dict[str, list[int]] = {}
    for step in range(20_000):
        if step == 1:
            os.kill(engine.daemon, signal.SIGKILL)
        for one in serving.step():
            if one.finished:
                ended[one.request_id.partition("-")[0]] = list(one.outputs[0].token_ids)
        if len(ended) == len(prompts):
            break
    engine.reset()
    after, _ = engine.answer()
    return {
        "answers": starts(cold),
        "during": starts([ended[f"r{at}"] for at in range(3)]),
        "after": starts(after),
        "all": len(ended) == len(prompts),
    }


def script_adapters(engine: Engine) -> dict[str, Any]:
    """Serve two adapters, and the first one's files under another name; nobody shares but these."""
    one, two, same = (LoRARequest(f"a{n}", n, path) for n, path in enumerate(engine.adapters, 1))
    cold, _ = engine.answer()
    engine.reset()
    first, none = engine.answer(lora=one)
    second, nothing = engine.answer(lora=two)
    engine.reset()
    again, cached = engine.answer(lora=same)
    plain, known = engine.answer()
    return {
        "answers": starts(cold),
        "differ": cold not in (first, second) and first != second,
        "apart": not sum(none) and not sum(nothing),
        "same": again == first and min(cached) >= 128,
        "plain": plain == cold and min(known) >= 128,
    }


def script_crowd(engine: Engine) -> dict[str, Any]:
    """Answer with so few blocks that requests preempt each other; the connector goes on saving."""
    free = engine.free_blocks()
    first, _ = engine.answer(tokens=100)
    engine.reset()
    second, _ = engine.answer(tokens=100)
    return {
        "answers": starts(first),
        "again": starts(second),
        "preempted": engine.count("vllm:num_preemptions"),
        "leaked": free - engine.free_blocks(),
    }


def main() -> None:
    setting = json.loads(sys.argv[1])
    engine = Engine(setting["model"], setting["tiers"], setting.get("options", {}), setting)
    found = globals()[f"script_{setting['script']}"](engine)
    engine.close()
    Path(setting["out"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
