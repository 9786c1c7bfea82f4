"""Recordings of a cache that is used from many threads: begun, replaced, and ended with it."""

from __future__ import annotations

import threading

import pytest

from kvtier.errors import ConfigError, MisuseError
from kvtier.recorder import Recorder
from kvtier.testing.small_recorder import SALT, lines
from kvtier.testing.toy import CHUNK, dram, opened, prompt


@pytest.fixture
def running(monkeypatch):
    """Return the recorders that run; none does at the end."""
    found = []
    begins, ends = Recorder.__init__, Recorder.close

    def begin(self, *args, **kwargs) -> None:
        begins(self, *args, **kwargs)
        found.append(self)

    def end(self) -> None:
        ends(self)
        if self in found:
            found.remove(self)

    monkeypatch.setattr(Recorder, "__init__", begin)
    monkeypatch.setattr(Recorder, "close", end)
    yield found
    assert not found


@pytest.fixture
def cache():
    toy = opened(dram(32))
    yield toy.cache
    toy.close()


def meanwhile(monkeypatch, name: str, call) -> threading.Thread:
    """Have another thread do `call` when a recorder is next asked for `name`, before that is done.

    It has a moment to do it in: who holds it off is not held up by it.
    """
    does = getattr(Recorder, name)
    other = threading.Thread(target=call)

    def first(self, *args, **kwargs):
        if not other.ident:
            other.start()
            other.join(0.5)
        return does(self, *args, **kwargs)

    monkeypatch.setattr(Recorder, name, first)
    return other


def test_of_two_that_record_at_once_one_goes_on(tmp_path, cache, running, monkeypatch):
    path = tmp_path / "r"
    cache.record(path, salt=SALT)
    other = meanwhile(monkeypatch, "close", lambda: cache.record(path, salt=SALT))
    cache.record(path, salt=SALT)
    other.join(20)
    assert running == [cache._recorder]
    cache.match(prompt(CHUNK, 1))
    cache.record(None)
    assert len(lines(path)) == 1
    assert not running


def test_who_is_closed_while_a_recording_begins_leaves_nothing(
    tmp_path, cache, running, monkeypatch
):
    """Others share its tiers, so that the flow loop goes on."""
    with cache.share(cache.namespace) as one:
        other = meanwhile(monkeypatch, "__init__", one.close)
        one.record(tmp_path / "r")
        other.join(20)
        assert not running
        with pytest.raises(MisuseError, match="closed"):
            one.record(tmp_path / "r")


def test_without_a_lock_it_would_leave_one(tmp_path, cache, running, monkeypatch):
    class Open:
        """A lock that locks nobody out."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(cache, "_closing", Open())
    path = tmp_path / "r"
    cache.record(path)
    other = meanwhile(monkeypatch, "close", lambda: cache.record(path))
    cache.record(path)
    other.join(20)
    lost = [one for one in list(running) if one is not cache._recorder]
    assert lost
    for one in lost:
        one.close()
    cache.record(None)


@pytest.mark.parametrize(
    ("path", "options"),
    [("no/such/folder/r", {}), ("r", {"salt": b"short"}), ("r", {"most_bytes": 7}), (7, {})],
)
def test_what_cannot_be_recorded_with_leaves_the_recording_that_runs(
    tmp_path, cache, running, monkeypatch, path, options
):
    monkeypatch.chdir(tmp_path)
    cache.record("r")
    with pytest.raises(ConfigError):
        cache.record(path, **options)
    assert running == [cache._recorder]
    cache.match(prompt(CHUNK, 1))
    cache.record(None)
    assert len(lines(tmp_path / "r")) == 1


def test_a_recording_ends_with_its_cache_whatever_fails_there(tmp_path, running, monkeypatch):
    def fails() -> None:
        raise RuntimeError("a defect")

    toy = opened(dram(32))
    toy.cache.record(tmp_path / "r")
    toy.cache.match(prompt(CHUNK, 1))
    monkeypatch.setattr(toy.cache._desk, "unpin", fails)
    with pytest.raises(RuntimeError, match="a defect"):
        toy.cache.close()
    assert not running
    assert len(lines(tmp_path / "r")) == 1


def test_a_recording_that_ends_while_a_prompt_is_matched_is_no_fault(tmp_path, cache, monkeypatch):
    cache.record(tmp_path / "r")
    looks = [cache._recorder]
    with monkeypatch.context() as patch:
        seen = property(lambda _: looks.pop() if looks else None)
        patch.setattr(type(cache), "_recorder", seen, raising=False)
        assert not cache.match(prompt(CHUNK, 1)).tokens
    cache.record(None)
    assert len(lines(tmp_path / "r")) == 1
