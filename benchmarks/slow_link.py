"""A link of a given speed to a port of this host, in a process of its own; it counts its bytes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from beside import Beside

PIECE = 64 << 10


class SlowLink(Beside):
    """Forwards to `port`, each way at `bytes_per_s` for all connections together.

    A context manager.
    """

    def __init__(self, port: int, bytes_per_s: float) -> None:
        super().__init__(__file__, port, bytes_per_s)

    def sent(self) -> tuple[int, int]:
        """Return how many bytes went there, and how many came back, until now."""
        there, back = self.ask("").split()
        return int(there), int(back)


class Way:
    """One direction: one wire, which carries one piece after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free = 0.0
        self.carried = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what is read until one side has gone."""
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE):
                self._free = max(self._free, time.monotonic()) + len(piece) / self._rate
                self.carried += len(piece)
                await asyncio.sleep(max(self._free - time.monotonic(), 0))
                writer.write(piece)
                await writer.drain()
        writer.close()


async def serve(port: int, bytes_per_s: float) -> None:
    """Forward until stdin ends; each line of it is answered with the bytes of both ways."""
    there, back = Way(bytes_per_s), Way(bytes_per_s)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the end of all of it
            answers, server = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(there.carry(reader, server), back.carry(answers, writer))

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(there.carried, back.carried, flush=True)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
