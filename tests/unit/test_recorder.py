"""A recording: a line a request, that the replay reads, and nothing of the prompt itself."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.identity.shape import chunk_shape
from kvtier.metrics import Metrics
from kvtier.planning.trace import read_trace
from kvtier.prefix import Namer
from kvtier.recorder import Recorder, Recording
from kvtier.seams import Future
from kvtier.testing.toy import CHUNK, GEOMETRY, NAMESPACE, dram, opened, prompt

SALT = bytes(range(16))
NAMER = Namer(NAMESPACE, chunk_shape(GEOMETRY, 1, 1))


class Hands:
    """A clock that goes on when told."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def record(tmp_path, clock):
    """Return what starts a recorder of ``r.jsonl``, which it closes at the end."""
    running = []

    def start(path=tmp_path / "r.jsonl", most=1 << 16, salt=SALT, when=clock) -> Recorder:
        running.append(Recorder(Recording(str(path), most, salt), None, Metrics(), when, 1000.0))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def recorder(record):
    return record()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(number: int, chunks: int = 1, more: int = 0):
    """Return a prompt; its chunks are those of no other number."""
    tokens = np.full(chunks * CHUNK + more, number % 1000, np.int32)
    tokens[0] = number // 1000
    return NAMER.prefix(tokens, None, None)


def written(recorder: Recorder, requests: int) -> None:
    """Wait until so many are written, or lost."""
    count = recorder._metrics.get
    until = time.monotonic() + 30
    while count("recorded_requests") + count("unrecorded_requests") < requests:
        assert time.monotonic() < until
        time.sleep(0.01)


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


def test_full_files_are_numbered_and_the_oldest_go(tmp_path, recorder, clock):
    for number in range(1, 7 * 600):
        clock.now += 0.001
        recorder.note(asked(number, 2))
        if not number % 100:  # let it be written in more than one piece
            recorder._flow.spawn(recorder._write()).result(20)
    recorder.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert set(names) <= {"r.jsonl", *(f"r.jsonl.{n}" for n in range(1, 5))}
    assert "r.jsonl.4" in names
    assert all(path.stat().st_size < (1 << 17) for path in tmp_path.iterdir())
    found = read_trace(tmp_path / "r.jsonl", None)
    count = sum(len(lines(path)) for path in tmp_path.iterdir())
    assert (len(found), found.block_tokens) == (count, CHUNK)


def filled(recorder, clock, batches: range) -> None:
    """Record a hundred requests a batch: a file takes not quite four of them."""
    for batch in batches:
        for number in range(batch * 100, batch * 100 + 100):
            clock.now += 0.001
            recorder.note(asked(number, 2))
        recorder._flow.spawn(recorder._write()).result(20)


@pytest.fixture
def immovable(tmp_path, monkeypatch):
    """A full file that cannot be renamed, though those with numbers can."""
    replaces = Path.replace

    def refuse(path, to):
        if path.name == "r.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied")
        return replaces(path, to)

    monkeypatch.setattr(Path, "replace", refuse)
    return lambda: monkeypatch.setattr(Path, "replace", replaces)


def test_a_full_file_that_cannot_be_numbered_grows_no_more(tmp_path, recorder, clock, immovable):
    """What it has is recorded, what it has no room for is not; and no older file goes for that."""
    for number in range(1, 5):
        (tmp_path / f"r.jsonl.{number}").write_text(f"{number}")
    filled(recorder, clock, range(12))
    path, count = tmp_path / "r.jsonl", recorder._metrics.get
    there = len(lines(path))
    assert path.stat().st_size < (1 << 16) + (1 << 15)
    assert count("recorded_requests") == there < 1200
    assert count("unrecorded_requests", reason="failed") == 1200 - there
    kept = sorted(one.name for one in tmp_path.iterdir())
    assert kept == ["r.jsonl", "r.jsonl.2", "r.jsonl.3", "r.jsonl.4"]
    assert [(tmp_path / name).read_text() for name in kept[1:]] == ["1", "2", "3"]
    immovable()
    filled(recorder, clock, range(12, 13))
    assert (len(lines(path)), len(lines(tmp_path / "r.jsonl.1"))) == (100, there)
    assert (tmp_path / "r.jsonl.4").read_text() == "3"


def test_a_file_of_which_nobody_looks_at_the_size_grows(
    tmp_path, recorder, clock, immovable, monkeypatch
):
    monkeypatch.setattr(Recorder, "_begin", lambda _: None)
    filled(recorder, clock, range(12))
    assert (tmp_path / "r.jsonl").stat().st_size > (1 << 17)


def test_a_disk_that_fails_costs_lines_and_no_request(tmp_path, record, caplog):
    folder = tmp_path / "there"
    folder.mkdir()
    recorder = record(folder / "r.jsonl")
    (folder / "r.jsonl").unlink()
    folder.rmdir()
    recorder.note(asked(1))
    written(recorder, 1)
    folder.mkdir()  # it is back
    recorder.note(asked(2))
    recorder.close()
    recorder.note(asked(3))  # after the end: nothing
    assert recorder._metrics.get("unrecorded_requests", reason="failed") == 1
    assert len(lines(folder / "r.jsonl")) == 1
    assert "not recorded" in caplog.text


@pytest.mark.parametrize("truncates", [True, False])
def test_a_disk_that_is_full_leaves_whole_lines(tmp_path, record, truncates):
    """It takes half of what is written, then no more, and then again all."""
    recorder = record()
    recorder.note(asked(1))
    written(recorder, 1)
    opens = recorder._open_file

    class Full:
        def __init__(self, file) -> None:
            self.file, self.tell = file, file.tell

        async def write(self, data):
            if len(data) < 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return await self.file.write(data[:-50])

        async def truncate(self, size):
            if not truncates:
                raise OSError(errno.EIO, "Input/output error")
            await self.file.truncate(size)

    @contextlib.asynccontextmanager
    async def full(*args, **kwargs):
        async with opens(*args, **kwargs) as file:
            yield Full(file)

    recorder._open_file = full
    recorder.note(asked(2))
    written(recorder, 2)
    recorder._open_file = opens
    recorder.note(asked(3))
    recorder.close()
    found = read_trace(tmp_path / "r.jsonl", CHUNK)
    assert (len(found), len(found.notes)) == (2, 0 if truncates else 1)
    assert recorder._metrics.get("unrecorded_requests", reason="failed") == 1


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


def test_who_recorded_before_is_told_and_goes_on(tmp_path, clock, caplog):
    """Its twin is above: who never did cannot begin."""
    path, metrics = tmp_path / "gone" / "r.jsonl", Metrics()
    one = Recorder(Recording(str(path)), None, metrics, clock, 0.0, again=True)
    assert f"cannot record into {path}" in caplog.text
    one.note(asked(1))
    written(one, 1)
    path.parent.mkdir()
    one.note(asked(2))
    one.close()
    assert metrics.get("unrecorded_requests", reason="failed") == 1
    assert len(lines(path)) == 1


def test_a_pipe_is_told_at_once(tmp_path, record):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="name another"):
        record(tmp_path / "pipe")


def test_a_file_is_not_too_small_nor_a_salt_too_short(tmp_path, record):
    with pytest.raises(ConfigError):
        record(most=100)
    with pytest.raises(ConfigError, match="can be guessed"):
        record(salt=b"secret")
