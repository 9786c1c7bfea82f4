"""Many clients, their ranks and a server walk at random, beside a plain model of who holds what."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvtier.daemon import messages
from kvtier.daemon.out import PLAN_BITS, first_plan
from kvtier.memory.arena import Slot
from kvtier.testing.small_daemon import CHUNK, PART_BYTES, Client, SmallDaemon, prompt

_SLOTS: Final = 16
_TEXTS: Final = "abcde"
_ENGINES: Final = ("one", "two")
ACTS: Final = {
    "come": 4,
    "rank": 3,
    "save": 6,
    "lease": 8,
    "fetch": 4,
    "issue": 4,
    "settle": 8,
    "release": 2,
    "disconnect": 1,
    "connect": 3,
    "kill": 1,
    "ended": 4,
    "steal": 2,
    "time": 3,
    "resume": 1,
    "restart": 0.6,
}
"""What happens, and how often."""


@dataclass(eq=False)
class _Plan:
    """A plan that is out. lease: of which it is, 0 for a save. ended: ranks that ended it."""

    number: int
    client: Client
    engine: str
    lease: int
    slots: list[Slot]
    ended: set[int] = field(default_factory=set)

    @property
    def saves(self) -> bool:
        """Whether it is a save's."""
        return not self.lease


class _Held(NamedTuple):
    """A lease that a client has. until: its deadline. counts: against the client's limit."""

    number: int
    until: float
    nbytes: int
    counts: bool = True


class Walk:
    """The daemon, its clients and ranks, and what the model says of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.daemon = SmallDaemon(_SLOTS, "memory:walk?capacity=256KiB")
        self.pids = iter(range(1, 1 << 20))
        self.clients: list[Client] = []
        self.connected: dict[Client, int] = {}
        self.ranks: dict[Client, str] = {}
        self.leases: dict[Client, list[_Held]] = {}
        self.plans: list[_Plan] = []
        self.seen: Counter[str] = Counter()

    # ---- steps

    def step(self) -> None:
        """Do one thing, and compare with the model."""
        act = self.random.choices([*ACTS], [*ACTS.values()])[0]
        if getattr(self, f"_{act}")() is not False:
            self.seen[act] += 1
        self._check()

    def _one(self, *, connected: bool = True) -> Client | None:
        some = [one for one in self.clients if bool(self.connected[one]) == connected]
        return self.random.choice(some) if some else None

    def _come(self) -> bool:
        if len(self.clients) >= 4:
            return False
        engine = self.random.choice(_ENGINES)
        pid = next(self.pids)
        client = self.daemon.client(pid, f"client {pid}", engine=engine)
        client.join()
        self.clients.append(client)
        self.connected[client] = 1
        self.leases[client] = []
        return True

    def _rank(self) -> bool:
        if len(self.ranks) >= 3:
            return False
        engine, pid = self.random.choice(_ENGINES), next(self.pids)
        made = self.daemon.client(pid, f"rank {pid}", engine=engine, role="worker")
        self.ranks[made] = engine
        if self.random.random() < 0.3:
            made.disconnect()
        return True

    def _text(self) -> str:
        return self.random.choice(_TEXTS)

    def _save(self) -> bool:
        client = self._one()
        if client is None:
            return False
        plan, _ = client.reserve(self._text(), self.random.randint(1, 6))
        if plan:
            self._went_out(plan, client, 0)
        return True

    def _lease(self) -> bool:
        client = self._one()
        if client is None:
            return False
        text = self._text()
        chunks = client.match(text, 6)
        if not chunks:
            return False
        seconds = self.random.uniform(1, 30)
        lease = client.lease(text, chunks, seconds)
        if lease:
            until, nbytes = self.daemon.clock.now + seconds, len(client.slots) * PART_BYTES
            self.leases[client].append(_Held(lease, until, nbytes))
        return bool(lease)

    def _fetch(self) -> bool:
        """Bring up what lies below DRAM, and lease or pin it, or do not."""
        client = self._one()
        if client is None:
            return False
        text, seconds = self._text(), self.random.uniform(1, 30)
        chunks = client.match(text, 6)
        if not chunks:
            return False
        one, tokens, pin = prompt(text, 6), chunks * CHUNK, self.random.random() < 0.3
        if self.random.random() < 0.2:
            client.ask(messages.Prefetch(client.desk, one, tokens, chunks, unknown=False, within=9))
            return True
        answer = client.ask(
            messages.Fetch(
                client.desk,
                one,
                tokens,
                chunks,
                unknown=False,
                first=0,
                within=9.0,
                hold=seconds,
                pin=pin,
            )
        )
        if answer.lease:
            nbytes = len(answer.slots) // 24 * PART_BYTES
            until = self.daemon.clock.now + seconds
            self.leases[client].append(_Held(answer.lease, until, nbytes, not pin))
        return bool(answer.lease)

    def _issue(self) -> bool:
        client = self._one()
        if client is None or not self.leases[client]:
            return False
        lease, until, *_ = self.random.choice(self.leases[client])
        holding = client.session.holdings.get(lease)
        plan = client.issue(lease)
        assert not plan or self.daemon.clock.now < until
        if plan:
            assert holding
            client.slots = [slot for chunk in holding.lease.slots for slot in chunk]
            self._went_out(plan, client, lease)
        return bool(plan)

    def _went_out(self, number: int, client: Client, lease: int) -> None:
        self.plans.append(_Plan(number, client, client.hello.engine, lease, list(client.slots)))

    def _settle(self) -> bool:
        some = [plan for plan in self.plans if self.connected.get(plan.client)]
        if not some:
            return False
        plan = self.random.choice(some)
        plan.client.settle(plan.number, ok=self.random.random() < 0.9)
        self.plans.remove(plan)
        return True

    def _steal(self) -> bool:
        """Settle a plan that is another's: nothing comes of it."""
        client = self._one()
        some = [plan for plan in self.plans if plan.client is not client]
        if client is None or not some:
            return False
        client.settle(self.random.choice(some).number)
        return True

    def _release(self) -> bool:
        client = self._one()
        if client is None or not self.leases[client]:
            return False
        lease, *_ = self.leases[client].pop(self.random.randrange(len(self.leases[client])))
        client.told(messages.Release(lease))
        return True

    def _disconnect(self) -> bool:
        client = self._one()
        if client is None:
            return False
        client.disconnect()
        self.connected[client] -= 1
        if not self.connected[client]:
            self.leases[client].clear()
        return True

    def _connect(self) -> bool:
        client = self._one(connected=self.random.random() < 0.5)
        if client is None or self.connected[client] > 2:
            return False
        client.connect()
        if not self.connected[client]:
            client.join()
        self.connected[client] += 1
        return True

    def _kill(self) -> bool:
        some = [*self.clients, *self.ranks]
        if not some:
            return False
        victim = self.random.choice(some)
        self.daemon.kill(victim.process.pid)
        if victim in self.ranks:
            del self.ranks[victim]
        else:
            self.clients.remove(victim)
            if self.random.random() < 0.5:
                for _ in range(self.connected[victim]):
                    victim.disconnect()
            self.connected[victim] = 0
            self.leases[victim].clear()
        self._forget_orphans()
        return True

    def _ended(self) -> bool:
        some = [one for one in self.ranks if not one.session.over]
        if not some or not self.plans:
            return False
        rank, plan = self.random.choice(some), self.random.choice(self.plans)
        rank.ended(plan.number)
        plan.ended.add(rank.process.pid)
        self._forget_orphans()
        return True

    def _forget_orphans(self) -> None:
        """Take plans off the list that no living process executes."""
        for plan in list(self.plans):
            ranks = [one for one, engine in self.ranks.items() if engine == plan.engine]
            waits = any(one.process.pid not in plan.ended for one in ranks)
            if plan.client not in self.clients and not waits:
                self.plans.remove(plan)

    def _time(self) -> None:
        self.daemon.clock.now += self.random.uniform(0, 8)
        self.daemon.depot.catalog.expire()
        self.daemon.sessions.tick()
        now = self.daemon.clock.now
        for client, leases in self.leases.items():
            self.leases[client] = [one for one in leases if one.until > now]

    def _resume(self) -> bool:
        client = self._one()
        if client is None:
            return False
        mine = [plan for plan in self.plans if plan.client is client]
        kept = [plan for plan in mine if self.random.random() < 0.5]
        self.plans = [plan for plan in self.plans if plan not in mine or plan in kept]
        data = b"".join(plan.number.to_bytes(8, "little") for plan in kept)
        client.told(messages.Resume(data))
        client.join()
        self.leases[client].clear()
        return True

    def _restart(self) -> None:
        dying = [one for one in self.clients if self.random.random() < 0.2]
        self.daemon.depot.flush(10.0)
        for one in dying:  # between two servers nobody is told
            del self.daemon._processes[one.process.pid]
            self.clients.remove(one)
        self.daemon.restart()
        for client in [*self.connected]:
            self.connected[client] = 0
            self.leases[client].clear()
        self._forget_orphans()

    # ---- what has to hold

    def _check(self) -> None:
        assert self.daemon.depot.flush(20.0)
        arena, outs = self.daemon.depot.arena, self.daemon.sessions._outs
        assert sorted(outs._all) == sorted(plan.number for plan in self.plans)
        assert sorted(self.daemon.grants._heads) == sorted(outs._all)
        for plan in self.plans:
            assert all(arena.holds(slot) for slot in plan.slots), "given away under a copy"
        self._check_owners()
        self._check_charges()
        assert self.daemon.depot.metrics.get("tier_errors") == 0

    def _check_owners(self) -> None:
        """Each slot in use is of one part, or of an earlier server; a save shares with none."""
        index, left = self.daemon.depot.catalog._index, self.daemon.sessions._slots
        rows = [row for row, serial in enumerate(index.serial) if serial and index.names[row]]
        slots = [index.slot(row) for row in rows]
        ranges = sorted((slot.offset, slot.offset + slot.nbytes) for slot in [*slots, *left])
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(ranges))
        assert len(ranges) == self.daemon.depot.arena.slots_in_use
        saved = Counter(slot for plan in self.plans if plan.saves for slot in plan.slots)
        assert set(saved.values()) <= {1}, "two saves share a slot"
        loaded = {slot for plan in self.plans if not plan.saves for slot in plan.slots}
        assert not loaded & set(saved), "a load reads what a save is writing"
        held = {slot for slot, row in zip(slots, rows, strict=True) if index.holds[row]}
        leased = self._leased()
        wanted = {slot for plan in self.plans for slot in plan.slots} - set(left) | leased
        assert wanted <= held
        assert held <= wanted | self._parents(rows), "held for nobody"

    def _leased(self) -> set[Slot]:
        holdings = [
            holding
            for session in self.daemon.sessions._all.values()
            for holding in session.holdings.values()
            if holding.lease.held
        ]
        numbers = [lease for leases in self.leases.values() for lease, *_ in leases]
        assert sorted(one.number for one in holdings) == sorted(numbers)
        return {slot for one in holdings for chunk in one.lease.slots for slot in chunk}

    def _parents(self, rows: list[int]) -> set[Slot]:
        """Return the slots of parents of what is being saved, which a save holds."""
        index = self.daemon.depot.catalog._index
        saving = [row for row in rows if not index.present[row] & 1]
        above = {index.parent[row] for row in saving} - {-1}
        return {index.slot(row) for row in above if index.serial[row]}

    def _fresh(self, plan: _Plan) -> bool:
        """Say whether the server that runs now issued it."""
        return plan.number >> PLAN_BITS == first_plan(self.daemon.grants.life) >> PLAN_BITS

    def _check_charges(self) -> None:
        """A save counts as long as it is out, a lease as long as it or a plan of it lasts."""
        charged: Counter[bytes] = Counter()
        leases = {
            lease: (client, nbytes)
            for client, leases in self.leases.items()
            for lease, _, nbytes, counts in leases
            if counts
        }
        for plan in self.plans:
            nbytes = sum(slot.nbytes for slot in plan.slots)
            if plan.lease and self._fresh(plan):
                leases[plan.lease] = (plan.client, nbytes)
            else:
                charged[plan.client.token] += nbytes
        for client, nbytes in leases.values():
            charged[client.token] += nbytes
        assert self.daemon.sessions._outs._charged == charged
        most = _SLOTS * PART_BYTES // 2
        for client in self.clients:
            old = [p for p in self.plans if p.client is client and not self._fresh(p)]
            assert charged[client.token] <= most or old

    def end(self) -> None:
        """Kill all processes: nothing is left of them."""
        for pid in list(self.daemon._processes):
            self.daemon.kill(pid)
        self.daemon.depot.flush(20.0)
        sessions = self.daemon.sessions
        assert len(sessions._outs) == 0
        assert not sessions._outs._charged
        assert not sessions._outs._members
        assert not sessions._outs._cells
        assert not sessions._all
        assert not sessions._slots
        assert sessions._recall.nbytes == 0
        assert self.daemon.grants.members == []
        assert sessions.figures()["kvtier_leased_parts"] == 0
        assert self.daemon.depot._caches == 1
