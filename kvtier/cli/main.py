"""``kvtier``: the command line. Commands are loaded when they are called."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

import click

import kvtier
from kvtier.checks import shown
from kvtier.cli.interrupts import FATAL, INTERRUPTED
from kvtier.cli.output import drop_stdout
from kvtier.errors import KvtierError, unknown

_BAD_INPUT: Final = 2
_UNWRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE)


@click.pass_context
def _help(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


class CommandGroup(click.Group):
    """A group whose commands are named with their module, and imported when called.

    kind: what a name that is not known is called. Without one, it shows its help.
    """

    def __init__(self, name: str, *, lazy: Mapping[str, str], kind: str, **more: Any) -> None:
        super().__init__(
            name, callback=_help, no_args_is_help=False, invoke_without_command=True, **more
        )
        self._lazy = lazy
        self._kind = kind

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, in the order of their definition."""
        del ctx
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import a command. Raises ConfigError that names the nearest one."""
        del ctx
        if cmd_name not in self._lazy:
            raise unknown(self._kind, cmd_name, self._lazy)
        module, _, name = self._lazy[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


cli: Final = CommandGroup(
    "kvtier",
    lazy={
        "bench": "kvtier.cli.bench:bench",
        "doctor": "kvtier.cli.doctor:doctor",
        "gc": "kvtier.cli.gc:gc",
        "inspect": "kvtier.cli.inspect:inspect",
        "plan": "kvtier.cli.plan:plan",
        "purge": "kvtier.cli.purge:purge",
        "replay": "kvtier.cli.replay:replay",
        "serve": "kvtier.cli.serve:serve",
        "sim": "kvtier.cli.sim:sim",
        "status": "kvtier.cli.status:status",
        "verify": "kvtier.cli.verify:verify",
    },
    kind="command",
    help="A KV-cache layer for LLM serving: GPU memory, pinned DRAM, NVMe and an object store.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(kvtier.__version__, prog_name="kvtier")(cli)


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 2 for bad input, said in one line."""
    try:
        status = cli.main(args, prog_name="kvtier", standalone_mode=False)
        sys.stdout.flush()  # at exit nobody would be told
    except click.NoSuchOption as error:
        options = [name for each in _parameters(error) for name in each.opts]
        return _bad_input(str(unknown("option", error.option_name, options)))
    except click.ClickException as error:
        return _bad_input(error.format_message())
    except click.Abort:
        return INTERRUPTED
    except (KvtierError, UnicodeEncodeError) as error:
        return _bad_input(_cause(error))
    except OSError as error:
        if error.errno not in _UNWRITTEN:
            raise
        drop_stdout()
        what = "what was found" if error.filename is None else error.filename
        return _bad_input(
            f"cannot write {what} ({error.strerror}); free some space, or have it written elsewhere"
        )
    return status if isinstance(status, int) else 0


def main() -> NoReturn:
    """Run this process's command line and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _terminate)
    sys.exit(run())


def _parameters(error: click.NoSuchOption) -> list[click.Parameter]:
    return error.ctx.command.get_params(error.ctx) if error.ctx is not None else []


def _cause(error: KvtierError | UnicodeEncodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{shown(error.object)} is no UTF-8, as all text is here; rename it"
    return str(error)


def _bad_input(message: str) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return _BAD_INPUT


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind, so that children, servers and temporary files go too."""
    del frame
    sys.exit(FATAL + number)
