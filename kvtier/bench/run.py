"""One benchmark from its settings to its report."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from kvtier.bench.place import Place
from kvtier.bench.report import (
    Report,
    against_recompute,
    arm_report,
    hung,
    machine,
    miscounted,
    problems,
    ratio,
)
from kvtier.bench.runner import Outcome, Tell, multi_turn, no_reuse, shared_prefix
from kvtier.bench.settings import Settings
from kvtier.bench.workloads import MultiTurn, NoReuse, SharedPrefix

__all__ = ["run"]

Shape = SharedPrefix | MultiTurn | NoReuse


def run(settings: Settings, shape: Shape, tell: Tell, *, details: bool = False) -> Report:
    """Run a workload in processes of its own. Blocks for minutes.

    tell: hears of the progress. details: keep every request in the report.
    Raises ConfigError for settings that cannot be served, KvtierError for an arm that died.
    """
    begin = time.monotonic()
    with Place(settings) as place:
        name, outcome = _served(settings, shape, place, tell)
    samples = outcome.samples
    first = shape.num_conversations if isinstance(shape, MultiTurn) else 0
    arms = [
        arm_report(arm, samples, timed=slice(first, None), details=details) for arm in settings.arms
    ]
    wrong = problems(arms, samples, reuse=not isinstance(shape, NoReuse))
    wrong += [said for arm in arms for said in miscounted(arm)]
    if settings.chaos is not None:
        wrong += hung(samples, settings.chaos)
    if isinstance(shape, NoReuse):
        arms = [against_recompute(arm, samples) for arm in arms]
    plain = ratio(*zip(*outcome.plain, strict=True)) if outcome.plain else None
    return Report(
        workload=name,
        model=outcome.model.name,
        model_sha256=outcome.model.sha256,
        args=_args(settings, shape),
        machine=machine(settings.device),
        arms=arms,
        problems=wrong,
        engine=outcome.model.engine,
        seconds=round(time.monotonic() - begin, 1),
        prefill_over_plain_torch=plain.median if plain else None,
        prefill_over_plain_torch_spread=plain,
        spoilt=outcome.spoilt if settings.chaos is not None else {},
    )


def _served(settings: Settings, shape: Shape, place: Place, tell: Tell) -> tuple[str, Outcome]:
    if isinstance(shape, SharedPrefix):
        return "shared-prefix", shared_prefix(settings, shape, place, tell)
    if isinstance(shape, MultiTurn):
        return "multi-turn", multi_turn(settings, shape, place, tell)
    return "no-reuse", no_reuse(settings, shape, place, tell)


def _args(settings: Settings, shape: Shape) -> Mapping[str, object]:
    """Return what was asked for, as plain data. A bucket's URL holds no secrets by its grammar."""
    given = msgspec.to_builtins(settings, enc_hook=str) | msgspec.to_builtins(shape)
    return {name: value for name, value in given.items() if name not in ("verbose", "type")}
