"""Running a workload: arms in processes of their own, their requests interleaved.

Each arm serves the same prompts. For each prompt every arm has its turn, in an order that
rotates, so that whatever else the machine does meets all of them alike. An arm's writes are
finished before the next arm is timed.
"""

from __future__ import annotations

from typing import Final

from kvtier.bench.messages import Build, Done, ModelLoaded, Serve, Served
from kvtier.bench.place import Place
from kvtier.bench.processes import PLANS, Bench, Outcome, Tell
from kvtier.bench.settings import Settings
from kvtier.bench.workloads import Group, MultiTurn, NoReuse, SharedPrefix

_PLAIN_RUNS: Final = 4
_WARM_UP_CHUNKS: Final = 2
_FEW: Final = 2  # output tokens of a request that only warms up


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
