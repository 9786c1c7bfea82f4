"""Run the cases of real engines, each in a process of its own, and say how each came out.

usage: python tests/engines/run.py [--short] with the Python that has them. ``make engines`` makes
that and calls this. A line each says how a case came out, once that is known. The last line is a
JSON object, {engine: {case: outcome}}; an outcome is ``ok`` or says what was seen instead. Leaves
with 1 unless all are ok.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.testing.daemon import running

HERE = Path(__file__).resolve().parent
SECONDS = 600
Outcomes = dict[str, str]


class Bench:
    """A folder with models, and the processes that use it, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def model(self, kind: str) -> str:
        folder = self.folder / kind
        if not folder.exists():
            self._call(["models.py", kind, str(folder)])
        return str(folder)

    def vllm(self, kind: str, script: str, *tiers: str, **more: Any) -> dict[str, Any]:
        """Run one script; an error of the process is what it says."""
        self.runs += 1
        out = self.folder / f"run-{self.runs}.json"
        setting = {"model": self.model(kind), "tiers": tiers, "script": script, "out": str(out)}
        said = self._call(["vllm_child.py", json.dumps({**setting, **more})])
        if not out.exists():
            return {"error": said.strip().rpartition("\n")[2]}
        return json.loads(out.read_text(encoding="utf-8"))

    def _call(self, words: list[str]) -> str:
        done = self.python(str(HERE / words[0]), *words[1:])
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr, flush=True)
        return done.stderr

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        try:
            return subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env=self.environment,
                cwd=self.folder,
            )
        except subprocess.TimeoutExpired:  # the other cases go on
            return subprocess.CompletedProcess(command, 1, "", f"not ended in {SECONDS} s")


def told(cases: Outcomes) -> Outcomes:
    for case, outcome in cases.items():
        print(f"vllm     {case:28} {outcome}", flush=True)
    return cases


def said(is_so: object, seen: object) -> str:
    return "ok" if is_so else f"not so; seen: {seen}"


def in_memory(bench: Bench, kind: str, plain: dict[str, Any]) -> Outcomes:
    """Judge what one process with DRAM alone has seen."""
    seen = bench.vllm(kind, "memory", "dram:128MiB")
    same = seen.get("answers") == plain.get("answers") is not None
    cases = ("cold", "own hit", "hit", "full prompt", "salt", "abort", "figures")
    cases = (*cases, "failed loads", "emptied", "noise")
    found = {case: said(same and seen.get(case) is True, seen) for case in cases}
    return {"no connector": said(plain.get("own hit") is True, plain), **found}


def on_disk(bench: Bench, kind: str, plain: dict[str, Any]) -> Outcomes:
    """Restart from a disk that is as it was left, and from one with flipped bits."""
    disk = bench.folder / f"{kind}-disk"
    tiers = ("dram:128MiB", f"lmdb:{disk}?capacity=256MiB&write_budget=unlimited")
    filled = bench.vllm(kind, "fill", *tiers)
    copy = bench.folder / f"{kind}-flipped"
    if disk.exists():
        shutil.copytree(disk, copy)
        flip(copy)
    restarted = bench.vllm(kind, "restart", *tiers)
    flipped = bench.vllm(kind, "restart", tiers[0], tiers[1].replace(str(disk), str(copy)))
    right = plain["answers"]
    return {
        "restart from NVMe": said(
            filled.get("flushed")
            and right == filled["answers"] == restarted.get("answers")
            and restarted["cached"] == restarted["hits"] >= 512,
            (filled, restarted),
        ),
        "corrupted record": said(
            flipped.get("answers") == right
            and flipped["corrupt"] > 0
            and flipped["hits"] < restarted.get("hits", 0),
            flipped,
        ),
    }


def flip(folder: Path) -> None:
    """Flip one byte in the middle of every 64 KiB of payload; the index stays as it is."""
    for path in folder.glob("slab-*.seg"):
        with path.open("r+b") as file:
            for at in range(1 << 15, path.stat().st_size, 1 << 16):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


def in_a_crowd(bench: Bench, kind: str, plain: dict[str, Any]) -> Outcomes:
    """Preempt: with so few blocks that the three prompts do not fit together."""
    few = {"num_gpu_blocks_override": {"plain": 26, "hybrid": 72}[kind]}
    seen = bench.vllm(kind, "crowd", "dram:128MiB", options=few)
    right = plain["answers"]
    fine = right == seen.get("answers") == seen.get("again") and not seen["leaked"]
    return {"preemption": said(fine and seen["preempted"] > 0, seen)}


def with_adapters(bench: Bench, plain: dict[str, Any]) -> Outcomes:
    """Serve LoRA adapters, which are told apart by their content."""
    adapters = [bench.model(f"adapter{seed}") for seed in (1, 2)]
    renamed = bench.folder / "renamed"
    shutil.copytree(adapters[0], renamed)
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    seen = bench.vllm(
        "plain", "adapters", "dram:128MiB", options=options, adapters=[*adapters, str(renamed)]
    )
    fine = plain["answers"] == seen.get("answers")
    cases = ("differ", "apart", "same", "plain")
    return {"LoRA": said(fine and all(seen[case] for case in cases), seen)}


def in_processes(bench: Bench, plain: dict[str, Any]) -> Outcomes:
    """Put ranks into processes of their own, and engines on a daemon."""
    right = plain["answers"]

    def warm(seen: dict[str, Any]) -> str:
        fine = right == seen.get("answers") and seen["warm"] and not seen["none"]
        return said(fine and min(seen["cached"]) >= 128, seen)

    two = {"tensor_parallel_size": 2}
    alone = {"distributed_executor_backend": "mp"}
    found = {
        "TP=2": warm(bench.vllm("plain", "warm", "dram:128MiB", options=two)),
        "worker apart": warm(bench.vllm("plain", "warm", "dram:128MiB", options=alone)),
    }
    with running("dram:128MiB") as daemon:
        filled = bench.vllm("plain", "fill", daemon.url)
        seen = bench.vllm("plain", "found", daemon.url, options=alone)
        fine = right == filled.get("answers") == seen.get("answers")
        found["daemon filled by another"] = said(fine and min(seen["cached"]) >= 128, seen)
    for name, options in (("in it", {}), ("apart", alone)):
        with running("dram:128MiB") as daemon:
            pid = daemon.supervisor_pid
            seen = bench.vllm("plain", "killed", daemon.url, daemon=pid, options=options)
        fine = right == seen.get("answers") == seen.get("during") == seen.get("after")
        found[f"daemon killed, worker {name}"] = said(fine and seen["all"], seen)
    return found


def benchmarked(bench: Bench) -> Outcomes:
    """Run the benchmark of the command line, small."""
    words = ["bench", "vllm", "shared-prefix", "--num-prefixes", "1", "--prefix-len", "512"]
    done = bench.python("-m", "kvtier", *words, "--arms", "recompute,dram", "--json", "-")
    if done.returncode:
        return {"kvtier bench vllm": f"not so; seen: {done.stderr[-500:]}"}
    recompute, dram = json.loads(done.stdout)["arms"]
    fine = recompute["tokens_sha256"] == dram["tokens_sha256"] and dram["hit_tokens"]
    return {"kvtier bench vllm": said(fine == {"dram": 512}, dram)}


def refused(bench: Bench) -> Outcomes:
    """Ask for what cannot work: it is refused at start."""
    absent = f"unix:{bench.folder}/nobody.sock?timeout=1s"
    how = {
        "refused policy": (["dram:128MiB"], {"policy": "fail"}, ("'fail'", "'recompute'")),
        "refused: no daemon": ([absent], {}, ("no daemon answers", "kvtier serve")),
        "refused: two connectors": (
            ["dram:128MiB"],
            {"beside": "ExampleConnector"},
            ("'MultiConnector'", "ExampleConnector", "'KvtierConnector'"),
        ),
    }
    found = {}
    for case, (tiers, more, words) in how.items():
        text = bench.vllm("plain", "none", *tiers, **more).get("error", "")
        found[case] = said(all(word in text for word in words), text)
    return found


def without_a_daemon(bench: Bench, plain: dict[str, Any]) -> Outcomes:
    """Start where no daemon is, if that was said to be fine."""
    found = {}
    for name, options in (("in it", {}), ("apart", {"distributed_executor_backend": "mp"})):
        url = f"unix:{bench.folder}/nobody.sock?timeout=1s"
        more = {"extra": {"optional": True}, "options": options}
        seen = bench.vllm("plain", "absent", url, **more)
        fine = plain["answers"] == seen.get("answers") and seen["again"] and not seen["cached"]
        found[f"no daemon, optional, worker {name}"] = said(fine, seen)
    return found


def vllm(bench: Bench, *, short: bool) -> Outcomes:
    plain = bench.vllm("plain", "none")
    found = told(in_memory(bench, "plain", plain))
    if short:
        return found
    more: list[Callable[[Bench, str, dict[str, Any]], Outcomes]] = [on_disk, in_a_crowd]
    for cases in more:
        found |= told(cases(bench, "plain", plain))
    found |= told(with_adapters(bench, plain))
    found |= told(in_processes(bench, plain))
    found |= told(without_a_daemon(bench, plain))
    found |= told(refused(bench))
    found |= told(benchmarked(bench))
    hybrid = bench.vllm("hybrid", "none")
    for cases in (in_memory, on_disk, in_a_crowd):
        found |= told(
            {f"hybrid: {case}": how for case, how in cases(bench, "hybrid", hybrid).items()}
        )
    return found


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvtier-engines-") as folder:
        outcomes = {"vllm": vllm(Bench(Path(folder)), short="--short" in sys.argv)}
    print(json.dumps(outcomes))
    return any(how != "ok" for cases in outcomes.values() for how in cases.values())


if __name__ == "__main__":
    sys.exit(main())
