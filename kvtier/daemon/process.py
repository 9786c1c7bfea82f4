"""A client's process, by a descriptor that stays its own whatever becomes of its number."""

from __future__ import annotations

import os
import select
from pathlib import Path

from kvtier.errors import ProtocolError


class Process:
    """A process. start_time: in clock ticks since boot.

    pidfd: becomes readable when it ends; it is closed by ``close``. dead: whether that was seen.
    """

    __slots__ = ("dead", "pid", "pidfd", "start_time")

    def __init__(self, pid: int, start_time: int, pidfd: int = -1, *, dead: bool = False) -> None:
        self.pid = pid
        self.start_time = start_time
        self.pidfd = pidfd
        self.dead = dead

    @classmethod
    def of(cls, pidfd: int, pid: int) -> Process:
        """Return the process that connected, `pid`, by the pidfd that it passed, which it owns now.

        Raises ProtocolError for another's pidfd, and for what is none; it is closed then.
        """
        try:
            _check(pidfd, pid)
            began = start_time(pid)
            _check(pidfd, pid)  # once more: until now the number was its own
        except BaseException:
            os.close(pidfd)
            raise
        return cls(pid, began, pidfd)

    @classmethod
    def again(cls, pid: int, start_time_then: int) -> Process:
        """Return a process that was known by its number and start time; dead when it is over.

        Raises OSError when that cannot be told, such as without descriptors.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return cls(pid, start_time_then, dead=True)
        if start_time(pid) == start_time_then and not has_ended(pidfd):
            return cls(pid, start_time_then, pidfd)
        os.close(pidfd)
        return cls(pid, start_time_then, dead=True)

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def start_time(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])  # proc(5): field 22; 2 is the name in ()
    except (OSError, ValueError, IndexError):
        return 0


def has_ended(pidfd: int) -> bool:
    """Say whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _check(pidfd: int, pid: int) -> None:
    """Raise ProtocolError for what is no pidfd of this process, or of one that has ended."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii", errors="replace")
    fields = dict(line.partition(":")[::2] for line in lines.splitlines())
    if "Pid" not in fields:
        raise ProtocolError("what came with Hello is no pidfd; pass os.pidfd_open(os.getpid())")
    if pid <= 0:  # so the system shows all whom it does not show
        raise ProtocolError(
            "the process that connected is not to be seen from here, nor its end; run it in the "
            "daemon's pid namespace, or in one below it"
        )
    if int(fields["Pid"]) != pid:
        raise ProtocolError(
            f"the pidfd that came with Hello is of process {int(fields['Pid'])}, not of {pid}, "
            "which connected; pass os.pidfd_open(os.getpid())"
        )
