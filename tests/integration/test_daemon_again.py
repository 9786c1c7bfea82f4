"""A daemon's cache when another server, another daemon, or no daemon answers."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvtier
from kvtier.daemon import up as up_module
from kvtier.daemon.answers import Welcome
from kvtier.daemon.frames import HEADER, encode
from kvtier.daemon.remote import RemoteLease
from kvtier.errors import ConfigError, ProtocolError
from kvtier.testing.daemon import children
from kvtier.testing.mortal import Mortal, arenas, figure, serves
from kvtier.testing.toy import CHUNK, GEOMETRY, NAMESPACE, Toy, prompt
from kvtier.testing.waiting import until
from kvtier.transfer import CopyResult, CopyStatus

OK = CopyResult(CopyStatus.OK)
TOKENS = prompt(4 * CHUNK + 1)
SLACK = 1.0  # for a machine that does other things as well


# --------------------------------------------------------------------------------- started again


def test_a_client_resumes_within_a_second_and_its_old_handles_are_void(daemon):
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    cache = toy.cache
    lease = cache.lease(cache.match(TOKENS), deadline=600)
    plan = cache.plan_load(lease, range(16))
    save = cache.plan_save(cache.prefix(prompt(257, 5)), range(16))
    before = daemon.server
    daemon.kill_server()
    until(lambda: children(daemon.pid) not in ([], [before]))
    begin = time.monotonic()
    until(lambda: cache._desk.link.up is not None)
    until(lambda: cache.plan_save(cache.prefix(prompt(65, 6)), range(4)))
    assert time.monotonic() - begin < 1.0 + SLACK
    assert not lease.held
    assert cache.plan_load(lease, range(16)) is None
    assert not lease.renew(5)
    lease.release()
    # The plans are of a server that is gone; their slots are still nobody else's.
    assert figure(toy, "plans_out") == 3
    pages = cache.bind(toy.kv, toy.device)
    for one in (plan, save):
        assert pages.execute(one, ()).result(20).status is CopyStatus.OK
        cache.settle(one, OK)
    until(lambda: figure(toy, "plans_out") == 1)
    assert cache.match(prompt(257, 5)).chunks == 0, "what was saved into it is nothing"


def test_a_stale_lease_is_refused_by_the_daemon_as_well(daemon, monkeypatch):
    """Its number is of another generation; that the client looks only spares the question."""
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    stale = toy.cache.lease(toy.cache.match(TOKENS), deadline=600)
    before = stale.up
    daemon.kill_server()
    until(lambda: toy.cache._desk.link.up not in (None, before))
    toy.save("b", TOKENS[: 4 * CHUNK])
    fresh = toy.cache.lease(toy.cache.match(TOKENS), deadline=600)
    assert not stale.held
    key, span = (fresh.up, stale.number), (0, 4 * CHUNK)
    again = RemoteLease(span, fresh.names, fresh.packed, fresh.deadline, fresh.origin, key)
    assert toy.cache.plan_load(again, range(16)) is None
    plan = toy.cache.plan_load(fresh, range(16))
    toy.cache.settle(plan, OK)
    fresh.release()


def test_all_namespaces_join_again_and_what_is_bypassed_stays_so(durable):
    toy = durable.open()
    other = Toy(toy.cache.share(kvtier.Namespace("other", GEOMETRY)))
    quiet = toy.cache.share(kvtier.Namespace("quiet", GEOMETRY))
    quiet.bypass = True
    toy.save("a", TOKENS[: 4 * CHUNK])
    other.save("a", prompt(257, 7)[:256])
    link, before = toy.cache._desk.link, toy.cache._desk.link.up
    durable.kill_server()
    until(lambda: link.up not in (None, before))
    assert toy.load("b", TOKENS)[::2] == (4 * CHUNK, True)
    assert other.load("b", prompt(257, 7))[::2] == (256, True)
    assert other.cache.match(TOKENS).chunks == 0
    assert quiet.bypass
    quiet.close()
    other.close()


def test_a_prompt_that_the_daemon_has_forgotten_is_sent_again(daemon, monkeypatch):
    monkeypatch.setattr(up_module, "_TOLD", 10_000)
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    for seed in range(300):  # it remembers 256
        toy.cache.match(prompt(65, 10 + seed))
    told = []
    calls = toy.cache._desk.link.up.calls
    put = calls.put

    def noted(frame: bytes, within: float) -> bool:
        told.append(len(frame))
        return put(frame, within)

    monkeypatch.setattr(calls, "put", noted)
    assert toy.cache.match(TOKENS).tokens == 4 * CHUNK
    assert len(told) == 2, "once without the keys, once with them"
    assert told[1] - told[0] >= 4 * 32


# ------------------------------------------------------------------------- the supervisor is gone


def test_its_memory_is_let_go_at_once_and_a_new_daemon_s_is_mapped(daemon):
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    lease = toy.cache.lease(toy.cache.match(TOKENS), deadline=60)
    plan = toy.cache.plan_load(lease, range(16))
    old = toy.cache._desk.arena.id
    assert arenas() == 1
    daemon.kill()
    until(lambda: arenas() == 0)
    assert toy.cache._desk.arena.id == 0
    pages = toy.cache.bind(toy.kv, toy.device)
    assert pages.execute(plan, ()).result(20).status is CopyStatus.FAILED
    toy.cache.settle(plan, CopyResult(CopyStatus.FAILED))
    assert toy.cache.match(TOKENS) == kvtier.Match(toy.cache.match(TOKENS).prefix, 0)
    daemon.start()
    until(lambda: toy.cache._desk.arena.id not in (0, old))
    assert arenas() == 1
    assert not lease.held
    serves(toy)
    assert figure(toy, "plans_out") == 0


def test_a_copy_in_flight_keeps_its_memory_until_it_has_ended(daemon):
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    assert toy.connector.match("b", TOKENS, 0).tokens == 4 * CHUNK
    gate = threading.Event()
    toy.device.stream("load").enqueue(lambda: gate.wait(10))
    toy.connector.load("b", list(range(128, 144)))
    daemon.kill()
    until(lambda: toy.cache._desk.arena.id == 0)
    assert arenas() == 1
    gate.set()
    update = toy.until(lambda update: update.loaded)
    assert update.loaded[0].tokens == 4 * CHUNK
    for at in range(16):
        assert np.array_equal(toy.kv[:, :, 128 + at], toy.kv[:, :, at])
    toy.connector.finish("b")
    until(lambda: arenas() == 0)
    daemon.start()
    serves(toy)
    assert arenas() == 1


# ------------------------------------------------------------------- who else may listen, or not


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (HEADER.pack(b"KV", 2, 64, 0, 1), "protocol version 2; this kvtier speaks 1"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program's socket"),
        (HEADER.pack(b"KV", 1, 64, 1 << 30, 1), "at most"),
        (HEADER.pack(b"KV", 1, 75, 1, 1) + b"\x90", "is no welcome"),
    ],
)
def test_who_speaks_something_else_is_refused(tmp_path, answer, says):
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def speak() -> None:
            with listening.accept()[0] as link:
                link.recv(1 << 16)
                link.sendall(answer)
                link.recv(1)

        speaking = threading.Thread(target=speak)
        speaking.start()
        with pytest.raises(ProtocolError, match=says):
            kvtier.open(f"unix:{path}", namespace=NAMESPACE)
        speaking.join()


def empty() -> int:
    return sealed(0)


def small() -> int:
    return sealed(4096)


def device() -> int:
    return os.open("/dev/null", os.O_RDWR)


def sealed(size) -> int:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize("make", [empty, small, device])
def test_an_arena_that_is_not_the_announced_one_is_refused(tmp_path, make):
    """Slots beyond its end would be mapped nowhere."""
    path, fd = f"{tmp_path}/s", make()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def speak() -> None:
            with listening.accept()[0] as link:
                link.recv(1 << 16)
                nbytes = 0 if make is empty else 1 << 20
                welcome = encode(Welcome(1, os.fstat(fd).st_ino, nbytes, ("dram",)), 1)
                socket.send_fds(link, [welcome], [fd])
                link.recv(1)

        speaking = threading.Thread(target=speak)
        speaking.start()
        with pytest.raises(ProtocolError, match=r"an arena of \d+ bytes, and passes another file"):
            kvtier.open(f"unix:{path}", namespace=NAMESPACE)
        speaking.join()
    os.close(fd)


def test_where_nobody_listens_it_waits_and_says_so(daemon, tmp_path):
    why = {"none": "No such file or directory", ".": "Connection refused"}
    for place, cause in why.items():
        with pytest.raises(ConfigError, match=rf"no daemon answers at .*{cause}.*start one with"):
            kvtier.open(f"unix:{tmp_path}/{place}?timeout=100ms", namespace=NAMESPACE)
    path = f"{tmp_path}/s"
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(kvtier.open, f"unix:{path}?timeout=20s", namespace=NAMESPACE)
        late = Mortal(daemon._nursery)
        os.link(late.path, path)
        opening.result(20).close()
    late.close()


def test_a_namespace_that_does_not_fit_is_refused_and_others_go_on(daemon):
    toy = daemon.open()
    huge = kvtier.Geometry(
        (kvtier.Component(layers=64, heads=64, head_size=128),), block_tokens=(16,), chunk_tokens=64
    )
    for opened in (toy.cache.share, lambda one: daemon.open(namespace=one)):
        with pytest.raises(ConfigError, match="below one chunk"):
            opened(kvtier.Namespace("huge", huge))
    serves(toy)
