"""Jobs in forks: each ends alone, in whatever way, and what waits for nothing is told apart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from kvtier.testing import device, forks
from kvtier.testing.forks import forked


def test_results_come_in_the_order_of_the_jobs_and_progress_is_told():
    told = []
    ended = forked([lambda at=at: {"at": at} for at in range(9)], lambda *some: told.append(some))
    assert [one.value for one in ended] == [{"at": at} for at in range(9)]
    assert told == [(done, 9) for done in range(1, 10)]
    assert forked([]) == []


def test_what_raises_crashes_or_computes_on_and_on_is_told_and_hurts_nobody_else():
    def endless() -> None:
        while True:
            pass

    jobs = [lambda: 1 // 0, lambda: os.kill(os.getpid(), signal.SIGKILL), endless, lambda: "well"]
    raised, crashed, ended, well = forked(jobs, seconds=1)
    assert "ZeroDivisionError" in raised.error
    assert str(-signal.SIGKILL) in crashed.error
    assert str(-signal.SIGPROF) in ended.error
    assert well.value == "well"
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        _ = raised.value


def test_jobs_that_wait_for_a_lost_thread_are_no_result(monkeypatch):
    """A changed planner that only waits would pass for one whose change was noticed."""
    monkeypatch.setattr(forks, "_SILENCE", 0.3)
    lock = threading.Lock()
    with lock, pytest.raises(RuntimeError, match="did nothing"):
        forked([lock.acquire, lock.acquire], seconds=20)


def test_a_planner_that_does_not_hold_in_a_fork_is_no_proof_that_its_changes_show(monkeypatch):
    monkeypatch.setattr(device, "planner_holds", lambda: False)
    with pytest.raises(AssertionError, match="does not plan"):
        device._planners_alive(60, lambda _done, _count: None)


def test_a_long_result_comes_whole():
    (found,) = forked([lambda: "x" * 300_000])
    assert len(found.value) == 300_000


WAITS = """
import sys
from kvtier.testing import forks

def job():
    print("begun", flush=True)
    sys.stdin.readline()
    print("went on", flush=True)

forks.forked([job])
"""
CARELESS = WAITS.replace("def job", "forks.end_with = lambda parent: True\ndef job")


@pytest.mark.parametrize(("program", "said"), [(WAITS, ""), (CARELESS, "went on\n")])
def test_a_job_ends_with_who_asked_for_it(program, said):
    """And the twin: one that waits would be there for good, where that was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout.readline() == "begun\n"
        asking.kill()
        asking.wait()
        with contextlib.suppress(BrokenPipeError):  # nobody is there to read it
            asking.stdin.write("go on\n")
            asking.stdin.flush()
        assert asking.stdout.read() == said
        with contextlib.suppress(BrokenPipeError):
            asking.stdin.close()
