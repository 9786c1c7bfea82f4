"""A fleet on one machine: each host is a process with a disk and a way to the bucket of its own.

``python -m kvtier.testing.fleet`` is one host: a toy engine on a cache, told what to do by lines
of JSON on stdin. ``Host`` is its other end. What a host loads is compared byte by byte with what
it would have computed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kvtier.errors import KvtierError
from kvtier.testing import toy as toy_engine
from kvtier.testing.toy import BLOCK, Toy, opened, pattern, prompt
from kvtier.testing.with_parent import with_parent

LIAR: Final = "KVTIER_TESTING_LIAR"
"""Set for a host, it computes other KV than all others: a test sees that this would be seen."""

_ANSWER_SECONDS: Final = 50.0
_END_SECONDS: Final = 15.0


class Save(msgspec.Struct, frozen=True, tag=True):
    """Compute and save the prompts of these seeds; wait so long until they are written down."""

    seeds: Sequence[int]
    tokens: int
    flush: float


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load what there is of the prompts of these seeds, DRAM being emptied before."""

    seeds: Sequence[int]
    tokens: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Empty a tier of what this host knows."""

    tier: str


class Figures(msgspec.Struct, frozen=True, tag=True):
    """Say what was counted."""


class Saved(msgspec.Struct, frozen=True, tag=True):
    """flushed: whether all was written down in time."""

    flushed: bool


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """tokens: loaded, by prompt. exact: whether every byte was right. seconds: of the slowest."""

    tokens: list[int]
    exact: bool
    seconds: float


class Done(msgspec.Struct, frozen=True, tag=True):
    """What was to be done is done."""

    figures: Mapping[str, float] = {}


Request = Save | Load | Forget | Figures
Reply = Saved | Loaded | Done
R = TypeVar("R", bound=Reply)


class Host:
    """One host of a fleet, seen from the test. For one thread; a context manager.

    inside: what goes before the command of its process, such as the door of a network namespace.
    """

    def __init__(
        self, tiers: Sequence[str], env: Mapping[str, str], inside: Sequence[str] = ()
    ) -> None:
        self._tiers = tiers
        self._inside = inside
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start its process; it is ready when its first answer comes."""
        self._process = subprocess.Popen(  # noqa: S603  (our own command)
            [*self._inside, *with_parent([sys.executable, "-m", __name__, *self._tiers])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
            cwd=Path(__file__).parents[2],
        )

    def kill(self) -> None:
        """End it by SIGKILL, in the middle of whatever it does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._let_go()

    def close(self) -> None:
        """End it in order, or after a while by force. Idempotent."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def send(self, request: Request) -> None:
        """Tell it to do something; its answer must be received before the next."""
        if self._process is None or self._process.stdin is None:
            raise KvtierError("the host does not run")
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()

    def receive(self, kind: type[R]) -> R:
        """Wait for the answer. Raises KvtierError if the host has died or does not answer."""
        if self._process is None or self._process.stdout is None:
            raise KvtierError("the host does not run")
        stdout = self._process.stdout
        if not select.select([stdout], [], [], _ANSWER_SECONDS)[0]:
            raise KvtierError(f"a host has not answered for {_ANSWER_SECONDS:.0f} s")
        reply = msgspec.json.decode(stdout.readline() or b"{}", type=Reply)
        if not isinstance(reply, kind):
            raise KvtierError(f"a host answered {type(reply).__name__}")
        return reply

    def ask(self, request: Request, kind: type[R]) -> R:
        """Tell it to do something, and wait until it is done."""
        self.send(request)
        return self.receive(kind)

    def save(self, seeds: Sequence[int], tokens: int, flush: float = 20.0) -> Saved:
        """See Save."""
        return self.ask(Save(seeds, tokens, flush), Saved)

    def load(self, seeds: Sequence[int], tokens: int) -> Loaded:
        """See Load."""
        return self.ask(Load(seeds, tokens), Loaded)

    def forget(self, tier: str) -> None:
        """See Forget."""
        self.ask(Forget(tier), Done)

    def figures(self) -> Mapping[str, float]:
        """See Figures."""
        return self.ask(Figures(), Done).figures


# ------------------------------------------------------------------------------------- the host


def _answer(toy: Toy, request: Request, serial: int) -> Reply:
    match request:
        case Save():
            for seed in request.seeds:
                _save(toy, f"save-{serial}-{seed}", seed, request.tokens)
            return Saved(toy.cache.flush(timeout=request.flush))
        case Load():
            return _load(toy, request, serial)
        case Forget():
            toy.cache.clear(request.tier)
            return Done()
        case Figures():
            return Done(toy.cache.figures())


def _save(toy: Toy, name: str, seed: int, tokens: int) -> None:
    asked = prompt(tokens, seed)
    blocks = range(tokens // BLOCK)
    toy.compute(asked, blocks)
    toy.connector.save(name, asked, list(blocks))
    if toy.connector.finish(name):
        toy.until(lambda update: name in update.released)


def _load(toy: Toy, request: Load, serial: int) -> Loaded:
    counts, exact, slowest = [], True, 0.0
    for seed in request.seeds:
        toy.cache.clear("dram")
        begin = time.monotonic()
        _, loaded, same = toy.load(f"load-{serial}-{seed}", prompt(request.tokens, seed))
        slowest = max(slowest, time.monotonic() - begin)
        counts.append(loaded.tokens if loaded else 0)
        exact &= same
    return Loaded(counts, exact, slowest)


def main() -> None:
    """Be a host until stdin ends."""
    if os.environ.get(LIAR):
        toy_engine.pattern = lambda tokens: ~pattern(tokens)
    toy = opened(*sys.argv[1:])
    decode = msgspec.json.Decoder(Request).decode
    for serial, line in enumerate(sys.stdin.buffer):
        reply = _answer(toy, decode(line), serial)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    toy.close()


if __name__ == "__main__":
    main()
