"""The same model in plain torch: what the paged engine is checked against and raced against.

No pool, no tiles, no chunks: one product over all rows and torch's own causal attention. It is
what a reader would write first, and the honest measure of what paging costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvtier.engine.model import Model


@torch.inference_mode()
def plain_prefill(model: Model, tokens: Sequence[int], logits: int = 1) -> torch.Tensor:
    """Compute a whole prompt at once and return the logits of its last tokens.

    tokens: ids, at least one. logits: of how many of the last tokens.
    Returns float32 [logits, vocab]. Blocks. KV is never rounded, so results are close to those
    of ``Model.forward`` over a float32 pool, not equal to them.
    """
    config, weights = model.config, model.weights
    count = len(tokens)
    ids = torch.as_tensor(tokens, dtype=torch.int64).to(model.device)
    hidden = weights.embedding.index_select(0, ids)
    cos, sin = model.cos[:count], model.sin[:count]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, config.norm_eps)

    def turn(x: torch.Tensor) -> torch.Tensor:
        left, right = x.view(count, -1, config.head_size).chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    for layer in weights.layers:
        qkv = functional.linear(norm(hidden, layer.attention_norm), layer.qkv)
        query, key, value = qkv.split((config.query_size, config.kv_size, config.kv_size), dim=1)
        mixed = functional.scaled_dot_product_attention(
            turn(query.contiguous()).transpose(0, 1)[None],
            turn(key.contiguous()).transpose(0, 1)[None],
            value.reshape(count, -1, config.head_size).transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )
        mixed = mixed[0].transpose(0, 1).reshape(count, -1)
        hidden = hidden + functional.linear(mixed, layer.attention_out)
        both = functional.linear(norm(hidden, layer.ffn_norm), layer.gate_up)
        gate, up = both.chunk(2, dim=1)
        hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
    return functional.linear(norm(hidden[-logits:], weights.norm), weights.head).float()
