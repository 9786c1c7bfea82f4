"""The short form of ``make crash``: every kind of crash and damage, a few dozen times."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvtier.errors import ConfigError
from kvtier.storage_backends.slab_files import Run, SegmentFiles
from kvtier.storage_backends.slab_index import Index
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.storage_backends.slab_writer import Lot, Writer
from kvtier.testing.crash import campaign, damage, kills, power, workload
from kvtier.testing.crash.campaign import without_checksums
from kvtier.testing.crash.judge import Findings
from kvtier.testing.crash.tracing import CAN_FAIL, Call, can_trace, trace

traced = pytest.mark.skipif(
    not can_trace(), reason="this system does not let a process trace its children"
)
pytestmark = pytest.mark.timeout(120)
failable = pytest.mark.skipif(
    not (CAN_FAIL and can_trace()), reason="system calls can be made to fail on x86-64 only"
)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder, in memory where there is any: much is copied and synced."""
    with tempfile.TemporaryDirectory(dir=campaign.in_memory()) as name:
        yield Path(name)


@pytest.mark.timeout(300)
def test_a_few_dozen_of_each() -> None:
    """In a process that is small: it forks a thousand times, and what is large takes long to."""
    command = [sys.executable, "-m", "kvtier.testing.crash", "--short", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["unusable"] == 0
    assert found["wrong_bytes"] == found["process_deaths"] == found["acked_durable_lost"] == 0
    assert found["flips"] > 400
    assert found["kill_points"] >= 48
    assert found["acked"] > 500
    assert not CAN_FAIL or not found["traced"] or found["failed_calls"] >= 12
    assert not found["traced"] or (found["power_losses"] >= 32 and found["lying_syncs"] > 50)
    assert found["control_wrong_bytes"] > 50, "without checksums, wrong bytes would be served"


def test_none_keeps_what_it_acknowledged_while_the_machine_is_up(memory: Path) -> None:
    """The others have their share of the campaign."""
    base = filled(memory, "none")
    for found in (kills.at_steps(base, "none", 40, 0, 1), torn_or_not(base, "none")):
        assert not found.notes
        assert found.counts["wrong"] == found.counts["lost"] == found.counts["deaths"] == 0
        assert found.counts["acked"] > 100


def torn_or_not(base: Path, durability: str) -> Findings:
    """Kill a writer as it writes payloads in pieces, where there are calls to kill it at."""
    if can_trace():
        return kills.at_calls(base, durability, 20, 0, 1, torn=True)
    return kills.at_steps(base, durability, 20, 0, 1)


# ---- what it would find


def filled(memory: Path, durability: str) -> Path:
    """Return the folder of a store that has much to lose."""
    folder = memory / "kv"
    workload.prefill(folder, durability)
    return folder


@pytest.fixture
def base(memory: Path) -> Path:
    return filled(memory, "each")


def publish_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is in the index before its payload is on the disk."""
    publish, write = Ledger.publish, Writer._write

    def late(writer: Writer, todo: Sequence[Run], lot: Lot) -> None:
        filled = [lot.left[at] for at in sorted(lot.left)]
        writer.ledger.commit(publish(writer.ledger, filled, lot.known))
        write(writer, todo, lot)

    monkeypatch.setattr(Writer, "_write", late)
    monkeypatch.setattr(Ledger, "publish", lambda ledger, *_: ledger._pending)


def overwrite_what_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is replaced in its own slot."""
    fill = Writer.fill

    def over(writer: Writer, lot: Lot) -> None:
        for one in lot.left.values():
            (old,) = writer.ledger.find([lot.known.names[one.at]])
            live = old and writer.ledger._slabs.segments.get(old.segment)
            if old and live:
                writer.files.write([[structs.replace(one, segment=live, slot=old.slot)]])
        fill(writer, lot)

    monkeypatch.setattr(Writer, "fill", over)


def free_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is free before the index has forgotten what was in it."""
    enter = Ledger._enter

    def early(ledger: Ledger, *entry: Any) -> None:
        enter(ledger, *entry)
        while ledger._pending.releases:
            segment, slot = ledger._pending.releases.pop()
            segment.release(slot)

    monkeypatch.setattr(Ledger, "_enter", early)


@pytest.mark.parametrize("broken", [publish_first, overwrite_what_is_live, free_first])
def test_twin_writes_in_another_order_lose_what_was_promised(
    memory: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    base = filled(memory, "batch")
    broken(monkeypatch)
    assert kills.at_steps(base, "batch", 40, 0, 1).counts["lost"] > 0


def test_without_checksums_wrong_bytes_are_served(base: Path) -> None:
    with without_checksums():
        found = damage.while_open(base, "each", "flips", 60, 0)
    assert found.counts["wrong"] > 20
    assert damage.while_open(base, "each", "flips", 60, 0).counts["wrong"] == 0


@traced
def test_without_syncs_a_power_loss_loses_what_was_promised(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentFiles, "sync", lambda *_: None)
    found = power.power_losses(base, "each", 40, 0, 1, lying=False)
    assert found.counts["lost"] > 0


@traced
def test_an_acknowledgement_before_the_commit_is_found_out(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload.LmdbSlabStore, "_settle", lambda *_: None)
    found = kills.at_calls(base, "each", 20, 0, 1, torn=False)
    assert found.counts["lost"] > 0


def test_the_writer_makes_its_index_anew(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[bool] = []
    renew = Ledger.renew

    def noted(ledger: Ledger) -> bool:
        renewed.append(renew(ledger))
        return renewed[-1]

    monkeypatch.setattr(Ledger, "renew", noted)
    workload.work(base, "each", 30, 1)
    assert renewed.count(True) == 3


@traced
def test_twin_a_new_index_that_is_not_synced_goes_with_the_power(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewal_only(monkeypatch)
    assert power.power_losses(base, "each", 40, 0, 1, lying=False).counts["lost"] == 0
    monkeypatch.setattr(Index, "sync", lambda _: None)
    found = power.power_losses(base, "each", 40, 0, 1, lying=False)
    assert found.counts["lost"] > 0


@traced
def test_twin_an_old_index_that_goes_first_leaves_none(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewal_only(monkeypatch)
    assert kills.at_calls(base, "each", 99, 0, 1, torn=False).counts["lost"] == 0
    replace = Path.replace

    def late(draft: Path, target: Path) -> Path:
        target.unlink(missing_ok=True)
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", late)
    assert kills.at_calls(base, "each", 99, 0, 1, torn=False).counts["lost"] > 0


def renewal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the writer do nothing else."""
    turn = workload._Writer.turn
    monkeypatch.setattr(workload._Writer, "turn", lambda self, at: at == 8 and turn(self, at))


@failable
def test_twin_an_index_that_is_not_opened_anew_never_heals(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB refuses all else once it could not write its meta page."""
    monkeypatch.setattr(Index, "_break", lambda _: None)
    found = kills.failing_calls(base, "each", 24, 0, 1)
    assert found.counts["deaths"] > 0, "the writer found that it does not heal"


@failable
@pytest.mark.parametrize("code", [errno.EINTR, errno.EIO, errno.ENFILE])
def test_an_index_that_cannot_be_opened_just_now_is_not_given_up(base: Path, code: int) -> None:
    there = set(_names(base))

    def visit(call: Call) -> int | None:
        index = call.name == "openat" and call.text(1).endswith("index.lmdb")
        writes = index and call.arguments[2] & os.O_RDWR
        return code if writes and call.result is None else None

    def work() -> None:
        with contextlib.suppress(ConfigError):
            workload.open_store(base, "each")
            os._exit(9)

    assert trace(work, visit) == 0
    assert len(there) > 5
    assert set(_names(base)) == there


def _names(folder: Path) -> list[bytes]:
    store = workload.open_store(folder, "each")
    try:
        return [header.id for header in store.scan()]
    finally:
        store.close()


# ---- the tracer


@traced
def test_every_call_that_changes_a_file_is_seen(tmp_path: Path) -> None:
    seen: list[str] = []

    def work() -> None:
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(descriptor, b"abc", 0)
        os.fdatasync(descriptor)
        os.close(descriptor)
        (tmp_path / "file").rename(tmp_path / "other")
        (tmp_path / "other").unlink()

    assert trace(work, lambda call: seen.append(call.name) if call.result is None else None) == 0
    changing = [name for name in seen if name not in ("openat", "close", "lseek")]
    assert changing == ["pwrite64", "fdatasync", "rename", "unlink"]


@failable
def test_a_call_can_be_made_to_fail(tmp_path: Path) -> None:
    def work() -> None:
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, b"abc", 0)
        except OSError as error:
            os._exit(error.errno)

    status = trace(work, lambda call: 5 if call.name == "pwrite64" else None)
    assert os.waitstatus_to_exitcode(status) == 5
    assert (tmp_path / "file").stat().st_size == 0
