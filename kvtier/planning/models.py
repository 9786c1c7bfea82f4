"""Models: the sizes that decide how much memory weights and KV take.

The table holds the published configurations (config.json) of well-known models; another model is
read from its own config.json. Parameters are counted from the configuration, so that they can be
checked: embeddings, attention, feed-forward with its experts, norms.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvtier.checks import shown, what_is_wrong
from kvtier.errors import ConfigError, unknown
from kvtier.planning.files import check_regular

_MOST: Final = 1 << 40
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_WHOLE: Final = re.compile(r"[0-9]{1,20}")
_SHOWN: Final = 80  # characters of what a file has that an error repeats
_FIELDS: Final = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
}


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
        for field, name in _FIELDS.items():
            size = getattr(self, field)
            if not 0 < size < _MOST:
                raise ConfigError(f"model {self.name!r}: {name} must be at least 1, not {size}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name!r}: {self.heads} heads do not share {self.kv_heads} KV heads; "
                "num_attention_heads is a multiple of num_key_value_heads"
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
    """Return the sizes of a model of the table, of a config.json, or as they are given.

    Given they look like ``layers=80,hidden=8192,heads=64,…``, a field of ModelSize each. Raises
    ConfigError.
    """
    if "=" in name:
        return _given(name)
    if not name:  # which would be the current directory
        raise unknown("model", name, MODELS)
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


def _given(text: str) -> ModelSize:
    """Read sizes that are given one by one."""
    fields = {one.name: one for one in dataclasses.fields(ModelSize)[1:]}
    found: dict[str, Any] = {}
    for pair in text.split(","):
        key, _, value = pair.strip().partition("=")
        if key not in fields:
            raise unknown("size of a model", key, fields)
        if key in found:
            raise ConfigError(f"{key} of the model is given twice")
        most = 2 if key == "tied" else _MOST
        if not _WHOLE.fullmatch(value) or not int(value) < most:
            raise ConfigError(
                f"{key} must be a whole number below {most:,}, not {value[:_SHOWN]!r}"
            )
        found[key] = int(value)
    lacks = [
        key
        for key, one in fields.items()
        if one.default is dataclasses.MISSING and key not in found
    ]
    if lacks:
        raise ConfigError(f"a model given by its sizes lacks {', '.join(lacks)}")
    return ModelSize("given", **found)


def _read(path: Path) -> ModelSize:
    """Read a config.json, as transformers write it."""
    try:
        check_regular(path)
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {what_is_wrong(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    text = config.get("text_config", config)  # of a model that sees images, too
    if not isinstance(text, dict):
        raise ConfigError(f"{path}: text_config must be an object, not {shown(text)}")
    config = text
    heads = _whole(path, config, "num_attention_heads")
    hidden = _whole(path, config, "hidden_size")
    latent = _whole(path, config, "kv_lora_rank", 0)
    if config.get("head_dim") is None and heads and hidden % heads:
        raise ConfigError(
            f"{path}: hidden_size {hidden} is no multiple of the {heads} of num_attention_heads; "
            "say head_dim, or mend them"
        )
    found = ModelSize(
        name=path.parent.name if path.name == "config.json" else path.stem,
        layers=_whole(path, config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(path, config, "num_key_value_heads", heads),
        head_size=_whole(path, config, "head_dim", hidden // max(heads, 1)),
        intermediate=_whole(path, config, "intermediate_size"),
        vocabulary=_whole(path, config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        latent=latent and latent + _whole(path, config, "qk_rope_head_dim"),
    )
    more = _of_experts(path, config, found)
    return replace(found, parameters=found.weights + more) if more else found


def _of_experts(path: Path, config: dict[str, Any], model: ModelSize) -> int:
    """Return the parameters that experts add to a dense model of the same sizes.

    Names are those of Mixtral, Qwen and DeepSeek, which differ.
    """
    counts = (_whole(path, config, name, 0) for name in _EXPERTS)
    experts = next(filter(None, counts), 0)
    if not experts:
        return 0
    size = _whole(path, config, "moe_intermediate_size", model.intermediate)
    shared = _whole(path, config, "n_shared_experts", 0) * size
    shared += _whole(path, config, "shared_expert_intermediate_size", 0)
    dense = _whole(path, config, "first_k_dense_replace", 0)
    step = max(_whole(path, config, "decoder_sparse_step", 1), 1)
    layers = max(model.layers - dense, 0) // step
    wider = 3 * model.hidden * (experts * size + shared - model.intermediate)
    return layers * (wider + model.hidden * experts)


def _whole(path: Path, config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{path}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise ConfigError(f"{path}: {name} must be a whole number, not {shown(value)}")
    return value
