"""``kvtier gc`` and ``kvtier doctor`` on a real S3 server."""

from __future__ import annotations

import json
import threading

import pytest

from kvtier.cli.main import run
from kvtier.storage_backends.s3_medium import CLAIM
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, dram, opened, prompt

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CHUNKS = 20


@pytest.fixture
def place(s3_server, s3_location) -> str:
    return f"s3:{s3_location}?endpoint={s3_server.endpoint}"


@pytest.fixture
def written(place) -> str:
    """Return a place where two prompts lie that share a beginning, 5 packs of 40 chunks."""
    toy = opened(dram(100), f"{place}&capacity=1GiB&admission=through")
    for seed in range(2):
        toy.save(f"prompt {seed}", prompt(CHUNKS * CHUNK + 1, seed))
    toy.close()
    return place


def gc(capsys, url: str, *more: str) -> tuple[int, dict]:
    status = run(["gc", url, "--json", *more])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else {"error": said.err}


def listed(server, location: str) -> list[str]:
    bucket, _, prefix = location.removeprefix("//").partition("/")
    answer = server.client().list_objects_v2(Bucket=bucket, Prefix=prefix)
    return [each["Key"].removeprefix(prefix + "/") for each in answer.get("Contents", ())]


def test_the_capacity_is_held_and_what_is_left_is_used(capsys, written, s3_server, s3_location):
    status, found = gc(capsys, f"{written}&capacity={20 * CHUNK_BYTES + 20 * 300}B")
    assert status == 0
    assert found["overshoot_bytes"] > 0
    assert found["left_over_bytes"] == 0
    assert set(found["removed"]) == {"capacity"}
    assert found["requests"]["LIST"] == 1
    assert 0 < found["request_usd"] < 0.01
    assert CLAIM not in listed(s3_server, s3_location)
    toy = opened(dram(100), f"{written}&capacity=1GiB")
    exact = [toy.load(f"p{seed}", prompt(CHUNKS * CHUNK + 1, seed))[::2] for seed in range(2)]
    toy.close()
    assert all(right for _, right in exact)
    assert sum(tokens for tokens, _ in exact) >= 16 * CHUNK


def test_strangers_stay_and_are_counted(capsys, written, s3_server, s3_location):
    bucket, _, prefix = s3_location.removeprefix("//").partition("/")
    client = s3_server.client()
    for key in ("notes.txt", "a" * 64, f"{'0' * 64}-{'0' * 20}"):
        client.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b"not yours")
    client.put_object(Bucket=bucket, Key=f"{prefix}-neighbour/x", Body=b"not yours")
    status, found = gc(capsys, f"{written}&capacity=1B")
    assert status == 1, "what is spoilt counts, and stays"
    assert (found["strangers"], found["unreadable"]) == (2, 1)
    assert len(listed(s3_server, s3_location)) == 4


def test_what_is_old_goes_and_a_dry_run_says_so(capsys, written, s3_server, s3_location):
    url = f"{written}&capacity=unbounded"
    before = len(listed(s3_server, s3_location))
    assert gc(capsys, url, "--max-age", "24h")[1]["removed"] == {}
    _, found = gc(capsys, url, "--max-age", "0s", "--dry-run")
    assert found["removed"] == {"age": before}
    assert len(listed(s3_server, s3_location)) == before
    assert gc(capsys, url, "--max-age", "0s")[0] == 0
    assert listed(s3_server, s3_location) == []


def test_a_tail_without_a_head_is_collected(capsys, written, s3_server, s3_location):
    bucket, _, prefix = s3_location.removeprefix("//").partition("/")
    client = s3_server.client()
    sizes = client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    for each in sizes:
        if each["Size"] > 8 * CHUNK_BYTES:  # the heads
            client.delete_object(Bucket=bucket, Key=each["Key"])
    url = f"{written}&capacity=unbounded"
    assert gc(capsys, url)[1]["removed"] == {}, "somebody may be writing the head"
    assert set(gc(capsys, url, "--orphans-after", "0s")[1]["removed"]) == {"orphan"}
    assert listed(s3_server, s3_location) == []


def test_two_at_once_do_no_harm(written, s3_server, s3_location):
    url = f"{written}&capacity={20 * CHUNK_BYTES + 20 * 300}B"
    states: list[int] = []
    threads = [threading.Thread(target=lambda: states.append(run(["gc", url]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 in states
    assert listed(s3_server, s3_location)
    assert CLAIM not in listed(s3_server, s3_location)


def test_a_claim_of_one_that_died_is_taken_over(capsys, written, s3_server, s3_location):
    bucket, _, prefix = s3_location.removeprefix("//").partition("/")
    url = f"{written}&capacity=1B"
    claim = {"Bucket": bucket, "Key": f"{prefix}/{CLAIM}"}
    body = b'{"owner": "other", "seconds": %b}'
    s3_server.client().put_object(**claim, Body=body % b"100")
    status, found = gc(capsys, url)
    assert (status, found["ended"]) == (1, "another collection is under way")
    s3_server.client().put_object(**claim, Body=body % b"-1")
    status, found = gc(capsys, url)
    assert (status, listed(s3_server, s3_location)) == (0, [])


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("dram:1GiB", "its owner or its server keeps its capacity"),
        ("memory:x?capacity=1GiB", "its owner or its server keeps its capacity"),
        ("valkey://127.0.0.1:1/0?capacity=1GiB", "its owner or its server keeps its capacity"),
        ("s3://no-such-bucket-here/x?capacity=1GiB&endpoint={}", "create the bucket"),
        ("s3://b", "no capacity"),
    ],
)
def test_where_nothing_can_be_collected_that_is_said(capsys, s3_server, url, says):
    status, found = gc(capsys, url.format(s3_server.endpoint))
    assert status == 2
    assert says in found["error"]


def test_the_doctor_takes_a_server_that_is_slow_at_races_for_what_it_is(
    capsys, s3_server, s3_location
):
    """Of writers that are not answered none has won; the bucket can be used all the same."""
    with DelayProxy(s3_server.port) as proxy:
        proxy.inject(Fault.HANG, f"{CLAIM}-race")
        url = f"s3:{s3_location}?endpoint={proxy.endpoint}&read_timeout=1s"
        assert run(["doctor", "--s3", url, "--json"]) == 0
    (found,) = [one for one in json.loads(capsys.readouterr().out) if one["name"] == "s3"]
    assert "of 32 conditional puts at once 0 won" in found["found"]
    assert found["state"] == "limited"


def test_the_doctor_races_writers(capsys, place, s3_server, s3_location):
    run(["doctor", "--s3", place.replace("s3:", "s3:", 1), "--json"])
    (found,) = [one for one in json.loads(capsys.readouterr().out) if one["name"] == "s3"]
    assert "of 32 conditional puts at once" in found["found"]
    won = int(found["found"].split("at once ")[1].split()[0])
    assert (found["state"] == "ok") == (won == 1)
    assert listed(s3_server, s3_location) == []
