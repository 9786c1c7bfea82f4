"""``kvtier plan``: the memory left for KV, by the published sizes of models, and bad input."""

from __future__ import annotations

import json
import os

import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.planning.models import MODELS, model_size
from kvtier.planning.sizing import PRECISIONS, Setting, budget

GPU = 80 * 10**9
CONFIG = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28_672,
    "vocab_size": 128_256,
}


def planned(**setting):
    return budget(MODELS["llama-3-70b"], Setting(GPU, **setting))


def test_a_70b_model_on_one_gpu():
    """Two bytes a weight do not fit, one leaves 2 GB, half of one 37 GB: over 100,000 tokens."""
    assert not planned(weights="bf16").fits
    assert planned(weights="fp8").kv / 1e9 == pytest.approx(2, abs=0.2)
    found = planned(weights="fp4")
    assert found.kv / 1e9 == pytest.approx(37, abs=0.5)
    assert found.bytes_per_token == 320 * 1024
    assert 100_000 < found.tokens < 120_000
    assert [planned(weights="fp4", kv=kv).bytes_per_token // 1024 for kv in ("fp8", "fp4")] == [
        160,
        80,
    ]


@pytest.mark.parametrize(
    ("name", "billions"),
    [  # as their publishers count them
        ("smollm2-135m", 0.1345),
        ("llama-3.2-1b", 1.236),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("llama-3-405b", 405.9),
        ("mistral-7b", 7.24),
        ("qwen2.5-72b", 72.7),
    ],
)
def test_parameters_follow_from_the_sizes(name, billions):
    assert MODELS[name].weights / 1e9 == pytest.approx(billions, rel=0.003)


def test_memory_adds_up_over_all_gpus():
    for gpus in (1, 2, 8):
        found = planned(gpus=gpus, weights="fp8")
        parts = found.weights + found.activations + found.overhead + found.kv
        assert parts == found.gpu_memory == gpus * GPU
    given = planned(weights="fp4", activations=10**9, overhead=2 * 10**9)
    assert (given.activations, given.overhead) == (10**9, 2 * 10**9)


@pytest.mark.parametrize(
    ("name", "gpus", "pipeline", "copies"),
    [
        ("llama-3-70b", 8, 1, 1),
        ("llama-3-70b", 16, 1, 2),  # two GPUs have each of the 8 KV heads
        ("llama-3-70b", 16, 2, 1),
        ("deepseek-v3", 16, 1, 16),  # the latent is everybody's
        ("deepseek-v3", 16, 16, 16 * 4 / 61),  # the fullest of 16 stages has 4 of 61 layers
    ],
)
def test_kv_that_several_gpus_have_takes_as_much_memory_again(name, gpus, pipeline, copies):
    model = MODELS[name]
    found = budget(model, Setting(GPU, gpus, pipeline, weights="fp8"))
    assert found.copies == pytest.approx(copies)
    assert found.tokens == pytest.approx(found.kv / copies / found.bytes_per_token, abs=1)
    assert found.bytes_per_token == budget(model, Setting(GPU, weights="fp8")).bytes_per_token


def test_copies_are_said(capsys):
    sizes = ("--gpu-memory", "80GB", "--weights", "fp8")
    assert run(["plan", "deepseek-v3", *sizes, "--gpus", "16"]) == 0
    assert "16 times that: GPUs cannot divide all of it" in capsys.readouterr().out
    assert run(["plan", "llama-3-70b", *sizes, "--gpus", "8"]) == 0
    assert "times that" not in capsys.readouterr().out
    assert run(["plan", "deepseek-v3", *sizes, "--gpus", "8"]) == 1  # one copy of 671 GB


def test_a_config_file_is_read_like_the_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for path in (tmp_path, tmp_path / "config.json"):
        found = model_size(str(path))
        assert found.weights == MODELS["llama-3-70b"].weights
        assert found.kv_elements == MODELS["llama-3-70b"].kv_elements
    latent = CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": latent}))
    assert model_size(str(tmp_path)).kv_elements == 80 * 576


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": "many"}, "vocab_size must be a whole number, not 'many'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 8193, "head_dim": None}, "hidden_size 8193 is no multiple of the 64"),
        ({"vocab_size": "x" * 5000}, "not 'x{79}…$"),
        ({"num_key_value_heads": 7}, "64 heads do not share 7 KV heads"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1, not 0"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"text_config": 3}, "text_config must be an object"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(tmp_path, change, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change))
    with pytest.raises(ConfigError, match=says):
        model_size(str(path))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\0", "[1]"])
def test_a_config_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config.json is not (a )?JSON"):
        model_size(str(path))


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="a pipe or a device"):
        model_size(str(tmp_path))


def sizes(hidden, layers, heads, kv_heads, intermediate, vocabulary, **more):
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        **more,
    }


@pytest.mark.parametrize(
    ("config", "billions", "within"),
    [
        (sizes(4096, 32, 32, 8, 14_336, 32_000, num_local_experts=8), 46.7, 0.003),
        (
            sizes(
                *(2048, 48, 32, 4, 6144, 151_936),
                head_dim=128,
                num_experts=128,
                moe_intermediate_size=768,
            ),
            30.5,
            0.003,
        ),
        (
            sizes(
                *(7168, 61, 128, 128, 18_432, 129_280),
                head_dim=128,
                n_routed_experts=256,
                moe_intermediate_size=2048,
                n_shared_experts=1,
                first_k_dense_replace=3,
            ),
            671,
            0.03,  # its attention is counted as if it had KV heads
        ),
    ],
)
def test_experts_count_as_the_models_cards_say(tmp_path, config, billions, within):
    """Mixtral 8x7B, Qwen3 30B-A3B and DeepSeek V3: as dense models, all of them would fit."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_size(str(path)).weights / 1e9 == pytest.approx(billions, rel=within)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("llama-3-70",), "did you mean 'llama-3-70b'"),
        (("no-such.json",), "cannot read no-such.json"),
        (("n" * 300,), "n" * 300),  # longer than a name may be: the system says so at once
        (("llama-3-8b", "--weights", "fp5"), "precision of --weights 'fp5'"),
        (("llama-3-8b", "--kv", "bf17"), "precision of --kv 'bf17'"),
        (("llama-3-8b", "--gpu-memory", "80"), "no known unit"),
        (("llama-3-8b", "--gpus", "0"), "gpus"),
        (("llama-3-8b", "--gpus", "3"), "cannot be divided among the 3 GPUs of a stage; choose"),
        (("llama-3-70b", "--gpus", "40", "--pipeline", "2"), "among the 20 GPUs of a stage"),
        (("llama-3-8b", "--gpus", "8", "--pipeline", "3"), "divided into 3 stages; --pipeline div"),
        (("llama-3-8b", "--gpus", "64", "--pipeline", "64"), "and 32 layers cannot be divided"),
        (("llama-3-8b", "--gpus", "9" * 20), "gpus"),
        (("llama-3-8b", "--overhead", "much"), "much"),
        (("llama-3-8b", "--trace", "no-such"), "cannot read no-such"),
        (("llama-3-8b", "--at-times"), "--at-times is of requests: name --trace or --workload"),
        (("llama-3-8b", "--prices", "x"), "--prices is of requests"),
        (("llama-3-8b", "--trace", "."), "it is a directory"),
        (("llama-3-8b", "--prefill", "nan"), "--prefill': nan is no number"),
        (("/dev/zero.json",), "cannot read /dev/zero.json"),
        (("",), "unknown model ''"),
    ],
)
def test_bad_input_is_one_clear_error(capsys, args, says):
    assert run(["plan", "--gpu-memory", "80GB", *args]) == 2
    assert says in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_said_so(capsys):
    assert run(["plan", "llama-3-70b", "--gpu-memory", "80GB"]) == 1
    assert "the model does not fit: 68.5 GB are missing" in capsys.readouterr().out


def test_the_report_says_where_more_stops_paying(tmp_path, capsys):
    """Sixteen prompts in turn, each of its own two blocks: only a cache of all of them hits."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": n,
            "input_length": 8,
            "output_length": 1,
            "hash_ids": [2 * (n % 16), 2 * (n % 16) + 1],
        }
        for n in range(64)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    report = tmp_path / "report.json"
    command = ["plan", "llama-3-8b", "--gpu-memory", "80GB", "--trace", str(path)]
    assert run([*command, "--block-size", "4", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "the knee" in out
    assert "TTFT with it" in out
    assert "GPU memory alone finds 100.0%, where it is all for the cache" in " ".join(out.split())
    tiers = json.loads(report.read_text())["tiers"]
    dram, disk = tiers["levels"]
    assert (dram["nbytes"], disk["nbytes"]) == (2 * 8 * 131_072, 16 * 8 * 131_072)
    assert (dram["hit_rate"], disk["reached"], tiers["hit_rate"]) == (0, 100, 100)
    assert tiers["ttft"]["p50"] < tiers["ttft_without"]["p50"] == pytest.approx(8 / 5000)
    assert tiers["dollars"] > 0
    found = json.loads(report.read_text())["curve"]
    rates = {point["tokens"]: point["hit_rate"] for point in found["points"]}
    assert rates[16 * 8] == found["ceiling"] == 100
    assert rates[8 * 8] == 0
    assert found["knee"] == 16 * 8 * 131_072
    assert found["request_tokens"] == 8 + 1  # with the answer
    assert found["at_a_time"] == json.loads(report.read_text())["budget"]["tokens"] // 9
    assert all(point["optimum"] >= point["hit_rate"] for point in found["points"])
    small = [*command, "--gpu-memory", "1GB", "--block-size", "4"]
    assert run(small) == 1  # what has no room finds nothing
    assert "GPU memory alone finds" not in capsys.readouterr().out


def test_every_precision_is_between_half_a_byte_and_four():
    assert all(0.5 <= size <= 4 for size in PRECISIONS.values())


SIZES = (
    "layers=80,hidden=8192,heads=64,kv_heads=8,head_size=128,intermediate=28672,vocabulary=128256"
)


def test_a_model_is_given_by_its_sizes(capsys):
    given, named = model_size(SIZES), model_size("llama-3-70b")
    assert (given.weights, given.kv_elements) == (named.weights, named.kv_elements)
    for wrong, says in (
        (SIZES.replace("layers=80,", ""), "lacks layers"),
        (SIZES + ",layer=3", "layers"),
        (SIZES.replace("=80", "=many"), "layers must be a whole number below .*, not 'many'"),
        (SIZES + ",layers=3", "layers of the model is given twice"),
        (SIZES + ",tied=2", "tied must be a whole number below 2"),
    ):
        with pytest.raises(ConfigError, match=says):
            model_size(wrong)


def test_a_replay_takes_the_bytes_of_a_token_from_a_model(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text(json.dumps(line))
    command = ["replay", str(path), "--block-size", "4", "--json", "-", "--kv", "fp8"]
    capacity = ["--capacity", f"{2 * 4 * 163_840}B", "--model", "llama-3-70b"]
    assert run([*command, *capacity]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["capacity_blocks"] == 2
    assert run([*command, *capacity, "--bytes-per-token", "1KiB"]) != 0
    assert "--bytes-per-token" in capsys.readouterr().err


def test_every_report_counts_bad_lines(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    line = json.dumps({"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]})
    path.write_text(f"{line}\n{{}}\n{line}\n")
    more = ["--block-size", "4", "--skip-bad", "--json", "-"]
    tiers = ["--tier", "dram:1GiB@25GB/s", "--bytes-per-token", "1KiB"]
    assert run(["replay", str(path), *more, *tiers]) == 0
    assert json.loads(capsys.readouterr().out)["skipped_lines"] == 1
    assert run(["plan", "llama-3-8b", "--gpu-memory", "80GB", "--trace", str(path), *more]) == 0
    assert json.loads(capsys.readouterr().out)["curve"]["skipped_lines"] == 1
