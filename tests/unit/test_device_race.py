"""The race checker: what it knows of bytes, streams, threads and fences, and what it says."""

from __future__ import annotations

import ast
import queue
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.device.accesses import History, Operation, spans
from kvtier.device.base import HOLE, Copy, Device
from kvtier.device.chaos import ChaosDevice
from kvtier.device.cpu import CpuDevice, CpuFence
from kvtier.device.race import Checked, RaceError
from kvtier.errors import MisuseError
from kvtier.testing.layouts import by_planes

PLANES, BLOCKS, BYTES = 6, 20, 48
SECONDS = 10.0


@pytest.fixture(params=["threads", "chaos"])
def device(request):
    inner = CpuDevice() if request.param == "threads" else ChaosDevice(4, "random")
    with closing(Checked(inner)) as found:
        yield found


def pages():
    shape = (PLANES, BLOCKS, BYTES)
    return np.random.default_rng(0).integers(0, 255, shape, np.uint8)


def slot(count, fill=0xAB):
    return np.full((PLANES, count, BYTES), fill, np.uint8)


def gather(device, copy, *after):
    return device.gather(device.stream("store"), [copy], after)


def scatter(device, copy, *after, groups=1):
    return device.scatter(device.stream("load"), by_planes([copy], groups), after)


# ---------------------------------------------------------------------------------- as a device


def test_it_is_a_device_and_copies_as_the_one_inside(device):
    assert isinstance(device, Device)
    kv, middle, target = pages(), slot(3), pages()
    assert np.shares_memory(device.pages(kv, PLANES, BYTES), kv)
    stored = gather(device, Copy(kv, [4, 5, 9], middle), device.host_fence())
    *_, landed = scatter(device, Copy(target, [1, 2, 3], middle), stored, groups=3)
    assert landed.wait(SECONDS)
    assert landed.done()
    assert np.array_equal(target[:, 1:4], kv[:, [4, 5, 9]])


def test_a_device_that_is_not_checked_has_nothing_of_it():
    """It costs nothing when off: none of its code is even there."""
    script = (
        "import sys, kvtier, kvtier.device.cpu, kvtier.connectors.reference;"
        "print([name for name in sys.modules if name.startswith('kvtier.device')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    inner = ("base", "cpu", "layout", "rows", "stack")
    names = ("kvtier.device", *(f"kvtier.device.{name}" for name in inner))
    assert sorted(ast.literal_eval(done.stdout)) == sorted(names)


def test_holes_are_not_touched(device):
    kv, target = pages(), slot(3)
    stored = gather(device, Copy(kv, [HOLE, 0, 5], target))
    device.touch("the engine", writes=[kv[:, 1:5], target[:, 0]])
    with pytest.raises(RaceError):
        device.touch("the engine", writes=[kv[:, 5]])
    with pytest.raises(RaceError):
        device.touch("the host", reads=[target[:, 1]])
    assert stored.wait(SECONDS)


def test_it_takes_its_own_streams_only(device):
    with pytest.raises(MisuseError, match="its own streams"):
        device.gather(device.inner.stream("store"), [], ())


# ---------------------------------------------------------------------------- what orders, or not


def test_two_copies_without_a_fence_are_refused_with_both_their_names(device):
    kv, middle = pages(), slot(2)
    before = kv.copy()
    gather(device, Copy(kv, [1, 2], middle))
    with pytest.raises(RaceError) as refused:
        scatter(device, Copy(kv, [7, 8], middle), groups=2)
    said = str(refused.value)
    assert "scatter 2 of blocks 7, 8 on stream load" in said
    assert "gather 1 of blocks 1, 2 on stream store" in said
    assert "group 1 of 2 reads 288 bytes" in said
    assert "let the second come after a fence of the first" in said
    assert "MainThread" in said
    device.close()
    assert np.array_equal(kv, before), "nothing was enqueued"


def test_a_fence_orders_them(device):
    kv, middle = pages(), slot(2)
    stored = gather(device, Copy(kv, [1, 2], middle))
    assert scatter(device, Copy(kv, [7, 8], middle), stored)[-1].wait(SECONDS)


def test_one_stream_orders_itself(device):
    kv, middle = pages(), slot(2)
    gather(device, Copy(kv, [1, 2], middle))
    assert gather(device, Copy(kv, [3, 4], middle)).wait(SECONDS)


def test_a_fence_of_earlier_work_does_not_do(device):
    kv, middle = pages(), slot(2)
    early = device.stream("store").record()
    gather(device, Copy(kv, [1, 2], middle))
    with pytest.raises(RaceError):
        scatter(device, Copy(kv, [7, 8], middle), early)


def test_a_fence_orders_by_way_of_a_third_stream(device):
    kv, middle = pages(), slot(2)
    third = device.wrap(device.inner.stream("load"), "third")
    third.wait(gather(device, Copy(kv, [1, 2], middle)))
    assert scatter(device, Copy(kv, [7, 8], middle), third.record())[-1].wait(SECONDS)


def test_a_fence_that_is_not_checked_orders_nothing(device):
    kv, middle = pages(), slot(2)
    gather(device, Copy(kv, [1, 2], middle)).wait(SECONDS)
    settled = CpuFence()
    settled.settle()
    scatter(device, Copy(kv, [7, 8], middle), settled)  # this thread knew, and enqueued it
    with pytest.raises(RaceError):
        gather(device, Copy(kv, [1, 2], middle), settled)


def test_the_host_learns_from_a_fence_when_it_is_done_and_not_before():
    with closing(Checked(ChaosDevice(0, "lazy"))) as device:
        kv, middle = pages(), slot(2)
        fence = gather(device, Copy(kv, [1, 2], middle))
        assert not fence.done()
        with pytest.raises(RaceError, match="checksum by thread 1"):
            device.touch("checksum", reads=[middle])
        assert fence.wait(SECONDS)
        device.touch("checksum", reads=[middle])


def test_what_the_host_did_before_is_before_what_it_enqueues(device):
    kv, middle = pages(), slot(2)
    device.touch("filling", writes=[middle, kv])
    gather(device, Copy(kv, [1, 2], middle))
    with pytest.raises(RaceError, match="filling anew"):
        device.touch("filling anew", writes=[kv[:, 2]])
    device.touch("filling another", writes=[kv[:, 3]])


def test_each_run_of_layers_has_its_own_fence(device):
    kv, middle = pages(), slot(2)
    first, second = scatter(device, Copy(kv, [7, 8], middle), groups=2)
    compute = device.wrap(device.inner.stream("store"), "engine")
    compute.wait(first)
    compute.declare("attention", reads=[kv[:3, 7]])
    with pytest.raises(RaceError, match="group 2 of 2"):
        compute.declare("attention", reads=[kv[3:, 7]])
    compute.wait(second)
    compute.declare("attention", reads=[kv[3:, 7]])


def test_readers_need_no_order_among_each_other(device):
    kv, one, two = pages(), slot(2), slot(2)
    gather(device, Copy(kv, [1, 2], one))
    compute = device.wrap(device.inner.stream("load"), "engine")
    compute.declare("attention", reads=[kv])
    gather(device, Copy(kv, [1, 2], two))
    with pytest.raises(RaceError, match=r"writes .* which gather 2 .* reads"):
        compute.declare("zeroing", writes=[kv[:, 2]])


def test_an_early_reader_has_only_what_the_host_knows(device):
    kv = pages()
    compute, copy = (device.wrap(device.inner.stream("load"), name) for name in ("engine", "copy"))
    compute.declare("computing", writes=[kv])
    computed = compute.record()
    copy.wait(computed)
    copy.declare("in order", reads=[kv])
    with pytest.raises(RaceError, match="in any order"):
        copy.declare("in any order", early=[kv])
    assert computed.wait(SECONDS)
    copy.declare("in any order", early=[kv])


# ------------------------------------------------------------------------------- failures, and ends


def test_after_a_failed_copy_its_bytes_may_be_written_but_not_read(device):
    kv, middle = pages(), slot(2)
    failed = gather(device, Copy(kv, [1, BLOCKS], middle))
    with pytest.raises(MisuseError, match="do not match"):
        failed.wait(SECONDS)
    with pytest.raises(RaceError, match=r"checksum .* which gather 1 .* has failed to write"):
        device.touch("checksum", reads=[middle])
    device.touch("filling", writes=[middle])
    device.touch("checksum", reads=[middle])


def test_an_older_fence_takes_nothing_back_of_what_a_newer_one_said(device):
    kv, first, second = pages(), slot(2), slot(2)
    older = gather(device, Copy(kv, [1, 2], first))
    newer = gather(device, Copy(kv, [3, 4], second))
    assert newer.wait(SECONDS)
    assert older.wait(SECONDS)
    device.touch("checksum", reads=[first, second])


def test_what_is_computed_on_the_devices_own_stream_is_behind_the_hosts_fence():
    kv, middle = pages(), slot(2)
    with closing(Checked(ChaosDevice(4, "random"))) as device:
        device.compute.declare("computing", writes=[kv])
        with pytest.raises(RaceError):
            gather(device, Copy(kv, [1, 2], middle))
        assert gather(device, Copy(kv, [1, 2], middle), device.host_fence()).wait(SECONDS)


def test_what_the_fence_before_covers_has_not_failed_with_what_comes_after_it(device):
    kv, good, bad = pages(), slot(2), slot(2)
    stored = gather(device, Copy(kv, [1, 2], good))
    failed = gather(device, Copy(kv, [1, BLOCKS], bad))
    with pytest.raises(MisuseError, match="do not match"):
        failed.wait(SECONDS)
    assert stored.wait(SECONDS)
    device.touch("checksum", reads=[good])
    with pytest.raises(RaceError, match="has failed to write"):
        device.touch("checksum", reads=[bad])


def test_close_orders_the_host_after_everything(device):
    kv, middle = pages(), slot(2)
    gather(device, Copy(kv, [1, 2], middle))
    with pytest.raises(RaceError):
        device.touch("unmapping", writes=[middle])
    device.close()
    device.touch("unmapping", writes=[middle])


# ------------------------------------------------------------------------------------------ threads


def on_another_thread(work):
    """Run work on a thread of its own; raise what it raises."""
    errors = []

    def run():
        try:
            work()
        except RaceError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_each_thread_has_a_clock_of_its_own(device):
    kv, middle = pages(), slot(2)
    fence = gather(device, Copy(kv, [1, 2], middle))
    assert fence.wait(SECONDS), "so this thread knows; another does not"
    with pytest.raises(RaceError, match=r"checksum by thread 2 \(another\)"):
        on_another_thread(lambda: device.touch("checksum", reads=[middle]))


def test_a_thread_that_asks_the_fence_itself_knows(device):
    kv, middle = pages(), slot(2)
    fence = gather(device, Copy(kv, [1, 2], middle))

    def checksum():
        assert fence.wait(SECONDS)
        device.touch("checksum", reads=[middle])

    on_another_thread(checksum)


def test_what_is_handed_over_in_a_queue_is_known_there(device):
    kv, middle, jobs = pages(), slot(2), queue.SimpleQueue()
    assert gather(device, Copy(kv, [1, 2], middle)).wait(SECONDS)
    jobs.put((device.sent(), middle))

    def checksum():
        clock, array = jobs.get()
        device.received(clock)
        device.touch("checksum", reads=[array])

    on_another_thread(checksum)
    with pytest.raises(RaceError, match="checksum by thread 2"):
        device.touch("filling", writes=[middle])  # nothing came back


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a[1:3],
        lambda a: a[:, 2:5],
        lambda a: a[:, [4]],
        lambda a: a[::-2, 3:9:2],
        lambda a: a[:, :, 4:8],
        lambda a: a[2, 3],
        lambda a: a[:, :0],
        lambda a: a[:1, :1, :1],
        lambda a: a.transpose(2, 0, 1)[:5],
        lambda a: a.view(np.uint16)[:, 1:2],
        lambda a: a[None, 1:, None, 3],
    ],
)
def test_the_addresses_of_a_view_are_those_of_its_bytes(view):
    whole = np.arange(6 * 20 * 48, dtype=np.uint16).view(np.uint8).reshape(6, 20, 96).copy()
    array = view(whole)
    base = array.__array_interface__["data"][0]
    offsets = np.array(0)
    for length, stride in zip(array.shape, array.strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(length) * stride)
    expected = {base + int(at) + n for at in offsets.ravel() for n in range(array.itemsize)}
    found = [address for low, high in spans([array]) for address in range(low, high)]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_whole_slot_is_one_range_and_addresses_go_as_they_are():
    assert len(spans([slot(4)])) == 1
    assert len(spans([slot(4)[:, 1:3]])) == PLANES
    assert spans([(100, 200), (300, 301)]) == [(100, 200), (300, 301)]


ACTORS = "abc"
ACCESS = st.tuples(
    st.sampled_from(ACTORS),
    st.booleans(),
    st.integers(0, 30),
    st.integers(1, 12),
    st.none() | st.sampled_from(ACTORS),
)


@given(st.lists(ACCESS, max_size=40))
def test_ranges_find_the_races_that_bytes_one_by_one_would(accesses):
    """Against all pairs, byte by byte, up to the first race.

    Sometimes one actor learns all that another one knows.
    """
    history = History()
    clocks = {actor: {actor: 0} for actor in ACTORS}
    done = []
    for number, (actor, writes, low, length, learns) in enumerate(accesses):
        clock = clocks[actor]
        if learns:
            for who, tick in clocks[learns].items():
                clock[who] = max(tick, clock.get(who, 0))
        clock[actor] += 1
        operation = Operation(actor, clock[actor], str(number))
        span = [(low, low + length)]
        reads, written = ([], span) if writes else (span, [])
        touched = set(range(low, low + length))
        races = history.races(operation, reads, written, clock)
        expected = {
            one.name
            for one, wrote, bytes_ in done
            if bytes_ & touched and (wrote or writes) and one.tick > clock.get(one.actor, 0)
        }
        assert bool(races) == bool(expected)
        assert {race.first for race in races} <= expected
        if races:
            return
        history.note(operation, reads, written)
        done.append((operation, writes, touched))
