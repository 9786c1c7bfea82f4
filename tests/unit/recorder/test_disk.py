"""A recording's files: numbered when they are full, and what a disk's faults cost."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from kvtier.metrics import Metrics
from kvtier.planning.trace import read_trace
from kvtier.recorder import Recorder, Recording
from kvtier.testing.small_recorder import asked, lines, written
from kvtier.testing.toy import CHUNK


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


def test_who_recorded_before_is_told_and_goes_on(tmp_path, clock, caplog):
    """Its twin: test_recorder.py, who never did cannot begin."""
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
