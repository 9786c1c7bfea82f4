"""``kvtier serve``: whoever interrupts it while it starts finds nothing that it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvtier.cli import serve as serve_command
from kvtier.daemon.principals import Principal
from kvtier.daemon.settings import Settings
from kvtier.daemon.supervisor import Supervisor
from kvtier.testing.with_parent import with_parent

DRAM = "dram:8MiB"
WENT_ON = 77
# It interrupts itself at a step, in a finalizer, where what an interrupt raises is lost. It ends
# where it begins to start a server though it was interrupted before.
PROGRAM = f"""
import os, signal, sys

step, deaf = sys.argv.pop(1), sys.argv.pop(1) == "deaf"
interrupted = False


class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def heard(event, about):
    global interrupted
    if not interrupted and f"{{event}} {{about and about[0]}}".startswith(step):
        interrupted = True
        Last()
    elif interrupted and event == "subprocess.Popen":
        os._exit({WENT_ON})


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.addaudithook(heard)
if deaf:
    import kvtier.cli.interrupts
    kvtier.cli.interrupts.AtOnce.__enter__ = kvtier.cli.interrupts.AtOnce.__exit__ = lambda *_: None
from kvtier.__main__ import main
main()
"""
BEFORE = ("import click", "import kvtier.daemon.principals", "import kvtier.daemon.supervisor")


def interrupted(step, folder, *, deaf=False):
    """Start a daemon that is interrupted at a step, in a session of its own."""
    command = [sys.executable, "-c", PROGRAM, step, "deaf" if deaf else "", "serve", DRAM]
    return subprocess.Popen(
        [*with_parent(command), "--socket", str(folder / "run" / "kv.sock")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process):
    """Return how it ended, and what it said; nothing that it started may be left."""
    said, wrong = process.communicate(timeout=50)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, said.partition(":")[0], wrong


def test_before_it_has_anything_it_ends_at_once_and_afterwards_in_order(tmp_path):
    steps = dict.fromkeys(BEFORE, (130, "", ""))
    steps |= dict.fromkeys(("os.mkdir {}/run", "subprocess.Popen"), (0, "ended", ""))
    folders = {step: tmp_path / str(number) for number, step in enumerate(steps)}
    for folder in folders.values():
        folder.mkdir()
    started = {step: interrupted(step.format(at), at) for step, at in folders.items()}
    assert {step: ended(process) for step, process in started.items()} == steps
    assert [list(folder.iterdir()) for folder in folders.values()] == [[]] * len(steps)


def test_twin_an_interrupt_that_raises_may_be_lost(tmp_path):
    status, _, wrong = ended(interrupted(BEFORE[1], tmp_path, deaf=True))
    assert status == WENT_ON
    assert "KeyboardInterrupt" in wrong


def test_who_interrupts_it_while_it_takes_its_memory_waits_for_no_server(tmp_path, monkeypatch):
    make, begun = Supervisor.__init__, []

    def made(self, *args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        make(self, *args, **options)

    monkeypatch.setattr(Supervisor, "__init__", made)
    monkeypatch.setattr(Supervisor, "_serve_once", lambda _: begun.append(True))
    found = [Principal("", tmp_path / "s", Settings((DRAM,), os.geteuid()))]
    told = []
    assert serve_command._run(found, lambda event, **_: told.append(event)) == 0
    assert told == ["ended"]
    assert begun == []
