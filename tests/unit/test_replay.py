"""``kvtier replay``: its figures on traces that can be reckoned by hand, and bad input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest
import zstandard

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.planning.trace import read_trace

LINE = {"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]}


def written(path, requests):
    lines = [
        json.dumps({**LINE, "timestamp": n, "input_length": 4 * len(one), "hash_ids": one})
        for n, one in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def trace(tmp_path):
    """Two prompts that share a block, in turn, and one alone: ten blocks, five of them known."""
    return written(tmp_path / "t.jsonl", [[1, 2], [1, 3], [1, 2], [1, 3], [9, 8]])


def replayed(capsys, *args):
    assert run(["replay", *map(str, args), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def rates(report):
    return {
        (one["policy"], one["capacity_blocks"]): one["hit_rate_blocks"] for one in report["results"]
    }


def test_rates_are_of_what_was_asked_for(trace, capsys):
    report = replayed(
        capsys, trace, "--block-size", 4, "--capacity-blocks", "2,3", "--policy", "all"
    )
    found = rates(report)
    assert report["ceiling"]["hit_rate_blocks"] == 50.0
    assert found["optimal", 3] == 50.0
    assert found["lru", 3] == 50.0
    assert found["optimal", 2] == 40.0  # the shared block and one of the two tails
    assert found["lru", 2] == 30.0
    assert (report["requests"], report["blocks"], report["unique_blocks"]) == (5, 10, 5)


def test_the_warmup_is_not_counted_and_said(trace, capsys):
    report = replayed(
        capsys, trace, "--block-size", 4, "--capacity-blocks", 3, "--warmup", 0.4, "--policy", "lru"
    )
    assert rates(report)["lru", 3] == pytest.approx(100 * 4 / 6, abs=0.01)
    assert "the last 60% of the requests" in report["denominator"]


def test_tokens_are_those_of_the_prompt(tmp_path, capsys):
    """The last block may be short."""
    path = tmp_path / "t.jsonl"
    path.write_text((json.dumps({**LINE, "input_length": 6}) + "\n") * 2)
    report = replayed(capsys, path, "--block-size", 4, "--capacity-blocks", 9, "--policy", "lru")
    (found,) = report["results"]
    assert (found["hit_rate_tokens"], found["hit_rate_blocks"]) == (50.0, 50.0)


def test_packed_traces_are_read_alike(trace, tmp_path, capsys):
    data = trace.read_bytes()
    (tmp_path / "t.gz").write_bytes(gzip.compress(data))
    half = data.index(b"\n") + 1
    frames = (zstandard.compress(data[:half]), zstandard.compress(data[half:]))
    (tmp_path / "t.zst").write_bytes(b"".join(frames))
    options = ("--block-size", 4, "--capacity-blocks", 2)
    plain, *packed = (
        replayed(capsys, path, *options) for path in (trace, *tmp_path.glob("t.[gz]*"))
    )
    assert len(packed) == 2
    assert all(rates(one) == rates(plain) for one in packed)


def test_capacities_in_bytes(trace, capsys):
    options = ("--block-size", 4, "--bytes-per-token", "1KiB", "--capacity", "8KiB,12KiB")
    assert [capacity for _, capacity in rates(replayed(capsys, trace, *options))] == [2, 3, 2, 3]


def test_several_traces_and_a_sweep_print_a_table_each(trace, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_bytes(trace.read_bytes())
    assert run(["replay", str(trace), str(other), "--block-size", "4", "--sweep"]) == 0
    out = capsys.readouterr().out
    assert out.count("ceiling") == out.count("optimal") == 2


def bad(**change):
    fields = {**LINE, "timestamp": 5, **change}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (bad(timestamp=...), "timestamp: it is missing"),
        (bad(timestamp=None), "timestamp: a number is needed, not None"),
        (bad(timestamp="now"), "timestamp: a number"),
        (bad(timestamp=-1), "timestamp: -1 is out of range"),
        (bad(input_length=-8), "input_length: -8 is out of range"),
        (bad(input_length=8.5), "input_length: a number"),
        (bad(output_length=True), "output_length: a number"),
        (bad(hash_ids=...), "hash_ids: it is missing"),
        (bad(hash_ids={}), "hash_ids: a list"),
        (bad(hash_ids=[1, None]), "hash_ids: numbers or texts"),
        (bad(hash_ids=[1, 2, 3]), "is --block-size right?"),
        (bad(hash_ids=[1]), "is --block-size right?"),
        (bad(hash_ids=[2, 1]), "stands behind another block than before"),
        (bad(hash_ids=[7, 2]), "stands behind another block than before"),
        (bad(timestamp=0.5), "timestamp: 0.5 lies before the request above"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path, capsys, line, says):
    path = tmp_path / "t.jsonl"
    good = json.dumps({**LINE, "timestamp": 1})
    path.write_text(f"{good}\n{line}\n{good}\n")
    command = ["replay", str(path), "--block-size", "4", "--capacity-blocks", "4"]
    assert run(command) == 2
    error = capsys.readouterr().err
    assert ", line 2: " in error
    assert says in error
    assert run([*command, "--skip-bad", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["skipped_lines"], report["requests"], report["unique_blocks"]) == (1, 2, 2)


def test_lines_are_counted_as_an_editor_counts_them(tmp_path, capsys, monkeypatch):
    """Empty ones too, and one beyond all measure once."""
    monkeypatch.setattr("kvtier.planning.trace._MOST_BYTES", 1000)
    path = tmp_path / "t.jsonl"
    long = json.dumps({**LINE, "hash_ids": [1] * 2000})
    path.write_text(f"\n{json.dumps(LINE)}\n\n{long}\n{bad(input_length=-1)}\n{bad()}\n")
    command = ["replay", str(path), "--block-size", "4", "--capacity-blocks", "4"]
    assert run(command) == 2
    assert ", line 4: it is longer than 1000 bytes" in capsys.readouterr().err
    assert run([*command, "--skip-bad", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped_lines"] == 2


def test_a_torn_last_line_is_told_and_no_error(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{bad()}\n{bad()[:-3]}")
    command = ["replay", str(path), "--block-size", "4", "--capacity-blocks", "4", "--json", "-"]
    assert run(command) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert (report["requests"], report["skipped_lines"]) == (2, 0)
    assert report["notes"] == [f"{path}, line 3: it is torn, as by a kill, and left out"]
    assert report["notes"][0] in told.err
    path.write_text(f"{json.dumps(LINE)}\n{bad()}\n{bad()[:-3]}\n")  # that is no tear
    assert run(command) == 2
    assert ", line 3: it is not JSON" in capsys.readouterr().err


def recording(path, name, first):
    """Write two requests of a recording."""
    lines = [bad(timestamp=first + n, recording=name, block_tokens=4) for n in range(2)]
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("named", "requests"),
    [
        ("r", [6]),
        ("r r.1 r.2", [6]),
        ("r.1 r.2 r", [6]),
        ("r.2 r.1", [4]),
        ("r.1", [2]),
        ("r r.3", [2, 6]),
        ("r.3", [2]),
        ("new", [2]),
    ],
)
def test_the_files_of_a_recording_are_one_trace(tmp_path, capsys, named, requests):
    for number, name in enumerate(("r.3", "r.2", "r.1", "r")):
        recording(tmp_path / name, "aa" if name != "r.3" else "bb", 3 * number)
    recording(tmp_path / "new.1", "cc", 0)  # it is full, and the next one has not begun
    paths = [str(tmp_path / name) for name in named.split()]
    assert run(["replay", *paths, "--capacity-blocks", "4", "--json", "-"]) == 0
    told = capsys.readouterr()
    reports = json.loads(told.out)
    reports = reports if isinstance(reports, list) else [reports]
    assert [one["requests"] for one in reports] == requests
    assert all(one["block_tokens"] == 4 for one in reports)
    assert ("r.3: of another recording, left out" in told.err) == (
        "r" in named.split() and "r.3" not in named
    )


def test_numbered_files_that_are_no_recordings_are_traces_of_their_own(trace, tmp_path, capsys):
    for number in (1, 2):
        (tmp_path / f"{trace.name}.{number}").write_bytes(trace.read_bytes())
    paths = [f"{trace}.1", f"{trace}.2"]
    assert len(json.loads(replayed_text(capsys, *paths))) == 2
    assert isinstance(json.loads(replayed_text(capsys, str(trace))), dict)


def replayed_text(capsys, *paths):
    options = ("--block-size", "4", "--capacity-blocks", "4", "--json", "-")
    assert run(["replay", *paths, *options]) == 0
    return capsys.readouterr().out


def test_recordings_of_two_salts_are_no_trace(tmp_path, capsys):
    """Their hashes never match, so that the hit rate would be wrong, and plausible."""
    path = tmp_path / "joined"
    lines = (bad(timestamp=0, recording="aa"), bad(timestamp=1, recording="bb"))
    path.write_text("\n".join(lines))
    assert run(["replay", str(path), "--block-size", "4", "--capacity-blocks", "4"]) == 2
    error = capsys.readouterr().err
    assert "line 2: recording: 'bb', and 'aa' above" in error


@pytest.fixture
def two_models(tmp_path):
    """Write a recording of two models, of one with chunks of 4 tokens and one with chunks of 8."""
    path = tmp_path / "two"
    lines = [
        bad(block_tokens=size, hash_ids=[f"{size}.{n}" for n in range(8 // size)])
        for size in (4, 8, 4, 8, 8)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("more", [(), ("--skip-bad",)])
def test_models_with_chunks_of_two_sizes_are_not_one_trace(two_models, capsys, more):
    assert run(["replay", str(two_models), "--capacity-blocks", "4", *more]) == 2
    error = capsys.readouterr().err
    assert "line 2: block_tokens: 8, and 4 above" in error
    assert "--block-size 8 or --block-size 4 replays those of one" in error


@pytest.mark.parametrize(("size", "requests", "others"), [(4, 2, 8), (8, 3, 4)])
def test_one_of_them_is_replayed_where_its_size_is_given(
    two_models, capsys, size, requests, others
):
    """The others are nobody's fault: they are not counted as bad."""
    report = replayed(capsys, two_models, "--capacity-blocks", 9, "--block-size", size)
    assert (report["requests"], report["skipped_lines"]) == (requests, 0)
    (note,) = report["notes"]
    assert f"left out: {5 - requests} with chunks of {others} tokens" in note
    assert f"--block-size {others} replays them" in note
    rate = 100 * (requests - 1) / requests
    assert report["ceiling"]["hit_rate_blocks"] == pytest.approx(rate, abs=0.001)


def test_a_size_that_none_of_them_has_names_theirs(two_models, capsys):
    assert run(["replay", str(two_models), "--block-size", "16", "--sweep"]) == 2
    error = capsys.readouterr().err
    assert "--block-size 4" in error
    assert "--block-size 8" in error


def test_a_size_that_is_none_is_a_bad_line(tmp_path, capsys):
    path = tmp_path / "t"
    for size in (0, -4, "4", True, 4.0):
        path.write_text(bad(block_tokens=size) + "\n")
        assert run(["replay", str(path), "--block-size", "4", "--sweep"]) == 2
        assert ", line 1: block_tokens: " in capsys.readouterr().err


def test_a_packed_recording_says_its_size_too(tmp_path, capsys):
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(f"{bad(recording='aa', block_tokens=4)}\n".encode()))
    assert replayed(capsys, path, "--sweep")["block_tokens"] == 4


def test_prompts_that_fill_no_block_are_told(tmp_path, capsys):
    path = tmp_path / "t"
    path.write_text(bad(input_length=3, hash_ids=[]) + "\n")
    assert run(["replay", str(path), "--sweep"]) == 2
    assert "no prompt fills a block of 512 tokens" in capsys.readouterr().err


def test_a_line_without_end_is_not_read_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvtier.planning.trace._MOST_BYTES", 1000)
    path = tmp_path / "t.jsonl"
    path.write_text("[" + "1," * 10_000)
    assert run(["replay", str(path), "--capacity-blocks", "4"]) == 2
    assert "longer than 1000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "name capacities"),
        (("--sweep", "--prices", "x"), "--prices is of tiers: name them with --tier"),
        (("--sweep", "--always-load"), "--always-load is of tiers"),
        (("--capacity-blocks", "many"), "numbers like 1000,10000"),
        (("--capacity-blocks", "0"), "numbers like 1000,10000"),
        (("--capacity", "8GiB"), "needs --bytes-per-token"),
        (("--capacity", "1KiB", "--bytes-per-token", "1MiB"), "below one block"),
        (("--capacity-blocks", "4", "--policy", "lur"), "did you mean 'lru'"),
        (("--capacity-blocks", "4", "--policy", ","), "--policy names none"),
        (("--capacity-blocks", "4", "--kv", "fp8"), "--kv is the precision of a --model"),
        (("--capacity-blocks", "4", "--prefill", "inf"), "--prefill': inf is no number from"),
        (("--capacity-blocks", "4", "--warmup", "1"), "warmup"),
        (("--capacity-blocks", "4", "--block-size", "0"), "block-size"),
    ],
)
def test_bad_options_are_one_clear_error(trace, capsys, options, says):
    assert run(["replay", str(trace), *options]) == 2
    assert says in capsys.readouterr().err


def test_a_packed_trace_that_ends_too_soon_is_no_torn_recording(tmp_path, capsys):
    """What is packed was whole before: its download was cut off, and most of it may be missing."""
    path = tmp_path / "t.zst"
    half = f"{json.dumps(LINE)}\n{bad()[:-3]}".encode()
    path.write_bytes(zstandard.compress(half))
    assert run(["replay", str(path), "--block-size", "4", "--capacity-blocks", "4"]) == 2
    assert "line 2: it is not JSON" in capsys.readouterr().err


def test_a_zstd_frame_that_is_cut_off_is_told_wherever_it_is(tmp_path):
    """A trace would lack its end, and give hit rates all the same."""
    lines = "".join(f"{bad(hash_ids=[n, f'{n}.'])}\n" for n in range(40)).encode()
    frames = [zstandard.compress(lines), zstandard.compress(lines)]
    whole = b"".join(frames)
    path = tmp_path / "t.zst"
    for end in range(5, len(whole)):
        path.write_bytes(whole[:end])
        if end == len(frames[0]):
            assert len(read_trace(path, 4)) == 40
            continue
        with pytest.raises(ConfigError, match="it is cut off"):
            read_trace(path, 4)
    path.write_bytes(whole)
    assert len(read_trace(path, 4)) == 80


def test_files_that_are_no_traces(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty"
    empty.touch()
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(f"{json.dumps(LINE)}\n".encode() * 1000)[:-20])
    cases = (
        (empty, "has no requests"),
        (cut, "cannot read"),
        (tmp_path, "cannot read"),
        (".", "cannot read"),
        ("/", "cannot read"),
        ("no/such", "cannot read"),
        ("n" * 300, "cannot read"),
        ("/dev/zero", "a pipe or a device; give a file"),
        (tmp_path / "pipe", "a pipe or a device; give a file"),  # nobody will write into it
    )
    os.mkfifo(tmp_path / "pipe")
    for path, says in cases:
        assert run(["replay", str(path), "--block-size", "4", "--capacity-blocks", "4"]) == 2
        assert says in capsys.readouterr().err


def test_a_plot_is_drawn(trace, tmp_path):
    """In a process of its own: matplotlib keeps fonts open."""
    path = tmp_path / "a.png"
    command = [sys.executable, "-m", "kvtier", "replay", str(trace), "--block-size", "4", "--sweep"]
    subprocess.run([*command, "--policy", "all", "--plot", str(path)], check=True, timeout=50)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("name", "says"), [("a.txt", "draws .png"), ("no-such/a.png", "name another file")]
)
def test_a_plot_that_cannot_be_is_refused_before_the_work(trace, tmp_path, capsys, name, says):
    command = ["replay", str(trace), "--sweep", "--block-size", "4"]
    assert run([*command, "--plot", str(tmp_path / name)]) == 2
    assert says in capsys.readouterr().err


def test_without_matplotlib_the_remedy_is_named(trace, capsys, monkeypatch):
    monkeypatch.setattr("kvtier.cli.output.find_spec", lambda _: None)
    assert run(["replay", str(trace), "--sweep", "--plot", "a.png"]) == 2
    assert 'pip install "kvtier[plot]"' in capsys.readouterr().err
