"""MLA, multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), folded.

A token keeps one latent vector, from which the keys and values of all heads are projected up, and
one key that all heads share and RoPE turns. The projections up are linear, so they are folded into
the queries and the output once, when the weights are made: every head then looks straight at the
latents, as if they were the one KV head of a multi-query attention whose keys are its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """One layer as the paper writes it. Matrices are [out, in].

    query: [heads * (head_size + rope_size), hidden]. down: [rank + rope_size, hidden].
    up_keys, up_values: [heads, head_size, rank]. out: [hidden, heads * head_size].
    """

    query: torch.Tensor
    down: torch.Tensor
    up_keys: torch.Tensor
    up_values: torch.Tensor
    out: torch.Tensor

    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projections into and out of the latents' space.

        In: [(heads + 1) * (rank + rope_size), hidden], queries, then what is kept. Out: [hidden,
        heads * (rank + rope_size)]; the part that RoPE turned is no value, and counts zero.
        The scores' scale is folded in too: the kernel divides by the root of its own head size.
        """
        heads, head_size, rank = self.up_keys.shape
        width = self.down.shape[0]
        query = self.query.view(heads, -1, self.query.shape[1])
        seen = torch.einsum("hdr,hdi->hri", self.up_keys, query[:, :head_size])
        scale = (width / query.shape[1]) ** 0.5
        queries = torch.cat((seen, query[:, head_size:]), dim=1) * scale
        out = torch.einsum("ohd,hdr->ohr", self.out.view(-1, heads, head_size), self.up_values)
        out = torch.nn.functional.pad(out, (0, width - rank))
        return torch.cat((queries.flatten(0, 1), self.down)), out.flatten(1)
