"""Sizing: what is left for KV in GPU memory, and how many tokens that is.

    KV = GPU memory x GPUs - weights - activations - overhead

Activations are the widest point of a step: of each batched token the residual, its norm, and the
feed-forward's two inputs and product; with one row of logits a sequence in float32. Overhead is
what the driver, graphs and collectives take, and what fragments. Both can be given.

The GPUs of a stage share each of its layers (tensor parallelism). Where they are more than there
are KV heads, several have the same one, and a latent of MLA is on each: that fills as much memory
again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import msgspec

from kvtier.errors import ConfigError, unknown
from kvtier.planning.models import ModelSize

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
    """How one model is served. activations and overhead: bytes a GPU, None for the estimate.

    gpus: in all, of which each of the `pipeline` stages of layers has as many.
    """

    gpu_memory: int
    gpus: int = 1
    pipeline: int = 1
    weights: str = "bf16"
    kv: str = "fp16"
    activations: int | None = None
    overhead: int | None = None


class Budget(msgspec.Struct, frozen=True):
    """Where GPU memory goes, in bytes over all GPUs. kv: below 0, the model does not fit.

    bytes_per_token: of KV, each once, as tiers store it. copies: how many times that a token takes
    of all GPUs' memory.
    """

    model: str
    gpus: int
    pipeline: int
    gpu_memory: int
    weights: int
    activations: int
    overhead: int
    kv: int
    bytes_per_token: int
    formula: str
    copies: float
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


def _copies(model: ModelSize, setting: Setting) -> Fraction:
    """Return how many times its bytes a token's KV takes of all GPUs' memory.

    Raises ConfigError where the model cannot be divided so.
    """
    stages, gpus = setting.pipeline, setting.gpus
    if not 0 < stages <= model.layers or gpus % stages:
        raise ConfigError(
            f"{gpus} GPUs and {model.layers} layers cannot be divided into {stages} stages; "
            "--pipeline divides --gpus, and is at most the number of layers"
        )
    share = gpus // stages
    uneven = not model.latent and model.kv_heads % share and share % model.kv_heads
    if model.heads % share or uneven:
        raise ConfigError(
            f"{model.heads} heads and {model.kv_heads} KV heads of {model.name} cannot be divided "
            f"among the {share} GPUs of a stage; choose other --gpus, or more stages by --pipeline"
        )
    fullest = Fraction(math.ceil(Fraction(model.layers, stages)) * stages, model.layers)
    each = share if model.latent else max(Fraction(share, model.kv_heads), Fraction(1))
    return fullest * each


def budget(model: ModelSize, setting: Setting) -> Budget:
    """Return where the GPUs' memory goes.

    Raises ConfigError for a GPU of no memory, and for GPUs that cannot share the model.
    """
    if setting.gpu_memory < 1 or setting.gpus < 1:
        raise ConfigError("there must be at least one GPU with memory")
    copies = _copies(model, setting)
    per_element = PRECISIONS[setting.kv]
    per_token = token_bytes(model, setting.kv)
    memory = setting.gpu_memory * setting.gpus
    weights = int(model.weights * PRECISIONS[setting.weights])
    activations, overhead = setting.activations, setting.overhead
    if activations is None:
        share = setting.gpus // setting.pipeline
        wide = 2 * model.hidden + 3 * model.intermediate // share
        activations = _STEP_TOKENS * wide * 2 + _SEQUENCES * model.vocabulary * 4 // share
    if overhead is None:
        overhead = int(setting.gpu_memory * _OVERHEAD_SHARE) + _OVERHEAD_BYTES
    kv = memory - weights - (activations + overhead) * setting.gpus
    size = f"{float(per_element):g} bytes" if per_element != 1 else "1 byte"
    return Budget(
        model=model.name,
        gpus=setting.gpus,
        pipeline=setting.pipeline,
        gpu_memory=memory,
        weights=weights,
        activations=activations * setting.gpus,
        overhead=overhead * setting.gpus,
        kv=kv,
        bytes_per_token=per_token,
        formula=f"{model.kv_formula} x {size}",
        copies=float(copies),
        tokens=max(math.floor(kv / (per_token * copies)), 0),
    )
