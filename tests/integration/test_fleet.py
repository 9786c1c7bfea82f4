"""A fleet: three hosts with a disk each and one bucket. Every byte that is loaded is right."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.fleet import LIAR, Host, Load, Loaded, Save, Saved
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.toy import dram
from kvtier.testing.yard import Yard

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TOKENS = 400  # of a prompt
WHOLE = 384  # what is reused of it
HEAL_SECONDS = 30.0
LONGEST = 20.0  # seconds of a load, whatever the bucket does: its fetch may take five
REASON = re.compile(r'tier_faults_total\{tier="s3",reason="([^"]+)"\}')
_seeds = itertools.count(1)


class Fleet:
    """Hosts A, B, C and the way of each to the bucket."""

    def __init__(self, server, location, folder, yard: Yard | None = None) -> None:
        self.location, self.folder, self.yard = location, folder, yard
        self.env = {**server.env(), "AWS_CONFIG_FILE": os.devnull, "OMP_NUM_THREADS": "1"}
        listeners = [None] * 4 if yard is None else [yard.listener]
        self.proxies = [DelayProxy(server.port, listener=at).__enter__() for at in listeners]
        self.hosts = [self.host(number) for number in range(3)]

    def host(self, number: int, name: str = "", **env: str) -> Host:
        """Start a host; hosts of one number have one way to the bucket."""
        disk = f"lmdb:{self.folder}/{name or number}?capacity=64MiB&admission=through"
        proxy = self.proxies[number % len(self.proxies)]
        way = f"endpoint={proxy.endpoint}&connect_timeout=1s&read_timeout=1s"
        bucket = f"s3:{self.location}?capacity=unbounded&admission=through&{way}"
        inside = self.yard.inside(number) if self.yard else ()
        return Host([dram(64), disk, bucket], {**self.env, **env}, inside)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        for proxy in self.proxies:
            proxy.__exit__(None, None, None)

    def weather(self, fault: Fault, only: str = "") -> None:
        for proxy in self.proxies:
            proxy.inject(fault, only)


@pytest.fixture(scope="module")
def fleet(s3_server, s3_bucket, tmp_path_factory) -> Iterator[Fleet]:
    one = Fleet(s3_server, f"//{s3_bucket}/fleet", tmp_path_factory.mktemp("fleet"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    """Return three hosts in network namespaces of their own, or say that there can be none."""
    one = Yard(3)
    try:
        one.__enter__()
    except ConfigError as refused:
        pytest.skip(str(refused))
    yield one
    one.__exit__(None, None, None)


@pytest.fixture(scope="module")
def apart(yard, s3_server, s3_bucket, tmp_path_factory) -> Iterator[Fleet]:
    """Return a fleet on those hosts."""
    one = Fleet(s3_server, f"//{s3_bucket}/apart", tmp_path_factory.mktemp("apart"), yard)
    yield one
    one.close()


@pytest.fixture
def seeds() -> Callable[[int], list[int]]:
    """Return prompts that no test has used."""
    return lambda count: list(itertools.islice(_seeds, count))


def until_loaded(host: Host, seeds: list[int]) -> None:
    """Load prompts again and again until all of each comes; no byte of any try may be wrong."""
    late = time.monotonic() + HEAL_SECONDS
    while True:
        found = host.load(seeds, TOKENS)
        assert found.exact
        if found.tokens == [WHOLE] * len(seeds):
            return
        time.sleep(0.05)
        assert time.monotonic() < late, f"only {found.tokens} after {HEAL_SECONDS} s"


def harmless(found: Loaded) -> None:
    """Check a load in bad weather: what came is exact, and it did not take for ever."""
    assert found.exact
    assert found.seconds < LONGEST


def test_fleet_what_one_host_computes_the_others_load(fleet, seeds):
    a, b, c = fleet.hosts
    prompts = seeds(4)
    assert a.save(prompts, TOKENS).flushed
    until_loaded(b, prompts)
    until_loaded(c, prompts)
    fetched = b.figures()['kvtier_fetched_bytes_total{tier="s3"}']
    assert fetched > 0
    until_loaded(b, prompts)  # from its own disk
    assert b.figures()['kvtier_fetched_bytes_total{tier="s3"}'] == fetched


def test_fleet_two_hosts_write_the_same_chunks_at_once(fleet, seeds):
    a, b, c = fleet.hosts
    prompts = seeds(4)
    for host in (a, b):
        host.send(Save(prompts, TOKENS, 20.0))
    assert [host.receive(Saved).flushed for host in (a, b)] == [True, True]
    until_loaded(c, prompts)
    b.forget("lmdb")
    until_loaded(b, prompts)


def test_fleet_a_host_dies_in_the_middle_of_a_write(fleet, seeds):
    """Its PUTs hang when it is killed; the others find what is whole, or nothing."""
    _, b, c = fleet.hosts
    prompts, way = seeds(4), fleet.proxies[3]
    doomed = fleet.host(3, "doomed")
    assert doomed.save(prompts[:1], TOKENS).flushed
    way.inject(Fault.HANG, "PUT")
    doomed.send(Save(prompts, TOKENS, 20.0))
    late = time.monotonic() + 20
    while not way.broken[Fault.HANG]:
        assert time.monotonic() < late
        time.sleep(0.01)
    doomed.kill()
    way.inject(Fault.NONE)
    until_loaded(b, prompts[:1])
    harmless(b.load(prompts, TOKENS))
    assert b.save(prompts, TOKENS).flushed
    until_loaded(c, prompts)
    heir = fleet.host(3, "doomed")  # on the dead host's disk
    until_loaded(heir, prompts)
    heir.close()


def test_fleet_a_host_that_computed_other_bytes_would_be_seen(fleet, seeds):
    """The twin of all tests here: what they compare is what the other host has written."""
    prompts = seeds(1)
    liar = fleet.host(3, "liar", **{LIAR: "1"})
    assert liar.save(prompts, TOKENS).flushed
    liar.close()
    found = fleet.hosts[1].load(prompts, TOKENS)
    assert (found.tokens, found.exact) == ([WHOLE], False)


def test_fleet_a_server_is_slow_refuses_hangs_stops_and_comes_back(fleet, seeds, s3_server):
    a, b, c = fleet.hosts
    prompts = seeds(3)
    assert a.save(prompts, TOKENS).flushed
    for proxy in fleet.proxies:
        proxy.slow(0.2)
    harmless(b.load(prompts[:1], TOKENS))
    for proxy in fleet.proxies:
        proxy.slow(0.0)
    for fault in (Fault.HALF, Fault.UNAVAILABLE):
        fleet.weather(fault)
        harmless(c.load(prompts, TOKENS))
        a.save(prompts, TOKENS, flush=0.1)
        harmless(a.load(prompts, TOKENS))
    fleet.weather(Fault.NONE)
    os.kill(s3_server.pid, signal.SIGSTOP)
    try:
        for host in fleet.hosts:
            host.send(Load(prompts, TOKENS))
        for host in fleet.hosts:
            harmless(host.receive(Loaded))
    finally:
        os.kill(s3_server.pid, signal.SIGCONT)
    for host in fleet.hosts:
        until_loaded(host, prompts)


def test_fleet_a_partition_heals(fleet, seeds):
    """B is cut off: it goes on with its own disk, misses what A saves, and finds it afterwards."""
    a, b, c = fleet.hosts
    old, mine, others = seeds(2), seeds(2), seeds(2)
    assert a.save(old, TOKENS).flushed
    until_loaded(b, old)
    fleet.proxies[1].inject(Fault.HANG)
    b.save(mine, TOKENS, flush=0.1)
    assert a.save(others, TOKENS).flushed
    until_loaded(c, others)
    found = b.load(others, TOKENS)
    harmless(found)
    assert found.tokens == [0, 0]
    until_loaded(b, [*old, *mine])
    fleet.proxies[1].inject(Fault.NONE)
    until_loaded(b, others)
    b.save(mine, TOKENS)
    until_loaded(a, old)


def test_fleet_a_cable_is_pulled_and_plugged_in_again(apart, seeds):
    """The same by a network that drops all packets of B, and tells nobody."""
    a, b, c = apart.hosts
    old, mine, others, later = (seeds(2) for _ in range(4))
    assert a.save(old, TOKENS).flushed
    until_loaded(b, old)
    apart.yard.pull(1)
    b.save(mine, TOKENS, flush=0.1)
    assert a.save(others, TOKENS).flushed
    until_loaded(c, others)
    found = b.load(others, TOKENS)
    harmless(found)
    assert found.tokens == [0, 0]
    until_loaded(b, [*old, *mine])  # from its own disk
    causes = set(REASON.findall(" ".join(b.figures())))
    assert causes <= {"ConnectTimeout", "ReadTimeout", "EndpointConnection", "late"}, "a reset"
    assert causes & {"ConnectTimeout", "ReadTimeout"}, b.figures()
    apart.yard.plug(1)
    until_loaded(b, others)
    assert b.save(later, TOKENS).flushed
    until_loaded(a, later)


def test_fleet_two_collections_under_load(fleet, seeds, s3_server):
    """Hosts save and load what two collections delete; what is left, or saved anew, is right."""
    a, b, c = fleet.hosts
    prompts, more = seeds(6), seeds(6)
    assert a.save(prompts, TOKENS).flushed
    until_loaded(b, prompts)
    url = f"s3:{fleet.location}?capacity=100KiB&endpoint={s3_server.endpoint}"
    command = [sys.executable, "-m", "kvtier", "gc", url, "--json"]
    env = {**os.environ, **fleet.env}
    sweepers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=ROOT) for _ in range(2)
    ]
    said = []
    try:
        while any(one.poll() is None for one in sweepers):
            a.send(Save(more, TOKENS, 20.0))
            for host in (b, c):
                host.forget("lmdb")
                host.send(Load([*prompts, *more], TOKENS))
            a.receive(Saved)
            for host in (b, c):
                harmless(host.receive(Loaded))
    finally:
        for one in sweepers:
            out, _ = one.communicate(timeout=50)
            said.append((one.returncode, out))
    swept = [json.loads(out) for status, out in said if status in (0, 1)]
    assert sum(sum(one["removed"].values()) for one in swept) > 0
    for host in (b, c):
        host.forget("lmdb")
        harmless(host.load(prompts, TOKENS))
    assert b.save([*prompts, *more], TOKENS).flushed
    until_loaded(c, [*prompts, *more])
