"""What a benchmark is told, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, unknown

__all__ = ["ARMS", "RANDOM", "SMOLLM2", "Settings", "check_arms", "check_model"]

ARMS: Final = ("recompute", "hbm", "dram", "lmdb", "s3")
"""Where the KV of a prefix comes from; each arm runs in a process of its own."""

SMOLLM2: Final = "smollm2"
RANDOM: Final = "random"
_MODELS: Final = (SMOLLM2, RANDOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all workloads have in common.

    dram, disk: capacities of the dram and the lmdb tier, bytes; dram None: what it takes.
    directory: where the lmdb tier makes a directory of its own; None: on the file system at
    hand. s3: URL of an existing bucket; None: a server of its own. s3_delay: seconds of
    round-trip time added to that server.
    """

    arms: tuple[str, ...]
    model: str
    threads: int
    seed: int
    chunk_tokens: int
    dram: int | None
    disk: int
    directory: Path | None
    s3: str | None
    s3_delay: float
    verbose: bool


def check_arms(names: Sequence[str]) -> tuple[str, ...]:
    """Return the arms by name, in the order of ARMS. Raises ConfigError for an unknown one."""
    for name in names:
        if name not in ARMS:
            raise unknown("arm", name, ARMS)
    if not names:
        raise ConfigError(f"no arm is named; choose from: {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in names)


def check_model(name: str) -> str:
    """Return a model's name, or the path of its file. Raises ConfigError for neither."""
    if name in _MODELS or Path(name).is_file():
        return name
    if "/" in name or name.endswith(".gguf"):
        raise ConfigError(f"there is no model file {name}; give the path of a GGUF file")
    raise unknown("model", name, _MODELS)
