"""The usable length, against the rule applied to every length in turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.usable import usable_tokens
from kvtier.identity.geometry import Component, Geometry, Needs
from kvtier.identity.shape import Shape, chunk_shape

BLOCK, CHUNK = 4, 8


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kinds = draw(st.lists(st.sampled_from(list(Needs)), min_size=1, max_size=3))
    components = tuple(
        Component(
            1,
            1,
            1,
            name=str(number),
            needs=kind,
            window=draw(st.integers(1, 30)) if kind is Needs.TRAILING else 0,
        )
        for number, kind in enumerate(kinds)
    )
    return chunk_shape(Geometry(components, "int8", (BLOCK,), CHUNK))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Shape, list[list[bool]], int]:
    """Return a shape, what is there of each chunk's parts, and the limit."""
    shape = draw(shapes())
    width = len(shape.names)
    row = st.lists(st.sampled_from([True, True, True, False]), min_size=width, max_size=width)
    there = draw(st.lists(row, max_size=8))
    return shape, there, draw(st.integers(0, len(there) * CHUNK + 5))


def usable(shape: Shape, there: list[list[bool]], tokens: int) -> bool:
    """Say, token by token, whether a prefix has all that it needs."""
    if tokens % BLOCK or tokens > len(there) * CHUNK:
        return False
    chunks = range(-(-tokens // CHUNK))
    always = all(there[chunk][at] for chunk in chunks for at in shape.always)
    windows = all(
        there[token // CHUNK][at]
        for at, window in shape.windows
        for token in range(max(tokens - window, 0), tokens)
    )
    ends = not shape.states or (tokens % CHUNK == 0)
    return always and windows and ends and all(there[tokens // CHUNK - 1][s] for s in shape.states)


@given(prompts())
def test_it_is_the_longest_length_that_has_what_it_needs(case):
    shape, there, limit = case
    found, chunks = usable_tokens(shape, len(there), limit, lambda c, at: there[c][at])
    best = max((n for n in range(1, limit + 1) if usable(shape, there, n)), default=0)
    assert found == best
    assert chunks == next(
        (c for c, parts in enumerate(there) if not all(parts[at] for at in shape.always)),
        len(there),
    )


@given(prompts())
def test_what_it_needs_of_each_chunk_is_there_and_enough(case):
    """The parts that are leased and fetched are those that make the length usable."""
    shape, there, limit = case
    found, _ = usable_tokens(shape, len(there), limit, lambda c, at: there[c][at])
    needed = {(c, at) for c in range(-(-found // CHUNK)) for at in shape.needed(found, c)}
    assert all(there[chunk][at] for chunk, at in needed)
    only = [[(c, at) in needed for at in range(len(shape.names))] for c in range(len(there))]
    assert not found or usable(shape, only, found)
