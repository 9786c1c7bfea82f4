"""``kvtier serve``: one cache for the engines of this host, behind a socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.cli.interrupts import AtOnce
from kvtier.cli.output import drop_stdout
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.daemon.principals import Principal
    from kvtier.daemon.settings import Ails, Down, Started
    from kvtier.daemon.supervisor import Supervisor

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@click.command("serve", short_help="Share one cache among the engines of this host.")
@click.argument("tiers", nargs=-1, metavar="[URL]...")
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file, in place of URLs.")
@click.option(
    "--socket",
    "path",
    type=click.Path(),
    metavar="PATH",
    help="Where engines connect; by default kv.sock in $XDG_RUNTIME_DIR/kvtier.",
)
@click.option(
    "--record",
    metavar="FILE",
    help="Record each client's requests, lengths and salted hashes alone, for `kvtier replay`.",
)
@click.option(
    "--record-size",
    metavar="SIZE",
    help="Of a file of it; then the next begins, and four are kept.  [default: 64MiB]",
)
@click.option(
    "--record-salt",
    metavar="FILE",
    help="A secret that other hosts' recordings have too, so that they can be joined. By default "
    "hashes are salted at random.",
)
@click.option("--print-config", is_flag=True, help="Print what would be served, and end.")
@click.option("--json", "as_json", is_flag=True, help="Tell what happens as JSON, a line each.")
def serve(
    tiers: tuple[str, ...],
    config: Path | None,
    path: str | None,
    print_config: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    **recording: str | None,
) -> int:
    """Hold a cache of DRAM and slower tiers for all engines that open unix:PATH.

    URL is dram:SIZE, then slower tiers. The config file has tiers = [URL, ...], socket, record,
    record_size, record_salt, and [tenants.NAME] with floor and ceiling; or [principals.NAME] with
    uid, socket, tiers and record, for users who must not meet: each gets a socket, memory and a
    server process of its own.

    It runs until SIGTERM or SIGINT; then what waits is written down first. It logs to stderr from
    the level in KVTIER_LOG_LEVEL on: debug, info (the default), warning or error.
    """
    with AtOnce():
        return _serve(tiers, config, path, print_config, _Teller(as_json=as_json), recording)


def _serve(
    tiers: tuple[str, ...],
    config: Path | None,
    path: str | None,
    print_config: bool,  # noqa: FBT001
    tell: _Teller,
    recording: Mapping[str, str | None],
) -> int:
    from kvtier.daemon.logs import set_up
    from kvtier.daemon.principals import of_file, of_urls

    if tiers and config is not None:
        raise ConfigError("name the tiers or a file with --config, and not both")
    if not tiers and config is None:
        raise ConfigError("name the tiers, such as dram:8GiB, or a file with --config")
    record = {name: value for name, value in recording.items() if value is not None}
    found = of_file(config, path, record) if config is not None else [of_urls(tiers, path, record)]
    if print_config:
        click.echo(_as_toml(found))
        return 0
    _check_memory(found)
    set_up()
    return _run(found, tell)


class _Teller:
    """Says what happens, on stdout."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, event: str, **said: Any) -> None:
        import msgspec

        if self._as_json:
            text = msgspec.json.encode({"event": event, **said}).decode()
        else:
            text = f"{event}: " + ", ".join(f"{name} {value}" for name, value in said.items())
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except OSError:  # whoever read it is gone; the daemon goes on, and ends well
            drop_stdout()


def _run(found: Sequence[Principal], tell: _Teller) -> int:
    """Start every principal's daemon, and wait for a signal, or until one has ended."""
    from kvtier.daemon.supervisor import Supervisor
    from kvtier.seams import CancelledError

    bell = os.eventfd(0, os.EFD_CLOEXEC)
    running: list[Supervisor] = []
    told = False

    def end(*_: object) -> None:
        nonlocal told
        told = True
        for supervisor in running:
            supervisor.end()
        os.eventfd_write(bell, 1)

    with contextlib.ExitStack() as undo:
        undo.callback(os.close, bell)
        for number in _SIGNALS:
            undo.callback(signal.signal, number, signal.signal(number, end))
        for one in found:  # all of them, before a thread runs: a place is taken as its user
            running.append(Supervisor(one.settings, one.path, tell=_news(one, tell)))
            undo.callback(running[-1].close)
        if told:  # while some of them were not there yet
            end()
        for supervisor in running:  # all at once: each opens tiers of its own
            supervisor.begin(lambda: os.eventfd_write(bell, 1))
        with contextlib.suppress(CancelledError):  # a signal came before all of them served
            for one, supervisor in zip(found, running, strict=True):
                tell("ready", **_described(one, supervisor, supervisor.wait()))
            _notify("READY=1")
            os.read(bell, 8)  # goes on after a signal, which eventfd_read does not
        _notify("STOPPING=1")
        end()
    tell("ended", pid=os.getpid())
    return 1 if any(supervisor.failed for supervisor in running) else 0


def _news(one: Principal, tell: _Teller) -> Callable[[Started | Ails | Down], None]:
    """Return what says that a server ended, was started again, is in trouble, or well again."""
    from kvtier.daemon.settings import Down, Started

    known: dict[str, str] = {}
    down: list[Down] = []  # the first since the last that has started

    def say(news: Started | Ails | Down) -> None:
        said = {"socket": str(one.path)}
        if isinstance(news, Down):
            if not down:
                tell("down", **said, why=news.why)
                _notify(f"STATUS=down: {one.path}: {news.why}".replace("\n", " "))
            down.append(news)
            return
        if isinstance(news, Started):
            if news.generation > 1:
                known.clear()
                down.clear()
                tell("restarted", **said, server=news.server, generation=news.generation)
                _notify("STATUS=")
            return
        for tier, why in news.troubles.items():
            if tier not in known:
                tell("degraded", **said, tier=tier, why=why)
                _notify(f"STATUS=degraded: {one.path}: {tier}: {why}".replace("\n", " "))
        for tier in known:
            if tier not in news.troubles:
                tell("well", **said, tier=tier)
                _notify("STATUS=")
        known.clear()
        known.update(news.troubles)

    return say


def _described(one: Principal, supervisor: Supervisor, started: Started) -> dict[str, Any]:
    """Return what the ready line says."""
    return {
        **({"principal": one.name} if one.name else {}),
        "socket": str(supervisor.path),
        "pid": os.getpid(),
        "server": started.server,
        "arena_bytes": supervisor.nbytes,
        "tiers": list(started.tiers),
        "generation": started.generation,
        **({"record": one.settings.record.path} if one.settings.record else {}),
    }


def _check_memory(found: Sequence[Principal]) -> None:
    """Raise ConfigError where all principals together want more memory than there is."""
    from kvtier.memory.sealed import available_bytes
    from kvtier.units import format_bytes

    wanted, available = sum(one.settings.config().dram for one in found), available_bytes()
    if wanted > available:
        raise ConfigError(
            f"dram of {format_bytes(wanted)} in all is more than the {format_bytes(available)} of "
            "memory available here; ask for less, or raise the limit (MemoryMax=, memory.max)"
        )


def _as_toml(found: Sequence[Principal]) -> str:
    """Return the configuration, with what was left to a default, and without secrets."""
    import msgspec

    from kvtier.config import hidden

    def quoted(value: Any) -> str:
        return msgspec.json.encode(value).decode()  # TOML's basic strings are JSON's

    lines: list[str] = []
    for one in found:
        if one.name:
            lines += [f"[principals.{quoted(one.name)}]", f"uid = {one.settings.uid}"]
        lines.append(f"socket = {quoted(str(one.path))}")
        if (record := one.settings.record) is not None:
            lines += [f"record = {quoted(record.path)}"]
            lines += [f"record_size = {quoted(f'{record.most_bytes}B')}"]
            lines += [f"record_salt = {quoted(record.salt_path)}"] if record.salt_path else []
        lines += ["tiers = [", *(f"    {quoted(hidden(u))}," for u in one.settings.tiers), "]", ""]
    for tenant, quota in found[0].settings.quotas.items():
        lines += [f"[tenants.{quoted(tenant)}]", f"floor = {quota.floor}"]
        lines += [f"ceiling = {quota.ceiling}", ""]
    return "\n".join(lines).rstrip()


def _notify(state: str) -> None:
    """Tell the service manager, where there is one: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    address = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.send(state.encode())
