"""``kvtier doctor``: what this machine offers, what it means for a cache, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvtier.bench.bucket import bucket_url
from kvtier.bench.filesystem import current_directory
from kvtier.cli.kinds import DIRECTORY
from kvtier.cli.output import REPORT, write_report
from kvtier.errors import ConfigError
from kvtier.units import parse_bytes

if TYPE_CHECKING:
    from kvtier.cli.probes import Finding


@click.command("doctor", short_help="Look at what this machine offers.")
@click.option(
    "--dir",
    "directory",
    type=DIRECTORY,
    help="Where an lmdb tier is to go; by default the current directory is looked at.",
)
@click.option("--s3", metavar="URL", help="A bucket for an s3 tier; it is written to.")
@click.option(
    "--dram",
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Size of the dram tier wanted.",
)
@click.option(
    "--device",
    is_flag=True,
    help="Measure copies to and from a GPU, and keep the fastest ways; a minute.",
)
@click.option(
    "--measure",
    "urls",
    multiple=True,
    metavar="URL",
    help="Write 64 MiB to a tier and read it back, beside a copy in memory; in one that is full, "
    "older records make room. May be repeated.",
)
@click.option(
    "--keep",
    type=REPORT,
    metavar="FILE",
    help="Write what was measured for Cache.seed, so that loads are weighed from the first on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    directory: Path | None,
    s3: str | None,
    dram: str,
    device: bool,  # noqa: FBT001
    urls: tuple[str, ...],
    keep: str | None,
    as_json: bool,  # noqa: FBT001
) -> int:
    """Look at this machine: what works, what is limited, what is missing.

    Everything is tried, not guessed: a file is written past the page cache, an object is put,
    read and deleted. The exit status is 1 if --dir or --s3 names something that cannot be used,
    and 2 if the command line makes no sense.
    """
    from kvtier.cli import probes
    from kvtier.cli.copies import copies

    if keep is not None and not urls:
        raise ConfigError("--keep is for what --measure found: name a tier, such as lmdb:DIR?…")
    wanted = parse_bytes(dram)
    if s3 is not None:
        bucket_url(s3)
    where = probes.disk(directory or current_directory())
    bucket = probes.s3(s3) if s3 is not None else None
    findings = [
        probes.python(),
        probes.cpu(),
        probes.gpu(),
        probes.memory(wanted),
        probes.memory_lock(wanted),
        *(copies() if device else ()),
        *(_rungs(urls, keep) if urls else ()),
        where,
        *([bucket] if bucket else []),
        probes.weights(),
    ]
    _show(findings, as_json=as_json)
    asked = [where] * (directory is not None) + ([bucket] if bucket else [])
    return 1 if any(finding.state == "missing" for finding in asked) else 0


def _rungs(urls: Sequence[str], keep: str | None) -> list[Finding]:
    """Measure memory, the codec, and each tier."""
    from kvtier.bench import rungs
    from kvtier.cli.probes import Finding
    from kvtier.units import format_bytes, format_seconds

    base, codec = rungs.memcpy(), rungs.codec()
    found = [rungs.tier_rung(url) for url in urls]
    if keep is not None:
        rungs.keep(found, Path(keep))
    shown = [
        Finding(
            "rung memcpy",
            "ok",
            f"{format_bytes(int(base.read_bytes_per_s))} a second",
            "what every byte between DRAM and an engine costs at least",
        ),
        Finding(
            "rung codec",
            "ok",
            f"a core encodes {format_bytes(int(codec.encode_bytes_per_s))} of bf16 a second, "
            f"decodes {format_bytes(int(codec.decode_bytes_per_s))}; saves {codec.saved:.0%}",
            f"codec=lossless saves time where a thread writes and reads less than "
            f"{format_bytes(int(codec.pays_below))} a second",
        ),
    ]
    for one in found:
        read, write = (
            format_bytes(int(one.read_bytes_per_s)),
            format_bytes(int(one.write_bytes_per_s)),
        )
        shown.append(
            Finding(
                f"rung {one.tier}",
                "ok",
                f"reads {read} a second after {format_seconds(one.latency_s)}; writes {write}",
                f"a 70B model's token of 320 KiB comes in "
                f"{format_seconds(320 * 1024 / one.read_bytes_per_s)}: to load pays where it is "
                "computed slower",
            )
        )
    return shown


def _show(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        write_report(findings, "-")
        return
    from rich.text import Text

    from kvtier.cli.screen import screen

    console = screen()
    yes, no = ("+", "-") if console.options.ascii_only else ("✓", "✗")
    marks = {"ok": (yes, "green"), "limited": ("!", "yellow"), "missing": (no, "red")}
    for finding in findings:
        mark, colour = marks[finding.state]
        head = Text(f"{mark} ", style=colour).append(f"{finding.name}: ", style="bold")
        console.print(head.append(finding.found, style=""), soft_wrap=True)
        line = finding.means + (f"; {finding.change}" if finding.change else "")
        console.print(f"    {line}", markup=False, soft_wrap=True)
