"""What vLLM's scheduler and its workers tell each other about kvtier's plans, step by step.

vLLM hands these on, and asks nothing of them but ``aggregate``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepPlans:
    """What a worker does in a step.

    loads: request and plan; saves: plans, of blocks that this step fills; reused: numbers of the
    saves that must have ended before this step writes; late: requests whose load came to nothing,
    with their blocks; idle: the step computes nothing.
    """

    loads: list[tuple[str, bytes]] = field(default_factory=list)
    saves: list[bytes] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    late: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    idle: bool = False


@dataclass
class Ended:
    """Plans that have ended: by number, for each rank that says so why it failed there, or ""."""

    causes: dict[int, list[str]] = field(default_factory=dict)

    def aggregate(self, other: Ended) -> Ended:
        """Put the reports of two ranks together. See vLLM's KVConnectorWorkerMetadata."""
        both = {plan: list(causes) for plan, causes in self.causes.items()}
        for plan, causes in other.causes.items():
            both.setdefault(plan, []).extend(causes)
        return Ended(both)
