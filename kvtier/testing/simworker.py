"""A process of a campaign: one task on stdin, its results on stdout, a line of JSON each."""

from __future__ import annotations

import contextlib
import sys

import msgspec

from kvtier.testing.campaign import Task, work


def main() -> None:
    """Do the task, for as long as somebody reads."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    with contextlib.suppress(BrokenPipeError):
        for result in work(task):
            sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
