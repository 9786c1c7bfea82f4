"""Workloads that are described: what is drawn of each kind, and what no description may say."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from kvtier.cli.main import run
from kvtier.cli.plot import title
from kvtier.errors import ConfigError
from kvtier.planning import workloads
from kvtier.planning.optimum import ceiling, optimum
from kvtier.planning.trace import Trace
from kvtier.planning.workloads import KINDS, parse_workload

BLOCK = 256


def drawn(text: str, block: int | None = None) -> Trace:
    return parse_workload(text).draw(block)


def content(trace: Trace) -> list[object]:
    return [
        (trace.time(number), tokens, trace.output(number), asked, *blocks)
        for number, (blocks, asked, tokens) in enumerate(trace.served())
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_one_description_is_one_trace_and_another_seed_another(kind):
    one, same, other = (drawn(f"workload:{kind}?requests=60&seed={seed}") for seed in (1, 1, 2))
    assert content(one) == content(same)
    assert content(one) != content(other)
    assert len(one) == 60
    times = [one.time(number) for number in range(60)]
    assert times == sorted(times)
    assert one.block_tokens == BLOCK
    for number, (blocks, asked, tokens) in enumerate(one.served()):
        assert asked == tokens // BLOCK
        assert len(blocks) == (tokens + one.output(number)) // BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_requests_come_at_the_rate(kind):
    trace = drawn(f"{kind}?requests=3000&rate=20")
    first, last = trace.time(1000), trace.last_time()  # chats have to begin at first
    assert 2000 / (last - first) * 1000 == pytest.approx(20, rel=0.1)


def test_lengths_are_about_their_mean_and_exact_where_nothing_varies():
    exact = drawn("no-reuse?question=300&output=70&vary=0&requests=9")
    assert {(tokens, exact.output(n)) for n, (_, tokens) in enumerate(exact.requests())} == {
        (300, 70)
    }
    spread = [tokens for _, tokens in drawn("no-reuse?question=300&requests=500").requests()]
    assert 150 <= min(spread) < 170
    assert 430 < max(spread) <= 450
    assert sum(spread) / 500 == pytest.approx(300, rel=0.03)


def test_a_turn_finds_what_was_said_and_what_was_answered():
    """Of 512, 256 each turn asked and answered: prompts of 3, 5 and 7 blocks."""
    trace = drawn("multi-turn?system=512&question=256&output=256&turns=3&vary=0&requests=300")
    blocks = Counter(asked for _, asked, _ in trace.served())
    assert set(blocks) == {3, 5, 7}
    found = ceiling(trace)
    known = {3: 2, 5: 4, 7: 6}  # a later turn lacks its question alone; a first one, but once, too
    assert found.hit_blocks == sum(known[size] * count for size, count in blocks.items()) - 2
    assert found.hit_tokens == found.hit_blocks * BLOCK


def test_an_agent_s_context_grows_by_observations():
    trace = drawn("agent?system=0&question=1024&observation=512&output=0&turns=4&vary=0")
    assert {tokens for _, tokens in trace.requests()} == {1024, 1536, 2048, 2560}


def test_system_prompts_are_several_of_which_the_first_comes_most_often():
    trace = drawn("shared-prefix?prefixes=3&zipf=1&system=256&question=1&output=0&requests=900")
    counts = [count for _, count in Counter(blocks[0] for blocks, _ in trace.requests()).items()]
    shares = sorted(count / 900 for count in counts)
    assert shares == pytest.approx([2 / 11, 3 / 11, 6 / 11], abs=0.04)


def test_documents_match_behind_the_same_ones_alone():
    trace = drawn("rag?documents=3&retrieved=2&document=256&system=256&question=1&output=0&vary=0")
    chains = {tuple(blocks) for blocks, _ in trace.requests()}
    assert {len(chain) for chain in chains} == {3}
    assert [len({chain[:depth] for chain in chains}) for depth in (1, 2, 3)] == [1, 3, 6]
    assert trace.unique == 1 + 3 + 6  # a second document is another block behind each first


@pytest.mark.parametrize("zipf", [0, 3])
def test_all_documents_may_be_wanted(zipf):
    """The last ones are hardly ever drawn by chance alone."""
    trace = drawn(
        f"rag?documents=40&retrieved=40&zipf={zipf}&document=16&system=0&question=1&vary=0"
        "&output=0&requests=3",
        block=16,
    )
    assert [len(blocks) for blocks, _ in trace.requests()] == [40, 40, 40]


def test_nothing_is_reused_where_nothing_is_shared():
    assert ceiling(drawn("no-reuse?requests=50")).hit_blocks == 0


def test_a_block_that_two_texts_share_is_not_everybody_s():
    """300 tokens of system prompt: the second block of 256 holds some of the question."""
    trace = drawn("shared-prefix?prefixes=1&system=300&question=300&vary=0&output=0&requests=2")
    first, second = (list(blocks) for blocks, _ in trace.requests())
    assert first[0] == second[0]
    assert first[1] != second[1]


# -------------------------------------------------------------------- answers, beside the optimum


def repeated() -> Trace:
    """One prompt whose answer is the same each time, and another."""
    trace = Trace("t", BLOCK)
    for number in range(5):
        asked, answer = (["b"], []) if number % 2 else (["a"], ["x"])
        trace.add(number, BLOCK, 1, asked, answer)
    return trace


def test_the_optimum_keeps_nothing_until_it_is_computed_again():
    assert optimum(repeated(), 2).hit_blocks == 3
    assert ceiling(repeated()).hit_blocks == 3


def test_an_answer_s_blocks_are_asked_for_by_nobody():
    assert (repeated().uses, repeated().entries, repeated().unique) == (5, 8, 3)
    assert optimum(repeated(), 3).blocks == 5


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown kind of workload ''"),
        ("chat", "choose from: agent, multi-turn, no-reuse, rag, shared-prefix"),
        ("shared-prefx", "did you mean 'shared-prefix'"),
        ("rag?documents", "must look like ?requests=2000&seed=1"),
        ("rag?documents=5&documents=6", "given twice"),
        (
            "rag?documnets=5",
            "unknown parameter of workload:rag 'documnets'; did you mean 'documents'?",
        ),
        ("no-reuse?turns=5", "choose from: output, question, rate, requests, seed, vary"),
        ("rag?documents=", "documents must be a whole number from 1 to 1000000, not ''"),
        ("rag?documents=-5", "documents must be a whole number from 1 to 1000000, not '-5'"),
        ("rag?documents=1.5", "documents must be a whole number"),
        ("rag?documents=0", "documents must be a whole number from 1 to"),
        ("rag?documents=" + "9" * 500, "documents must be a whole number from 1 to 1000000, not"),
        ("rag?" + "&".join(f"x{n}=1" for n in range(500)), "at most 1,000 characters"),
        ("rag?rate=nan", "rate must be a number from 0.001 to 100000, not 'nan'"),
        ("rag?rate=inf", "rate must be a number"),
        ("rag?rate=0", "rate must be a number from 0.001"),
        ("rag?rate=1e3", "rate must be a number"),
        ("rag?vary=1.01", "vary must be a number from 0 to 1"),
        ("rag?seed=-1", "seed must be a whole number from 0 to 4294967295"),
        ("rag?retrieved=5&documents=4", "retrieved must not exceed documents"),
        ("multi-turn?pause=30", "workload:multi-turn: pause: duration '30' has no known unit"),
        ("multi-turn?pause=900h", "pause must be a time from 0s to 1000000s, not '900h'"),
        ("no-reuse?requests=10000000", "and at most 16,777,216 can be replayed"),
        ("agent?turns=10000&observation=1000000&requests=20000", "ask for fewer requests"),
        ("no-reuse?question=10&output=9", "no prompt fills a block of 256 tokens"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_error(capsys, text, says):
    assert run(["replay", f"workload:{text}", "--sweep"]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.count("\n") == 1


def test_every_bound_can_be_reached_and_not_exceeded():
    for kind, known in ((kind, KINDS[kind].parameters) for kind in KINDS):
        for name, one in known.items():
            for value in (one.least, one.most):
                read = parse_workload(f"{kind}?{name}={one.shown(value)}").values[name]
                assert read == value
            beyond = one.most * 2 + 1
            with pytest.raises(ConfigError, match="must be"):
                parse_workload(f"{kind}?{name}={one.shown(beyond)}")


def test_too_many_blocks_are_refused_before_one_is_drawn(monkeypatch):
    monkeypatch.setattr(workloads, "_arrivals", None)
    with pytest.raises(ConfigError, match="larger --block-size"):
        drawn("no-reuse?requests=10000000")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_is_about_what_would_be_drawn(kind, monkeypatch):
    text = f"{kind}?requests=600&output=300"
    monkeypatch.setattr(workloads, "_MOST_BLOCKS", 0)
    with pytest.raises(ConfigError) as refused:
        drawn(text)
    about = int(str(refused.value).split("about ")[1].split(" blocks")[0].replace(",", ""))
    monkeypatch.undo()
    assert drawn(text).entries == pytest.approx(about, rel=0.2)


# ------------------------------------------------------------------------------------- commands


def reported(capsys, *args) -> dict:
    assert run([*map(str, args), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_replay_takes_workloads_beside_files(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text(json.dumps(line))
    command = ("replay", "workload:rag?requests=50", path, "--capacity-blocks", 9)
    found = reported(capsys, *command, "--block-size", 4)
    assert [one["trace"] for one in found] == ["t.jsonl", "workload:rag?requests=50"]
    assert [one["block_tokens"] for one in found] == [4, 4]
    usual = reported(capsys, "replay", "workload:rag?requests=50", "--capacity-blocks", 9)
    assert usual["block_tokens"] == BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_says_all_that_was_drawn_of(kind, capsys):
    """So that it can be drawn again where defaults are others."""
    text = f"workload:{kind}?requests=20&rate=2.5&seed=3"
    (note,) = reported(capsys, "replay", text, "--sweep")["notes"]
    whole = note.removeprefix("drawn: ")
    assert content(drawn(whole)) == content(drawn(text))
    assert {f"{name}=" for name in KINDS[kind].parameters} == {
        f"{pair.split('=')[0]}=" for pair in whole.split("?")[1].split("&")
    }


def test_a_bench_serves_a_workload_as_it_does_a_trace(monkeypatch):
    seen = []
    monkeypatch.setattr("kvtier.cli.bench_trace.run_workload", lambda *run: seen.append(run) or 0)
    text = "workload:agent?requests=40&rate=1"
    assert run(["bench", "trace", text, "--timing-model", "--speed-up", "10"]) == 0
    ((_, shape, _),) = seen
    trace = drawn(text)
    assert (shape.trace, shape.block_size, len(shape.asked)) == (text, BLOCK, 40)
    span = (trace.last_time() - trace.time(0)) / 1000
    assert shape.asked[-1].at == pytest.approx(span / 10)


def test_requests_of_a_workload_wait_for_each_other_the_more_of_them_come(capsys):
    """An engine of 5,000 tokens a second has to compute 2,000 for each."""
    waited = []
    for rate in (0.1, 2.4):
        found = reported(
            capsys,
            *("replay", f"workload:no-reuse?requests=200&output=0&vary=0&rate={rate}"),
            *("--tier", "dram:1GiB@25GB/s", "--bytes-per-token", "1KiB", "--at-times"),
            *("--time-unit", "s"),  # which is of files
        )
        waited.append(found["ttft"]["mean"])
    load = 2.4 * 0.4  # of an M/D/1 queue, whose wait that is in the long run
    assert 0.4 < waited[0] < 0.42
    assert 1.0 < waited[1] < 0.4 * (1 + load / (2 * (1 - load)))


@pytest.mark.parametrize("times", [[], ["--at-times"]])
def test_a_stack_of_tiers_finds_answers_too(times, capsys):
    text = "workload:multi-turn?requests=100&rate=0.1&system=256&question=256&output=512&vary=0"
    found = reported(
        capsys,
        *("replay", text, "--tier", "dram:1GiB@25GB/s", "--bytes-per-token", "1KiB", *times),
    )
    assert found["hit_rate"] == pytest.approx(ceiling(drawn(text)).rate_tokens, abs=0.001)


def test_a_plan_takes_a_workload_instead_of_a_trace(capsys):
    plan = ("plan", "llama-3-8b", "--gpu-memory", "80GB")
    found = reported(capsys, *plan, "--workload", "multi-turn?requests=200&rate=4")
    assert found["curve"]["trace"] == "workload:multi-turn?requests=200&rate=4"
    assert found["tiers"]["hit_rate"] > 50
    assert found["tiers"]["ttft"]["p50"] < found["tiers"]["ttft_without"]["p50"]
    assert found["tiers"]["dollars"] > 0
    waiting = reported(capsys, *plan, "--workload", "multi-turn?requests=200&rate=4", "--at-times")
    assert waiting["tiers"]["at_times"]
    assert waiting["tiers"]["ttft"]["p50"] > found["tiers"]["ttft"]["p50"]
    assert run([*plan, "--workload", "rag", "--trace", "t.jsonl"]) == 2
    assert "name one" in capsys.readouterr().err
    assert run([*plan, "--workload", "t.jsonl"]) == 2
    assert "unknown kind of workload 't.jsonl'" in capsys.readouterr().err


def test_a_plot_s_title_has_all_parameters():
    text = "workload:rag?zipf=1.25&rate=0.5&documents=100000&retrieved=3&question=90"
    assert title(text).split() == text.split("&")
    assert title("trace.jsonl.zst") == "trace"


@pytest.mark.parametrize("command", ["replay", "plan", "bench trace"])
def test_the_workloads_are_shown_with_all_that_they_take(command, capsys):
    assert run([*command.split(), "--help-workloads"]) == 0
    shown = capsys.readouterr().out
    for name, kind in KINDS.items():
        assert f"\n{name}: " in shown
        for parameter, one in kind.parameters.items():
            assert f"  {parameter}={one.shown(one.default)} " in shown


def test_a_capacity_in_bytes_is_as_many_blocks_as_each_trace_has_in_it(tmp_path, capsys):
    """A file's blocks have 512 tokens here, and a workload's 256."""
    file = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    file.write_text(json.dumps(line) + "\n")
    size = ("--bytes-per-token", "1KiB", "--capacity", "1MiB,2MiB")
    traces = (str(file), "workload:no-reuse?requests=9")
    assert run(["replay", *traces, *size, "--policy", "lru", "--json", "-"]) == 0
    reports = json.loads(capsys.readouterr().out)
    blocks = [[result["capacity_blocks"] for result in one["results"]] for one in reports]
    assert blocks == [[2, 4], [4, 8]]
    assert run(["replay", *traces, *size, "--policy", "lru"]) == 0
    told = capsys.readouterr().out
    assert told.count("1 MiB") == told.count("2 MiB") == 2
