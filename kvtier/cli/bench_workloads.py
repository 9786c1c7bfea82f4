"""The workloads that every engine can serve, as commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import click

from kvtier.bench.settings import Settings
from kvtier.bench.workloads import LongDoc, MultiTurn, NoReuse, SharedPrefix
from kvtier.cli.bench_options import Common, Output, common, number, run_workload
from kvtier.cli.options import with_options
from kvtier.errors import ConfigError

_MODES: Final = ("random", "tile", "interleave")


class Workload(NamedTuple):
    """A workload on the command line: its options, and the shape that they make."""

    name: str
    short: str
    text: str
    options: tuple[Callable[[Any], Any], ...]
    make: Callable[..., SharedPrefix | MultiTurn | NoReuse | LongDoc]


def workload_command(
    workload: Workload, told: Common, *more: Callable[[Any], Any]
) -> click.Command:
    """Return the command. more: decorators that take what its options do not make a shape of."""

    def serve(settings: Settings, output: Output, **shape: Any) -> int:
        return run_workload(settings, workload.make(**shape), output)

    for one in more:
        serve = one(serve)
    serve = common(told)(serve)
    serve = with_options(*workload.options)(serve)
    return click.command(workload.name, short_help=workload.short, help=workload.text)(serve)


def _long_doc(hit_miss_ratio: str, hbm_documents: int | None, **shape: Any) -> LongDoc:
    hits, _, misses = hit_miss_ratio.partition(":")
    if not (hits.isdecimal() and misses.isdecimal() and int(hits)):
        raise ConfigError(f"--hit-miss-ratio is two numbers like 3:1, not {hit_miss_ratio!r}")
    held = hbm_documents or max(shape["num_documents"] // 3, 1)
    return LongDoc(hits=int(hits), misses=int(misses), hbm_documents=held, **shape)


SHARED_PREFIX: Final = Workload(
    "shared-prefix",
    "Prompts that share long prefixes.",
    """Prompts that share long prefixes, each served again from every tier.

    One process computes each prefix once and fills the tiers. Then new processes serve another
    question on it: one has to compute all, the others find the prefix in the tier they are
    named after, and nowhere above.
    """,
    (
        number(
            *("--num-prefixes", "--prefix-repetition-num-prefixes", "--gsp-num-groups"),
            default=8,
            help="Different prefixes, besides one to warm up.",
        ),
        number(
            *("--prefix-len", "--prefix-repetition-prefix-len", "--gsp-system-prompt-len"),
            default=2048,
            help="Tokens of a prefix.",
        ),
        number(
            *("--suffix-len", "--prefix-repetition-suffix-len", "--gsp-question-len"),
            default=32,
            help="Tokens of a question, at most.",
        ),
        number(
            *("--output-len", "--prefix-repetition-output-len", "--gsp-output-len"),
            default=16,
            help="Tokens of an answer.",
        ),
        number(
            *("--prompts-per-prefix", "--gsp-prompts-per-group"),
            default=1,
            help="Timed questions on each prefix.",
        ),
    ),
    SharedPrefix,
)
MULTI_TURN: Final = Workload(
    "multi-turn",
    "Conversations that grow.",
    """Conversations: each prompt is all that was said and one more question.

    Times are those of the second and later turns.
    """,
    (
        number("--num-conversations", default=2, help="Conversations, besides one to warm up."),
        number("--turns", least=2, default=3, help="Turns of a conversation."),
        number("--prefix-len", default=1024, help="Tokens of the text that it begins with."),
        number("--suffix-len", default=64, help="Tokens of a question, at most."),
        number("--output-len", default=16, help="Tokens of an answer."),
    ),
    MultiTurn,
)
NO_REUSE: Final = Workload(
    "no-reuse",
    "Prompts that share nothing.",
    """Prompts that share nothing: what a cache costs where it brings nothing.""",
    (
        number("--num-prompts", default=8, help="Prompts, besides one to warm up."),
        number("--input-len", "--random-input-len", default=1024, help="Tokens of a prompt."),
        number("--output-len", "--random-output-len", default=32, help="Tokens of an answer."),
    ),
    NoReuse,
)
LONG_DOC: Final = Workload(
    "long-doc",
    "Questions on documents that HBM cannot all hold.",
    """Long documents: each is read once, then asked about.

    The engine's own pool has room for some of them only. What it lost, the arms dram, lmdb and
    s3 find in the tier they are named after, and nowhere above; hbm and recompute read it
    again. Beside the times of the questions stand those of the first reading.
    """,
    (
        number("--num-documents", default=3, help="Documents, besides one to warm up."),
        number("--document-length", default=512, help="Tokens of a document."),
        number("--suffix-len", default=64, help="Tokens of a question, at most."),
        number("--output-len", default=4, help="Tokens of an answer."),
        number("--repeat-count", default=2, help="Questions on each document."),
        click.option(
            "--repeat-mode",
            type=click.Choice(_MODES),
            default="random",
            show_default=True,
            help="The order of the questions: shuffled, all documents in turn, or one by one.",
        ),
        click.option(
            "--hit-miss-ratio",
            default="1:0",
            show_default=True,
            metavar="HITS:MISSES",
            help="After so many questions, so many on documents that nobody has read.",
        ),
        number(
            "--hbm-documents",
            help="Documents that the engine's pool has room for; by default, a third of them.",
        ),
    ),
    _long_doc,
)
WORKLOADS: Final = {one.name: one for one in (SHARED_PREFIX, MULTI_TURN, NO_REUSE, LONG_DOC)}
"""Every workload by name."""
