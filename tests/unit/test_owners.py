"""Owners: whose a namespace is, and what a quota may be."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.catalog import owners
from kvtier.catalog.owners import NOBODY, Owners, Quota, check_floors
from kvtier.errors import ConfigError


def test_more_namespaces_than_can_be_told_apart_are_nobodys(monkeypatch):
    monkeypatch.setattr(owners, "_MOST", 3)
    found = Owners()
    assert [found.number(name) for name in (b"a", b"b", b"c", b"a")] == [1, 2, NOBODY, 1]
    assert found.find(b"c") is None
    assert len(found.digests) == len(found.shares) == 3


@pytest.mark.parametrize(
    ("floor", "ceiling"), [("0.1", 1.0), (0.1, "1"), (True, 1.0), (0.5, None), (0.9, 0.8)]
)
def test_a_quota_takes_numbers_that_make_sense(floor: Any, ceiling: Any):
    with pytest.raises(ConfigError, match="0 <= floor <= ceiling <= 1"):
        Quota(floor, ceiling)


@pytest.mark.parametrize(
    ("quotas", "says"),
    [
        ([("a", Quota())], "quotas must be a Mapping"),
        ({5: Quota()}, "tenant's name must be a str"),
        ({"a": 0.5}, "quota of tenant 'a' must be a Quota"),
    ],
)
def test_quotas_are_of_tenants_by_name(quotas: Any, says):
    with pytest.raises(ConfigError, match=says):
        check_floors(quotas)


def test_floors_may_add_up_to_the_whole():
    check_floors({"a": Quota(0.25), "b": Quota(0.75)})
    check_floors({name: Quota(0.1) for name in "abcdefghij"})
    with pytest.raises(ConfigError, match="add up to"):
        check_floors({"a": Quota(0.5), "b": Quota(0.500001)})
