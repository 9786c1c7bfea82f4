"""Which tests fail without which guards of the catalog.

    python tests/sim/under_guards.py TEST... < NAMES     # the first that fails, for each guard
    python tests/sim/under_guards.py < JSON              # {guard: test}: whether that one fails
    python tests/sim/under_guards.py --table             # the same, for all of found_by.txt
    python tests/sim/under_guards.py --add REPORT        # try what a run of kvtier sim missed
    python tests/sim/under_guards.py --tidy              # drop what is no guard any more

It prints a line of JSON for each guard: its name, and the test's, or an empty one. --add also
enters them into found_by.txt. Each guard is taken away in a forked process of its own, in which
those tests that pass with it run until one fails.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import pytest
from _pytest.runner import runtestprotocol

from kvtier.testing.bounded import bounded
from kvtier.testing.guards import guards
from kvtier.testing.harmless import FOUND_BY, found_by
from kvtier.testing.mutations import removed

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 2.0
FAST = [
    f"tests/{name}.py"
    for name in (
        *("unit/test_catalog", "unit/test_order", "unit/test_lease", "unit/test_catalog_shards"),
        *("unit/test_spill", "unit/test_spill_room", "unit/test_spill_deadline"),
        *("unit/test_strays", "unit/test_admission", "unit/test_write_budget", "unit/test_fetch"),
        *("unit/test_probe", "unit/test_removal_retention", "unit/test_removal"),
        *("property/test_usable", "property/test_catalog_walk", "unit/test_catalog_lock"),
        *("unit/test_quotas", "unit/test_explain", "unit/test_bad_calls"),
    )
]


class UnderGuards:
    """Runs tests once for each guard. wanted: guards, with the tests to run; none for all."""

    def __init__(self, wanted: Mapping[str, str | None], out: TextIO) -> None:
        self.wanted = wanted
        self.out = out

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        here = [item for item in session.items if "[unix" not in item.nodeid]  # guarded elsewhere
        unsound = set(in_child(lambda: failures(None, here)))
        sound = [item for item in here if item.nodeid not in unsound]
        for guard, test in self.wanted.items():
            items = [item for item in sound if test in (None, item.nodeid)]
            found = in_child(lambda: itertools.islice(failures(guard, items), 1))  # noqa: B023
            print(json.dumps([guard, *found, ""][:2]), file=self.out, flush=True)
        return True


def in_child(names: Callable[[], Iterable[str]]) -> list[str]:
    """Return what a function yields that runs in a forked process."""
    answer, tell = os.pipe()
    if not os.fork():
        os.write(tell, "\n".join(names()).encode())
        os._exit(0)
    os.close(tell)
    said = b"".join(iter(lambda: os.read(answer, 1 << 16), b"")).decode()
    os.close(answer)
    os.wait()
    return said.splitlines()


def failures(guard: str | None, items: Iterable[pytest.Item]) -> Iterator[str]:
    """Yield the names of the tests that fail without a guard; None is without none."""
    with removed(guard):
        for item in items:
            try:
                with bounded(SECONDS):
                    reports = runtestprotocol(item, log=False, nextitem=None)
                failed = any(report.failed for report in reports)
            except BaseException:  # noqa: BLE001  (it did not end)
                failed = True
            if failed:
                yield item.nodeid


def run(tests: Iterable[str], wanted: Mapping[str, str | None], out: TextIO) -> None:
    """Print for each guard, a line each, the first test that fails; none is an empty name."""
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(ROOT)]
    with contextlib.redirect_stdout(sys.stderr):
        plugins = [UnderGuards(wanted, out)]
        pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=plugins)


def check(wanted: Mapping[str, str]) -> None:
    """Try guards, each with one test."""
    if wanted:
        run(dict.fromkeys(wanted.values()), wanted, sys.stdout)


class Adding(io.StringIO):
    """Enters what is found into found_by.txt as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = found_by()

    def write(self, text: str) -> int:
        if text.strip():
            guard, test = json.loads(text)
            if test:
                self.table[guard] = test
                save(self.table)
        return sys.stdout.write(text)


def add(report: str) -> None:
    """Try the fast tests on what a report of ``kvtier sim --mutate`` says nobody missed."""
    mutations = json.loads(Path(report).read_text(encoding="utf-8"))["mutations"]
    missed = [
        one["name"]
        for one in mutations
        if one["found_after"] is None and not (one["found_by"] or one["harmless"])
    ]
    run(FAST, dict.fromkeys(missed), Adding())


def save(table: Mapping[str, str]) -> None:
    """Write found_by.txt, without what is no guard any more."""
    by_test: dict[str, list[str]] = {}
    for guard, test in table.items():
        if guard in guards():
            by_test.setdefault(test, []).append(guard)
    lines = [
        line
        for test, names in sorted(by_test.items())
        for line in (test, *(f"  {name}" for name in sorted(names)))
    ]
    FOUND_BY.write_text("\n".join([*lines, ""]), encoding="utf-8")


def main() -> None:
    match sys.argv[1:]:
        case ["--tidy"]:
            save(found_by())
        case ["--table"]:
            check(found_by())
        case ["--add", report]:
            add(report)
        case []:
            check(json.loads(sys.stdin.read()))
        case tests:
            run(tests, dict.fromkeys(sys.stdin.read().split()), sys.stdout)


if __name__ == "__main__":
    main()
