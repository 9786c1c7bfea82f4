"""Power losses at any moment of a recorded run, of disks that sync and of disks that lie."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.testing.crash import disk, kills, workload
from kvtier.testing.crash.judge import Findings, judge

_TURNS: Final = 30


def power_losses(
    base: Path,
    durability: str,
    most: int,
    offset: int,
    stride: int,
    *,
    lying: bool = False,
    fills: bool = False,
) -> Findings:
    """Record a writer, cut its power at `most` moments, and judge what each leaves.

    lying: from a moment before on, syncs are acknowledged and nothing is brought to the disk. What
    was promised may be lost then, and is not looked for; everything that is served must be exact.
    fills: see workload.work.
    """
    findings = Findings()
    folder = base.with_name(f"case-{os.getpid()}")
    choose = random.Random(f"{durability} {lying} {offset}")
    kills.copied(base, folder)
    log = workload.log_of(folder)
    told_before = log.read_text()

    def work() -> None:
        workload.work(folder, durability, _TURNS, 4, fills=fills)

    events = disk.record(work, folder, log)
    before = kills.acked_before(base, durability)
    for at in kills.spread(len(events), most, offset, stride):
        shutil.rmtree(folder)
        honest_until = choose.randint(max(0, at - len(events) // 3), at) if lying else at
        image = _until(base, events[:at], honest_until, findings)
        disk.written(image.lost(choose), folder)
        log.write_text(told_before + disk.notes(events[:at]))
        promised = workload.told(log.read_text(), durability)
        findings.counts["lying_images" if lying else "power_losses"] += 1
        findings.counts["acked"] += 0 if lying else promised.acked - before
        case = f"{durability}, power lost at event {at}, honest until {honest_until}"
        findings.add(case, judge(folder, durability, promised, durable=not lying))
    return findings


def _until(
    base: Path, events: Sequence[disk.Event], honest_until: int, findings: Findings
) -> disk.Disk:
    image = disk.loaded(base)
    for number, event in enumerate(events):
        if number == honest_until:
            findings.counts["lying_syncs"] -= image.syncs
        image.do(event, honest=number < honest_until)
    if honest_until < len(events):
        findings.counts["lying_syncs"] += image.syncs
    return image
