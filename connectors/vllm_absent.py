"""Both halves of the connector where an optional daemon was not there: every match is a miss."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.vllm_step import Ended, StepPlans


class AbsentSide:
    """Stands where ``SchedulerSide`` or ``WorkerSide`` does, and moves nothing."""

    busy = False

    # ---- the scheduler's

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Offer nothing."""
        del request, computed
        return 0, False

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Plan nothing: nothing was offered."""

    def step(self, output: Any) -> StepPlans:
        """Return a step without plans."""
        del output
        return StepPlans()

    def ended(self, report: Ended) -> None:
        """Hear of nothing."""

    def finish(self, request: Any) -> None:
        """Forget nothing."""

    # ---- the worker's

    def bind(self, tensors: dict[str, Any]) -> None:
        """Take no KV."""

    def before(self, plans: StepPlans) -> None:
        """Wait for nothing."""

    def load(self, plans: StepPlans) -> None:
        """Load nothing."""

    def save(self, plans: StepPlans) -> None:
        """Save nothing."""

    def arrived(self, *, idle: bool) -> tuple[set[str], dict[str, tuple[int, ...]]]:
        """Return that nothing has."""
        del idle
        return set(), {}

    def report(self) -> Ended | None:
        """Return nothing."""
        return None

    def close(self) -> None:
        """Hold nothing."""
