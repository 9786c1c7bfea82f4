"""What the tests of the Valkey store share: servers, and stores on them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.storage_backends.valkey import ValkeyStore
from kvtier.testing.tls import self_signed
from kvtier.testing.valkey_server import ValkeyServer

TIMEOUT = 0.4  # of the stores that tests open


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTIER_VALKEY_USER", "KVTIER_VALKEY_PASSWORD"):
        monkeypatch.delenv(name, raising=False)


def serving(**options: str) -> ValkeyServer:
    server = ValkeyServer(**options)
    try:
        server.__enter__()
    except ConfigError as absent:
        pytest.skip(str(absent))
    return server


@pytest.fixture(scope="session")
def server() -> Iterator[ValkeyServer]:
    """Return a server that all tests share; each begins with an empty one."""
    one = serving(maxmemory="256mb", maxmemory_policy="noeviction")
    yield one
    one.close()


@pytest.fixture
def own():
    """Start servers of a test's own."""
    servers = []

    def start(**options: str) -> ValkeyServer:
        servers.append(serving(**options))
        return servers[-1]

    yield start
    for one in servers:
        one.close()


@pytest.fixture
def open_at():
    """Open stores that are closed at the end."""
    stores = []

    def opened_at(server: ValkeyServer, location: str = "", **options) -> ValkeyStore:
        given = {"timeout": TIMEOUT, "connect_timeout": TIMEOUT, **options}
        stores.append(ValkeyStore.open(location or server.location, None, given))
        return stores[-1]

    yield opened_at
    for store in stores:
        store.close()


class Scripted:
    """A server that takes connections and says the same to each, whatever it is asked."""

    def __init__(self, said: bytes) -> None:
        self.said = said
        self.door = socket.create_server(("127.0.0.1", 0))
        self.location = f"//127.0.0.1:{self.door.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                link, _ = self.door.accept()
            except OSError:
                return
            with link:
                link.settimeout(2.0)
                try:
                    link.recv(65536)
                    link.sendall(self.said)
                except OSError:
                    continue

    def close(self) -> None:
        self.door.shutdown(socket.SHUT_RDWR)
        self.door.close()
        self.thread.join(20)


@pytest.fixture
def scripted():
    """Make servers that say the same to everybody."""
    made = []

    def one(said: bytes) -> Scripted:
        made.append(Scripted(said))
        return made[-1]

    yield one
    for each in made:
        each.close()


class TlsDoor:
    """Speaks TLS with a certificate that it signed itself, and passes on what is said."""

    def __init__(self, folder: Path, target: int) -> None:
        self.certificate, self.context = self_signed(folder)
        self.target = target
        self.loop = asyncio.new_event_loop()
        self.started = threading.Event()
        self.stop = asyncio.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.started.wait(10)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.serve())

    async def serve(self) -> None:
        server = await asyncio.start_server(self.client, "127.0.0.1", 0, ssl=self.context)
        self.location = f"//127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.started.set()
        await self.stop.wait()
        server.close()

    async def client(self, reader, writer) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.target)

        async def pass_on(source, sink) -> None:
            while piece := await source.read(1 << 16):
                sink.write(piece)
                await sink.drain()
            sink.close()

        with contextlib.suppress(OSError):
            await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)


@pytest.fixture
def tls_door(server, tmp_path):
    """Return a way to the server by TLS, or say that a certificate cannot be made."""
    try:
        one = TlsDoor(tmp_path, server.port)
    except ConfigError as absent:
        pytest.skip(str(absent))
    yield one
    one.close()
