"""One benchmark from its settings to its report."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from kvtier.bench.long_doc import long_doc
from kvtier.bench.place import Place
from kvtier.bench.processes import PLANS, Outcome, Tell
from kvtier.bench.recorded import Recorded
from kvtier.bench.replaying import replay_recorded
from kvtier.bench.report import (
    ArmReport,
    Report,
    against_recompute,
    arm_report,
    hung,
    machine,
    miscounted,
    problems,
    ratio,
    with_cold,
    with_throughput,
)
from kvtier.bench.runner import multi_turn, no_reuse, shared_prefix
from kvtier.bench.settings import Settings
from kvtier.bench.workloads import LongDoc, MultiTurn, NoReuse, SharedPrefix

Shape = SharedPrefix | MultiTurn | NoReuse | LongDoc | Recorded
_SERVED: Final = {
    SharedPrefix: ("shared-prefix", shared_prefix),
    MultiTurn: ("multi-turn", multi_turn),
    NoReuse: ("no-reuse", no_reuse),
    LongDoc: ("long-doc", long_doc),
    Recorded: ("trace", replay_recorded),
}
_NOT_SAID: Final = ("verbose", "type", "asked")  # of what a run was told


def run(settings: Settings, shape: Shape, tell: Tell, *, details: bool = False) -> Report:
    """Run a workload in processes of its own. Blocks for minutes.

    tell: hears of the progress. details: keep every request in the report.
    Raises ConfigError for settings that cannot be served, KvtierError for an arm that died.
    """
    begin = time.monotonic()
    name, serve = _SERVED[type(shape)]
    with Place(settings) as place:
        outcome: Outcome = serve(settings, shape, place, tell)  # type: ignore[operator]  # by type
    samples = outcome.samples
    arms = [
        arm_report(arm, samples, timed=slice(_first(shape), None), details=details)
        for arm in settings.arms
    ]
    wrong = problems(arms, samples, {arm: _allowed(arm, shape) for arm in settings.arms})
    part = settings.chunk_tokens * outcome.model.bytes_per_token
    wrong += [said for arm in arms for said in miscounted(arm, part)]
    if settings.chaos is not None:
        wrong += hung(samples, settings.chaos)
    plain = ratio(*zip(*outcome.plain, strict=True)) if outcome.plain else None
    return Report(
        workload=name,
        model=outcome.model.name,
        model_sha256=outcome.model.sha256,
        args=_args(settings, shape),
        machine=machine(settings.device),
        arms=[_added(arm, shape, outcome) for arm in arms],
        problems=wrong,
        engine=outcome.model.engine,
        seconds=round(time.monotonic() - begin, 1),
        denominator=_denominator(shape, len(arms[0].ttft_each_ms)),
        bytes_per_token=outcome.model.bytes_per_token,
        capacities=outcome.capacities,
        cut_prompts=outcome.cut_prompts,
        ceiling=outcome.ceiling,
        prefill_over_plain_torch=plain.median if plain else None,
        prefill_over_plain_torch_spread=plain,
        spoilt=outcome.spoilt if settings.chaos is not None else {},
    )


def _first(shape: Shape) -> int:
    """Return how many of an arm's samples come before those whose times count."""
    if isinstance(shape, MultiTurn):
        return shape.num_conversations
    return shape.num_documents if isinstance(shape, LongDoc) else 0


def _allowed(arm: str, shape: Shape) -> Collection[str]:
    """Return the tiers that an arm's hits may come from."""
    if isinstance(shape, NoReuse):
        return ()
    if isinstance(shape, LongDoc | Recorded) and PLANS[arm].prefix_cache:
        tiers = PLANS[arm].tiers if isinstance(shape, Recorded) else (arm,)
        return tuple(dict.fromkeys(("hbm", *tiers)))
    return (arm,)


def _added(arm: ArmReport, shape: Shape, outcome: Outcome) -> ArmReport:
    """Add what only some workloads tell."""
    if isinstance(shape, NoReuse):
        return against_recompute(arm, outcome.samples)
    if isinstance(shape, LongDoc):
        return with_cold(arm, outcome.samples[arm.name][: shape.num_documents])
    if isinstance(shape, Recorded):
        return with_throughput(arm, outcome.seconds[arm.name])
    return arm


def _denominator(shape: Shape, requests: int) -> str:
    """Say what hit rates are of."""
    if isinstance(shape, MultiTurn):
        return f"prompt tokens of the {requests:,} second and later turns"
    if isinstance(shape, LongDoc):
        return f"prompt tokens of the {requests:,} questions, after the documents were read"
    if isinstance(shape, Recorded) and shape.first:
        return f"prompt tokens of the last {requests:,} of {shape.num_prompts:,} requests"
    return f"prompt tokens of all {requests:,} requests"


def _args(settings: Settings, shape: Shape) -> Mapping[str, object]:
    """Return what was asked for, as plain data. A bucket's URL holds no secrets by its grammar."""
    given = msgspec.to_builtins(settings, enc_hook=str) | msgspec.to_builtins(shape)
    return {name: value for name, value in given.items() if name not in _NOT_SAID}
