"""A cache's metrics among vLLM's own: in its log, and where Prometheus asks vLLM.

They are counted in the scheduler's process, and leave it with a step's output. Every few seconds a
thread of its own looks at them, so that no step waits for a cache, or for its daemon.
These are what vLLM calls KVConnectorStats and KVConnectorPromMetrics, by their methods alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from kvtier.clock import Clock, monotonic
from kvtier.metrics import TABLE, parsed
from kvtier.seams import Future, IoPool

_SECONDS: Final = 5.0  # between two looks
_END_SECONDS: Final = 1.0
_SHOWN: Final = ("kvtier_match_tokens_total", "kvtier_hit_tokens_total", "kvtier_tier_errors_total")
"""What vLLM logs of them: what was asked for, from where it came, and what went wrong."""

_log = logging.getLogger("kvtier")


class Changes:
    """What counters have risen by, and what gauges are, by ``name{label="value"}``.

    data: that, as vLLM sends it from process to process.
    """

    def __init__(self, data: Mapping[str, float] | None = None) -> None:
        self.data = dict(data or {})

    def to_dict(self) -> dict[str, float]:
        """Return what is sent."""
        return self.data

    def reset(self) -> None:
        """Forget all."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Say whether there is nothing to tell."""
        return not self.data

    def aggregate(self, other: Changes) -> Self:
        """Take what came later, too."""
        for series, value in other.data.items():
            if _is_counter(series):
                value += self.data.get(series, 0)  # noqa: PLW2901  (what is kept)
            self.data[series] = value
        return self

    def reduce(self) -> dict[str, float]:
        """Return what is worth a line in a log."""
        return {
            series.removeprefix("kvtier_"): value
            for series, value in self.data.items()
            if series.partition("{")[0] in _SHOWN
        }


class Watched:
    """Looks at a cache's figures now and then; for one thread, which never waits.

    figures: as of ``Cache.figures``; called by a thread of this.
    """

    def __init__(self, figures: Callable[[], dict[str, float]], clock: Clock = monotonic) -> None:
        self._figures = figures
        self._clock = clock
        self._pool = IoPool("vllm-figures", 1)
        self._due = 0.0
        self._asked: Future[dict[str, float]] | None = None
        self._last: dict[str, float] = {}

    def changes(self) -> Changes | None:
        """Return what has changed since the last answer, if there is a new one."""
        if self._asked is None:
            if self._clock() >= self._due:
                self._asked = self._pool.submit(self._figures)
            return None
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        self._due = self._clock() + _SECONDS
        error = asked.exception()
        if error is not None:
            _log.warning("the cache's figures cannot be told to vLLM: %s", error)
            return None
        last, self._last = self._last, asked.result()
        return Changes(
            {
                series: _risen(value, last.get(series, 0)) if _is_counter(series) else value
                for series, value in self._last.items()
                if value != last.get(series)
            }
        )

    def close(self) -> None:
        """End its thread. Blocks, bounded. Idempotent."""
        self._pool.close(_END_SECONDS)


def _is_counter(series: str) -> bool:
    row = TABLE.get(series.partition("{")[0])
    return row is not None and row.kind == "counter"


def _risen(value: float, last: float) -> float:
    """Return by how much a counter has risen; one that was lower began anew, with its daemon."""
    return value - last if value >= last else value


class Exported:
    """The figures of all engines as metrics of Prometheus, named ``vllm:kvtier_…``.

    kinds: what makes a metric, by the type of prometheus_client that it stands for. labels: names
    of vLLM's own labels, and their values for each engine.
    """

    def __init__(
        self,
        kinds: Mapping[type, Callable[..., Any]],
        labels: Sequence[str],
        values: Mapping[int, Sequence[object]],
    ) -> None:
        made = {kind.__name__.lower(): make for kind, make in kinds.items()}
        self._values = values
        self._metrics: dict[str, Any] = {}
        for row in TABLE.values():
            # Of several front-ends' gauges the last one that was told counts.
            more = {"multiprocess_mode": "mostrecent"} if row.kind == "gauge" else {}
            self._metrics[row.name] = made[row.kind](
                name=f"vllm:{row.name.removesuffix('_total')}",
                documentation=f"{row.help}, in {row.unit}",
                labelnames=[*labels, *row.labels],
                **more,
            )

    def observe(self, data: Mapping[str, float], engine_idx: int = 0) -> None:
        """Take the changes of one engine. See vLLM's KVConnectorPromMetrics."""
        for series, value in data.items():
            name, own = parsed(series)
            if name in self._metrics:
                metric = self._metrics[name].labels(*self._values[engine_idx], *own)
                (metric.inc if TABLE[name].kind == "counter" else metric.set)(value)
