"""Hosts in network namespaces of their own, with a cable each to one switch.

A pulled cable is a partition as it is in the field: nothing is refused or reset, packets go
nowhere. ``python -m kvtier.testing.yard`` keeps the namespaces; ``Yard`` is its other end. It needs
``ip`` and a kernel that lets this user make namespaces, and touches no network of this machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

import msgspec

from kvtier.errors import ConfigError

_SWITCH: Final = "10.77.0.1"
_NETWORK: Final = "10.77.0.{}/24"
_START_SECONDS: Final = 20.0
_TOOLS: Final = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


class Yard:
    """A switch and hosts, numbered from 0. A context manager; for one thread.

    listener: a socket that listens at the switch, for a server of this process.
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._pids: list[int] = []
        self._process: subprocess.Popen[str] | None = None
        self.listener = socket.socket()

    def __enter__(self) -> Self:
        """Make the namespaces. Raises ConfigError, with the reason, where that is not permitted."""
        for tool in ("ip", "unshare", "nsenter"):
            if shutil.which(tool, path=_TOOLS) is None:
                raise ConfigError(f"network namespaces cannot be made here: there is no {tool}")
        mine, theirs = socket.socketpair()
        with mine, theirs:
            command = [sys.executable, "-m", __name__, str(self._hosts), str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603  (our own command)
                [_tool("unshare"), "-rn", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                text=True,
            )
            theirs.close()
            mine.settimeout(_START_SECONDS)
            said, descriptors, _, _ = socket.recv_fds(mine, 4096, 1)
        if not said:
            _, why = self._process.communicate(timeout=_START_SECONDS)
            last = (why.strip() or "unshare failed").splitlines()[-1]
            raise ConfigError(f"network namespaces cannot be made here: {last}")
        self.listener.close()
        self.listener = socket.socket(fileno=descriptors[0])
        self._pids = msgspec.json.decode(said, type=list[int])
        return self

    def inside(self, host: int) -> list[str]:
        """Return what goes before a command, so that it runs on a host."""
        target = f"--target={self._pids[host]}"
        return [_tool("nsenter"), target, "--user", "--net", "--preserve-credentials", "--"]

    def pull(self, host: int) -> None:
        """Pull the cable of a host: from now on nothing comes or goes."""
        self._say(f"{host} down")

    def plug(self, host: int) -> None:
        """Plug it in again."""
        self._say(f"{host} up")

    def _say(self, text: str) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ConfigError("the yard is not open")
        process.stdin.write(text + "\n")
        process.stdin.flush()
        process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        if self._process is not None:
            self._process.communicate(timeout=_START_SECONDS)  # it ends with its stdin


def _tool(name: str) -> str:
    return shutil.which(name, path=_TOOLS) or name


# ------------------------------------------------------------------------------- in the namespace


def _ip(text: str, pid: int | None = None) -> None:
    """Run ``ip``, here or in the namespace of a process."""
    enter = [] if pid is None else [_tool("nsenter"), f"--target={pid}", "--net", "--"]
    subprocess.run([*enter, _tool("ip"), *text.split()], check=True)  # noqa: S603


def _host(number: int) -> subprocess.Popen[bytes]:
    """Make a host and its cable; it is there as long as its stdin is open."""
    cat = _tool("cat")
    process = subprocess.Popen([_tool("unshare"), "-n", cat], stdin=subprocess.PIPE)  # noqa: S603
    late = time.monotonic() + _START_SECONDS
    while _namespace("self") == _namespace(process.pid):
        if time.monotonic() > late:
            raise TimeoutError
        time.sleep(0.005)
    _ip(f"link add cable{number} type veth peer name eth0 netns {process.pid}")
    _ip(f"link set cable{number} master switch up")
    _ip(f"addr add {_NETWORK.format(number + 2)} dev eth0", process.pid)
    for link in ("eth0", "lo"):
        _ip(f"link set {link} up", process.pid)
    return process


def _namespace(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def main() -> None:
    """Keep a switch and hosts until stdin ends."""
    count, descriptor = map(int, sys.argv[1:])
    _ip("link add switch type bridge")
    _ip(f"addr add {_SWITCH}/24 dev switch")
    _ip("link set switch up")
    hosts = [_host(number) for number in range(count)]
    with (
        socket.create_server((_SWITCH, 0)) as door,
        socket.socket(fileno=descriptor) as way,
    ):
        socket.send_fds(way, [msgspec.json.encode([host.pid for host in hosts])], [door.fileno()])
    for line in sys.stdin:
        number, state = line.split()
        _ip(f"link set cable{number} {state}")
        sys.stdout.write(f"{state}\n")
        sys.stdout.flush()
    for host in hosts:
        host.communicate()


if __name__ == "__main__":
    main()
