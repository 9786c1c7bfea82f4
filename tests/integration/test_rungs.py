"""``kvtier doctor --measure``: tiers measured for real, kept, and believed by a cache."""

from __future__ import annotations

import itertools
import json

import pytest

import kvtier
from kvtier.bench import rungs
from kvtier.bench.rungs import tier_rung
from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.testing.toy import NAMESPACE, dram


def doctor(tmp_path, *args):
    return run(["doctor", "--dir", str(tmp_path), *args])


def test_a_measured_tier_is_believed(tmp_path, capsys):
    url = f"lmdb:{tmp_path}/kv?capacity=256MiB"
    kept = tmp_path / "rungs.json"
    assert doctor(tmp_path, "--measure", url, "--keep", str(kept)) == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines() if "rung" in line] == [
        f"✓ rung {name}" for name in ("memcpy", "codec", "lmdb")
    ]
    (rung,) = json.loads(kept.read_text())
    assert rung["read_bytes_per_s"] > 1e6
    with kvtier.open(dram(8), url, namespace=NAMESPACE) as cache:
        assert cache.figures()['kvtier_tier_parts{tier="lmdb"}'] == 0  # nothing stayed
        cache.seed(kept)
        latency, rate = cache._adviser.costs.figures()["lmdb"]
        assert rate == pytest.approx(rung["read_bytes_per_s"])
        assert latency == rung["latency_s"]
    with kvtier.open(dram(8), namespace=NAMESPACE) as cache:
        cache.seed(kept)  # of a tier that is not here
        assert cache._adviser.costs.figures() == {}


def test_the_codec_is_a_rung_by_what_it_takes_of_a_core(monkeypatch):
    """Encoding 16 MiB in 32 ms and decoding them in 16, of which nearly a third is saved."""
    times = itertools.count()
    steps = (0.0, 0.032, 0.048)
    monkeypatch.setattr(rungs.time, "thread_time", lambda: (at := next(times)) // 3 + steps[at % 3])
    found = rungs.codec()
    assert found.encode_bytes_per_s == pytest.approx((16 << 20) / 0.032)
    assert found.decode_bytes_per_s == pytest.approx((16 << 20) / 0.016)
    assert 0.25 < found.saved < 0.35
    # A link at which the bytes saved take as long, down and up, as the codec does.
    assert 2 * found.saved * (16 << 20) / found.pays_below == pytest.approx(0.048)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '[{"tier": 1}]',
        '[{"of a later version": ' + "[" * 9999,
        '[{"tier": "lmdb", "latency_s": -1, "read_bytes_per_s": 1}]',
        '[{"tier": "lmdb", "latency_s": 0, "read_bytes_per_s": 0}]',
    ],
)
def test_what_doctor_did_not_write_is_refused(tmp_path, text):
    path = tmp_path / "k.json"
    path.write_text(text)
    with kvtier.open(dram(8), namespace=NAMESPACE) as cache:
        with pytest.raises(ConfigError):
            cache.seed(path)
        with pytest.raises(ConfigError):
            cache.seed(tmp_path / "none")
        with pytest.raises(ConfigError, match="it is larger than 16 MiB"):
            cache.seed("/dev/zero")


def test_what_cannot_be_measured_is_told(tmp_path, capsys):
    assert doctor(tmp_path, "--keep", str(tmp_path / "k")) == 2
    assert "--measure" in capsys.readouterr().err
    assert doctor(tmp_path, "--measure", "lmdb:/proc/kv?capacity=1GiB") != 0
    with pytest.raises(ConfigError, match="below it"):
        tier_rung("dram:1GiB")
    for room in ("8MiB", "127MiB"):
        with pytest.raises(ConfigError, match="give it 128 MiB at least"):
            tier_rung(f"lmdb:{tmp_path}/kv?capacity={room}")
    assert tier_rung(f"lmdb:{tmp_path}/kv?capacity=128MiB").read_bytes_per_s > 0


def test_a_tier_that_does_not_delete_is_named(tmp_path, monkeypatch):
    def hangs(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(kvtier.Cache, "purge", hangs)
    with pytest.raises(ConfigError, match=r"lmdb:.* did not delete within 60 s"):
        tier_rung(f"lmdb:{tmp_path}/kv?capacity=256MiB")
