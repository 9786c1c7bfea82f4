"""Workloads as token ids: prompts that share a prefix, conversations, prompts that share nothing.

Prompts have the ChatML form that the model was trained on. They are put together from token
ids, not from text, so that a prefix has exactly the length asked for and is the same in every
prompt that shares it. One seed gives one workload.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

from kvtier.bench.texts import QUESTIONS, Corpus
from kvtier.errors import ConfigError

Encode = Callable[[str], list[int]]
"""Text to token ids."""

_START: Final = "<|im_start|>"
_END: Final = "<|im_end|>\n"
_TAIL: Final = f"{_END}{_START}assistant\n"
_SYSTEM: Final = "You answer questions about a text, briefly and to the point."
_CHARACTERS: Final = 6  # of text taken for one token at first: 4.1 is the average of SmolLM2's


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """prefix_len: tokens, exactly. suffix_len: at most: as many whole questions as fit."""

    num_prefixes: int
    prefix_len: int
    suffix_len: int
    prompts_per_prefix: int
    output_len: int


class MultiTurn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """prefix_len: tokens of the text that a conversation begins with. suffix_len: of a question."""

    num_conversations: int
    turns: int
    prefix_len: int
    suffix_len: int
    output_len: int


class NoReuse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """input_len: tokens of a prompt, exactly."""

    num_prompts: int
    input_len: int
    output_len: int


class LongDoc(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Documents that are read once, and then asked about.

    document_length: tokens, exactly. repeat_count: questions on each. repeat_mode: ``random``,
    ``tile`` (all documents in turn, again and again) or ``interleave`` (all questions on one
    document in a row). hbm_documents: how many the engine's own pool has room for. hits, misses:
    after so many questions come so many documents that nobody has read yet.
    """

    num_documents: int
    document_length: int
    suffix_len: int
    output_len: int
    repeat_count: int
    repeat_mode: str
    hbm_documents: int
    hits: int = 1
    misses: int = 0

    @property
    def asked(self) -> int:
        """Questions on documents that were read."""
        return self.num_documents * self.repeat_count

    @property
    def strangers(self) -> int:
        """Documents that nobody has read before they are asked about."""
        return self.asked // self.hits * self.misses


class Group(msgspec.Struct, frozen=True):
    """One prefix with the suffixes that follow it: one to warm caches with, and those timed."""

    prefix: list[int]
    warm: list[int]
    timed: list[list[int]]

    def cut(self, tokens: int) -> Group:
        """Return it with at most `tokens` tokens of its prefix."""
        return Group(self.prefix[:tokens], self.warm, self.timed)


class Conversation(msgspec.Struct, frozen=True):
    """The first prompt, and what follows each answer: its end and the next question."""

    opening: list[int]
    follow_ups: list[list[int]]


def shared_prefixes(encode: Encode, shape: SharedPrefix, seed: int, chunk: int) -> list[Group]:
    """Return one group more than asked for; the first is for warming up.

    chunk: tokens of a chunk; prefixes differ within their first, so that none shares another's.
    """
    if shape.prefix_len < chunk:
        raise ConfigError(
            f"prefix-len {shape.prefix_len} is below one chunk of {chunk} tokens, so that nothing "
            f"could be reused; ask for at least {chunk}"
        )
    corpus = Corpus(seed)
    count = shape.num_prefixes + 1
    head = f"{_START}system\n{_SYSTEM}{_END}{_START}user\nRead this text.\n\n"
    groups, per = [], shape.prompts_per_prefix + 1
    for index, start in enumerate(corpus.passages(count)):
        suffixes = [
            _suffix(encode, index * per + number, shape.suffix_len) for number in range(per)
        ]
        prefix = _cut(encode, head, corpus, start, shape.prefix_len)
        groups.append(Group(prefix, suffixes[0], suffixes[1:]))
    if len({tuple(group.prefix[:chunk]) for group in groups}) < count:
        raise ConfigError(
            f"{count} prefixes do not differ within their first {chunk} tokens; ask for fewer"
        )
    return groups


def documents(encode: Encode, shape: LongDoc, seed: int, chunk: int) -> list[Group]:
    """Return the documents with their questions: one to warm up, those read, those not read."""
    return shared_prefixes(
        encode,
        SharedPrefix(
            num_prefixes=shape.num_documents + shape.strangers,
            prefix_len=shape.document_length,
            suffix_len=shape.suffix_len,
            prompts_per_prefix=shape.repeat_count,
            output_len=shape.output_len,
        ),
        seed,
        chunk,
    )


def question_order(shape: LongDoc, seed: int) -> list[tuple[int, int]]:
    """Return (document, question) in the order in which they are asked.

    The documents that were read have the first numbers.
    """
    counts = range(shape.repeat_count)
    order = [(document, number) for number in counts for document in range(shape.num_documents)]
    if shape.repeat_mode == "interleave":
        order.sort()
    elif shape.repeat_mode == "random":
        random.Random(seed).shuffle(order)
    found, stranger = [], shape.num_documents
    for number, one in enumerate(order, 1):
        found.append(one)
        if not number % shape.hits:
            found += [(stranger + extra, 0) for extra in range(shape.misses)]
            stranger += shape.misses
    return found


def conversations(encode: Encode, shape: MultiTurn, seed: int, chunk: int) -> list[Conversation]:
    """Return one conversation more than asked for; the first is for warming up."""
    groups = shared_prefixes(
        encode,
        SharedPrefix(
            num_prefixes=shape.num_conversations,
            prefix_len=shape.prefix_len,
            suffix_len=shape.suffix_len,
            prompts_per_prefix=1,
            output_len=shape.output_len,
        ),
        seed,
        chunk,
    )
    lead = f"{_END}{_START}user\n"
    return [
        Conversation(
            group.prefix + group.timed[0],
            [
                _suffix(encode, index + turn * len(groups), shape.suffix_len, lead)
                for turn in range(1, shape.turns)
            ],
        )
        for index, group in enumerate(groups)
    ]


def distinct_prompts(encode: Encode, shape: NoReuse, seed: int) -> list[list[int]]:
    """Return one prompt more than asked for, each different within its first tokens."""
    corpus = Corpus(seed)
    count = shape.num_prompts + 1
    numbers = random.Random(seed).sample(range(1000, 10_000), min(count, 9000))
    tail = encode(_TAIL)
    if shape.input_len <= 3 * len(tail):
        raise ConfigError(
            f"input-len {shape.input_len} leaves no room for a text; ask for more than "
            f"{3 * len(tail)}"
        )
    length = shape.input_len - len(tail)
    return [
        _cut(encode, f"{_START}user\n{number}. Go on with this text.\n\n", corpus, start, length)
        + tail
        for number, start in zip(numbers, corpus.passages(count), strict=True)
    ]


def _cut(encode: Encode, head: str, corpus: Corpus, start: int, tokens: int) -> list[int]:
    """Return exactly `tokens` tokens: `head`, then text from `start`."""
    characters = tokens * _CHARACTERS
    while len(found := encode(head + corpus.text(start, characters))) < tokens:
        characters *= 2
    return found[:tokens]


def _suffix(encode: Encode, number: int, longest: int, lead: str = "\n\n") -> list[int]:
    """Return as many whole questions, from the given one on, as fit, and the template's tail."""
    tail = encode(_TAIL)
    best: list[int] = []
    text = lead
    for offset in range(longest):
        text += QUESTIONS[(number + offset) % len(QUESTIONS)]
        suffix = encode(text) + tail
        if len(suffix) > longest:
            break
        best, text = suffix, text + " "
    if not best:
        raise ConfigError(
            f"--suffix-len {longest} is too short for question and template, which take "
            f"{len(suffix)} tokens here; ask for at least that"
        )
    return best
