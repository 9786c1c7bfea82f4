"""``kvtier gc`` and ``kvtier doctor`` on a real S3 server."""

from __future__ import annotations

import json
import threading

import pytest
from botocore.awsrequest import AWSResponse

from kvtier.cli.main import run
from kvtier.events import noted
from kvtier.storage_backends.s3_medium import CLAIM
from kvtier.storage_backends.s3_send import _Held
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


@pytest.fixture
def proxy(s3_server):
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LESS])
def test_the_tail_of_a_head_that_cannot_be_read_is_no_orphan(
    capsys, written, s3_server, s3_location, proxy, fault
):
    bucket, _, prefix = s3_location.removeprefix("//").partition("/")
    sizes = s3_server.client().list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    head = max(sizes, key=lambda each: each["Size"])["Key"]
    url = f"{written.replace(s3_server.endpoint, proxy.endpoint)}&capacity=unbounded"
    proxy.inject(fault, f"GET /{bucket}/{head}", other=b"?" * 1000)
    status, found = gc(capsys, url, "--orphans-after", "0s")
    assert (status, found["unread"], found["removed"]) == (1, 1, {})
    assert len(listed(s3_server, s3_location)) == len(sizes)
    proxy.inject(Fault.NONE)
    status, found = gc(capsys, url, "--orphans-after", "0s")
    assert (status, found["unread"], found["removed"]) == (0, 0, {})


@pytest.mark.parametrize(
    ("fault", "verb", "says"),
    [
        (
            Fault.DENIED,
            "POST",
            "not everything could be deleted: DeleteObjects was answered by Acc",
        ),
        (
            Fault.XML_ERROR,
            "POST",
            "not everything could be deleted: DeleteObjects was answered by ",
        ),
        (Fault.DENIED, "PUT", "PutObject was answered by AccessDenied, injected; let these cred"),
        (Fault.XML_ERROR, "GET", "the server did not answer with a claim"),
    ],
)
def test_why_nothing_could_be_collected_is_said(
    capsys, written, s3_server, s3_location, proxy, fault, verb, says
):
    before = len(listed(s3_server, s3_location))
    url = f"{written.replace(s3_server.endpoint, proxy.endpoint)}&capacity=1B"
    place = s3_location if verb == "POST" else f"{s3_location}/{CLAIM}"
    if verb == "GET":  # it is looked at where another one may be collecting
        claim = place.removeprefix("//").partition("/")
        s3_server.client().put_object(Bucket=claim[0], Key=claim[2], Body=b"{}")
        before += 1
    proxy.inject(fault, verb if verb == "POST" else f"{verb} {place.removeprefix('/')}")
    status, found = gc(capsys, url)
    assert status == (1 if "ended" in found else 2)
    assert says in found.get("ended", found.get("error", ""))
    assert len(listed(s3_server, s3_location)) == before


def test_what_may_not_be_deleted_one_by_one_is_said_too(s3_open, monkeypatch):
    """As a bucket's policy, or a lock on objects, may have it: S3 answers for each."""
    medium = s3_open().medium()
    errors = [{"Key": medium._key_of(b"b" * 42), "Code": "AccessDenied", "Message": "it is locked"}]
    monkeypatch.setattr(medium._client, "delete_objects", lambda **_: {"Errors": errors})
    assert medium.remove([b"a" * 42, b"b" * 42]) == [True, False]
    assert "AccessDenied, it is locked; let these credentials" in noted()


def test_a_server_that_refuses_conditions_is_taken_for_one_that_ignores_them(s3_open):
    """Such are there: they answer 501 to a PUT that has one."""
    store = s3_open()
    asked = []

    def answer(request, **_):
        if not {"If-None-Match", "If-Match"} & request.headers.keys():
            return None
        asked.append(request.url)
        body = b"<Error><Code>NotImplemented</Code><Message>no</Message></Error>"
        return AWSResponse(request.url, 501, {}, _Held(body))

    store._client.meta.events.register_first("before-send.s3.PutObject", answer)
    medium, other = store.medium(), store.medium()
    assert [medium.claim(60), other.claim(60)] == [True, True]
    assert asked
    assert medium.race(4) == 4, "which the doctor calls limited"
    other.release()


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
