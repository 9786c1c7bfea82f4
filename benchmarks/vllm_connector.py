"""What the connector costs vLLM, and what a hit in DRAM costs beside one in vLLM's own cache.

    .venv-engines/bin/python benchmarks/vllm_connector.py [--rounds N] [--json FILE]
    … --recorded           only what is said to the connector again, without vLLM: any Python
    … --record             write that down anew, from the vLLM that is installed

Real vLLM on CPU, with a random model; `make engines` installs it. In every round a process
without the connector and one with it have their turn, with the same prompts. Its pool of KV is
written to beforehand, so that no page of it is touched for the first time while it is timed.

scheduler_us_per_step      time in the connector on the scheduler's thread, of the steps in which
                           64 requests are running; what admits and hashes a new one is apart.
                           The calls are those that a vLLM made once, in RECORDED
live_us_per_step           the same while vLLM computes
no_reuse_throughput_ratio  tokens a second over those without the connector, where no two prompts
                           share anything, so that all it does is to save; the median of rounds
warm_ttft_over_own_hit     a prompt of 2,064 tokens in DRAM over the same one in vLLM's own cache
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.testing.vllm_record import Recorder, Replay, read_record, write_record

RUNNING = 64
PROMPT, OUTPUT = 288, 96  # a whole chunk, so that there is something to save
LONG, WARM = 2064, 25
RECORDED = Path(__file__).parent / "results" / "vllm-steps.json.gz"
REPLAYS = 5
TOKENS = 32_000
BLOCK = 32
ON_STEP = ("build_connector_meta", "update_connector_output", "has_pending_push_work")
ON_REQUEST = ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")


def make_model(folder: str) -> None:
    """Write a random model that is large enough for steps of 20 ms and more."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


class Watch:
    """Adds up the time in the connector's calls, step by step."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[tuple[int, float, float]] = []
        self._spent = {True: 0.0, False: 0.0}
        self._scheduler = scheduler
        for names, per_step in ((ON_STEP, True), (ON_REQUEST, False)):
            for name in names:
                self._wrap(name, per_step=per_step)
        schedule = scheduler.schedule

        def scheduled(*args: Any) -> Any:
            self.steps.append((len(scheduler.running), *self._spent.values()))
            self._spent = {True: 0.0, False: 0.0}
            return schedule(*args)

        scheduler.schedule = scheduled

    def _wrap(self, name: str, *, per_step: bool) -> None:
        call: Callable[..., Any] = getattr(self._scheduler.connector, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._spent[per_step] += time.perf_counter() - begin

        setattr(self._scheduler.connector, name, timed)


def started(folder: str, arm: str) -> Any:
    """Start vLLM, its pool of KV resident."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KvtierConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"tiers": ["dram:512MiB"]},
    )
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=RUNNING,
        block_size=BLOCK,
        seed=0,
        kv_transfer_config=transfer if arm == "kvtier" else None,
        disable_log_stats=False,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for tensor in runner.kv_caches:
        tensor.zero_()
    return llm


def child(folder: str, arm: str, turn: int) -> dict[str, Any]:
    """Measure one arm in this process; with a negative turn, record what its scheduler says."""
    import vllm

    llm = started(folder, arm)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    watch = Watch(scheduler) if arm == "kvtier" and turn >= 0 else None
    drawn = random.Random(turn)

    def answer(prompts: list[list[int]], tokens: int) -> float:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, detokenize=False, ignore_eos=True
        )
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[drawn.randrange(TOKENS) for _ in range(length)] for _ in range(count)]

    answer(prompts(4, PROMPT), 4)
    if turn < 0:
        recorder = Recorder(scheduler.connector)
        lengths = [160 + 5 * at for at in range(RUNNING)]
        answer([[drawn.randrange(256) for _ in range(length)] for length in lengths], OUTPUT)
        made_by = "benchmarks/vllm_connector.py --record"
        write_record(
            recorder.record(engine=f"vLLM {vllm.__version__}, CPU", made_by=made_by), RECORDED
        )
        llm.llm_engine.engine_core.shutdown()
        return {}
    seconds = answer(prompts(RUNNING, PROMPT), OUTPUT)
    found: dict[str, Any] = {"tokens_per_s": RUNNING * OUTPUT / seconds}
    found["ms_per_step"] = seconds * 1000 / (OUTPUT + 1)
    if watch is not None:
        full = [step for step in watch.steps if step[0] == RUNNING]
        found["step_us"] = [step * 1e6 for _, step, _ in full]
        found["request_us"] = [request * 1e6 for _, _, request in watch.steps if request]
        found["ttft"] = {"own": [], "dram": []}
        (long,) = prompts(1, LONG)
        answer([long], 4)
        for _ in range(WARM):
            found["ttft"]["own"].append(answer([long], 1))
            llm.reset_prefix_cache()
            found["ttft"]["dram"].append(answer([long], 1))
        hits = scheduler.connector.cache.metrics.get("hit_tokens", tier="dram")
        found["hit_tokens"] = hits
    llm.llm_engine.engine_core.shutdown()
    return found


def measured(folder: str, arm: str, turn: int) -> dict[str, Any]:
    """Run a child and return what it found."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words = [sys.executable, __file__, "--child", folder, arm, str(turn)]
    done = subprocess.run(words, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def replayed() -> tuple[list[float], list[float]]:
    """Return the microseconds of recorded steps, with all requests running, and of admissions."""
    steps, asking = [], []
    for _ in range(REPLAYS):
        replay = Replay(read_record(RECORDED))
        replay.run()
        if replay.made != replay.recorded:
            sys.exit("the connector does other than it did when this was recorded: see --record")
        steps += [seconds * 1e6 for count, seconds in replay.step_seconds if count == RUNNING]
        asking += [seconds * 1e6 for seconds in replay.request_seconds]
    return steps, asking


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": statistics.median(values), "p99": cuts[98], "count": len(values)}


def report(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Put the rounds together."""
    with_it = [one["kvtier"] for one in rounds]
    ratios = [one["kvtier"]["tokens_per_s"] / one["none"]["tokens_per_s"] for one in rounds]
    own = statistics.median([s for one in with_it for s in one["ttft"]["own"]])
    dram = statistics.median([s for one in with_it for s in one["ttft"]["dram"]])
    return {
        "live_us_per_step": spread([us for one in with_it for us in one["step_us"]]),
        "admitting_us_per_step": spread([us for one in with_it for us in one["request_us"]]),
        "ms_per_step": statistics.median([one["none"]["ms_per_step"] for one in rounds]),
        "no_reuse_throughput_ratio": statistics.median(ratios),
        "no_reuse_throughput_ratios": ratios,
        "warm_ttft_over_own_hit": dram / own,
        "ttft_s": {"own": own, "dram": dram},
        "expected_hit": all(one["hit_tokens"] == WARM * (LONG // 256 * 256) for one in with_it),
    }


def main() -> None:
    if "--child" in sys.argv:
        folder, arm, turn = sys.argv[2:]
        print(json.dumps(child(folder, arm, int(turn))))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--recorded", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    if not given.record:
        steps, asking = replayed()
        found = {"scheduler_us_per_step": spread(steps), "match_us": spread(asking)}
    if not given.recorded:
        with tempfile.TemporaryDirectory() as folder:
            make_model(folder)
            if given.record:
                measured(folder, "kvtier", -1)
                return
            rounds = []
            for turn in range(given.rounds):
                arms = ("none", "kvtier") if turn % 2 else ("kvtier", "none")
                rounds.append({arm: measured(folder, arm, turn) for arm in arms})
        found |= report(rounds)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
