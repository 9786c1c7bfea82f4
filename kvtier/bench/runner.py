"""Running a workload: arms in processes of their own, their requests interleaved.

Each arm serves the same prompts. For each prompt every arm has its turn, in an order that
rotates, so that whatever else the machine does meets all of them alike. An arm's writes are
finished before the next arm is timed.
"""

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
    Serve,
    Served,
)
from kvtier.bench.place import Place
from kvtier.bench.report import Sample
from kvtier.bench.settings import Settings
from kvtier.bench.workloads import Group, MultiTurn, NoReuse, SharedPrefix
from kvtier.errors import ConfigError
from kvtier.units import format_bytes, format_least

__all__ = ["Outcome", "Tell", "multi_turn", "no_reuse", "shared_prefix"]

Tell = Callable[[str, int, int], None]
"""Called with what is being done, and how many steps of how many are behind."""

_PLAIN_RUNS: Final = 4
_WARM_UP_CHUNKS: Final = 2
_FEW: Final = 2  # output tokens of a request that only warms up
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
    """samples: of each arm, in the order of requests. plain: pairs of seconds, plain and engine."""

    model: ModelLoaded
    samples: Mapping[str, list[Sample]]
    plain: Sequence[tuple[float, float]] = ()
    spoilt: Mapping[str, int] = {}


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
        self._load = LoadModel(settings.model, settings.chunk_tokens, str(place.directory))
        self._stack = contextlib.ExitStack()
        self._steps = (0, 1)
        self._dram = _LEAST_DRAM

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
        return self._place.tiers(names, lmdb, self._dram)

    @property
    def spoilt(self) -> Mapping[str, int]:
        """How many requests met which fault on their way to the bucket."""
        return self._place.spoilt()

    def spoil(self) -> None:
        """Let the bad weather begin, if there is to be one, until arms are opened."""
        self._place.spoil(bad=True)

    def open(self, arms: Sequence[str], tokens: int, filled: str = "") -> None:
        """Open engine and cache of arms. filled: the directory that the lmdb arm finds."""
        self._place.spoil(bad=False)  # whoever comes now would be turned away at the door
        for arm in arms:
            child, plan = self._children[arm], PLANS[arm]
            child.receive(ModelLoaded)
            tiers = self.tiers(plan.tiers, filled if filled and arm == "lmdb" else arm)
            child.ask(self.opening(tokens, tiers, prefix_cache=plan.prefix_cache), Done)

    def opening(self, tokens: int, tiers: list[str], *, prefix_cache: bool = True) -> Open:
        """Return the message by which an engine is opened, and a cache below it."""
        settings = self.settings
        return Open(tokens, prefix_cache, tiers, settings.device_chaos, settings.device)

    def empty(self, arm: str) -> None:
        """Empty what lies above the tier that an arm is named after."""
        if not PLANS[arm].keeps_hbm:
            self._children[arm].ask(Empty(list(PLANS[arm].empties)), Done)

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
            _check_capacity("--disk", self.settings.disk, need)

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


def shared_prefix(settings: Settings, shape: SharedPrefix, place: Place, tell: Tell) -> Outcome:
    """Fill the slower tiers from one process, then serve each prefix again from others."""
    plain: list[tuple[float, float]] = []
    with Bench(settings, place, tell) as bench:
        loaded, groups = _fill(bench, shape)
        bench.steps(len(groups) * len(settings.arms) * shape.prompts_per_prefix)
        _serve_group(bench, groups[0], shape, turn=0, is_timed=False)
        for turn, group in enumerate(groups[1:], 1):
            _serve_group(bench, group, shape, turn=turn, is_timed=True)
            if settings.compares_with_torch and len(plain) < _PLAIN_RUNS:
                engine = bench.samples["recompute"][-1].served.ttft_s
                plain.append((bench.plain(group.prefix + group.timed[-1]), engine))
        spoilt = bench.spoilt
        bench.clean()
    return Outcome(loaded, bench.samples, plain, spoilt)


def _fill(bench: Bench, shape: SharedPrefix) -> tuple[ModelLoaded, list[Group]]:
    """Let a process of its own write every prefix to the slower tiers, and open all arms.

    Side by side with it, the arms that keep prefixes in their own memory compute them as well:
    so their HBM, or their dram tier, holds all prefixes at once. The first group, which is for
    warming up, is cut short.
    """
    settings = bench.settings
    tokens = shape.prefix_len + shape.suffix_len + shape.output_len
    build = Build(shape, settings.seed, settings.chunk_tokens)
    early = [arm for arm in settings.arms if "lmdb" not in PLANS[arm].tiers]
    late = [arm for arm in settings.arms if arm not in early]
    with bench.prompts(build, tokens) as (child, loaded, built):
        first, *rest = built.groups
        groups = [first.cut(_WARM_UP_CHUNKS * settings.chunk_tokens), *rest]
        whole = tokens * len(groups)
        bench.check_room(loaded, at_once=whole, in_all=shape.prefix_len * len(groups))
        bench.start()
        names = [tier for tier in ("lmdb", "s3") if tier in settings.arms]
        tiers = bench.tiers(["dram", *names], "filled")
        child.ask(bench.opening(tokens, tiers), Done)
        bench.open(early, whole)
        bench.steps(len(groups))
        bench.spoil()
        for turn, group in enumerate(groups):
            bench.step("computing each prefix once")
            arms = [arm for arm in early if PLANS[arm].warms or not turn]
            with bench.serving(arms, group.prefix + group.warm):
                if late:
                    child.ask(Serve(group.prefix + group.warm, 1), Served)
    bench.open(late, tokens, filled="filled")
    bench.spoil()
    return loaded, groups


def _serve_group(
    bench: Bench, group: Group, shape: SharedPrefix, *, turn: int, is_timed: bool
) -> None:
    """Let every arm serve all prompts of a prefix."""
    reusable = len(group.prefix) // bench.settings.chunk_tokens * bench.settings.chunk_tokens
    for number, suffix in enumerate(group.timed):
        for arm in bench.rotated(turn + number):
            bench.step(f"prefix {turn} of {shape.num_prefixes}, {arm}")
            bench.empty(arm)
            prompt = group.prefix + suffix
            if is_timed:
                expected = 0 if arm in ("recompute", bench.settings.chaos) else reusable
                bench.timed(arm, prompt, shape.output_len, expected)
            else:
                bench.serve(arm, prompt, _FEW)


def multi_turn(settings: Settings, shape: MultiTurn, place: Place, tell: Tell) -> Outcome:
    """Let conversations grow: each turn's prompt is all before it and one more question.

    The samples of an arm come turn by turn; those of the first turn, which nothing can have
    cached, come first.
    """
    tokens = shape.prefix_len + shape.turns * (shape.suffix_len + shape.output_len)
    with Bench(settings, place, tell) as bench:
        build = Build(shape, settings.seed, settings.chunk_tokens)
        with bench.prompts(build, tokens) as (_, loaded, built):
            talks = built.conversations
            bench.check_room(loaded, at_once=tokens * len(talks), in_all=tokens * len(talks))
        bench.start()
        bench.open(
            settings.arms, tokens * len(talks)
        )  # HBM must hold all conversations: they take turns
        bench.steps(shape.turns * len(talks) * len(settings.arms))
        history = {arm: [talk.opening for talk in talks] for arm in settings.arms}
        known = {arm: [0] * len(talks) for arm in settings.arms}
        for turn in range(shape.turns):
            for number, talk in enumerate(talks):
                for arm in bench.rotated(turn + number):
                    bench.step(f"turn {turn + 1} of {shape.turns}, {arm}")
                    prompt = history[arm][number]
                    served = _serve_turn(bench, arm, prompt, known[arm][number], shape, number)
                    # The last token of an answer is never computed, so nobody can reuse it.
                    known[arm][number] = len(prompt) + len(served.tokens) - 1
                    follow_up = talk.follow_ups[turn] if turn + 1 < shape.turns else []
                    history[arm][number] = prompt + served.tokens + follow_up
        bench.clean()
    return Outcome(loaded, bench.samples)


def _serve_turn(
    bench: Bench, arm: str, prompt: list[int], known: int, shape: MultiTurn, number: int
) -> Served:
    """Serve one turn; the first conversation is for warming up."""
    bench.empty(arm)
    if not number:
        return bench.serve(arm, prompt, shape.output_len)
    chunk = bench.settings.chunk_tokens
    expected = 0 if arm == "recompute" else known // chunk * chunk
    return bench.timed(arm, prompt, shape.output_len, expected)


def no_reuse(settings: Settings, shape: NoReuse, place: Place, tell: Tell) -> Outcome:
    """Serve prompts that share nothing: what a cache costs where it brings nothing."""
    tokens = shape.input_len + shape.output_len
    with Bench(settings, place, tell) as bench:
        build = Build(shape, settings.seed, settings.chunk_tokens)
        with bench.prompts(build, tokens) as (_, loaded, built):
            bench.check_room(loaded, at_once=tokens, in_all=tokens * len(built.prompts))
        bench.start()
        bench.open(settings.arms, tokens)
        bench.steps(len(built.prompts) * len(settings.arms))
        for turn, prompt in enumerate(built.prompts):
            for arm in bench.rotated(turn):
                bench.step(f"prompt {turn} of {shape.num_prompts}, {arm}")
                if turn:
                    bench.timed(arm, prompt, shape.output_len, 0)
                else:
                    bench.serve(arm, prompt, shape.output_len)
        bench.clean()
    return Outcome(loaded, bench.samples)
