"""What identifies KV bytes that vLLM computed: of all requests of an engine, and of each."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError, check_known
from kvtier.identity.geometry import Component, Geometry, Needs, chunk_tokens_for
from kvtier.identity.namespace import Namespace, Request, Span

_log = logging.getLogger("kvtier")

OPTIONS: Final = ("tiers", "chunk_tokens", "tenant", "revision", "optional", "try_gpu")
"""Keys of ``kv_connector_extra_config``."""

_NEAR_TOKENS: Final = 256
_KINDS: Final = {"FullAttentionSpec": Needs.ALL, "SlidingWindowSpec": Needs.TRAILING}
_DTYPES: Final = {
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float8_e4m3fn": "float8_e4m3",
    "torch.uint8": "int8",  # bytes of eight bits, whatever they mean: the namespace says it
    "torch.int8": "int8",
}
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.json")
_READ_BYTES: Final = 1 << 20


def namespace_for(config: Any, kv: Any) -> Namespace:
    """Return the namespace of a vLLM engine. Reads no weights, only their files' names and times.

    config: its VllmConfig; kv: its KVCacheConfig.
    Raises ConfigError for a model whose KV cannot be restored, naming the layer and why.
    """
    options = config.kv_transfer_config.kv_connector_extra_config
    check_known("key of kv_connector_extra_config", options, OPTIONS)
    model, cache = config.model_config, config.cache_config
    architecture = model.hf_config.to_dict()
    revision = options.get("revision") or getattr(model.hf_config, "_commit_hash", None)
    shown = {
        "config": architecture,
        "max_model_len": model.max_model_len,  # some rotary embeddings are chosen by it
        "dtype": str(model.dtype),
        "weights": [] if revision else list(_files(Path(model.model))),
    }
    device = config.device_config.device_type
    if device != "cpu":  # whose kernels round in another way
        shown["device"] = device
    calibrated = bool(getattr(cache, "calculate_kv_scales", False))
    return Namespace(
        model=str(model.model),
        geometry=_geometry(config, kv, options.get("chunk_tokens")),
        revision=str(revision or ""),
        config_digest=_digest(json.dumps(shown, sort_keys=True, default=str).encode()),
        quantisation=str(model.quantization or ""),
        kv_scales="calibrated" if calibrated else str(cache.cache_dtype),
        tenant=str(options.get("tenant", "")),
    )


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of change of what a local model is made of.

    Other weights under the same path are another model. A hub's commit says so by itself.
    """
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            found = path.stat()
            yield path.name, found.st_size, found.st_mtime_ns


# --------------------------------------------------------------------------------- the KV's shape


def _geometry(config: Any, kv: Any, chunk_tokens: int | None) -> Geometry:
    """Return the shape of the KV; raise ConfigError for what cannot be restored."""
    if config.speculative_config is not None:
        raise ConfigError("speculative decoding and kvtier do not go together yet; leave one out")
    groups = kv.kv_cache_groups
    if not groups:
        raise ConfigError("this model has no KV to cache; start it without kvtier")
    ranks = config.parallel_config.tensor_parallel_size // kv.kv_tp_replicas
    components = tuple(_component(number, group, ranks) for number, group in enumerate(groups))
    if config.device_config.device_type != "cpu" and kv.needs_kv_cache_zeroing:
        raise ConfigError(
            "vLLM clears the blocks of this model before it asks whether they are still being "
            "saved, so that on a GPU its KV cannot be cached: start it without kvtier"
        )
    blocks = {group.kv_cache_spec.block_size for group in groups}
    dtypes = {str(group.kv_cache_spec.dtype) for group in groups}
    for what, values in (("block sizes", blocks), ("dtypes", dtypes)):
        if len(values) > 1:
            raise ConfigError(f"the layers of this model have {what} {sorted(values)}, not one")
    block = int(blocks.pop())
    if chunk_tokens is None:
        windows = [one.window for one in components if one.window]
        chunk_tokens = _chunk(block, min(windows, default=_NEAR_TOKENS))
    return Geometry(
        components,
        _DTYPES[dtypes.pop()],
        (block,),
        chunk_tokens_for((block,), chunk_tokens),
        f"vllm-{kv.kv_cache_layout or 'LBHNC'}",
    )


def _chunk(block: int, window: int) -> int:
    """Return the chunk's tokens where none are configured.

    A chunk is saved when its last token is computed. Of a window's layers the blocks of its first
    tokens must be there still, so that no chunk is longer than the shortest window.
    """
    usual = chunk_tokens_for((block,))
    return usual if window >= usual else max(window // block, 1) * block


def _component(number: int, group: Any, ranks: int) -> Component:
    """Return the component of one group of layers, which share a block table.

    ranks: that have different heads, each as many as the group says.
    """
    spec, layers = group.kv_cache_spec, group.layer_names
    kind = type(spec).__name__
    name = f"group {number} ({layers[0]} and {len(layers) - 1} more)"
    if kind not in _KINDS:
        raise ConfigError(f"{name} has KV of kind {kind}; kvtier restores {', '.join(_KINDS)}")
    dense = spec.num_states * spec.num_heads * spec.state_content_size_bytes
    why = {
        "its KV stays on the host": group.host_resident or not group.enable_kv_transfer,
        "it is a drafter's": group.is_eagle_group,
        f"its dtype is {spec.dtype}": str(spec.dtype) not in _DTYPES,
        f"its pages of {dense} bytes are padded to {spec.page_size_bytes}": (
            dense != spec.page_size_bytes
        ),
        f"it keeps {spec.num_states} states of {spec.block_size} tokens": (
            spec.num_states != spec.block_size
        ),
    }
    for cause in (cause for cause, is_so in why.items() if is_so):
        raise ConfigError(f"{name} cannot be restored: {cause}")
    needs = _KINDS[kind]
    return Component(
        layers=len(layers),
        heads=spec.num_heads * ranks,
        head_size=spec.state_content_size_bytes // spec.dtype.itemsize,  # K and V side by side
        planes=1,
        name=f"group{number}",
        needs=needs,
        window=spec.sliding_window if needs is Needs.TRAILING else 0,
    )


# ------------------------------------------------------------------------------------- a request


class Identities:
    """Tells requests apart. Adapters are told by their files' content, which is read once."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[object, ...], bytes] = {}
        self._loaded: dict[int, bytes] = {}  # by vLLM's number; "": who knows what

    def of(self, request: Any) -> Request | None:
        """Return what tells a request from others with its tokens; None: not to be cached."""
        if request.resumable:
            return None  # its last token may be taken back
        adapter = b""
        if request.lora_request is not None:
            found = self._adapter(request.lora_request)
            if found is None:
                return None
            adapter = found
        spans = [
            Span(
                feature.mm_position.offset,
                feature.mm_position.offset + feature.mm_position.length,
                _digest(feature.modality.encode(), feature.identifier.encode()),
            )
            for feature in request.mm_features
        ]
        if request.prompt_embeds is not None:
            spans.append(Span(0, request.num_prompt_tokens, _tensor(request.prompt_embeds)))
        salt = (request.cache_salt or "").encode()
        return Request(adapter=adapter, salt=salt, spans=tuple(spans))

    def _adapter(self, lora: Any) -> bytes | None:
        """Return the digest of an adapter's files.

        None where they are not on this machine, and from then on where they are others than before:
        what vLLM has loaded under a number it keeps, unless a request says to load it anew.
        """
        try:
            paths = sorted(path for path in Path(lora.lora_path).iterdir() if path.is_file())
            stats = [(path.name, path.stat()) for path in paths]
            key = (lora.lora_path, *((name, s.st_size, s.st_mtime_ns) for name, s in stats))
            if key not in self._adapters:
                self._adapters[key] = _content(paths)
        except OSError as error:
            _log.warning("requests of adapter %s are not cached: %s", lora.lora_name, error)
            return None
        digest, number = self._adapters[key], lora.lora_int_id
        loaded = digest if lora.load_inplace else self._loaded.get(number, digest)
        if loaded and loaded != digest:
            _log.warning(
                "requests of adapter %s are not cached any more: its files at %s are not those "
                "that vLLM has loaded as number %d; load them under a new name",
                *(lora.lora_name, lora.lora_path, number),
            )
        same = loaded == digest
        self._loaded[number] = digest if same else b""
        return digest if same else None


def _content(paths: list[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(_digest(path.name.encode()))
        digest.update(struct.pack("<Q", path.stat().st_size))
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
    return digest.digest()


def _tensor(tensor: Any) -> bytes:
    import torch

    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return _digest(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), data.tobytes())


def _digest(*values: bytes) -> bytes:
    digest = hashlib.sha256()
    for value in values:
        digest.update(struct.pack("<Q", len(value)))
        digest.update(value)
    return digest.digest()
