"""Workloads: exact prefixes, real questions, one seed one workload."""

from __future__ import annotations

import itertools
from itertools import combinations

import pytest

from kvtier.bench.texts import QUESTIONS, WORDS, Corpus, encode_words
from kvtier.bench.workloads import (
    LongDoc,
    MultiTurn,
    NoReuse,
    SharedPrefix,
    conversations,
    distinct_prompts,
    documents,
    question_order,
    shared_prefixes,
)
from kvtier.errors import ConfigError

CHUNK = 256
TAIL = b"<|im_end|>\n<|im_start|>assistant\n"


def test_words_are_as_long_as_real_tokens():
    text = Corpus(0).text(0, 8000)
    ids = encode_words(text)
    assert 3 < len(text) / len(ids) < 5
    assert 0 <= min(ids) <= max(ids) < WORDS
    assert len(encode_words("<|im_start|>user\nWhy?<|im_end|>")) == 5
    assert encode_words("a word") != encode_words("another")


def encode(text):
    return list(text.encode())


def shape(**changes):
    given = {
        "num_prefixes": 4,
        "prefix_len": 512,
        "suffix_len": 120,
        "prompts_per_prefix": 2,
        "output_len": 4,
    }
    return SharedPrefix(**(given | changes))


def common(left, right):
    return sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(left, right, strict=False)
        )
    )


def test_prefixes_have_exactly_the_length_asked_for():
    for length in (256, 512, 700):
        groups = shared_prefixes(encode, shape(prefix_len=length), 0, CHUNK)
        assert [len(group.prefix) for group in groups] == [length] * 5


def test_prefixes_share_no_chunk():
    groups = shared_prefixes(encode, shape(num_prefixes=40), 0, CHUNK)
    assert all(common(a.prefix, b.prefix) < CHUNK for a, b in combinations(groups, 2))


def test_prefixes_begin_with_the_template_and_hold_documentation():
    for group in shared_prefixes(encode, shape(), 0, CHUNK):
        text = bytes(group.prefix).decode()
        assert text.startswith("<|im_start|>system\n")
        assert "Read this text.\n\n" in text


def test_suffixes_fit_hold_questions_and_end_with_the_template():
    groups = shared_prefixes(encode, shape(), 0, CHUNK)
    for group in groups:
        assert len(group.timed) == 2
        for suffix in (group.warm, *group.timed):
            assert len(suffix) <= 120
            assert bytes(suffix).endswith(TAIL)
            assert any(question.encode() in bytes(suffix) for question in QUESTIONS)


def test_the_suffix_to_warm_with_shares_no_block_with_the_timed():
    for group in shared_prefixes(encode, shape(), 0, CHUNK):
        assert all(common(group.warm, suffix) < 16 for suffix in group.timed)


def test_one_seed_gives_one_workload():
    first, again, other = (shared_prefixes(encode, shape(), seed, CHUNK) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefix_len": 255}, "below one chunk of 256 tokens"),
        ({"suffix_len": 40}, "suffix-len 40 is too short"),
        ({"num_prefixes": 100_000}, "ask for fewer"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        shared_prefixes(encode, shape(**change), 0, CHUNK)


def long_doc(**changes):
    given = {
        "num_documents": 3,
        "document_length": 512,
        "suffix_len": 120,
        "output_len": 4,
        "repeat_count": 2,
        "repeat_mode": "tile",
        "hbm_documents": 1,
    }
    return LongDoc(**(given | changes))


def test_questions_come_in_the_order_that_was_named():
    tile = question_order(long_doc(), 0)
    assert tile == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert question_order(long_doc(repeat_mode="interleave"), 0) == sorted(tile)
    shuffled = question_order(long_doc(repeat_mode="random"), 3)
    assert shuffled != tile
    assert sorted(shuffled) == sorted(tile)
    assert shuffled == question_order(long_doc(repeat_mode="random"), 3)


def test_strangers_come_after_so_many_hits():
    shape = long_doc(hits=2, misses=1)
    assert shape.strangers == 3
    assert question_order(shape, 0)[:4] == [(0, 0), (1, 0), (3, 0), (2, 0)]
    assert len({document for document, _ in question_order(shape, 0)}) == 6
    assert len(documents(encode, shape, 0, CHUNK)) == 7


def test_text_goes_on_at_the_beginning():
    corpus = Corpus(0)
    whole = corpus._text
    assert corpus.text(len(whole) - 5, 10) == whole[-5:] + whole[:5]
    assert corpus.text(3, 2 * len(whole)) == (whole[3:] + whole + whole)[: 2 * len(whole)]


def test_passages_begin_alike_nowhere():
    corpus = Corpus(0)
    starts = corpus.passages(200)
    assert len({corpus.text(start, 300) for start in starts}) == 200


def test_conversations_follow_with_a_question_for_each_turn():
    given = MultiTurn(num_conversations=2, turns=3, prefix_len=512, suffix_len=120, output_len=4)
    talks = conversations(encode, given, 0, CHUNK)
    assert len(talks) == 3
    for talk in talks:
        assert 512 < len(talk.opening) <= 632
        assert len(talk.follow_ups) == 2
        for follow_up in talk.follow_ups:
            assert bytes(follow_up).startswith(b"<|im_end|>\n<|im_start|>user\n")
            assert bytes(follow_up).endswith(TAIL)
    assert len({tuple(f) for talk in talks for f in talk.follow_ups}) == 6


def test_distinct_prompts_differ_from_the_start():
    prompts = distinct_prompts(encode, NoReuse(num_prompts=20, input_len=300, output_len=4), 0)
    assert [len(prompt) for prompt in prompts] == [300] * 21
    start = len("<|im_start|>user\n")
    assert all(common(a, b) < start + 4 for a, b in combinations(prompts, 2))


def test_a_prompt_without_room_for_text_is_refused():
    with pytest.raises(ConfigError, match="leaves no room"):
        distinct_prompts(encode, NoReuse(num_prompts=1, input_len=50, output_len=4), 0)
