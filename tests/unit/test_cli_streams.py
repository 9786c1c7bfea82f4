"""The command line with streams that are closed or narrow, and names that are no UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvtier.cli.main import run

PLAN = ("plan", "llama-3-8b", "--gpu-memory", "80GB")
PRINTS = "serve", "dram:8MiB", "--print-config"
TWIN = "from kvtier.cli.main import main; main()"


def kvtier(*args, closed=(), encoding="utf-8", program=("-m", "kvtier")):
    """Run a command of its own process; return its status and what it says, as bytes."""

    def close():
        for number in closed:
            os.close(number)

    ran = subprocess.run(
        [sys.executable, *program, *args],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        preexec_fn=close if closed else None,
    )
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize("args", [PLAN, PRINTS, (*PLAN, "--json", "-")])
def test_what_nobody_reads_is_no_error(args):
    assert kvtier(*args, closed=[1]) == (0, b"", b"")
    assert kvtier(*args, closed=[0, 1, 2]) == (0, b"", b"")


def test_twin_python_has_nothing_in_place_of_a_closed_stdout():
    status, _, said = kvtier(*PRINTS, closed=[1], program=("-c", TWIN))
    assert status == 1
    assert b"'NoneType' object has no attribute" in said


READY = "from kvtier.cli.streams import ready_streams; ready_streams()"
ALONE = f"import os; os.set_inheritable = lambda *_: None; {READY}"
NUMBER = """
import os
print(os.open("/dev/zero", os.O_RDONLY), file=open("/dev/fd/9", "w"))
"""
OF_A_CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {NUMBER!r}], check=True, pass_fds=[9])
"""


@pytest.mark.parametrize(
    ("program", "free"),
    [
        (READY + NUMBER, False),
        (NUMBER, True),
        (READY + OF_A_CHILD, False),
        (ALONE + OF_A_CHILD, True),
    ],
    ids=["here", "twin", "in a process that is started", "twin, whose streams are its own"],
)
def test_what_is_opened_gets_no_number_of_a_stream(program, free):
    """And the twins: else a store's file would get what is printed."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)

    def close():
        os.dup2(writing, 9)
        for number in (0, 1, 2):
            os.close(number)

    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, pass_fds=[9], preexec_fn=close)
    os.close(writing)
    number = int(os.read(reading, 100))
    os.close(reading)
    assert (number <= 2) is free


def test_doctor_speaks_ascii_where_stdout_does():
    status, said, wrong = kvtier("doctor", encoding="ascii")
    assert (status, wrong) == (0, b"")
    assert said.startswith(b"+ python: ")
    assert kvtier("doctor", encoding="utf-8")[1].startswith("✓ python: ".encode())


def trace(folder, name):
    """Write a trace of that name, in bytes; return its path."""
    path = os.path.join(os.fsencode(folder), name)  # noqa: PTH118  (bytes)
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
        for hashes in ([1, 2], [1, 2], [3]):
            one = {"timestamp": 0, "input_length": 4 * len(hashes), "output_length": 0}
            file.write(json.dumps(one | {"hash_ids": hashes}) + "\n")
    return os.fsdecode(path)


REPLAY = ("--block-size", "4", "--capacity-blocks", "2")


def test_what_stdout_has_no_character_for_is_an_escape(tmp_path):
    """And the twin."""
    args = ("replay", trace(tmp_path, "\u00e9.jsonl".encode()), *REPLAY)
    status, said, wrong = kvtier(*args, encoding="ascii")
    assert (status, wrong) == (0, b"")
    assert said.startswith(rb"\u00e9.jsonl: hit rate")
    assert kvtier(*args, encoding="ascii", program=("-c", TWIN))[0] == 2


NAME = "\u00e9\u20ac\U0001f600.jsonl"  # of two, of four, and of twice four hex digits
BY_PYTHON = """
import sys
from kvtier.cli.main import main
sys.stdout.reconfigure(errors="backslashreplace")
main()
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_json_stays_json_whatever_stdout_has_characters_for(tmp_path, encoding):
    args = ("replay", trace(tmp_path, NAME.encode()), *REPLAY, "--json", "-")
    status, said, wrong = kvtier(*args, encoding=encoding)
    assert (status, wrong) == (0, b"")
    assert json.loads(said.decode(encoding))["trace"] == NAME


def test_twin_by_escapes_of_python_it_would_be_none(tmp_path):
    args = ("replay", trace(tmp_path, NAME.encode()), *REPLAY, "--json", "-")
    status, said, _ = kvtier(*args, encoding="ascii", program=("-c", BY_PYTHON))
    assert status == 0
    with pytest.raises(ValueError, match="escape"):
        json.loads(said)


STRICT = """
from kvtier.cli import streams
streams._ERRORS = "strict"
from kvtier.__main__ import main
main()
"""


@pytest.mark.parametrize(("program", "status"), [(("-m", "kvtier"), 2), (("-c", STRICT), 1)])
def test_an_error_that_nobody_reads_may_have_any_name(tmp_path, program, status):
    """And the twin: a stream that takes UTF-8 only, as Python opens others than its stderr."""
    absent = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    assert kvtier("replay", absent, *REPLAY, closed=[2], program=program)[0] == status


def test_a_trace_may_have_any_name(tmp_path, capsys):
    replay = ("replay", trace(tmp_path, b"t\xff.jsonl"), *REPLAY)
    assert run(replay) == 0
    assert capsys.readouterr().out.startswith(r"t\udcff.jsonl: hit rate")
    assert run([*replay, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == r"t\udcff.jsonl"


def test_what_is_no_text_is_one_line(capsys):
    assert run(["serve", "dram:8MiB", "--socket", "\udcff.sock", "--print-config"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert r"\udcff.sock' is no UTF-8, as all text is here; rename it" in said
