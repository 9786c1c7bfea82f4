"""Sizing: what is left for KV in GPU memory, and how many tokens that is.

    KV = GPU memory x GPUs - weights - activations - overhead

Activations are the widest point of a step: of each batched token the residual, its norm, and the
feed-forward's two inputs and product; with one row of logits a sequence in float32. Overhead is
what the driver, graphs and collectives take, and what fragments. Both can be given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import msgspec

from kvtier.errors import ConfigError, unknown
from kvtier.planning.models import ModelSize

__all__ = ["PRECISIONS", "Budget", "Setting", "budget", "token_bytes"]

PRECISIONS: Final = {
    "fp32": Fraction(4),
    "fp16": Fraction(2),
    "bf16": Fraction(2),
    "fp8": Fraction(1),
    "int8": Fraction(1),
    "fp4": Fraction(1, 2),
    "int4": Fraction(1, 2),
}
"""Bytes of an element. Scales of blocks come on top: a sixteenth more for fp4 with one in 16."""

_STEP_TOKENS: Final = 8192
_SEQUENCES: Final = 256
_OVERHEAD_SHARE: Final = Fraction(5, 100)
_OVERHEAD_BYTES: Final = 3 << 29  # 1.5 GiB: CUDA context, graphs, collectives' buffers


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is served. activations and overhead: bytes a GPU, None for the estimate."""

    gpu_memory: int
    gpus: int = 1
    weights: str = "bf16"
    kv: str = "fp16"
    activations: int | None = None
    overhead: int | None = None


class Budget(msgspec.Struct, frozen=True):
    """Where GPU memory goes, in bytes over all GPUs. kv: below 0, the model does not fit."""

    model: str
    gpus: int
    gpu_memory: int
    weights: int
    activations: int
    overhead: int
    kv: int
    bytes_per_token: int
    formula: str
    tokens: int

    @property
    def fits(self) -> bool:
        """Whether any KV fits beside the weights."""
        return self.tokens > 0


def token_bytes(model: ModelSize, kv: str) -> int:
    """Return the bytes of KV of a token. Raises ConfigError for a precision that is none."""
    if kv not in PRECISIONS:
        raise unknown("precision of --kv", kv, PRECISIONS)
    return math.ceil(model.kv_elements * PRECISIONS[kv])


def budget(model: ModelSize, setting: Setting) -> Budget:
    """Return where the GPUs' memory goes. Raises ConfigError for a GPU of no memory."""
    if setting.gpu_memory < 1 or setting.gpus < 1:
        raise ConfigError("there must be at least one GPU with memory")
    per_element = PRECISIONS[setting.kv]
    per_token = token_bytes(model, setting.kv)
    memory = setting.gpu_memory * setting.gpus
    weights = int(model.weights * PRECISIONS[setting.weights])
    activations, overhead = setting.activations, setting.overhead
    if activations is None:
        wide = 2 * model.hidden + 3 * model.intermediate // setting.gpus
        activations = _STEP_TOKENS * wide * 2 + _SEQUENCES * model.vocabulary * 4 // setting.gpus
    if overhead is None:
        overhead = int(setting.gpu_memory * _OVERHEAD_SHARE) + _OVERHEAD_BYTES
    kv = memory - weights - (activations + overhead) * setting.gpus
    size = f"{float(per_element):g} bytes" if per_element != 1 else "1 byte"
    return Budget(
        model=model.name,
        gpus=setting.gpus,
        gpu_memory=memory,
        weights=weights,
        activations=activations * setting.gpus,
        overhead=overhead * setting.gpus,
        kv=kv,
        bytes_per_token=per_token,
        formula=f"{model.kv_formula} x {size}",
        tokens=max(kv // per_token, 0),
    )
