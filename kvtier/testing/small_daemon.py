"""A daemon's sessions on a small arena, without sockets, and clients of them, for tests."""

from __future__ import annotations

import hashlib
import os
import queue
from collections.abc import Mapping
from typing import Any, Final, Literal

from kvtier.config import Config
from kvtier.daemon import answers, messages
from kvtier.daemon.grants import Grants, make_grants
from kvtier.daemon.messages import Message, Prompt
from kvtier.daemon.process import Process
from kvtier.daemon.sessions import Session, Sessions
from kvtier.depot import Depot
from kvtier.identity.geometry import Component, Geometry
from kvtier.memory.arena import Arena, Slot
from kvtier.memory.packed import unpack_slots
from kvtier.memory.sealed import sealed_memory
from kvtier.seams import ThreadFlow
from kvtier.testing.hands import Hands

PART_BYTES: Final = 4096
SLOTS: Final = 16
"""Of a daemon that no test has asked for more."""

CHUNK: Final = 16
"""Tokens of a chunk."""

GEOMETRY: Final = Geometry(
    (Component(1, 1, 128),), dtype="int8", block_tokens=(CHUNK,), chunk_tokens=CHUNK
)
"""One part of PART_BYTES a chunk."""

_TEXTS: Final[Mapping[str, Any]] = dict.fromkeys(
    ("revision", "quantisation", "kv_scales", "draft", "tenant"), ""
)
_SECONDS: Final = 20.0  # an answer may take so long on a busy machine


class SmallDaemon:
    """Sessions over an arena of `slots` parts. Its processes are made up: see ``process``.

    urls: tiers below DRAM. What it is given besides goes to Sessions.
    """

    def __init__(self, slots: int, *urls: str, **settings: Any) -> None:
        self.clock = Hands()
        self.slots = slots
        self._urls = urls
        self._settings = settings
        self._processes: dict[int, Process] = {}
        self._arena = sealed_memory(slots * PART_BYTES)
        self._grants = make_grants()
        self._start()

    def _start(self) -> None:
        config = Config.from_urls([f"dram:{self.slots * PART_BYTES}B", *self._urls])
        arena = Arena(0, fd=os.dup(self._arena))
        self.depot = Depot.open(config, self.clock, ThreadFlow(), arena)
        self.grants = Grants(os.dup(self._grants), self.depot.arena.id)
        self.generation = self.grants.generation
        self.sessions = Sessions(
            self.depot, self.grants, self.clock, again=self._again, **self._settings
        )

    def restart(self) -> None:
        """End the server; another one gets the arena and the grants."""
        self.sessions.close()
        self._start()

    def process(self, pid: int) -> Process:
        """Return a process of that number, which lives until ``kill``."""
        return self._processes.setdefault(pid, Process(pid, 1000 + pid))

    def kill(self, pid: int) -> None:
        """End a process, and tell the server."""
        process = self._processes.pop(pid)
        process.dead = True
        self.sessions.died(process)

    def _again(self, pid: int, start_time: int) -> Process:
        process = self._processes.get(pid)
        if process is None or process.start_time != start_time:
            return Process(pid, start_time, dead=True)
        return process

    def client(
        self,
        pid: int,
        name: str = "",
        *,
        engine: str = "",
        role: Literal["scheduler", "worker"] = "scheduler",
    ) -> Client:
        """Return a client that has said Hello. name: of its session, by default the process's."""
        token = hashlib.sha256((name or f"{role} {pid}").encode()).digest()[:16]
        return Client(self, self.process(pid), token, engine, role)

    def close(self) -> None:
        """End all of it. Idempotent."""
        self.sessions.close()
        for fd in (self._arena, self._grants):
            if fd >= 0:
                os.close(fd)
        self._arena = self._grants = -1


class Client:
    """One session with one connection. desk: of the namespace that it has joined, 0 for none.

    slots: that the last lease, or reservation, gave.
    """

    def __init__(
        self,
        daemon: SmallDaemon,
        process: Process,
        token: bytes,
        engine: str,
        role: Literal["scheduler", "worker"],
    ) -> None:
        self.daemon = daemon
        self.process = process
        self.hello = messages.Hello(token, engine, role)
        self.desk = 0
        self.slots: list[Slot] = []
        self.connect()

    @property
    def token(self) -> bytes:
        """What its session is called by."""
        return self.hello.session

    def connect(self) -> None:
        """Open one more connection."""
        self.session: Session = self.daemon.sessions.hello(self.hello, self.process)

    def disconnect(self) -> None:
        """Close one connection."""
        self.daemon.sessions.closed(self.session)

    def told(self, message: Message) -> list[Message]:
        """Say something; return what is answered at once."""
        found: list[Message] = []
        self.daemon.sessions.handle(self.session, message, found.append)
        return found

    def ask(self, message: Message) -> Any:
        """Say something and wait for its answer; Progress does not count as one."""
        found: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.daemon.sessions.handle(self.session, message, found.put)
        while isinstance(answer := found.get(timeout=_SECONDS), answers.Progress):
            pass
        return answer

    # ---- what caches ask

    def join(self, model: str = "model", **fields: Any) -> int:
        """Join a namespace; return the desk."""
        given = dict(_TEXTS) | {
            "geometry": GEOMETRY,
            "config_digest": b"",
            "shards": 1,
            "stages": 1,
        }
        self.desk = self.ask(messages.Join(model, **(given | fields))).desk
        return self.desk

    def save(self, text: str, chunks: int, *, ok: bool = True) -> int:
        """Save a prompt, as an engine would; return how many chunks found no room."""
        plan, refused = self.reserve(text, chunks)
        if plan:
            self.settle(plan, ok=ok)
        self.ask(messages.Flush(self.desk, _SECONDS))
        return refused

    def reserve(self, text: str, chunks: int) -> tuple[int, int]:
        """Reserve for a prompt; return the plan's id and how many chunks found no room."""
        answer = self.ask(messages.Reserve(self.desk, prompt(text, chunks), 0, None, []))
        self.slots = unpack_slots(answer.slots)
        return answer.plan, answer.refused

    def match(self, text: str, chunks: int) -> int:
        """Return how many chunks of a prompt are there."""
        tokens: int = self.ask(messages.Match(self.desk, prompt(text, chunks))).tokens
        return tokens // CHUNK

    def lease(self, text: str, chunks: int, seconds: float = 60.0) -> int:
        """Lease a prompt; return the lease's number, 0 for none."""
        answer = self.ask(
            messages.Lease(self.desk, prompt(text, chunks), chunks * CHUNK, 0, seconds)
        )
        self.slots = unpack_slots(answer.slots)
        number: int = answer.lease
        return number

    def issue(self, lease: int) -> int:
        """Let a plan of a lease go out; return its id, 0 for none."""
        plan: int = self.ask(messages.Issue(self.desk, lease)).value
        return plan

    def settle(self, plan: int, *, ok: bool = True) -> None:
        """Say that a plan's copies have ended."""
        self.told(messages.Settle(plan, ok))

    def ended(self, plan: int) -> None:
        """Say, as a worker, that this process executes a plan no more."""
        self.told(messages.Ended(plan))


def prompt(text: str, chunks: int, **changes: Any) -> Prompt:
    """Return a prompt of so many chunks and one token more, by made-up keys."""
    keys = [hashlib.sha256(f"{text} {at}".encode()).digest() for at in range(chunks)]
    fields: Mapping[str, Any] = {
        "tokens": chunks * CHUNK + 1,
        "chunks": chunks,
        "last": keys[-1] if keys else b"",
        "keys": b"".join(keys),
        **changes,
    }
    return Prompt(**fields)
