"""``kvtier gc``: a shared tier's records deleted by capacity and age, leaves first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvtier.cli.output import write_report
from kvtier.errors import ConfigError
from kvtier.units import format_bytes, parse_seconds

if TYPE_CHECKING:
    from kvtier.config import TierConfig
    from kvtier.tiers.collection import Collected
    from kvtier.tiers.store import Store


@click.command(
    "gc", short_help="Delete from a shared tier what is too much, too old, or an orphan."
)
@click.argument("url")
@click.option("--max-age", metavar="TIME", help="Delete what was written longer ago, such as 720h.")
@click.option(
    "--orphans-after",
    default="1h",
    show_default=True,
    metavar="TIME",
    help="Delete what hangs under nothing and was written longer ago.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gc(url: str, max_age: str | None, orphans_after: str, dry_run: bool, as_json: bool) -> int:  # noqa: FBT001
    """Hold the capacity of the shared tier at URL, such as s3://bucket/prefix?capacity=10TiB.

    To be run now and then, on one host; two at once do no harm. What goes are leaves, the ones
    written first before others, so that what is left can be used. Objects that are no records, and
    records of other versions, are counted and left alone. The exit status is 0 when all is as it
    should be, 1 when the tier is still above its capacity or something could not be read, or
    deleted, and 2 when nothing could be done.
    """
    from dataclasses import asdict

    from kvtier.cli.progress import progress
    from kvtier.config import parse_tier
    from kvtier.errors import Unavailable
    from kvtier.tiers.collection import Collectable, Kept, collect

    tier = parse_tier(url)
    age = None if max_age is None else parse_seconds(max_age)
    orphan_age = parse_seconds(orphans_after)
    store = _opened(tier)
    try:
        if not isinstance(store, Collectable):
            raise ConfigError(f"a tier of {tier.scheme} cannot be collected")
        medium = store.medium()
        if medium.keeps_versions():
            raise ConfigError(
                "the bucket keeps what is deleted as old versions, so that deleting would free "
                "nothing; give it a lifecycle rule with NoncurrentVersionExpiration, and let these "
                "credentials read its rules"
            )
        room = tier.capacity
        if room is not None:  # for records: what the Store takes for itself is in no list
            room = max(0, room - store.capabilities.overhead)
        kept = Kept(room, age, orphan_age)
        with progress() as tell:
            found = collect(medium, kept, tell, dry_run=dry_run)
    except Unavailable as error:
        raise ConfigError(str(error)) from error
    finally:
        store.close()
    if as_json:
        write_report(asdict(found), "-")
    else:
        for line in _lines(found, dry_run=dry_run):
            click.echo(line)
    short = found.ended or found.unconfirmed or found.unread or found.left_over_bytes
    return 1 if short else 0


def _opened(tier: TierConfig) -> Store:
    """Open the Store of a tier that hosts share by its medium. Raises ConfigError for others."""
    from kvtier.config import load_store, store_types

    kind = load_store(store_types()[tier.scheme]) if tier.scheme != "dram" else None
    if kind is None or not hasattr(kind, "medium"):
        raise ConfigError(
            f"a tier of {tier.scheme} is not for this: its owner or its server keeps its capacity; "
            "name one that hosts share by a bucket or a directory, s3: or files:"
        )
    check_made = getattr(kind, "check_made", None)
    if check_made is not None:  # whoever collects makes nothing where a path is mistyped
        check_made(tier.location)
    return kind.open(tier.location, tier.capacity, tier.options)


def _lines(found: Collected, *, dry_run: bool) -> list[str]:
    lines = [f"{found.objects:,} records, {format_bytes(found.nbytes)}"]
    if found.overshoot_bytes:
        lines[0] += f", {format_bytes(found.overshoot_bytes)} above the capacity"
    unreadable = "records are spoilt or of another version, and were left alone"
    if found.newer:
        unreadable += "; some are of a later one, so that no orphans were looked for"
    for count, what in (
        (found.strangers, "objects are no records, and were left alone"),
        (found.unreadable, unreadable),
        (found.unread, "records could not be read, so that no orphans were looked for; try again"),
        (found.unconfirmed, "records could not be deleted"),
    ):
        if count:
            lines.append(f"{count:,} {what}")
    would = "would be removed" if dry_run else "were removed"
    reasons = ", ".join(f"{why} {count:,}" for why, count in sorted(found.removed.items()))
    lines.append(
        f"{sum(found.removed.values()):,} records, {format_bytes(found.removed_bytes)}, {would}"
        + (f": {reasons}" if reasons else "")
    )
    month = f", ${found.month_usd:,.2f} a month" if found.month_usd else ""
    lines.append(f"{format_bytes(found.left_bytes)} are left{month}")
    if found.left_over_bytes:
        lines.append(f"{format_bytes(found.left_over_bytes)} above the capacity")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.requests.items()))
    paid = f": ${found.request_usd:,.4f}" if found.request_usd else ""
    lines.append(f"this took {kinds}{paid}")
    if found.ended:
        lines.append(f"ended early: {found.ended}")
    return lines
