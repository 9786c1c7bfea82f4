"""Which tests fail without which guards of the catalog.

    python tests/sim/under_guards.py TEST... < NAMES     # the first that fails, for each guard
    python tests/sim/under_guards.py < JSON              # {guard: test}: whether that one fails

It prints a line of JSON for each guard: its name, and the test's, or an empty one.

Each guard is taken away in a forked process of its own, in which the tests run until one fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import pytest
from _pytest.runner import runtestprotocol

from kvtier.testing.bounded import bounded
from kvtier.testing.mutations import removed

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 2.0


class UnderGuards:
    """Runs tests once for each guard. wanted: guards, with the tests to run; none for all."""

    def __init__(self, wanted: Mapping[str, str | None], out: TextIO) -> None:
        self.wanted = wanted
        self.out = out

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        for guard, test in self.wanted.items():
            items = [item for item in session.items if test in (None, item.nodeid)]
            print(json.dumps([guard, first_failure(guard, items)]), file=self.out, flush=True)
        return True


def first_failure(guard: str, items: Iterable[pytest.Item]) -> str:
    """Return the name of the first test that fails without a guard, run in another process."""
    answer, tell = os.pipe()
    if not os.fork():
        os.write(tell, next(failures(guard, items), "").encode())
        os._exit(0)
    os.close(tell)
    name = b"".join(iter(lambda: os.read(answer, 1 << 10), b"")).decode()
    os.close(answer)
    os.wait()
    return name


def failures(guard: str, items: Iterable[pytest.Item]) -> Iterator[str]:
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


def run(tests: Iterable[str], wanted: Mapping[str, str | None]) -> None:
    """Print for each guard, a line each, the first test that fails; none is an empty name."""
    plugin = UnderGuards(wanted, sys.stdout)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(ROOT)]
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[plugin])


def main() -> None:
    asked = sys.stdin.read()
    if sys.argv[1:]:
        run(sys.argv[1:], dict.fromkeys(asked.split()))
        return
    wanted: dict[str, str] = json.loads(asked)
    if wanted:
        run(dict.fromkeys(test.partition("::")[0] for test in wanted.values()), wanted)


if __name__ == "__main__":
    main()
