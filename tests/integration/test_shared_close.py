"""Caches that share a Depot, while it is closed: the last one closes it, and nobody comes later."""

from __future__ import annotations

import pytest

from kvtier.errors import MisuseError
from kvtier.testing.toy import NAMESPACE, dram, opened

pytestmark = pytest.mark.everywhere


@pytest.mark.inside("joins the depot itself")
def test_nobody_joins_after_the_last_has_left():
    """Its memory is gone: who came between that and the end of `close` would read nothing."""
    one = opened(dram(8))
    depot = one.cache._desk.depot
    one.close()
    with pytest.raises(MisuseError, match="closed"):
        depot.join(NAMESPACE, one.cache.shape)
    assert not depot._caches


@pytest.mark.inside("lets a flush wait")
def test_the_last_one_may_close_while_another_is_on_its_way_out(monkeypatch):
    one = opened(dram(8))
    other = one.cache.share(NAMESPACE)
    depot = one.cache._desk.depot
    flush = depot.flush

    def after_the_other(timeout: float) -> bool:
        monkeypatch.setattr(depot, "flush", flush)
        other.close()
        return flush(timeout)

    monkeypatch.setattr(depot, "flush", after_the_other)
    one.close()
    with pytest.raises(MisuseError, match="closed"):
        other.match([1])
