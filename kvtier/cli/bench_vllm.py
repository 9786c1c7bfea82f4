"""``kvtier bench vllm``: the same workloads, served by vLLM itself."""

from __future__ import annotations

from typing import Final

import click

from kvtier.bench.settings import Settings
from kvtier.bench.workloads import MultiTurn, NoReuse, SharedPrefix
from kvtier.cli.bench_options import (
    MULTI_TURN,
    NO_REUSE,
    SHARED_PREFIX,
    common,
    run_workload,
    with_options,
)
from kvtier.cli.main import CommandGroup

__all__ = ["multi_turn", "no_reuse", "shared_prefix", "vllm"]

_HERE: Final = "kvtier.cli.bench_vllm"
_PREFIXES: Final = 8
_ENGINE: Final = "vllm"


@click.group(
    cls=CommandGroup,
    lazy={
        "shared-prefix": f"{_HERE}:shared_prefix",
        "multi-turn": f"{_HERE}:multi_turn",
        "no-reuse": f"{_HERE}:no_reuse",
    },
    kind="workload",
    short_help="The same through vLLM, with its connector and without.",
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.pass_context
def vllm(ctx: click.Context) -> None:
    """Serve prompts with real vLLM, with the connector and without, and compare.

    The arms recompute and hbm are vLLM without a connector, its own prefix cache off and on. The
    others have the connector over the tiers that they are named after.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command("shared-prefix", short_help="Prompts that share long prefixes.")
@with_options(*SHARED_PREFIX)
@common("recompute,hbm,dram,lmdb", _ENGINE)
def shared_prefix(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    num_prefixes: int | None,
    **shape: int,
) -> int:
    """Prompts that share long prefixes, each served again by a vLLM for every tier."""
    count = num_prefixes or _PREFIXES
    return run_workload(settings, SharedPrefix(num_prefixes=count, **shape), json_file, details)


@click.command("multi-turn", short_help="Conversations that grow.")
@with_options(*MULTI_TURN)
@common("recompute,hbm,dram,lmdb", _ENGINE)
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
@common("recompute,dram,lmdb", _ENGINE)
def no_reuse(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Prompts that share nothing: what the connector costs where it brings nothing."""
    return run_workload(settings, NoReuse(**shape), json_file, details)
