"""Fuzz: what a daemon reads from its sockets, and what it makes of it.

    python -m kvtier.testing.fuzz [--inputs N] [--seed N] [--json FILE]

Every input goes through the frames as a connection's bytes do. Nothing but ProtocolError may come
out, and what is read takes no more memory than its length allows. What passes is said to live
Sessions by a hostile client; nothing but a KvtierError may come out there, and an honest client
that saves and loads beside it must find every byte as it was. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.daemon.frames import HEADER, decode, encode, open_frame
from kvtier.daemon.messages import MOST_CHUNKS, Message
from kvtier.errors import ProtocolError
from kvtier.testing.besieged import Besieged
from kvtier.testing.hostile import hostile

_WEIGHED: Final = 32  # one input in so many is weighed
_CHECKED: Final = 1_000  # after so many the honest client has its turn
_LIVED: Final = 5_000  # after so many the hostile client's process is killed


def messages_in(data: bytes) -> list[Message]:
    """Return the messages of a connection that sends `data` and then waits, as a daemon reads them.

    Raises ProtocolError at the first frame that is none.
    """
    found: list[Message] = []
    while len(data) >= HEADER.size:
        kind, length, _ = open_frame(data[: HEADER.size])
        end = HEADER.size + length
        if end > len(data):
            break  # the rest has not come yet
        found.append(decode(kind, memoryview(data)[HEADER.size : end]))
        data = data[end:]
    return found


def memory_limit(sent: int) -> int:
    """Return the bytes of memory that reading `sent` bytes may take, whatever they say.

    A number takes 16 times its one byte. As many lists as a prompt has chunks come on top.
    """
    return 16 * sent + MOST_CHUNKS * 96


@dataclass
class Findings:
    """What became of the inputs. Inputs that broke something raise AssertionError instead."""

    seed: int
    inputs: int = 0
    refused: int = 0
    messages: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    most_bytes: int = 0
    most_memory: int = 0
    slowest_ms: float = 0.0
    taken: int = 0
    slowest_taken_ms: float = 0.0
    honest_checks: int = 0
    honest_refused: int = 0
    hostile_deaths: int = 0
    held: int = 0


def memory_taken(data: bytes) -> int:
    """Return the most memory, in bytes, that reading took at once."""
    tracemalloc.start()
    try:
        messages_in(data)
    except ProtocolError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


def _reads_back(message: Message) -> bool:
    again = encode(message)
    return encode(decode(message.KIND, again[HEADER.size :])) == again


def _feed(found: Findings, data: bytes, number: int) -> list[Message]:
    """Read one input and check what comes of it; return the messages."""
    begin = time.perf_counter()
    try:
        messages = messages_in(data)
    except ProtocolError:
        found.refused += 1
        messages = []
    found.slowest_ms = max(found.slowest_ms, (time.perf_counter() - begin) * 1e3)
    found.messages += len(messages)
    found.most_bytes = max(found.most_bytes, len(data))
    if number % _WEIGHED == 0:
        most = memory_taken(data)
        found.most_memory = max(found.most_memory, most)
        assert most <= memory_limit(len(data)), f"{len(data)} bytes took {most} bytes of memory"
        assert all(map(_reads_back, messages)), "a message does not read back"
    return messages


def fuzz(inputs: int, seed: int = 0) -> Findings:
    """Try so many inputs. Raises AssertionError, with the input, for the first that breaks."""
    found = Findings(seed)
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as name:
        besieged = Besieged(Path(name), seed)
        try:
            for number in range(inputs):
                _try(found, besieged, number)
            besieged.check()
            found.held = besieged.held()
            assert not found.held, f"{found.held} slots are held when all is over"
        finally:
            besieged.close()
    found.taken = sum(n for what, n in besieged.said.items() if what.endswith(" taken"))
    found.slowest_taken_ms = besieged.slowest_ms
    found.honest_checks, found.honest_refused = besieged.checks, besieged.refused
    found.hostile_deaths = besieged.deaths
    return found


def _try(found: Findings, besieged: Besieged, number: int) -> None:
    """Try one input."""
    way, data = hostile(found.seed, number)
    found.ways[way] += 1
    found.inputs += 1
    try:
        for message in _feed(found, data, number):
            besieged.say(message)
        if number % _CHECKED == 0:
            besieged.check()
        if number % _LIVED == _LIVED - 1:
            besieged.succeed()
    except Exception as error:
        text = f"input {number} of seed {found.seed} ({way}, {len(data)} bytes): {error!r}"
        raise AssertionError(f"{text}\n{data[:512].hex()}") from error


def main() -> None:
    """Run from the command line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--inputs", type=int, default=1_000_000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    begin = time.monotonic()
    found = vars(fuzz(options.inputs, options.seed))
    found["seconds"] = round(time.monotonic() - begin, 1)
    line = json.dumps(found)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
