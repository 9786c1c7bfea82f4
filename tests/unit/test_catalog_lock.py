"""The Catalog's lock: each of its calls takes it before anything else, from whatever thread."""

from __future__ import annotations

import inspect

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.testing.mutations import chosen, removed
from kvtier.testing.small_catalog import SmallCatalog

# They read what is set once, when the Catalog is made.
UNLOCKED = {"capacity"}
CALLS = [
    name
    for name, _ in inspect.getmembers(Catalog, inspect.isfunction)
    if not name.startswith("_") and name not in UNLOCKED
]


class TakenError(Exception):
    """Raised in place of waiting."""


class Taken:
    """A lock that another thread has."""

    def __enter__(self):
        raise TakenError

    def __exit__(self, *_):
        """Never entered."""


@pytest.fixture
def catalog():
    small = SmallCatalog(2)
    small.catalog._lock = Taken()
    yield small.catalog
    small.close()


def call(catalog, name):
    method = getattr(catalog, name)
    needed = [
        one
        for one in inspect.signature(method).parameters.values()
        if one.default is inspect.Parameter.empty
    ]
    values = {one.name: 1 if one.annotation == "int" else None for one in needed}
    keywords = {one.name: values.pop(one.name) for one in needed if one.kind is one.KEYWORD_ONLY}
    return method(*values.values(), **keywords)


def test_there_are_calls():
    assert {"match", "lease", "reserve", "commit", "evict"} < set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_catalog_takes_its_lock_first(catalog, name):
    with pytest.raises(TakenError):
        call(catalog, name)


def test_without_the_lock_a_call_goes_ahead(catalog):
    """The twin: one that has lost its lock is noticed."""
    (unlocked,) = chosen("*.gone:unlocked-*")
    with removed(unlocked):
        assert call(catalog, "gone")
