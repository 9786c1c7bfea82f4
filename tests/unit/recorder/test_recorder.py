"""A recording: a line a request, that the replay reads, and nothing of the prompt itself."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading

import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.planning.trace import read_trace
from kvtier.recorder import Recorder, Recording
from kvtier.seams import Future
from kvtier.testing.small_recorder import SALT, asked, lines, written
from kvtier.testing.toy import CHUNK, dram, opened, prompt


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
    assert run(["replay", str(path), "--capacity-blocks", "20"]) == 0  # as recorded
    assert run(["replay", str(path), "--block-size", "512", "--capacity-blocks", "20"]) != 0
    assert f"--block-size {CHUNK}" in capsys.readouterr().err


def test_neither_tokens_nor_keys_are_in_it(tmp_path):
    path = tmp_path / "requests.jsonl"
    toy = opened(dram(32))
    toy.cache.record(path)
    prefix = toy.cache.prefix([123_454_321] * CHUNK)
    toy.cache.match(prefix)
    toy.close()
    (line,) = lines(path)
    assert line["hash_ids"]
    assert "123454321" not in path.read_text()
    assert prefix.keys[0].hex()[:8] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_hashes_can_be_compared_only_where_the_salt_is_one(tmp_path, record):
    found = []
    for name, salt in (("a", SALT), ("b", SALT), ("c", b""), ("d", b""), ("e", SALT[1:] + b"x")):
        recorder = record(tmp_path / name, salt=salt)
        recorder.note(asked(1))
        recorder.close()
        (line,) = lines(tmp_path / name)
        found.append((line["recording"], *line["hash_ids"]))
    assert found[0] == found[1]
    assert len({each for one in found for each in one}) == 8


def test_hashes_without_a_salt_could_be_compared(tmp_path, record, monkeypatch):
    monkeypatch.setattr(Recorder, "_hashed", lambda _, key: hashlib.sha256(key).hexdigest())
    found = []
    for name in ("a", "b"):
        recorder = record(tmp_path / name, salt=b"")
        recorder.note(asked(1))
        recorder.close()
        found += lines(tmp_path / name)[0]["hash_ids"]
    assert found[0] == found[1]


def test_who_asks_again_at_once_is_the_same_request(tmp_path, recorder, clock):
    for wait in (0.0, 1.0, 1.0, 1.0, 2.5):  # an engine that asks until it may run the request
        clock.now += wait
        recorder.note(asked(1))
    recorder.note(asked(1, more=1))
    recorder.close()
    times = [one["timestamp"] for one in lines(tmp_path / "r.jsonl")]
    assert times == [1_050_000, 1_055_500, 1_055_500]


def test_a_recording_of_one_salt_goes_on_and_one_of_another_begins_anew(tmp_path, record, clock):
    path = tmp_path / "r.jsonl"
    for salt in (SALT, SALT, b""):
        recorder = record(salt=salt)
        for wait in (9.0, 1.0):
            clock.now += wait
            recorder.note(asked(int(clock.now)))
        recorder.close()
    assert [len(lines(tmp_path / name)) for name in ("r.jsonl.1", "r.jsonl")] == [4, 2]
    found = read_trace(path, None)
    assert (len(found), found.notes) == (
        2,
        ["r.jsonl.1: of another recording, left out; name them to read them"],
    )


def killed_and_gone_on(path, record) -> None:
    """Record a request, then half a one, and go on."""
    for number in range(2):
        recorder = record()
        recorder.note(asked(number))
        recorder.close()
        if not number:
            path.write_bytes(path.read_bytes() + b'{"timestamp')


def test_nothing_is_written_behind_half_a_line(tmp_path, record):
    path = tmp_path / "r.jsonl"
    killed_and_gone_on(path, record)
    found = read_trace(path, None)
    assert len(found) == 2
    assert found.notes == [
        f"{path}.1, line 2: it is torn, as by a kill, and left out",
    ]


def test_without_that_what_follows_could_not_be_read(tmp_path, record, monkeypatch):
    monkeypatch.setattr(Recorder, "_begin", lambda _: None)
    killed_and_gone_on(tmp_path / "r.jsonl", record)
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(tmp_path / "r.jsonl", None)


def test_recording_anew_into_the_same_file_mixes_nothing(tmp_path):
    path = tmp_path / "r.jsonl"
    toy = opened(dram(32))
    for seed in range(2):
        toy.cache.record(path)
        toy.cache.match(prompt(CHUNK, seed))
    toy.close()
    assert len(read_trace(path, CHUNK)) == 1
    assert len(read_trace(tmp_path / "r.jsonl.1", CHUNK)) == 1


def test_lines_stand_in_the_order_of_their_times(tmp_path, record, clock):
    """Though another thread notes a prompt just when this one has looked at the clock."""
    others = []

    def late() -> float:
        clock.now += 1
        now = clock.now
        if clock.now == 51.0:
            others.append(threading.Thread(target=recorder.note, args=(asked(9),)))
            others[0].start()
            others[0].join(0.2)
        return now

    recorder = record(when=late)
    recorder.note(asked(1))
    others[0].join(20)
    recorder.close()
    first, second = (one["timestamp"] for one in lines(tmp_path / "r.jsonl"))
    assert first < second


class Still:
    """A flow on which nothing comes to run."""

    def spawn(self, work):
        work.close()
        future = Future()
        future.cancel()
        return future


def test_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path, monkeypatch, clock):
    monkeypatch.setattr("kvtier.recorder._MOST_WAITING", 10)
    metrics = Metrics()
    one = Recorder(Recording(str(tmp_path / "r")), Still(), metrics, clock, 0.0)
    for number in range(1, 5):
        one.note(asked(number, 3))
    assert metrics.get("unrecorded_requests", reason="queue") == 2
    one.close()
    assert metrics.get("unrecorded_requests", reason="closed") == 2
    assert not (tmp_path / "r").read_bytes()


def test_what_is_encoded_is_written_though_the_rest_is_taken_just_then(
    tmp_path, recorder, monkeypatch
):
    """As by a close that has waited long enough, from another thread."""
    monkeypatch.setattr("kvtier.recorder._PIECE", 1)
    takes, taken = recorder._taken, []

    def raced(*, whole: bool = False):
        some = takes(whole=whole or len(taken) == 1)
        taken.append(some)
        return [] if len(taken) == 2 else some

    async def written_at_once() -> None:
        """Do all on the loop, so that nothing else writes in between."""
        recorder.note(asked(1))
        recorder.note(asked(2))
        recorder._taken = raced
        await recorder._write()

    recorder._flow.spawn(written_at_once()).result(20)
    assert list(map(len, taken[:2])) == [1, 1]
    assert recorder._metrics.get("recorded_requests") == 1
    assert len(lines(tmp_path / "r.jsonl")) == 1


def test_the_engine_s_thread_opens_no_file_and_wakes_nobody(recorder, monkeypatch):
    """It appends; a quarter of a second later the flow looks."""
    for name in ("spawn", "io"):
        monkeypatch.setattr(recorder._flow, name, None)
    monkeypatch.setattr(recorder._pool, "submit", None)
    monkeypatch.setattr(recorder, "_path", None)
    recorder.note(asked(1))
    monkeypatch.undo()
    written(recorder, 1)


KILLED = """
import os, sys, time
from kvtier.testing.toy import dram, opened, prompt
toy = opened(dram(32))
toy.cache.record(sys.argv[1], salt=bytes(16))
for number in range(10**6):
    toy.cache.match(prompt(640, number))
    if toy.cache.metrics.get("recorded_requests") >= 50 and number % 7 == 0:
        print(int(toy.cache.metrics.get("recorded_requests")), flush=True)
"""


def test_a_recording_is_readable_up_to_the_last_write_when_its_process_is_killed(tmp_path):
    path = tmp_path / "r.jsonl"
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE) as process:
        told = 0
        for line in process.stdout:
            told = int(line)
            if told >= 200:
                break
        process.kill()
    found = read_trace(path, None)
    assert len(found) >= told
    assert list(found.blocks(0)) == list(range(10))


@pytest.mark.parametrize("path", ["/nowhere/at/all.jsonl", "", 7, "\0", "/dev/full"])
def test_what_cannot_be_written_is_told_at_once(path, clock):
    with pytest.raises(ConfigError):
        Recorder(Recording(path), None, Metrics(), clock, 0.0)


def test_a_pipe_is_told_at_once(tmp_path, record):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="name another"):
        record(tmp_path / "pipe")


def test_a_file_is_not_too_small_nor_a_salt_too_short(tmp_path, record):
    with pytest.raises(ConfigError):
        record(most=100)
    with pytest.raises(ConfigError, match="can be guessed"):
        record(salt=b"secret")
