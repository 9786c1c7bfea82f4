"""``kvtier purge``: a namespace taken out of an lmdb tier that nobody has open."""

from __future__ import annotations

from pathlib import Path

import click

from kvtier.cli.kinds import DIRECTORY
from kvtier.cli.output import write_report
from kvtier.units import format_bytes


@click.command("purge", short_help="Take a namespace out of an lmdb tier's directory.")
@click.argument("directory", type=DIRECTORY)
@click.option(
    "--namespace",
    metavar="DIGEST",
    required=True,
    help="64 hex digits, or the first 8 or more of them, as kvtier inspect shows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def purge(directory: Path, namespace: str, as_json: bool) -> int:  # noqa: FBT001
    """Take all records of a namespace out of DIRECTORY, which nobody may have open.

    A running cache is purged by Cache.purge instead. The payloads stay in slots that are free from
    then on, until other records are written there.
    """
    from kvtier.cli.medium import slab_medium
    from kvtier.cli.progress import progress

    with progress() as tell:
        purged = slab_medium().purge(str(directory), namespace, tell)
    if as_json:
        write_report(purged, "-")
    else:
        click.echo(
            f"{purged.removed:,} records of namespace {purged.namespace}, "
            f"{format_bytes(purged.stored_bytes)}, were removed"
        )
    return 0
