"""``kvtier bench vllm``: the same workloads, served by vLLM itself."""

from __future__ import annotations

from typing import Final

import click

from kvtier.cli.bench_options import Common
from kvtier.cli.bench_workloads import WORKLOADS, workload_command
from kvtier.cli.main import CommandGroup

_HERE: Final = "kvtier.cli.bench_vllm"


vllm: Final = CommandGroup(
    "vllm",
    lazy={name: f"{_HERE}:{name.replace('-', '_')}" for name in WORKLOADS},
    kind="workload",
    short_help="The same through vLLM, with its connector and without.",
    help="""Serve prompts with real vLLM, with the connector and without, and compare.

    The arms recompute and hbm are vLLM without a connector, its own prefix cache off and on. The
    others have the connector over the tiers that they are named after.
    """,
)


def _command(name: str, arms: str) -> click.Command:
    return workload_command(WORKLOADS[name], Common(arms, "vllm"))


shared_prefix = _command("shared-prefix", "recompute,hbm,dram,lmdb")
multi_turn = _command("multi-turn", "recompute,hbm,dram,lmdb")
no_reuse = _command("no-reuse", "recompute,dram,lmdb")
long_doc = _command("long-doc", "recompute,hbm,dram,lmdb")
