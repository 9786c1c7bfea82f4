"""A recording: a line a request, that the replay reads, and nothing of the prompt itself."""

from __future__ import annotations

import json
import threading

import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.planning.trace import read_trace
from kvtier.recorder import Recorder
from kvtier.testing.toy import CHUNK, dram, opened, prompt


class Hands:
    """A clock that goes on when told."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def recorder(tmp_path, clock):
    one = Recorder(tmp_path / "r.jsonl", CHUNK, 1 << 16, clock)
    yield one
    one.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.mark.everywhere
def test_a_recording_of_a_cache_is_replayed(tmp_path, capsys):
    path = tmp_path / "requests.jsonl"
    toy = opened(dram(32))
    toy.cache.record(path)
    first, second = prompt(4 * CHUNK, 1), prompt(5 * CHUNK + 7, 2)
    for tokens in (first, second, first[: 2 * CHUNK]):
        toy.cache.match(tokens)
    toy.cache.record(None)
    toy.cache.match(prompt(CHUNK, 3))  # not recorded any more
    toy.close()
    found = read_trace(path, CHUNK)
    assert [(len(blocks), tokens) for blocks, tokens in found.requests()] == [
        (4, 4 * CHUNK),
        (5, 5 * CHUNK + 7),
        (2, 2 * CHUNK),
    ]
    assert list(found.blocks(2)) == list(found.blocks(0))[:2]
    assert run(["replay", str(path), "--block-size", str(CHUNK), "--capacity-blocks", "20"]) == 0
    assert run(["replay", str(path), "--capacity-blocks", "20"]) != 0
    assert f"--block-size {CHUNK}" in capsys.readouterr().err


def test_no_token_is_in_it(tmp_path):
    path = tmp_path / "requests.jsonl"
    toy = opened(dram(32))
    toy.cache.record(path)
    toy.cache.match([123_454_321] * CHUNK)
    toy.close()
    assert len(lines(path)) == 1
    assert "123454321" not in path.read_text()


def test_who_asks_again_at_once_is_the_same_request(tmp_path, recorder, clock):
    for wait in (0.0, 1.0, 1.0, 1.0, 2.5):  # an engine that asks until it may run the request
        clock.now += wait
        recorder.note([key(1)], CHUNK)
    recorder.note([key(1)], CHUNK + 1)
    recorder.close()
    assert [one["timestamp"] for one in lines(tmp_path / "r.jsonl")] == [0, 5500, 5500]


def test_a_recording_that_goes_on_after_a_restart_can_be_replayed(tmp_path, clock):
    """Its times begin anew, so that it is another file."""
    path = tmp_path / "r.jsonl"
    for number in range(2):
        recorder = Recorder(path, CHUNK, 1 << 16, clock)
        for wait in (9.0, 1.0):
            clock.now += wait
            recorder.note([key(int(clock.now))], CHUNK)
        recorder.close()
        assert len(read_trace(path, CHUNK)) == 2, number
    assert len(read_trace(tmp_path / "r.jsonl.1", CHUNK)) == 2


def test_recording_anew_into_the_same_file_mixes_nothing(tmp_path):
    path = tmp_path / "r.jsonl"
    toy = opened(dram(32))
    for seed in range(2):
        toy.cache.record(path)
        toy.cache.match(prompt(CHUNK, seed))
    toy.close()
    assert len(read_trace(path, CHUNK)) == 1
    assert len(read_trace(tmp_path / "r.jsonl.1", CHUNK)) == 1


def test_lines_stand_in_the_order_of_their_times(tmp_path, clock):
    """Though another thread notes a prompt just when this one has looked at the clock."""
    others = []

    def late() -> float:
        clock.now += 1
        now = clock.now
        if clock.now == 52.0:
            others.append(threading.Thread(target=recorder.note, args=([key(9)], CHUNK)))
            others[0].start()
            others[0].join(0.2)
        return now

    recorder = Recorder(tmp_path / "r.jsonl", CHUNK, 1 << 16, late)
    recorder.note([key(1)], CHUNK)
    others[0].join(20)
    recorder.close()
    assert [one["timestamp"] for one in lines(tmp_path / "r.jsonl")] == [1000, 2000]


def test_full_files_are_numbered_and_the_oldest_go(tmp_path, recorder, clock):
    for number in range(7 * 600):
        recorder.note([key(number), key(number + 1)], 2 * CHUNK)
        if not number % 100:  # let it be written in more than one piece
            written = threading.Event()
            recorder._pool.submit(written.set)
            assert written.wait(20)
    recorder.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert set(names) <= {"r.jsonl", *(f"r.jsonl.{n}" for n in range(1, 5))}
    assert "r.jsonl.4" in names
    assert all(path.stat().st_size < (1 << 17) for path in tmp_path.iterdir())


def test_a_disk_that_fails_costs_lines_and_no_request(tmp_path, clock, caplog):
    folder = tmp_path / "there"
    folder.mkdir()
    recorder = Recorder(folder / "r.jsonl", CHUNK, 1 << 16, clock)
    (folder / "r.jsonl").unlink()
    folder.rmdir()
    recorder.note([key(1)], CHUNK)
    recorder.close()
    recorder.note([key(2)], CHUNK)  # after the end: nothing
    assert recorder.dropped == 1
    assert "not recorded" in caplog.text


@pytest.mark.parametrize("path", ["/nowhere/at/all.jsonl", "", 7, "\0"])
def test_what_cannot_be_written_is_told_at_once(path, clock):
    with pytest.raises(ConfigError):
        Recorder(path, CHUNK, 1 << 16, clock)


def test_a_file_is_not_too_small(tmp_path, clock):
    with pytest.raises(ConfigError):
        Recorder(tmp_path / "r", CHUNK, 100, clock)
