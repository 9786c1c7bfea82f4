"""Models: the sizes that decide how much memory weights and KV take.

The table holds the published configurations (config.json) of well-known models; another model is
read from its own config.json. Parameters are counted from the configuration, so that they can be
checked: embeddings, attention, feed-forward, norms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError, unknown

__all__ = ["MODELS", "ModelSize", "model_size"]

_MOST: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder. Elements are counted, not bytes.

    latent: elements of the MLA latent with its RoPE key, a token and layer; 0 for attention with
    KV heads. parameters: 0 counts them from the other sizes.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    latent: int = 0
    parameters: int = 0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_size)
        if not all(0 < size < _MOST for size in (*sizes, self.intermediate, self.vocabulary)):
            raise ConfigError(f"model {self.name!r}: every size must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name!r}: {self.heads} heads do not share {self.kv_heads} KV heads"
            )

    @property
    def kv_elements(self) -> int:
        """Elements of KV that a token takes: layers x (K and V) x KV heads x head size."""
        if self.latent:
            return self.layers * self.latent
        return self.layers * 2 * self.kv_heads * self.head_size

    @property
    def weights(self) -> int:
        """Parameters."""
        if self.parameters:
            return self.parameters
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def kv_formula(self) -> str:
        """How the elements of a token come about."""
        if self.latent:
            return f"{self.layers} layers x {self.latent} elements of the latent"
        return f"{self.layers} layers x 2 x {self.kv_heads} KV heads x {self.head_size}"


_TABLE: Final = (
    ModelSize("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152, tied=True),
    ModelSize("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, tied=True),
    ModelSize("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128_256, tied=True),
    ModelSize("llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
    ModelSize("llama-3-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
    ModelSize("llama-3-405b", 126, 16_384, 128, 8, 128, 53_248, 128_256),
    ModelSize("mistral-7b", 32, 4096, 32, 8, 128, 14_336, 32_000),
    ModelSize("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064),
    ModelSize("qwen2.5-32b", 64, 5120, 40, 8, 128, 27_648, 152_064),
    ModelSize("qwen2.5-72b", 80, 8192, 64, 8, 128, 29_568, 152_064),
    ModelSize("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936),
    ModelSize(
        "deepseek-v3", 61, 7168, 128, 128, 128, 18_432, 129_280, latent=576, parameters=671 * 10**9
    ),
)

MODELS: Final = {model.name: model for model in _TABLE}
"""Well-known models by name."""


def model_size(name: str) -> ModelSize:
    """Return the sizes of a model of the table, or of a config.json. Raises ConfigError."""
    path = Path(name)
    try:
        in_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if in_folder:
        return _read(path / "config.json")
    if is_file or path.suffix == ".json":
        return _read(path)
    found = MODELS.get(name.lower())
    if found is None:
        raise unknown("model", name, MODELS)
    return found


def _read(path: Path) -> ModelSize:
    """Read a config.json, as transformers write it."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    text = config.get("text_config", config)  # of a model that sees images, too
    if not isinstance(text, dict):
        raise ConfigError(f"{path}: text_config must be an object, not {text!r}")
    config = text
    heads = _whole(path, config, "num_attention_heads")
    hidden = _whole(path, config, "hidden_size")
    latent = _whole(path, config, "kv_lora_rank", 0)
    return ModelSize(
        name=path.parent.name if path.name == "config.json" else path.stem,
        layers=_whole(path, config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(path, config, "num_key_value_heads", heads),
        head_size=_whole(path, config, "head_dim", max(hidden // max(heads, 1), 1)),
        intermediate=_whole(path, config, "intermediate_size"),
        vocabulary=_whole(path, config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        latent=latent and latent + _whole(path, config, "qk_rope_head_dim"),
    )


def _whole(path: Path, config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise ConfigError(f"{path}: {name} must be a whole number, not {value!r}")
    return value
