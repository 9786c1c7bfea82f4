"""Runs work in a child and stops it at each system call that changes a file, by ptrace.

It needs no privilege: a process may trace its children. So it sees everything that reaches the
kernel, LMDB's own writes and syncs included, and can kill the child there, or let the call fail.
The work must not start threads: only the thread that begins it is stopped.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.errors import Unavailable

KILL: Final = -1
"""What a visitor returns to have the child killed before the call is made."""

# The numbers of Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
_NUMBERS: Final = {
    "x86_64": {
        "write": 1, "open": 2, "close": 3, "lseek": 8, "pwrite64": 18, "writev": 20, "msync": 26,
        "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "rename": 82, "mkdir": 83,
        "creat": 85, "link": 86, "unlink": 87, "openat": 257, "mkdirat": 258, "unlinkat": 263,
        "renameat": 264, "sync_file_range": 277, "fallocate": 285, "pwritev": 296,
        "renameat2": 316, "pwritev2": 328,
    },
    "aarch64": {
        "mkdirat": 34, "unlinkat": 35, "renameat": 38, "truncate": 45, "ftruncate": 46,
        "fallocate": 47, "openat": 56, "close": 57, "lseek": 62, "write": 64, "writev": 66,
        "pwrite64": 68, "pwritev": 70, "fsync": 82, "fdatasync": 83, "sync_file_range": 84,
        "msync": 227, "renameat2": 276, "pwritev2": 287,
    },
}  # fmt: skip
_MACHINE: Final = platform.machine()
_NAMES: Final = {number: name for name, number in _NUMBERS.get(_MACHINE, {}).items()}
CAN_FAIL: Final = _MACHINE == "x86_64"
"""Whether a call can be made to fail here: where its number lies depends on the machine."""

_ONLY_WATCHED: Final = ("close", "lseek")
_TRACEME, _KILLED_WITH_PARENT, _SYSCALL, _POKE_USER = 0, 0x100000, 24, 6
_SET_OPTIONS, _GET_SYSCALL_INFO, _GOOD = 0x4200, 0x420E, 1
_ORIG_RAX, _RAX = 15 * 8, 10 * 8
_SECONDS: Final = 60  # that work may take
_STOPPED_AT_CALL: Final = signal.SIGTRAP | 0x80
_INFO: Final = struct.Struct("<B3xIQQ7Q")  # struct ptrace_syscall_info, at the entry of a call
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@dataclass(slots=True)
class Call:
    """A system call of the child. result: None before it is made, below zero an errno."""

    pid: int
    name: str
    arguments: tuple[int, ...]
    result: int | None = None
    _memory: list[int] = field(default_factory=list, repr=False)

    @property
    def changes(self) -> bool:
        """Whether it may change a file, or is what makes changes durable."""
        if self.name in ("open", "openat"):
            flags = self.arguments[2 if self.name == "openat" else 1]
            return bool(flags & (os.O_CREAT | os.O_TRUNC))
        return self.name not in _ONLY_WATCHED

    def path(self, argument: int = 0) -> str:
        """Return what a descriptor among the arguments is open on."""
        try:
            return str(Path(f"/proc/{self.pid}/fd/{self.arguments[argument]}").readlink())
        except OSError:
            return ""

    def text(self, argument: int) -> str:
        """Return the path that an argument points to."""
        found = self.memory(self.arguments[argument], 4096)
        return found.partition(b"\0")[0].decode()

    def memory(self, address: int, length: int) -> bytes:
        """Return memory of the child: up to `length` bytes, as far as there are any."""
        got = b""
        while len(got) < length:
            try:
                more = os.pread(self._memory[0], length - len(got), address + len(got))
            except OSError:
                break
            if not more:
                break
            got += more
        return got


Visitor = Callable[[Call], int | None]
"""Called twice for each call: before it, when it may return KILL or an errno to fail it with, and
after it, unless it was killed."""


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    found: int = _libc.ptrace(request, pid, address, data)
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def fork_and_wait(work: Callable[[], None]) -> int:
    """Do work in a child, and return its wait status. It is killed after a minute."""
    child = os.fork()
    if child == 0:
        _do(work)
    return os.waitpid(child, 0)[1]


def _do(work: Callable[[], None]) -> None:
    code = 1
    try:
        faulthandler.disable()  # whoever waits sees how it died
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(_SECONDS)
        work()
        code = 0
    finally:
        os._exit(code)


def trace(work: Callable[[], None], visit: Visitor) -> int:
    """Do work in a child that is stopped at its calls; return its wait status.

    Raises Unavailable where tracing is not allowed.
    """

    def traced() -> None:
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()

    child = os.fork()
    if child == 0:
        _do(traced)
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        raise Unavailable("this system does not let a process trace its children")
    _ptrace(_SET_OPTIONS, child, 0, _GOOD | _KILLED_WITH_PARENT)
    memory = os.open(f"/proc/{child}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _follow(child, visit, memory)
    finally:
        os.close(memory)


def _follow(child: int, visit: Visitor, memory: int) -> int:
    buffer = ctypes.create_string_buffer(_INFO.size)
    call: Call | None = None
    failing = send = 0
    while True:
        _ptrace(_SYSCALL, child, 0, send)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            return status
        send = os.WSTOPSIG(status)
        if send != _STOPPED_AT_CALL:
            continue
        send = 0
        _ptrace(_GET_SYSCALL_INFO, child, _INFO.size, ctypes.addressof(buffer))
        entered, _, _, _, number, *arguments = _INFO.unpack(buffer.raw)
        if entered == 1:
            name = _NAMES.get(number)
            call = Call(child, name, tuple(arguments), None, [memory]) if name else None
            failing = (call and visit(call)) or 0
            if failing == KILL:
                os.kill(child, signal.SIGKILL)
                return os.waitpid(child, 0)[1]
            if failing:
                _ptrace(_POKE_USER, child, _ORIG_RAX, -1)
        elif call is not None:
            if failing:
                _ptrace(_POKE_USER, child, _RAX, -failing)
            (result,) = struct.unpack_from("<q", buffer, 24)
            call.result = -failing if failing else result
            visit(call)
            call, failing = None, 0


def can_trace() -> bool:
    """Say whether a process may trace its children here, and this module knows the calls."""
    seen: list[str] = []

    def visit(call: Call) -> None:
        seen.append(call.name)

    try:
        return trace(lambda: os.close(os.open("/", os.O_RDONLY)), visit) == 0 and bool(seen)
    except (OSError, Unavailable):
        return False
