"""Soak: many clients of one daemon, all of which are killed and stopped again and again.

    python -m kvtier.testing.soak [--seconds N] [--clients N] [--seed N] [--stalls N] [--json FILE]

Each client is a process of its own that saves and loads prompts, and checks each byte that it
loads. The server is killed every two seconds, once it has answered again; every minute its
supervisor is, and another daemon started in its place. Clients are stopped and continued, killed,
and replaced. Some stop themselves when a copy of theirs is queued, and are continued only when
their lease has long ended and others have used the slots that were free.

The last line is a JSON object:

wrong_bytes           bytes loaded, in words of 8 that were not what the tokens say
hangs                 steps of a client, its opening and its end included, longer than 25 s
leaked_leases         slots that the daemon still holds for somebody when all clients have ended
arenas_alive_max      arenas mapped at once when the daemon has answered for half a second, in which
                      all clients look for it again; not in the second after another daemon has
                      started, and not by processes that are stopped or were a second ago
resumed_within_s_max  from the daemon's first answer after a kill to that of a client that was not
                      stopped meanwhile; it pauses up to 0.25 s of its own between two prompts
errors                exceptions in clients; refusals and misses are none
unopened              clients that found no daemon within the ten seconds that opening may take, and
                      ended, as it says
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import kvtier
from kvtier.testing.daemon import Daemon, running
from kvtier.testing.soaked import CHUNK_BYTES, LEASE_SECONDS, NAMESPACE, Board, Row, client
from kvtier.testing.soakwatch import Probe, arenas_mapped, state
from kvtier.testing.with_parent import fork_with_parent

_TICK_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = 0.25  # between two looks at what is mapped
_HUNG_SECONDS: Final = 25.0  # opening may take 10 s to find a daemon, and as many to join
_AGAIN_SECONDS: Final = 0.5  # the longest that a client waits before it looks for a daemon again
_LET_GO_SECONDS: Final = 1.0  # in which memory that is gone may be mapped still
_CHUNKS: Final = 192  # in DRAM; the prompts have more than twice as many
_HELD: Final = ("kvtier_leased_parts", "kvtier_quarantined_slots", "kvtier_plans_out")


@dataclass
class _Crewman:
    """One client's process. wake: when to continue it, 0.0 while it runs."""

    number: int
    pid: int = 0
    start_at: float = 0.0
    running_since: float = 0.0
    wake: float = 0.0


@dataclass
class _Tally:
    """What happened."""

    kills: int = 0
    supervisors_killed: int = 0
    stops: int = 0
    clients_killed: int = 0
    hangs: int = 0
    arenas: int = 0
    resumed: list[float] = field(default_factory=list)


class Soak:
    """One run. Its process has one thread until all clients have ended.

    start: starts a daemon, in place of the one before. stalls: one copy in so many stands still.
    longest: seconds that a client stays stopped beyond its lease, at most.
    server: seconds between two kills. supervisor: after so many seconds each daemon's is killed, 0
    for never.
    """

    def __init__(
        self,
        start: Callable[[], Daemon],
        board: Board,
        seed: int,
        stalls: int,
        *,
        longest: float,
        server: float,
        supervisor: float,
    ) -> None:
        self._start_daemon = start
        self._daemon = daemon = start()
        self._longest = longest
        self._server_lives = server
        self._every = supervisor
        self._began = time.monotonic()  # the daemon that there is
        self._board = board
        self._random = Random(seed)
        self._stalls = stalls
        self._url = daemon.url
        self._probe = Probe(Path(daemon.path))
        self._crew = [_Crewman(number) for number in range(len(board.rows))]
        self._waiting: dict[int, None] = {}  # clients that have yet to be answered again
        self._returned = 0.0
        self._killed = 0.0
        self._looked = 0.0
        self.tally = _Tally()

    def run(self, seconds: float, *, first: bool = False, least: float = math.inf) -> None:
        """Go on for so long, or to the `first` wrong byte or second arena, and let all end.

        After `least` seconds it is enough if each kind of harm was done.
        """
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            if first and (self._board.sum(Row.WRONG_BYTES) or self.tally.arenas > 1):
                break
            if time.monotonic() > begin + least and self._done():
                break
            self._tick()
            self._harm(time.monotonic())
            time.sleep(_TICK_SECONDS)
        self._end()

    def _done(self) -> bool:
        """Say whether each kind of harm was done, and work in spite of it."""
        tally, board = self.tally, self._board
        harm = [tally.kills, tally.stops, tally.clients_killed, board.sum(Row.STALLED_COPIES)]
        if self._every:
            harm.append(tally.supervisors_killed)
        return all((*harm, tally.resumed, board.sum(Row.LOADS), board.sum(Row.SAVES)))

    def _tick(self) -> None:
        """Look at everything once."""
        now = time.monotonic()
        self._probe.look()
        for one in self._crew:
            self._look_at(one, now)
        self._resumed()
        settled = self._returned and now > self._returned + _AGAIN_SECONDS
        if settled and now > max(self._looked + _LOOK_SECONDS, self._began + _LET_GO_SECONDS):
            self._looked = now
            pids = [
                one.pid
                for one in self._crew
                if one.pid and not one.wake and now > one.running_since + _LET_GO_SECONDS
            ]
            pids += [self._daemon.supervisor_pid, self._daemon.server_pid()]
            self.tally.arenas = max(self.tally.arenas, len(arenas_mapped(filter(None, pids))))

    def _look_at(self, one: _Crewman, now: float) -> None:
        """Start, continue or bury a client."""
        row = self._board.rows[one.number]
        if not one.pid:
            if now >= one.start_at and not row[Row.STOP]:
                self._start(one, now)
            return
        if os.waitpid(one.pid, os.WNOHANG)[0]:
            one.pid, one.start_at = 0, now + self._random.random() / 2
            self._waiting.pop(one.number, None)
            return
        if state(one.pid) in "Tt":
            self._waiting.pop(one.number, None)
            one.wake = one.wake or now + LEASE_SECONDS + self._random.uniform(0.2, self._longest)
            if now >= one.wake:
                one.wake, one.running_since = 0.0, now
                os.kill(one.pid, signal.SIGCONT)
            return
        begun = int(row[Row.BEGUN_NS]) / 1e9
        if begun and now - max(begun, one.running_since) > _HUNG_SECONDS:
            self.tally.hangs += 1
            _say(f"client {one.pid} hangs")
            os.kill(one.pid, signal.SIGKILL)

    def _start(self, one: _Crewman, now: float) -> None:
        row = self._board.rows[one.number]
        row[Row.ANSWERED_NS] = row[Row.BEGUN_NS] = 0
        seed = self._random.randrange(1 << 32)
        one.pid = fork_with_parent(
            partial(client, self._url, self._board, one.number, seed, self._stalls)
        )
        one.running_since, one.wake = now, 0.0

    def _resumed(self) -> None:
        """See who has been answered since the daemon returned."""
        if self._probe.returned != self._returned:
            self._returned = self._probe.returned
            if self._returned and self._killed:
                rows = self._board.rows
                self._waiting = dict.fromkeys(
                    one.number
                    for one in self._crew
                    if one.pid and not one.wake and rows[one.number, Row.ANSWERED_NS]
                )
        for number in list(self._waiting):
            answered = int(self._board.rows[number, Row.ANSWERED_NS]) / 1e9
            if answered > self._returned:
                self.tally.resumed.append(answered - self._returned)
                del self._waiting[number]

    def _harm(self, now: float) -> None:
        """Kill the server when its time has come; stop or kill a client now and then."""
        answers = self._returned and now - self._returned > self._server_lives / 4
        if answers and now - self._killed > self._server_lives:
            self.tally.resumed += [now - self._returned] * len(self._waiting)
            self._waiting.clear()
            self._killed = now
            if self._every and now - self._began > self._every:
                self._replace()
            elif server := self._daemon.server_pid():
                os.kill(server, signal.SIGKILL)
                self.tally.kills += 1
        per_tick = _TICK_SECONDS * len(self._crew)
        one = self._random.choice(self._crew)
        if one.pid and not one.wake and self._random.random() < per_tick / 16:
            os.kill(one.pid, signal.SIGSTOP)
            self.tally.stops += 1
        one = self._random.choice(self._crew)
        if one.pid and self._random.random() < per_tick / 60:
            os.kill(one.pid, signal.SIGKILL)
            self.tally.clients_killed += 1

    def _replace(self) -> None:
        """Kill the supervisor, and start another daemon. Blocks."""
        os.kill(self._daemon.supervisor_pid, signal.SIGKILL)
        self.tally.supervisors_killed += 1
        self._daemon = self._start_daemon()
        self._began = time.monotonic()

    def _end(self) -> None:
        """Let all clients end, in order and within bounds."""
        self._board.rows[:, Row.STOP] = 1
        end = time.monotonic() + _HUNG_SECONDS
        while any(one.pid for one in self._crew):
            self._tick()
            if time.monotonic() > end:
                for one in self._crew:
                    if one.pid:
                        self.tally.hangs += 1
                        _say(f"client {one.pid} does not end")
                        os.kill(one.pid, signal.SIGKILL)
                end = time.monotonic() + _HUNG_SECONDS
            time.sleep(_TICK_SECONDS)
        self._probe.close()

    def leaked(self) -> int:
        """Return what the daemon still holds for clients, all of which have ended. Waits."""
        with kvtier.open(self._url, namespace=NAMESPACE) as cache:
            end = time.monotonic() + _HUNG_SECONDS
            while True:
                figures = cache.figures()
                held = sum(int(figures[name]) for name in _HELD)
                if not held or time.monotonic() > end:
                    return held
                time.sleep(_TICK_SECONDS)

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        board, tally = self._board, self.tally
        resumed = sorted(tally.resumed) or [0.0]
        return {
            "wrong_bytes": board.sum(Row.WRONG_BYTES),
            "hangs": tally.hangs,
            "leaked_leases": self.leaked(),
            "arenas_alive_max": tally.arenas,
            "resumed_within_s_max": round(resumed[-1], 3),
            "resumed_within_s_p50": round(statistics.median(resumed), 3),
            "resumed_within_s_p99": round(resumed[len(resumed) * 99 // 100], 3),
            "resumes": len(tally.resumed),
            "errors": board.sum(Row.ERRORS),
            "unopened": board.sum(Row.UNOPENED),
            "kills": tally.kills,
            "supervisors_killed": tally.supervisors_killed,
            "clients_killed": tally.clients_killed,
            "stops": tally.stops,
            "stalled_copies": board.sum(Row.STALLED_COPIES),
            "loads": board.sum(Row.LOADS),
            "saves": board.sum(Row.SAVES),
            "misses": board.sum(Row.MISSES),
            "checked_bytes": board.sum(Row.CHECKED_BYTES),
        }


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> None:
    """Run from the command line. Exits with 1 when something was wrong."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--seconds", type=float, default=600.0)
    arguments.add_argument("--clients", type=int, default=64)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--stalls", type=int, default=20, help="one copy in so many is stalled")
    arguments.add_argument("--longest", type=float, default=2.5, help="seconds of a stop")
    arguments.add_argument("--server", type=float, default=2.0, help="seconds that one lives")
    arguments.add_argument("--chunks", type=int, default=_CHUNKS, help="that DRAM has room for")
    arguments.add_argument("--supervisor", type=float, default=60.0, help="seconds that one lives")
    arguments.add_argument("--first", action="store_true", help="end at what is found first")
    arguments.add_argument(
        "--least", type=float, default=math.inf, help="end then, if each kind of harm was done"
    )
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        tiers = (f"dram:{options.chunks * CHUNK_BYTES}B", f"lmdb:{folder / 'nvme'}?capacity=256MiB")

        def start() -> Daemon:
            ends.close()  # the one before has ended
            return ends.enter_context(running(*tiers, path=folder / "kv.sock"))

        board = Board(folder / "board", options.clients)
        soak = Soak(
            start,
            board,
            options.seed,
            options.stalls,
            longest=options.longest,
            server=options.server,
            supervisor=options.supervisor,
        )
        soak.run(options.seconds, first=options.first, least=options.least)
        report = soak.report()
    report |= {"seconds": options.seconds, "clients": options.clients, "seed": options.seed}
    line = json.dumps(report)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    bad = any(report[name] for name in ("wrong_bytes", "hangs", "leaked_leases", "errors"))
    sys.exit(bad or report["arenas_alive_max"] > 1)


if __name__ == "__main__":
    main()
