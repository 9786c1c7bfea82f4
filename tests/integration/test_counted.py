"""What is counted as asked for: a request once, however often its engine has to look."""

from __future__ import annotations

import pytest

from kvtier import Cache
from kvtier.testing.toy import CHUNK, dram, opened, prompt

pytestmark = pytest.mark.everywhere
LENGTH = 4 * CHUNK + 1


@pytest.fixture
def toy(tmp_path):
    """An engine over a shared tier, which has to be asked for what is not known."""
    one = opened(dram(32), f"files:{tmp_path}/kv?capacity=1GiB&admission=through")
    yield one
    one.close()


def asked(toy):
    """Return the tokens that were asked for."""
    return toy.cache.figures().get("kvtier_match_tokens_total", 0)


def test_a_miss_that_a_shared_tier_was_asked_about_is_one_request(toy):
    assert toy.load("a", prompt(LENGTH))[0] == 0
    assert asked(toy) == LENGTH


def test_twin_who_looks_again_as_at_first_is_counted_twice(toy, monkeypatch):
    look = Cache.match
    monkeypatch.setattr(Cache, "match", lambda cache, prompt, **_: look(cache, prompt))
    assert toy.load("a", prompt(LENGTH))[0] == 0
    assert asked(toy) == 2 * LENGTH


def test_an_engine_that_has_no_room_yet_asks_again_for_nothing(toy):
    for _ in range(3):
        while toy.connector.match("a", prompt(LENGTH), 0).pending:
            toy.connector.wait(5)
    assert asked(toy) == LENGTH
    toy.connector.finish("a")


def test_who_was_preempted_and_loads_again_asks_again(toy):
    toy.save("a", prompt(LENGTH))
    for _ in range(2):
        assert toy.connector.match("b", prompt(LENGTH), 0).tokens == 4 * CHUNK
        toy.connector.load("b", list(range(128, 144)))
        assert toy.until(lambda update: update.loaded).loaded[0].tokens == 4 * CHUNK
    assert asked(toy) == 2 * LENGTH
    toy.connector.finish("b")


def test_to_prefetch_a_prompt_is_not_to_ask_for_it(toy):
    toy.save("a", prompt(LENGTH))
    toy.cache.prefetch(prompt(LENGTH), base=5, per_1024_tokens=0).result(20)
    assert not asked(toy)
