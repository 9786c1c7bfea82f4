"""``kvtier verify``: every record of an lmdb tier compared with its checksums."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvtier.cli.kinds import DIRECTORY
from kvtier.cli.output import write_report
from kvtier.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvtier.tiers.survey import Damage, Verdict

_SHOWN: Final = 20
_DIGITS: Final = 16


@click.command("verify", short_help="Compare an lmdb tier's records with their checksums.")
@click.argument("directory", type=DIRECTORY)
@click.option("--repair", is_flag=True, help="Take what is wrong out of the index.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(directory: Path, repair: bool, as_json: bool) -> int:  # noqa: FBT001
    """Read every record in DIRECTORY: its header, its checksums, and whether its slot is its own.

    It takes no lock and writes nothing: records that a running cache replaces meanwhile are
    counted, not judged. With --repair nobody may have the directory open; what is wrong is removed,
    and what is right is kept, also where a part of the index cannot be read. The exit status is 0
    when nothing is wrong any more, 1 when something is, and 2 when that cannot be told.
    """
    from kvtier.cli.medium import slab_medium
    from kvtier.cli.progress import progress

    with progress() as tell:
        verdict = slab_medium().verify(str(directory), tell, repair=repair)
    if as_json:
        write_report(verdict, "-")
    else:
        for line in _lines(verdict):
            click.echo(line)
    return 0 if verdict.whole else 1


def _lines(found: Verdict) -> list[str]:
    speed = format_bytes(int(found.checked_bytes / max(found.seconds, 1e-6)))
    lines = [f"{found.path}: open in process {found.holder}"] if found.holder else []
    lines.append(
        f"{found.checked:,} records are right, {format_bytes(found.checked_bytes)} in "
        f"{format_seconds(found.seconds)}, {speed}/s"
    )
    if found.changed:
        lines.append(f"{found.changed:,} records were replaced or removed meanwhile")
    if found.raw_unchecked:
        lines.append(f"{found.raw_unchecked:,} records are encoded: only stored bytes were checked")
    lines += found.torn
    if found.damage:
        reasons = Counter(damage.reason for damage in found.damage)
        counts = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
        lines.append(f"{len(found.damage):,} records are wrong: {counts}")
        lines += [_line(damage) for damage in found.damage[:_SHOWN]]
        if len(found.damage) > _SHOWN:
            lines.append(f"  and {len(found.damage) - _SHOWN:,} more; --json has all")
    lines += _outcome(found)
    return lines


def _line(damage: Damage) -> str:
    return (
        f"  {damage.key[:_DIGITS]} in slot {damage.slot} of segment {damage.segment}: "
        f"{damage.reason}: {damage.detail}"
    )


def _outcome(found: Verdict) -> list[str]:
    if found.index_replaced:
        return ["the index was written anew, with what is right"]
    if found.removed:
        return [f"{found.removed:,} records were removed"]
    if found.whole:
        return []
    return [f"remove what is wrong with: kvtier verify {found.path} --repair"]
