"""``kvtier bench``: what a cache brings, measured on a real model."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import click

from kvtier.bench.settings import ARMS, CHAOTIC, Settings
from kvtier.bench.workloads import MultiTurn, NoReuse, SharedPrefix
from kvtier.cli.bench_options import (
    MULTI_TURN,
    NO_REUSE,
    SHARED_PREFIX,
    common,
    number,
    run_workload,
    with_options,
)
from kvtier.cli.main import CommandGroup

__all__ = ["bench", "multi_turn", "no_reuse", "shared_prefix"]

_HERE: Final = "kvtier.cli.bench"
_LARGEST_SEED: Final = (1 << 63) - 1  # it goes to the arms as JSON
_PREFIXES: Final = 8
_DEMO_PREFIXES: Final = 4


@click.group(
    cls=CommandGroup,
    lazy={
        "shared-prefix": f"{_HERE}:shared_prefix",
        "multi-turn": f"{_HERE}:multi_turn",
        "no-reuse": f"{_HERE}:no_reuse",
        "vllm": "kvtier.cli.bench_vllm:vllm",
    },
    kind="workload",
    short_help="Serve prompts with the cache and without.",
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Serve prompts with the cache and without, and compare.

    Each arm is a process of its own and gets the KV of a prefix from another place: recompute
    (no cache), hbm (the engine's own prefix cache), dram, lmdb (NVMe) or s3. Answers must be
    the same in all of them, token by token; if they are not, the exit status is 1.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command("shared-prefix", short_help="Prompts that share long prefixes.")
@with_options(*SHARED_PREFIX)
@number(
    "--device-chaos",
    least=0,
    most=_LARGEST_SEED,
    help="Copy in an odd order that this seed chooses, checked for races; times mean nothing then.",
)
@click.option(
    "--chaos",
    type=click.Choice(CHAOTIC),
    help="Spoil answers of that tier: errors, resets, hangs, other objects.",
)
@click.option("--demo", is_flag=True, help=f"A short run: {_DEMO_PREFIXES} prefixes.")
@common(",".join(ARMS))
def shared_prefix(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    num_prefixes: int | None,
    device_chaos: int | None,
    chaos: str | None,
    demo: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Prompts that share long prefixes, each served again from every tier.

    One process computes each prefix once and fills the tiers. Then new processes serve another
    question on it: one has to compute all, the others find the prefix in the tier they are
    named after, and nowhere above.
    """
    count = num_prefixes or (_DEMO_PREFIXES if demo else _PREFIXES)
    settings = replace(settings, device_chaos=device_chaos, chaos=chaos)
    return run_workload(settings, SharedPrefix(num_prefixes=count, **shape), json_file, details)


@click.command("multi-turn", short_help="Conversations that grow.")
@with_options(*MULTI_TURN)
@common(",".join(ARMS))
def multi_turn(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Conversations: each prompt is all that was said and one more question.

    Times are those of the second and later turns.
    """
    return run_workload(settings, MultiTurn(**shape), json_file, details)


@click.command("no-reuse", short_help="Prompts that share nothing.")
@with_options(*NO_REUSE)
@common("recompute,dram,lmdb")
def no_reuse(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Prompts that share nothing: what a cache costs where it brings nothing."""
    return run_workload(settings, NoReuse(**shape), json_file, details)
