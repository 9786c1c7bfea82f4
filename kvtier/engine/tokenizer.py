"""The tokenizer that a checkpoint carries: byte-level BPE, with digits one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as _Bpe

_CONTROL: Final = 3
"""GGUF's token type of tokens that are never part of text."""


class Tokenizer:
    """Text to token ids and back.

    tokens: their texts, in the order of ids, in the byte-level alphabet of GPT-2.
    types: GGUF token types. merges: pairs joined by a space, most frequent first.
    end: the id that ends an answer.
    """

    def __init__(
        self, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], end: int
    ) -> None:
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self._bpe = _Bpe(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self._bpe.decoder = decoders.ByteLevel()
        self._bpe.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == _CONTROL
            ]
        )
        self.end = end

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Control tokens written in it are taken as such."""
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, control tokens left out."""
        text: str = self._bpe.decode(list(tokens))
        return text
