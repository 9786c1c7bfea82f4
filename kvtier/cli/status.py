"""``kvtier status``: what a daemon holds and how it fares, for people, scripts and Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.cli.output import write_report
from kvtier.errors import ConfigError
from kvtier.units import format_bytes

if TYPE_CHECKING:
    from kvtier.daemon.status import Status

_DEGRADED: Final = 1
_SECONDS: Final = 5.0


@click.command("status", short_help="Say how a daemon fares, or let Prometheus ask.")
@click.argument("socket", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all metrics.")
@click.option("--prometheus", is_flag=True, help="Print all metrics in Prometheus' text format.")
@click.option(
    "--alive", is_flag=True, help="End with 0 also where a tier is not served, as a liveness check."
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Go on until SIGINT, and answer GET /metrics, /health and /alive over HTTP.",
)
def status(
    socket: str | None,
    as_json: bool,  # noqa: FBT001
    prometheus: bool,  # noqa: FBT001
    alive: bool,  # noqa: FBT001
    listen: str | None,
) -> int:
    """Say what the daemon at SOCKET holds, tier by tier, and what ails it.

    SOCKET is a path, or unix:PATH; by default that of `kvtier serve`. The exit status is 0 when all
    tiers are served, 1 when one is not, and 2 when no daemon answers.
    """
    from kvtier.daemon.place import user_folder
    from kvtier.daemon.status import ask_status

    if as_json + prometheus + (listen is not None) > 1:
        raise ConfigError("--json, --prometheus and --listen: choose one")
    path = _path_of(str(user_folder() / "kv.sock") if socket is None else socket)
    if listen is not None:
        from kvtier.cli.listen import listen_at

        return listen_at(listen, path)
    found = ask_status(path, _SECONDS)
    if as_json:
        write_report(found._asdict() | {"socket": path}, "-")
    elif prometheus:
        from kvtier.metrics import exposition

        click.echo("\n".join(exposition(found.figures)))
    else:
        _show(path, found)
    return _DEGRADED if found.troubles and not alive else 0


def _path_of(text: str) -> str:
    """Return a socket's path, which may be named as clients name it. Raises ConfigError."""
    from kvtier.daemon.address import SCHEME, parse_address
    from kvtier.daemon.place import check_path

    if text.startswith(SCHEME):
        return parse_address(text).path
    if "://" in text:
        raise ConfigError(f"{text!r} is no path of a socket, such as /run/kvtier/kv.sock")
    return str(check_path(text))


def _show(path: str, found: Status) -> None:
    from rich import box
    from rich.table import Table

    from kvtier.cli.screen import print_table, screen

    console = screen()
    for line in _lines(path, found):
        console.print(line, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("tier", no_wrap=True)
    for name in ("used", "of", "parts", "tokens hit", "read", "written", "errors"):
        table.add_column(name, justify="right", no_wrap=True)
    for tier in found.tiers:
        table.add_row(tier, *_row(found.figures, tier))
    print_table(console, table)
    for tier, why in found.troubles.items():
        console.print(f"{tier} is not served: {why}", markup=False, soft_wrap=True)


def _lines(path: str, found: Status) -> list[str]:
    figures = found.figures
    asked = figures.get("kvtier_match_tokens_total", 0)
    hits = sum(figures.get(_series("hit_tokens_total", tier), 0) for tier in found.tiers)
    others = int(figures.get("kvtier_sessions", 1)) - 1
    lines = [f"{path}: server {found.generation} of this daemon, {others:,} other sessions"]
    if asked:
        lines.append(f"{hits / asked:.1%} of {asked:,.0f} tokens matched were loaded")
    return lines


def _row(figures: dict[str, float], tier: str) -> list[str]:
    def of(name: str) -> Any:
        return figures.get(_series(name, tier), 0)

    capacity = figures.get(_series("tier_capacity_bytes", tier))
    return [
        format_bytes(int(of("tier_used_bytes"))),
        "unbounded" if capacity is None else format_bytes(int(capacity)),
        f"{of('tier_parts'):,.0f}",
        f"{of('hit_tokens_total'):,.0f}",
        format_bytes(int(of("fetched_bytes_total"))),
        format_bytes(int(of("spilled_bytes_total"))),
        f"{of('tier_errors_total'):,.0f}",
    ]


def _series(name: str, tier: str) -> str:
    return f'kvtier_{name}{{tier="{tier}"}}'
