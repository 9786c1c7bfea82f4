"""H10: where few tokens hit, the chunk that ends the match and its reason can be told."""

from __future__ import annotations

import dataclasses
import json

import pytest

import kvtier
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, NAMESPACE, prompt

pytestmark = [pytest.mark.everywhere, pytest.mark.usefixtures("unhurried")]

CHUNKS = 8
TOKENS = CHUNKS * CHUNK
PROMPT = prompt(TOKENS + 1)


def below(toy):
    """Have all of the prompt in the tier below only."""
    toy.save("save", PROMPT[:TOKENS])
    toy.cache.clear("dram")


def test_a_tail_without_its_head_is_a_miss_whose_reason_is_told(engines, disk):
    """The scenario: all chunks but the first two are there, and the hit is zero."""
    toy = engines(disk)
    below(toy)
    disk.delete_many([names[0] for names in toy.cache.prefix(PROMPT).names[:2]])
    assert toy.load("finds out", PROMPT)[0] == 0
    told = toy.cache.explain(PROMPT)
    assert (told.usable, told.end.chunk) == (0, 0)
    assert told.end.why == "disk had lost it, just now."
    assert [chunk.parts[0].reason for chunk in told.chunks[:3]] == ["lost", "lost", "headless"]
    assert all("disk" in chunk.parts[0].tiers for chunk in told.chunks[3:CHUNKS])
    assert toy.cache.figures()["kvtier_orphan_parts"] == 1
    toy.save("again", PROMPT[:TOKENS])
    assert toy.load("healed", PROMPT)[::2] == (TOKENS, True)
    assert toy.cache.explain(PROMPT).usable == TOKENS


@pytest.mark.parametrize("bad", [0, 1, CHUNKS - 1])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("failed", "lost"), ("absent", "lost"), ("short", "lost"), ("wrong", "corrupt")],
)
def test_a_read_that_failed_is_the_reason_of_the_chunk_that_it_lost(
    engines, faulty_at, kind, reason, bad
):
    store = faulty_at(kind, ())
    toy = engines(store)
    below(toy)
    store.depths = {bad}
    assert toy.load("load", PROMPT)[0] == bad * CHUNK
    told = toy.cache.explain(PROMPT)
    assert (told.usable, told.end.chunk) == (bad * CHUNK, bad)
    assert told.chunks[bad].parts[0].reason == reason
    assert told.chunks[bad].parts[0].tier == "disk"


@pytest.mark.parametrize(
    "change", [{"tenant": "b"}, {"revision": "2"}, {"quantisation": "int8"}, {"secret": b"s"}]
)
def test_what_is_there_for_another_namespace_was_never_seen_by_this_one(engines, disk, change):
    toy = engines(disk)
    below(toy)
    engines.close(toy)
    other = engines(disk, namespace=dataclasses.replace(NAMESPACE, **change))
    told = other.cache.explain(PROMPT)
    assert (told.usable, told.end.chunk) == (0, 0)
    assert told.end.why.startswith("never seen")


def test_an_adapter_a_salt_and_an_image_are_part_of_the_question(engines, disk):
    toy = engines(disk)
    below(toy)
    for request in (
        kvtier.Request(adapter=b"a" * 32),
        kvtier.Request(salt=b"user"),
        kvtier.Request(spans=(kvtier.Span(3 * CHUNK, 4 * CHUNK, b"i" * 32),)),
    ):
        told = toy.cache.explain(PROMPT, request=request)
        assert told.usable == toy.cache.match(PROMPT, request).tokens
        assert told.end.chunk == (3 if request.spans else 0)
        assert told.end.why.startswith("never seen")


def test_what_had_no_room_is_told_by_tier(engines, disk):
    """Room for five chunks below and for eight in dram: evicted from there, from here not saved."""
    toy = engines(disk, chunks=CHUNKS, capacity=5 * disk.footprint(CHUNK_BYTES))
    below(toy)
    told = toy.cache.explain(PROMPT)
    assert 4 * CHUNK <= told.usable <= 5 * CHUNK
    reasons = {chunk.parts[0].reason for chunk in told.chunks[told.end.chunk : CHUNKS]}
    assert reasons <= {"cleared", "evicted"}
    assert json.dumps(told.plain())
    assert str(told).startswith(f"{told.usable} of {TOKENS + 1} tokens are usable. Chunk ")
