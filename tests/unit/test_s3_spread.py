"""The body of an answer of S3, spread over many buffers from a real socket."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Iterator
from http.client import HTTPResponse

import pytest

from kvtier.deadline import NEVER
from kvtier.storage_backends.s3_errors import BrokenError
from kvtier.storage_backends.s3_send import Answer
from kvtier.storage_backends.s3_wire import Wire
from kvtier.testing.tls import self_signed

SIZES = [256, 5000, 0, 256, 70_000, 1, 256, 30_000, 0]
TOTAL = sum(SIZES)
BODY = random.Random(1).randbytes(TOTAL)


def head(*lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 206 Partial Content", *lines, "", ""]).encode()


WHOLE = head(f"Content-Length: {TOTAL}") + BODY


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def says(theirs: socket.socket, data: bytes, *, hangs_up: bool = False) -> threading.Thread:
    """Send bytes in portions of any size, as a network does."""

    def run() -> None:
        draw, at = random.Random(2), 0
        while at < len(data):
            at += theirs.send(data[at : at + draw.choice([1, 100, 4096, 40_000])])
        if hangs_up:
            theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def answered(wire: Wire, kept: list[Wire]) -> Answer:
    wire.begin(NEVER)
    response = HTTPResponse(wire.as_socket(), method="GET")
    response.begin()
    return Answer(response, wire, kept.append)


def room() -> tuple[bytearray, list[memoryview]]:
    """Return buffers with a byte between each two, that nobody may write to."""
    whole, views, at = bytearray(TOTAL + len(SIZES)), [], 0
    for size in SIZES:
        views.append(memoryview(whole)[at : at + size])
        at += size + 1
    return whole, views


def is_whole(whole: bytearray, views: list[memoryview]) -> bool:
    return b"".join(views) == BODY and sum(whole) == sum(BODY)


def test_each_buffer_gets_its_own_bytes_and_the_connection_is_kept(ends):
    ours, theirs = ends
    wire, kept = Wire(ours, 10.0), []
    for turn in range(3):
        saying = says(theirs, WHOLE)
        whole, views = room()
        with answered(wire, kept) as answer:
            answer.spread(views[:4])
            answer.spread(views[4:])
        saying.join()
        assert is_whole(whole, views)
        assert kept == [wire] * (turn + 1)


def test_a_body_without_a_length_is_spread_too(ends):
    ours, theirs = ends
    cut = b"".join(b"%x\r\n%b\r\n" % (len(some), some) for some in (BODY[:9000], BODY[9000:]))
    saying = says(theirs, head("Transfer-Encoding: chunked") + cut + b"0\r\n\r\n")
    whole, views = room()
    with answered(Wire(ours, 10.0), []) as answer:
        answer.spread(views)
    saying.join()
    assert is_whole(whole, views)


def test_a_body_by_tls_is_spread_too(ends, tmp_path):
    certificate, context = self_signed(tmp_path)
    ours, theirs = ends
    trusting = ssl.create_default_context(cafile=certificate)
    shaken: list[ssl.SSLSocket] = []
    server = threading.Thread(
        target=lambda: shaken.append(context.wrap_socket(theirs, server_side=True))
    )
    server.start()
    with trusting.wrap_socket(ours, server_hostname="127.0.0.1") as sock:
        server.join()
        with shaken[0] as peer:
            saying = says(peer, WHOLE)
            whole, views = room()
            with answered(Wire(sock, 10.0), []) as answer:
                answer.spread(views)
            saying.join()
    assert is_whole(whole, views)


@pytest.mark.parametrize("short", [1, 30_001, TOTAL - 100, TOTAL])
def test_a_body_that_ends_too_early_is_an_error_and_the_connection_goes(ends, short):
    ours, theirs = ends
    kept: list[Wire] = []
    saying = says(theirs, WHOLE[:-short], hangs_up=True)
    with answered(Wire(ours, 10.0), kept) as answer, pytest.raises(BrokenError):
        answer.spread(room()[1])
    saying.join()
    assert not kept


def test_a_body_that_is_shorter_than_the_buffers_is_an_error(ends):
    ours, theirs = ends
    saying = says(theirs, head(f"Content-Length: {TOTAL - 1}") + BODY[:-1])
    with answered(Wire(ours, 10.0), []) as answer, pytest.raises(BrokenError):
        answer.spread(room()[1])
    saying.join()


def calls(ends: tuple[socket.socket, socket.socket], monkeypatch) -> int:
    """Return how often the socket is asked for the bytes of 100 buffers that are there already."""
    ours, theirs = ends
    size = 20_000  # fits into a socket's buffer
    theirs.sendall(head(f"Content-Length: {size}") + BODY[:size])
    count = 0
    waits = Wire._wait

    def counted(self: Wire) -> None:
        nonlocal count
        count += 1
        waits(self)

    into = memoryview(bytearray(size))
    with answered(Wire(ours, 10.0), []) as answer:
        monkeypatch.setattr(Wire, "_wait", counted)
        answer.spread([into[at : at + 200] for at in range(0, size, 200)])
    assert into == BODY[:size]
    return count


def test_many_buffers_are_filled_by_one_system_call(ends, monkeypatch):
    assert calls(ends, monkeypatch) == 1


def test_twin_one_buffer_at_a_time_would_ask_for_each(ends, monkeypatch):
    monkeypatch.setattr("kvtier.storage_backends.s3_wire._AT_ONCE", 1)
    assert calls(ends, monkeypatch) > 50
