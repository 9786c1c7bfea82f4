"""Options that commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Give a command options, in their order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add
