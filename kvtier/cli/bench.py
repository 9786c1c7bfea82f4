"""``kvtier bench``: what a cache brings, measured on a real model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import click

from kvtier.bench.settings import ARMS, CHAOTIC, Settings
from kvtier.cli.bench_options import Common, Output, number
from kvtier.cli.bench_workloads import SHARED_PREFIX, WORKLOADS, workload_command
from kvtier.cli.main import CommandGroup

_HERE: Final = "kvtier.cli.bench"
_LARGEST_SEED: Final = (1 << 63) - 1  # it goes to the arms as JSON
_DEMO_PREFIXES: Final = 4


bench: Final = CommandGroup(
    "bench",
    lazy={
        "shared-prefix": f"{_HERE}:shared_prefix",
        "multi-turn": f"{_HERE}:multi_turn",
        "no-reuse": f"{_HERE}:no_reuse",
        "long-doc": f"{_HERE}:long_doc",
        "trace": "kvtier.cli.bench_trace:trace",
        "vllm": "kvtier.cli.bench_vllm:vllm",
    },
    kind="workload",
    short_help="Serve prompts with the cache and without.",
    help="""Serve prompts with the cache and without, and compare.

    Each arm is a process of its own and gets the KV of a prefix from another place: recompute
    (no cache), hbm (the engine's own prefix cache), dram, lmdb (NVMe) or s3. Answers must be
    the same in all of them, token by token; if they are not, the exit status is 1.
    """,
)


def _spoilt(serve: Callable[..., int]) -> Callable[..., int]:
    """Add the options of the demo, and of what goes wrong on purpose."""

    @number(
        "--device-chaos",
        least=0,
        most=_LARGEST_SEED,
        help="Copy in an odd order that this seed chooses, checked for races; times mean nothing "
        "then.",
    )
    @click.option(
        "--chaos",
        type=click.Choice(CHAOTIC),
        help="Spoil answers of that tier: errors, resets, hangs, other objects.",
    )
    @click.option("--demo", is_flag=True, help=f"A short run: {_DEMO_PREFIXES} prefixes.")
    @functools.wraps(serve)
    def more(
        settings: Settings,
        output: Output,
        device_chaos: int | None,
        chaos: str | None,
        demo: bool,  # noqa: FBT001  (an option)
        **shape: Any,
    ) -> int:
        source = click.get_current_context().get_parameter_source("num_prefixes")
        if demo and source is click.core.ParameterSource.DEFAULT:
            shape["num_prefixes"] = _DEMO_PREFIXES
        return serve(replace(settings, device_chaos=device_chaos, chaos=chaos), output, **shape)

    return more


shared_prefix = workload_command(SHARED_PREFIX, Common(",".join(ARMS)), _spoilt)
multi_turn = workload_command(WORKLOADS["multi-turn"], Common(",".join(ARMS)))
no_reuse = workload_command(WORKLOADS["no-reuse"], Common("recompute,dram,lmdb"))
long_doc = workload_command(WORKLOADS["long-doc"], Common("recompute,hbm,dram,lmdb"))
