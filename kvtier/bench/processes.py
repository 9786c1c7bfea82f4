"""The processes of a run, one for each arm, and the steps that all workloads are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from kvtier.bench.child import Child
from kvtier.bench.messages import (
    Build,
    Built,
    Done,
    Empty,
    LoadModel,
    ModelLoaded,
    Open,
    Plain,
    PlainTook,
    Replay,
    Replayed,
    Serve,
    Served,
)
from kvtier.bench.place import LEAST_DISK, Place
from kvtier.bench.recorded import Asked
from kvtier.bench.report import Sample
from kvtier.bench.settings import Settings
from kvtier.errors import ConfigError
from kvtier.units import format_bytes, format_least

Tell = Callable[[str, int, int], None]
"""Called with what is being done, and how many steps of how many are behind."""

_LEAST_DRAM: Final = 64 << 20
_IN_FLIGHT: Final = 2  # at most half of the dram tier waits to be written down
_USABLE: Final = 0.8  # of the lmdb tier's capacity: its index and whole segments take some


class ArmPlan(NamedTuple):
    """How an arm gets its KV.

    tiers: of its cache. empties: those emptied before each timed request, HBM besides unless
    `keeps_hbm`. warms: a prefix that others find below is served once, untimed, before.
    """

    prefix_cache: bool = True
    tiers: tuple[str, ...] = ()
    empties: tuple[str, ...] = ()
    keeps_hbm: bool = False
    warms: bool = False


PLANS: Final = {
    "recompute": ArmPlan(prefix_cache=False),
    "hbm": ArmPlan(keeps_hbm=True, warms=True),
    "dram": ArmPlan(tiers=("dram",), warms=True),
    "lmdb": ArmPlan(tiers=("dram", "lmdb"), empties=("dram",)),
    "s3": ArmPlan(tiers=("dram", "lmdb", "s3"), empties=("dram", "lmdb")),
}


PROGRAMS: Final = {"kvtier": "kvtier.bench.arm", "vllm": "kvtier.bench.vllm_arm"}
"""What an arm's process runs, by engine."""


class Outcome(NamedTuple):
    """What came of a workload.

    samples: of each arm, in the order of requests. plain: pairs of seconds, plain and engine.
    seconds: what each arm took for all that counts. capacities: bytes by tier, where they matter.
    cut_prompts: that were longer than the model's context. ceiling: see ``Report``.
    """

    model: ModelLoaded
    samples: Mapping[str, list[Sample]]
    plain: Sequence[tuple[float, float]] = ()
    spoilt: Mapping[str, int] = {}
    seconds: Mapping[str, float] = {}
    capacities: Mapping[str, int] = {}
    cut_prompts: int = 0
    ceiling: float | None = None


class Bench:
    """The processes of one run, and the steps that all workloads are made of.

    A context manager: all processes end with it, at once if there was an error.
    """

    def __init__(self, settings: Settings, place: Place, tell: Tell) -> None:
        self.settings = settings
        self.samples: dict[str, list[Sample]] = {arm: [] for arm in settings.arms}
        self._place = place
        self._tell = tell
        self._children: dict[str, Child] = {}
        self._models: dict[str, ModelLoaded] = {}
        self._load = LoadModel(
            settings.model,
            settings.chunk_tokens,
            str(place.directory),
            settings.seconds_per_token,
        )
        self._stack = contextlib.ExitStack()
        self._steps = (0, 1)
        self._dram = _LEAST_DRAM
        self._disk = settings.disk or LEAST_DISK

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children.values():
            child.hang_up()  # they end side by side
        self._stack.__exit__(kind, error, trace)

    def start(self) -> None:
        """Start a process for each arm, their models on the way."""
        for arm in self.settings.arms:
            self._children[arm] = self._stack.enter_context(self._child(arm))
            self._children[arm].send(self._load)

    def clean(self) -> None:
        """Empty a bucket that was there before."""
        if self.settings.s3 is not None and "s3" in self._children:
            self._children["s3"].ask(Empty(["s3"]), Done)

    def steps(self, count: int) -> None:
        """Say how many steps the next phase has."""
        self._steps = (0, count)

    def step(self, text: str) -> None:
        """Say that a step begins."""
        done, count = self._steps
        self._tell(text, done, count)
        self._steps = (done + 1, count)

    @contextlib.contextmanager
    def prompts(self, build: Build, tokens: int) -> Iterator[tuple[Child, ModelLoaded, Built]]:
        """Make prompts, of at most `tokens` tokens with their answers, in a process of its own."""
        self.step("loading the model")
        with self._child("prompts") as child:
            loaded = child.ask(self._load, ModelLoaded)
            if tokens > loaded.context_tokens:
                raise ConfigError(
                    f"prompt and output of {tokens} tokens exceed the {loaded.context_tokens} of "
                    f"the model's context; ask for less"
                )
            yield child, loaded, child.ask(build, Built)

    def tiers(self, names: Sequence[str], lmdb: str) -> list[str]:
        """Return the URLs of tiers; lmdb: the name of the directory."""
        return self._place.tiers(names, lmdb, self._dram, self._disk)

    @property
    def spoilt(self) -> Mapping[str, int]:
        """How many requests met which fault on their way to the bucket."""
        return self._place.spoilt()

    def spoil(self) -> None:
        """Let the bad weather begin, if there is to be one, until arms are opened."""
        self._place.spoil(bad=True)

    def loaded(self) -> ModelLoaded:
        """Wait until every arm has its model. Raises ConfigError."""
        self.step("loading the model")
        self._models.update({arm: one.receive(ModelLoaded) for arm, one in self._children.items()})
        return next(iter(self._models.values()))

    def give(self, *, dram: int, disk: int) -> None:
        """Say how many bytes the dram and the lmdb tier have."""
        self._dram, self._disk = dram, disk

    def open(
        self, arms: Sequence[str], tokens: int, filled: str = "", *, spare: bool = True
    ) -> None:
        """Open engine and cache of arms. filled: the directory that the lmdb arm finds.

        tokens, spare: of the engine's pool, see ``Open``.
        """
        self._place.spoil(bad=False)  # whoever comes now would be turned away at the door
        for arm in arms:
            child, plan = self._children[arm], PLANS[arm]
            if arm not in self._models:
                self._models[arm] = child.receive(ModelLoaded)
            tiers = self.tiers(plan.tiers, filled if filled and arm == "lmdb" else arm)
            opening = self.opening(tokens, tiers, prefix_cache=plan.prefix_cache, spare=spare)
            child.ask(opening, Done)

    def opening(
        self, tokens: int, tiers: list[str], *, prefix_cache: bool = True, spare: bool = True
    ) -> Open:
        """Return the message by which an engine is opened, and a cache below it."""
        settings = self.settings
        return Open(tokens, prefix_cache, tiers, settings.device_chaos, settings.device, spare)

    def empty(self, arm: str, *, keeps_hbm: bool = False) -> None:
        """Empty what lies above the tier that an arm is named after, HBM only where that goes."""
        if not PLANS[arm].keeps_hbm:
            self._children[arm].ask(Empty(list(PLANS[arm].empties), keeps_hbm), Done)

    @contextlib.contextmanager
    def serving(self, arms: Sequence[str], tokens: list[int]) -> Iterator[None]:
        """Let arms serve a request that does not count, side by side, until the block ends."""
        for arm in arms:
            self._children[arm].send(Serve(tokens, 1))
        yield
        for arm in arms:
            self._children[arm].receive(Served)

    def serve(self, arm: str, tokens: list[int], output_len: int) -> Served:
        """Serve a request that does not count."""
        return self._children[arm].ask(Serve(tokens, output_len), Served)

    def timed(self, arm: str, tokens: list[int], output_len: int, expected: int) -> Served:
        """Serve a request that counts. expected: tokens that the arm's tier must have."""
        before = self._place.s3_bytes() if arm == "s3" else None
        served = self.serve(arm, tokens, output_len)
        after = self._place.s3_bytes() if arm == "s3" else None
        sent = None if before is None or after is None else after - before
        self.samples[arm].append(Sample(served, expected, sent))
        return served

    def replay(self, arm: str, asked: list[Asked], size: int, *, is_timed: bool) -> Replayed:
        """Serve recorded requests as they arrive; they count where they are timed."""
        before = self._place.s3_bytes() if arm == "s3" else None
        request = Replay(asked, size, self.settings.seed)
        replayed = self._children[arm].ask(request, Replayed)
        after = self._place.s3_bytes() if arm == "s3" else None
        if is_timed:
            *some, last = replayed.served
            sent = None if before is None or after is None else after - before
            self.samples[arm] += [*map(Sample, some), Sample(last, 0, sent)]
        return replayed

    def plain(self, tokens: list[int]) -> float:
        """Return the seconds that plain torch takes, in the recompute arm's process."""
        return self._children["recompute"].ask(Plain(tokens), PlainTook).seconds

    def rotated(self, turn: int) -> list[str]:
        """Return the arms, a different one first at each turn."""
        arms = list(self.settings.arms)
        first = turn % len(arms)
        return arms[first:] + arms[:first]

    def check_room(self, loaded: ModelLoaded, *, at_once: int, in_all: int) -> None:
        """Check that the tiers take the KV of so many tokens. Raises ConfigError."""
        need = at_once * loaded.bytes_per_token * _IN_FLIGHT
        self._dram = self.settings.dram or max(need, _LEAST_DRAM)
        if {"dram", "lmdb", "s3"} & set(self.settings.arms):
            _check_capacity("--dram", self._dram, need)
        if {"lmdb", "s3"} & set(self.settings.arms):
            need = int(in_all * loaded.bytes_per_token / _USABLE)
            _check_capacity("--disk", self._disk, need)

    def _child(self, name: str) -> Child:
        log = None if self.settings.verbose else self._place.directory / f"{name}.log"
        return Child(
            name,
            program=PROGRAMS[self.settings.engine],
            threads=self.settings.threads,
            log=log,
            env=self._place.env,
        )


def _check_capacity(option: str, given: int, need: int) -> None:
    if need > given:
        raise ConfigError(
            f"{option} {format_bytes(given)} is too little for this workload; give at least "
            f"{format_least(need)}, or ask for fewer or shorter prompts"
        )
