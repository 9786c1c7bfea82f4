"""``kvtier inspect``: what lies in the directory of an lmdb tier. No payload is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvtier.cli.kinds import DIRECTORY
from kvtier.cli.output import write_report
from kvtier.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtier.tiers.survey import Found, Survey

_DIGITS: Final = 8  # of a namespace in the table: as many as kvtier purge needs


@click.command("inspect", short_help="Say what lies in an lmdb tier's directory.")
@click.argument("directory", type=DIRECTORY)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(directory: Path, as_json: bool) -> int:  # noqa: FBT001
    """Say what lies in DIRECTORY: by namespace the records, their size, depth, age and codec.

    Also the slots by their size, what is used of the capacity, and who has the directory open.
    It takes no lock and writes nothing, so that a running cache is not disturbed: it is shown as it
    was last committed. The exit status is 2 where there is no such tier, or its index is damaged.
    """
    from kvtier.cli.medium import slab_medium
    from kvtier.cli.progress import progress

    with progress() as tell:
        found = slab_medium().survey(str(directory), tell)
    if as_json:
        write_report(found, "-")
    else:
        _show(found)
    return 0


def _show(found: Survey) -> None:
    from kvtier.cli.screen import print_table, screen

    console = screen()
    for line in _lines(found):
        console.print(line, markup=False, soft_wrap=True)
    if found.namespaces:
        print_table(console, _namespaces(found.namespaces))
    if found.classes:
        _print_classes(console, found)


def _lines(found: Survey) -> list[str]:
    held = f"open in process {found.holder}, shown as last committed" if found.holder else "closed"
    durability = found.durability or "not written down"
    capacity = "an unknown capacity" if found.capacity is None else format_bytes(found.capacity)
    share = f" ({found.charged_bytes / found.capacity:.1%})" if found.capacity else ""
    taken, index = format_bytes(found.charged_bytes), format_bytes(found.index_bytes)
    disk = format_bytes(found.disk_bytes)
    lines = [
        f"{found.path}: {held}",
        f"format {found.format}, durability {durability}",
        f"{taken} of {capacity} taken{share}, {index} of it for the index; {disk} on the disk",
        f"{found.records:,} records, {format_bytes(found.stored_bytes)}",
    ]
    if found.astray:
        lines.append(f"{found.astray:,} entries lead to no record; see kvtier verify")
    return lines


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _namespaces(found: Sequence[Found]) -> Table:
    from kvtier.cli.medium import age

    table = _table("namespace", "records", "size", "each", "depth", "age", "most", "codec")
    for one in found:
        table.add_row(
            one.namespace[:_DIGITS],
            f"{one.records:,}",
            format_bytes(one.stored_bytes),
            format_bytes(int(one.record_bytes.median)),
            f"{one.depth.median:,}/{one.depth.most:,}",
            age(one.age_s.median) if one.age_s else "?",
            age(one.age_s.most) if one.age_s else "?",
            ", ".join(one.codecs),
        )
    return table


def _print_classes(console: Console, found: Survey) -> None:
    from kvtier.cli.screen import print_table

    table = _table("slots of", "segments", "slots", "used", "", "filled")
    for one in found.classes:
        space = one.used_slots * one.slot_bytes
        table.add_row(
            format_bytes(one.slot_bytes),
            f"{one.segments:,}",
            f"{one.slots:,}",
            f"{one.used_slots:,}",
            f"{one.used_slots / one.slots:.0%}" if one.slots else "",
            f"{one.stored_bytes / space:.1%}" if space else "",
        )
    print_table(console, table)
    console.print(
        "each and age: medians; depth: median/most; filled: payload of the used slots' bytes"
    )
