"""What the connector costs vLLM, and what a hit in DRAM costs beside one in vLLM's own cache.

    .venv-engines/bin/python benchmarks/vllm_connector.py [--rounds N] [--json FILE]
    … --recorded           only what is said to the connector again, without vLLM: any Python
    … --record             write that down anew, from the vLLM that is installed

Real vLLM on CPU, with a random model; `make engines` installs it. All is measured in one process:
two processes of the same vLLM differ by more than what is looked for. In every round it serves
prompts without the connector, which is taken out of it for that time, and others with it. Its pool
of KV is written to beforehand, so that no page is touched for the first time while it is timed.

scheduler_us_per_step      time in the connector on the scheduler's thread, of the steps in which
                           64 requests are running; what admits and hashes a new one is apart.
                           The calls are those that a vLLM made once, in RECORDED
live_us_per_step           the same while vLLM computes for 24
no_reuse_throughput_ratio  tokens a second over those without the connector, where no two prompts
                           share anything, so that all it does is to save; the median of rounds
no_reuse_cpu_ratio         the same of the processor's seconds, which other work does not change
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
from typing import Any, Self

from plot import kept, option

from kvtier.testing.vllm_record import (
    Recorder,
    Replay,
    read_record,
    without_connector,
    write_record,
)

RUNNING = 64
SERVED, PROMPT, OUTPUT = 24, 288, 32  # a whole chunk, so that there is something to save
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

    def end(self) -> None:
        """Put the scheduler's and the connector's own methods back."""
        del self._scheduler.schedule
        for name in (*ON_STEP, *ON_REQUEST):
            delattr(self._scheduler.connector, name)

    def _wrap(self, name: str, *, per_step: bool) -> None:
        call: Callable[..., Any] = getattr(self._scheduler.connector, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._spent[per_step] += time.perf_counter() - begin

        setattr(self._scheduler.connector, name, timed)


def started(folder: str) -> Any:
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
        kv_transfer_config=transfer,
        disable_log_stats=False,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for tensor in runner.kv_caches:
        tensor.zero_()
    return llm


class Child:
    """vLLM in this process, told what to do a line at a time."""

    def __init__(self, folder: str) -> None:
        import vllm

        self.vllm = vllm
        self.llm = started(folder)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.drawn = random.Random(0)
        self.answer(self.prompts(4, PROMPT), 4)

    def answer(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Return the seconds that it took, and the processor's."""
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, detokenize=False, ignore_eos=True
        )
        given = [{"prompt_token_ids": one} for one in prompts]
        begin = time.perf_counter(), time.process_time()
        self.llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self.drawn.randrange(TOKENS) for _ in range(length)] for _ in range(count)]

    def serve(self) -> dict[str, Any]:
        """Serve prompts that share nothing; what was saved is published before this returns."""
        watch = Watch(self.scheduler)
        found = self._served()
        watch.end()
        found["step_us"] = [step * 1e6 for n, step, _ in watch.steps if n == SERVED]
        found["request_us"] = [request * 1e6 for _, _, request in watch.steps if request]
        self.connector.cache.flush(timeout=60)
        return found

    def without(self) -> dict[str, Any]:
        """Serve such prompts as if there were no connector."""
        with without_connector(self.scheduler):
            return self._served()

    def _served(self) -> dict[str, Any]:
        seconds, cpu = self.answer(self.prompts(SERVED, PROMPT), OUTPUT)
        rate, step = SERVED * OUTPUT / seconds, seconds * 1000 / (OUTPUT + 1)
        return {"tokens_per_s": rate, "cpu_s": cpu, "ms_per_step": step}

    def warm(self) -> dict[str, Any]:
        """Time a prompt that vLLM has, and that kvtier has, in turns."""
        found: dict[str, Any] = {"own": [], "dram": []}
        (long,) = self.prompts(1, LONG)
        self.answer([long], 4)
        for _ in range(WARM):
            found["own"].append(self.answer([long], 1)[0])
            self.llm.reset_prefix_cache()
            found["dram"].append(self.answer([long], 1)[0])
        found["hit_tokens"] = self.connector.cache.metrics.get("hit_tokens", tier="dram")
        return found

    def record(self) -> dict[str, Any]:
        """Write down what the scheduler says to the connector."""
        recorder = Recorder(self.connector)
        lengths = [160 + 5 * at for at in range(RUNNING)]
        self.answer([[self.drawn.randrange(256) for _ in range(n)] for n in lengths], 96)
        source = {"engine": f"vLLM {self.vllm.__version__}, CPU", "made_by": "--record"}
        write_record(recorder.record(**source), RECORDED)
        return {}

    def run(self) -> None:
        """Answer each line with another."""
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(getattr(self, line.strip())()), file=out, flush=True)
        self.llm.llm_engine.engine_core.shutdown()


class Served:
    """A child's process, seen from here. A context manager."""

    def __init__(self, folder: str) -> None:
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
        words = [sys.executable, __file__, "--child", folder]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()

    def ask(self, what: str) -> dict[str, Any]:
        print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            sys.exit("a child has ended; see what it says above")
        found: dict[str, Any] = json.loads(line)
        return found


def measured(folder: str, rounds: int) -> dict[str, Any]:
    """Serve with the connector and without in every round, the other one first each time."""
    with Served(folder) as vllm:
        served = []
        for turn in range(rounds + 1):
            ways = ("without", "serve") if turn % 2 else ("serve", "without")
            served.append({way: vllm.ask(way) for way in ways})
        return report(served[1:], vllm.ask("warm"))  # the first one warms up


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


def report(rounds: list[dict[str, dict[str, Any]]], warm: dict[str, Any]) -> dict[str, Any]:
    """Put the rounds together."""
    pairs = [(one["serve"], one["without"]) for one in rounds]
    ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs]
    own, dram = (statistics.median(warm[name]) for name in ("own", "dram"))
    return {
        "live_us_per_step": spread([us for one, _ in pairs for us in one["step_us"]]),
        "admitting_us_per_step": spread([us for one, _ in pairs for us in one["request_us"]]),
        "ms_per_step": statistics.median([other["ms_per_step"] for _, other in pairs]),
        "no_reuse_throughput_ratio": statistics.median(ratios),
        "no_reuse_throughput_ratios": ratios,
        "no_reuse_cpu_ratio": statistics.median([a["cpu_s"] / b["cpu_s"] for a, b in pairs]),
        "warm_ttft_over_own_hit": dram / own,
        "warm_ttft_over_own_hit_fastest": min(warm["dram"]) / min(warm["own"]),
        "ttft_s": {"own": own, "dram": dram},
        "expected_hit": warm["hit_tokens"] == WARM * (LONG // 256 * 256),
    }


def main() -> None:
    if "--child" in sys.argv:
        Child(*sys.argv[2:]).run()
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    option(parser)
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
                with Served(folder) as vllm:
                    vllm.ask("record")
                return
            found |= measured(folder, given.rounds)
    print(json.dumps(found, indent=1))
    panels = {
        "us": "{scheduler_us_per_step,match_us,live_us_per_step,admitting_us_per_step}",
        "over vLLM alone": "{no_reuse_throughput_ratio,no_reuse_cpu_ratio}@1",
        "time to first token, s": "ttft_s.*",
    }
    kept(found, given, panels)


if __name__ == "__main__":
    main()
