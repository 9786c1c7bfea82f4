"""Sessions under siege: a hostile client says whatever is well-formed, an honest one goes on.

Both are sessions of one server over a real Depot, without sockets. The hostile one is said to be
a process that is killed and replaced now and then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

import kvtier
from kvtier.clock import monotonic
from kvtier.daemon import answers, messages
from kvtier.daemon.grants import Grants, make_grants
from kvtier.daemon.messages import Message, Prompt
from kvtier.daemon.process import Process
from kvtier.daemon.sessions import Session, Sessions
from kvtier.depot import Depot
from kvtier.errors import KvtierError, ProtocolError
from kvtier.memory.arena import Arena, Slot
from kvtier.memory.packed import unpack_slots
from kvtier.memory.sealed import sealed_memory
from kvtier.seams import ThreadFlow
from kvtier.testing.wire import PROMPT
from kvtier.testing.with_parent import with_parent

_M = TypeVar("_M", bound=Message)

_CHUNK: Final = 256
_CHUNKS: Final = 4
_GEOMETRY: Final = kvtier.Geometry(
    (kvtier.Component(layers=1, heads=1, head_size=8),), chunk_tokens=_CHUNK
)
_PART_BYTES: Final = _GEOMETRY.bytes_per_token * _CHUNK
_ARENA_BYTES: Final = 4 << 20
_WAIT_SECONDS: Final = 20.0
_SPARED: Final = 0.95
_KNOWN: Final = 32  # numbers of each kind that the hostile client remembers


_WELL: Final[dict[str, Any]] = {"places": None, "kept": [], "first": 0, "tokens": 512}
"""What fields have that are not hostile this time."""


def _joining(model: str) -> messages.Join:
    return messages.Join(model, _GEOMETRY, "", b"", "", "", "", "", 1, 1)


def _prompt(keys: list[bytes]) -> Prompt:
    return Prompt(len(keys) * _CHUNK + 1, len(keys), keys[-1], b"".join(keys))


class Besieged:
    """Sessions, and both clients of them. Ends with ``close``.

    said: how often what came of a hostile message, by its kind and what that was.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.said: Counter[str] = Counter()
        self.slowest_ms = 0.0
        self.checks = self.refused = self.deaths = 0
        self._random = Random(seed)
        self._arena = Arena(0, fd=sealed_memory(_ARENA_BYTES))
        config = kvtier.Config.from_urls(["dram:4MiB", f"lmdb:{folder / 'kv'}?capacity=32MiB"])
        depot = Depot.open(config, monotonic, ThreadFlow(), self._arena)
        self.sessions = Sessions(depot, Grants(make_grants(), depot.arena.id), monotonic)
        self._here = Process.of(os.pidfd_open(os.getpid()), os.getpid())
        self._honest = self._hello(self._here)
        self._desk = self._ask(_joining("honest"), answers.Joined).desk
        self._saved: list[list[bytes]] = []
        self._numbers: dict[str, list[int]] = {}
        self._child, self._process, self._enemy = self._entered()

    # ---- the hostile client

    def say(self, message: Message) -> None:
        """Have the hostile client say it, aimed at what there is. Whatever raises is a finding."""
        if isinstance(message, messages.Hello):
            self._reconnect(message)
            return
        if message.KIND >= answers.Welcome.KIND and self._random.random() < _SPARED:
            return  # it would only end the session
        message = self._aimed(message)
        kind = type(message).__name__
        begin = time.perf_counter()
        try:
            self.sessions.handle(self._enemy, message, self._heard)
            self.said[f"{kind} taken"] += 1
            if isinstance(message, messages.Leave | messages.Resume):
                self._join(self._enemy)
        except ProtocolError:
            self.said[f"{kind} refused"] += 1
            self.sessions.closed(self._enemy)
            self._enemy = self._joined(self._process)
        except KvtierError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, KvtierError):
                raise AssertionError(f"{message} broke the daemon") from error
            self.said[f"{kind} refused"] += 1
        self.slowest_ms = max(self.slowest_ms, (time.perf_counter() - begin) * 1e3)

    def succeed(self) -> None:
        """Kill the hostile client's process, and begin with another one."""
        self._leave()
        self._child, self._process, self._enemy = self._entered()

    def _entered(self) -> tuple[subprocess.Popen[bytes], Process, Session]:
        """Return a process that does nothing, and a session of it."""
        command = with_parent([sys.executable, "-ISc", "import sys; sys.stdin.read()"])
        child = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603  (our own)
        process = Process.of(os.pidfd_open(child.pid), child.pid)
        return child, process, self._joined(process)

    def _leave(self) -> None:
        self._child.kill()
        self._child.communicate()
        self._process.dead = True
        self.sessions.died(self._process)
        self.sessions.closed(self._enemy)
        self._process.close()
        self.deaths += 1

    def _joined(self, process: Process) -> Session:
        """Return a new session of the hostile client, with a desk."""
        self._numbers = {"desk": [], "lease": [], "plan": []}
        session = self._hello(process)
        self._join(session)
        return session

    def _join(self, session: Session) -> None:
        with contextlib.suppress(KvtierError):  # it may have as many as it may
            self.sessions.handle(session, _joining("hostile"), self._heard)

    def _reconnect(self, message: messages.Hello) -> None:
        """Open one connection more, of any session, and close it again."""
        with contextlib.suppress(KvtierError):
            self.sessions.closed(self.sessions.hello(message, self._process))

    def _aimed(self, message: Message) -> Message:
        """Return it with numbers that mean something, most of the time."""
        random, kind = self._random, type(message)
        aimed: dict[str, Any] = {}
        for field in message.__struct_fields__:
            if random.random() < 0.2:
                continue
            if field == "desk" and random.random() < 0.1:
                aimed[field] = self._desk  # the honest client's
            elif self._numbers.get(field):
                aimed[field] = random.choice(self._numbers[field])
            elif field == "prompt" and random.random() < 0.5:
                known = [PROMPT, *map(_prompt, self._saved)]
                # Whoever knows the keys of another namespace could as well write into its slots.
                aimed[field] = PROMPT if kind is messages.Reserve else random.choice(known)
            elif field in {"timeout", "within"}:
                aimed[field] = random.random() / 10
            elif field in _WELL:
                aimed[field] = _WELL[field]
        return msgspec.structs.replace(message, **aimed)

    def _heard(self, message: Message) -> None:
        """Take an answer. It may come from any thread."""
        self.said[f"{type(message).__name__} heard"] += 1
        for field in ("desk", "lease", "plan"):
            if value := getattr(message, field, 0):
                self._numbers[field] = [*self._numbers[field][1 - _KNOWN :], value]
        if isinstance(message, answers.Count) and message.value:
            self._numbers["plan"] = [*self._numbers["plan"][1 - _KNOWN :], message.value]

    # ---- the honest client

    def check(self) -> None:
        """Have the honest client save and load. Raises AssertionError when something is wrong."""
        self.checks += 1
        self.sessions.tick()
        keys = [self._random.randbytes(32) for _ in range(_CHUNKS)]
        assert not self._match(keys).tokens, "what nobody saved was found"
        if self._save(keys):
            self._flush()
            self._saved = [*self._saved[-7:], keys]
        else:
            self.refused += 1
        for saved in self._saved:
            self._load(saved)

    def _save(self, keys: list[bytes]) -> bool:
        reserved = self._ask(
            messages.Reserve(self._desk, _prompt(keys), 0, None, []), answers.Reserved
        )
        if not reserved.plan:
            return False
        slots = unpack_slots(reserved.slots)
        for chunk, slot in zip(np.frombuffer(reserved.chunks, "<u4").tolist(), slots, strict=True):
            self._view(slot)[:] = _content(keys[chunk])
        whole = not reserved.refused
        self._tell(messages.Settle(reserved.plan, ok=True))
        return whole

    def _load(self, keys: list[bytes]) -> None:
        match = self._match(keys)
        if not match.tokens or any(match.tiers):
            return
        lease = self._ask(
            messages.Lease(self._desk, _prompt(keys), match.tokens, 0, 30.0), answers.Leased
        )
        if not lease.lease:
            return
        plan = self._ask(messages.Issue(self._desk, lease.lease), answers.Count).value
        assert plan, "a lease that has just begun has ended"
        self._tell(messages.Release(lease.lease))
        for key, slot in zip(keys, unpack_slots(lease.slots), strict=False):
            assert (self._view(slot) == _content(key)).all(), "wrong bytes"
        self._tell(messages.Settle(plan, ok=True))

    def _match(self, keys: list[bytes]) -> answers.Matched:
        return self._ask(messages.Match(self._desk, _prompt(keys)), answers.Matched)

    def _flush(self) -> None:
        """Wait until what was saved is published; somebody may have removed it again."""
        flushed = self._ask(messages.Flush(self._desk, _WAIT_SECONDS), answers.Told)
        assert flushed.value, "what was saved is not written down in time"

    def _view(self, slot: Slot) -> Any:
        return self._arena.memory[slot.offset : slot.offset + _PART_BYTES]

    def _tell(self, message: Message) -> None:
        """Say what has no answer."""
        said: list[Message] = []
        self.sessions.handle(self._honest, message, said.append)
        assert not said, f"an answer to a {type(message).__name__}: {said}"

    def _ask(self, message: Message, kind: type[_M]) -> _M:
        """Say what has an answer, and wait for it."""
        said: list[Message] = []
        self.sessions.handle(self._honest, message, said.append)
        end = time.monotonic() + _WAIT_SECONDS
        while not said and time.monotonic() < end:
            time.sleep(0.0005)
        assert said, f"no answer to a {type(message).__name__}"
        assert isinstance(said[0], kind), f"to a {type(message).__name__}: {said[0]}"
        return said[0]

    # ---- both

    def _hello(self, process: Process) -> Session:
        token = self._random.randbytes(16)
        return self.sessions.hello(messages.Hello(token, "", "scheduler"), process)

    def held(self) -> int:
        """Return what is held when the hostile client is gone and nothing is under way. Waits."""
        self._leave()
        end = time.monotonic() + _WAIT_SECONDS
        while (held := _held(self.sessions.figures())) and time.monotonic() < end:
            self.sessions.tick()
            time.sleep(0.01)
        self._child, self._process, self._enemy = self._entered()
        return held

    def close(self) -> None:
        """End all."""
        self._leave()
        self.sessions.closed(self._honest)
        self.sessions.close()
        self._here.close()


def _content(key: bytes) -> Any:
    """Return the bytes of a chunk that has this key."""
    words = np.frombuffer(key, "<u8").astype(np.uint64)
    return np.resize(words * np.uint64(0x9E3779B97F4A7C15), _PART_BYTES // 8).view(np.uint8)


def _held(figures: dict[str, float]) -> int:
    names: Iterable[str] = ("kvtier_leased_parts", "kvtier_quarantined_slots")
    return sum(int(figures[name]) for name in names)
