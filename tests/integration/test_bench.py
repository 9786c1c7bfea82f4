"""The benchmark from end to end: real processes, a real S3 server, a small random model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.bench import child, processes
from kvtier.bench.arm import Arm
from kvtier.bench.messages import Done
from kvtier.cli.main import run
from kvtier.errors import ConfigError, KvtierError
from kvtier.testing import seaweed
from kvtier.testing.waiting import lives, until

pytestmark = pytest.mark.timeout(180)  # five processes that import torch, on a busy machine
SMALL = ("--model", "random", "--prefix-len", "512", "--suffix-len", "128", "--output-len", "6")
ENDLESS = ("--num-prefixes", "8", "--prompts-per-prefix", "5000")  # for the time of a test
HEADER = 256
# What a shell starts in the background ignores signals, and so would a benchmark under it.
HEED_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def weed():
    """Say so where the S3 server is not installed."""
    try:
        return seaweed._binary()
    except ConfigError as absent:
        pytest.skip(str(absent))


def kvtier(*args, env=None, cwd=None):
    command = [sys.executable, "-m", "kvtier", *args]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=env, cwd=cwd, timeout=170
    )


def refused(*args, env=None):
    ran = kvtier("bench", *args, env=env)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1
    return ran.stderr


def reported(*args, env=None, cwd=None):
    ran = kvtier("bench", *args, "--json", "-", env=env, cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.server
def test_all_arms_answer_alike_from_the_tiers_they_name_in_table_and_json(tmp_path, weed):
    file, folder = tmp_path / "report.json", tmp_path / "kv"
    folder.mkdir()
    args = ("shared-prefix", *SMALL, "--num-prefixes", "2", "--dir", str(folder))
    ran = kvtier("bench", *args, "--output-details", "--json", str(file))
    assert ran.returncode == 0, ran.stderr
    assert "TTFT p50" in ran.stdout
    assert "speed of a GPU" in ran.stdout
    report = json.loads(file.read_text())
    assert report["workload"] == "shared-prefix"
    arms = {arm["name"]: arm for arm in report["arms"]}
    assert list(arms) == ["recompute", "hbm", "dram", "lmdb", "s3"]
    assert report["problems"] == []
    assert len({arm["tokens_sha256"] for arm in arms.values()}) == 1
    for name, arm in arms.items():
        hits = {} if name == "recompute" else {name: 1024}
        assert arm["hit_tokens"] == hits
        total = arm["recomputed_tokens"] + sum(hits.values())
        assert total == arms["recompute"]["recomputed_tokens"]
        assert arm["ttft_ms"]["p50"] > 0
        assert arm["tpot_ms"]["p50"] > 0
        assert [len(one["tokens"]) for one in arm["details"]] == [6, 6]
    assert report["prefill_over_plain_torch"] > 0
    assert report["prefill_over_plain_torch_spread"]["pairs"] == 2
    claimed = 1024 * 256  # tokens times KV bytes a token
    # Each record has a header, a page of its own on disk and 256 bytes in S3, where one more is
    # read to find out whether the record is there.
    assert arms["lmdb"]["claimed_bytes"] == {"lmdb": claimed}
    assert claimed <= arms["lmdb"]["disk_read_bytes"] <= claimed + 4 * 4096
    assert arms["s3"]["claimed_bytes"] == {"s3": claimed}
    assert claimed <= arms["s3"]["s3_sent_bytes"] <= claimed + 4 * 2 * HEADER
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_answers_are_alike_when_copies_come_in_an_odd_order(tmp_path):
    args = ("shared-prefix", *SMALL, "--num-prefixes", "1", "--dir", str(tmp_path))
    report = reported(*args, "--arms", "recompute,dram,lmdb", "--device-chaos", "11")
    assert report["args"]["device_chaos"] == 11
    assert report["problems"] == []
    assert len({arm["tokens_sha256"] for arm in report["arms"]}) == 1
    assert [arm["hit_tokens"] for arm in report["arms"]] == [{}, {"dram": 512}, {"lmdb": 512}]


@pytest.mark.slow
@pytest.mark.server
def test_answers_are_alike_in_bad_weather_and_nothing_hangs(tmp_path, weed):
    args = ("shared-prefix", *SMALL, "--num-prefixes", "2", "--dir", str(tmp_path))
    report = reported(*args, "--arms", "recompute,s3", "--chaos", "s3")
    assert report["problems"] == []
    assert len({arm["tokens_sha256"] for arm in report["arms"]}) == 1
    spoilt = report["spoilt"]
    assert sum(count for fault, count in spoilt.items() if fault != "none") >= 1


def test_chaos_is_refused_where_there_is_nothing_to_spoil():
    assert "add it to --arms" in refused("shared-prefix", "--arms", "dram", "--chaos", "s3")
    assert "leave out --s3" in refused(
        "shared-prefix", "--arms", "s3", "--chaos", "s3", "--s3", "s3://bucket"
    )


@pytest.mark.slow
def test_conversations_find_their_history(tmp_path):
    args = ("multi-turn", *SMALL, "--num-conversations", "1", "--turns", "3")
    report = reported(*args, "--arms", "recompute,lmdb", "--dir", str(tmp_path))
    assert report["problems"] == []
    recompute, lmdb = report["arms"]
    assert recompute["tokens_sha256"] == lmdb["tokens_sha256"]
    assert set(lmdb["hit_tokens"]) == {"lmdb"}
    assert lmdb["hit_tokens"]["lmdb"] >= 2 * 512


@pytest.mark.slow
def test_prompts_that_share_nothing_hit_nothing(tmp_path):
    args = ("no-reuse", "--model", "random", "--num-prompts", "2", "--input-len", "600")
    args = (*args, "--output-len", "4", "--arms", "recompute,lmdb")
    report = reported(*args, "--dir", str(tmp_path))
    assert report["problems"] == []
    recompute, lmdb = report["arms"]
    assert [recompute["hit_tokens"], lmdb["hit_tokens"]] == [{}, {}]
    assert lmdb["throughput_over_recompute"]["pairs"] == 2


# -------------------------------------------------------------------------------- at the door


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--prefix-len", "4096"), "exceed the 2048 of the model's context"),
        (("--dram", "1KiB"), "--dram 1 KiB is too little"),
        (("--prefix-len", "100"), "below one chunk of 256 tokens"),
        (("--suffix-len", "20"), "suffix-len 20 is too short"),
        (("--chunk-tokens", "100"), "the nearest that fits is 96"),
    ],
)
def test_what_the_model_cannot_serve_is_refused(args, said, monkeypatch, capsys):
    monkeypatch.setattr(processes, "Child", Here)
    given = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | {args[0]: args[1]}
    flat = [text for pair in given.items() for text in pair]
    assert run(["bench", "shared-prefix", *flat, "--arms", "dram"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert said in err


class Here(child.Child):
    """An arm in this process: one of its own takes three seconds to load what it needs."""

    def __enter__(self):
        self.arm = Arm()
        return self

    def send(self, request):
        self.reply = self.arm.answer(request)

    def receive(self, kind):
        assert isinstance(self.reply, kind)
        return self.reply

    def close(self, *, now=False):
        self.arm.close()


def test_a_truncated_model_file_is_refused(tmp_path, weights):
    short = tmp_path / "short.gguf"
    with weights.open("rb") as file:
        short.write_bytes(file.read(5_000_000))
    said = refused("shared-prefix", "--model", str(short), "--arms", "hbm")
    assert "not a whole GGUF file" in said


@pytest.mark.server
def test_a_bucket_that_is_missing_is_refused(s3_server, s3_credentials, s3_bucket):
    url = f"s3://no-such-bucket?endpoint={s3_server.endpoint}"
    assert "create the bucket" in refused("shared-prefix", *SMALL, "--arms", "s3", "--s3", url)


@pytest.mark.server
def test_wrong_credentials_are_refused(s3_server, s3_credentials, s3_bucket):
    url = f"s3://{s3_bucket}?endpoint={s3_server.endpoint}"
    env = os.environ | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    said = refused("shared-prefix", *SMALL, "--arms", "s3", "--s3", url, env=env)
    assert "the secret key does not belong to the access key" in said


@pytest.mark.slow
@pytest.mark.server
def test_an_existing_bucket_is_left_as_it_was(s3_server, s3_credentials, s3_bucket, tmp_path):
    url = f"s3://{s3_bucket}/there?endpoint={s3_server.endpoint}"
    args = ("shared-prefix", *SMALL, "--num-prefixes", "1", "--dir", str(tmp_path))
    [s3] = reported(*args, "--arms", "s3", "--s3", url)["arms"]
    assert s3["hit_tokens"] == {"s3": 512}
    assert "s3_sent_bytes" not in s3
    listing = s3_server.client().list_objects_v2(Bucket=s3_bucket, Prefix="there")
    assert listing["KeyCount"] == 0


@pytest.mark.slow
@pytest.mark.server
def test_a_distant_server_gives_the_same_answers_later(tmp_path, weed):
    args = ("shared-prefix", *SMALL, "--num-prefixes", "1", "--dir", str(tmp_path))
    report = reported(*args, "--arms", "recompute,s3", "--s3-delay", "150ms")
    recompute, s3 = report["arms"]
    assert s3["tokens_sha256"] == recompute["tokens_sha256"]
    assert s3["hit_tokens"] == {"s3": 512}
    assert s3["ttft_ms"]["p50"] >= 150


@pytest.mark.server
def test_the_doctor_tries_a_bucket(s3_server, s3_credentials, s3_bucket, tmp_path):
    url = f"s3://{s3_bucket}/doctor?endpoint={s3_server.endpoint}"
    ran = kvtier("doctor", "--json", "--s3", url, "--dir", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    [found] = [one for one in json.loads(ran.stdout) if one["name"] == "s3"]
    assert found["state"] == "ok"
    listing = s3_server.client().list_objects_v2(Bucket=s3_bucket, Prefix="doctor")
    assert listing["KeyCount"] == 0


# ------------------------------------------------------------------------------- its processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, number, status):
    report = tmp_path / "report.json"
    args = ("shared-prefix", *SMALL, *ENDLESS, "--arms", "hbm", "--json", str(report))
    heed = [sys.executable, "-c", HEED_SIGNALS, "-m", "kvtier", "bench"]
    command = [*heed, *args, "--dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as bench:
        try:
            children = until(lambda: children_of(bench.pid))
            bench.send_signal(number)
            _, said = bench.communicate(timeout=30)
        finally:
            bench.kill()
    assert bench.returncode == status
    assert b"Traceback" not in said
    assert not any(map(lives, children))
    assert list(tmp_path.iterdir()) == []


def test_an_arm_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(child, "_ANSWER_SECONDS", 0.0)
    with (
        child.Child("mute", program="kvtier.bench.arm", threads=1, log=None, env={}) as mute,
        pytest.raises(KvtierError) as no,
    ):
        mute.receive(Done)
    assert "arm mute has not answered" in str(no.value)


@pytest.mark.slow
def test_arms_die_with_a_benchmark_that_was_killed(tmp_path):
    args = ("shared-prefix", *SMALL, *ENDLESS, "--arms", "hbm")
    command = [sys.executable, "-m", "kvtier", "bench", *args, "--dir", str(tmp_path)]
    with subprocess.Popen(command) as bench:
        children = until(lambda: children_of(bench.pid))
        bench.kill()
    until(lambda: not any(map(lives, children)))


@pytest.mark.slow
@pytest.mark.server
def test_a_server_leaves_no_file_behind(weed):
    with seaweed.SeaweedServer() as server:
        folder = Path(server._folder.name)
        sockets = [
            seaweed._SOCKETS / f"seaweedfs-{part}-grpc-{port + seaweed._GRPC}.sock"
            for part, port in server._ports.items()
        ]
        assert folder.exists()
        assert any(path.exists() for path in sockets)
    assert not any(path.exists() for path in (folder, *sockets))


def children_of(pid):
    """Return the arms that a benchmark has started, and knows of."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed if b"-m\0kvtier.bench.arm" in command_of(child)]


def command_of(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command if b"-ISc" not in command else b""
    return b""
