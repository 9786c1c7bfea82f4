"""What is refused at start, and what tells KV apart, without vLLM: its settings are stand-ins."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier.connectors.vllm_checks import (
    SUPPORTED,
    apart,
    check_alone,
    check_version,
    checked_tiers,
)
from kvtier.connectors.vllm_identity import Identities, namespace_for
from kvtier.errors import ConfigError


def setting(**more) -> SimpleNamespace:
    """A VllmConfig that is fine but for what is said."""
    transfer = {
        "kv_load_failure_policy": "recompute",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": ["dram:1MiB"]},
    }
    parallel = {"world_size": 1, "distributed_executor_backend": "uni", "nnodes": 1}
    one = ("tensor", "pipeline", "prefill_context", "decode_context")
    parallel |= {f"{kind}_parallel_size": 1 for kind in one}
    device = {"device_type": "cpu"}
    for kind in (transfer, parallel, device):
        kind.update({name: more.pop(name) for name in list(more) if name in kind})
    hf = SimpleNamespace(to_dict=lambda: {"layers": 2}, _commit_hash=more.pop("commit", None))
    model = {"model": "m", "hf_config": hf, "max_model_len": 64, "dtype": "float32"}
    model |= {"quantization": None, "enable_sleep_mode": False}
    model.update({name: more.pop(name) for name in list(more) if name in model})
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer),
        parallel_config=SimpleNamespace(**parallel),
        device_config=SimpleNamespace(**device),
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(
            cache_dtype=more.pop("cache_dtype", "auto"),
            calculate_kv_scales=more.pop("scales", False),
        ),
        speculative_config=more.pop("speculative", None),
        **more,
    )


class FullAttentionSpec(SimpleNamespace):
    """As vLLM names it."""


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM names it."""


class MambaSpec(SimpleNamespace):
    """As vLLM names it."""


def group(kind: type = FullAttentionSpec, **more) -> SimpleNamespace:
    block = more.get("block_size", 16)
    spec = {"block_size": block, "num_heads": 2, "num_states": block, "dtype": torch.bfloat16}
    spec |= {"state_content_size_bytes": 256, "page_size_bytes": block * 2 * 256}
    spec |= {"sliding_window": None}
    whole = {"host_resident": False, "enable_kv_transfer": True, "is_eagle_group": False}
    whole.update({name: more.pop(name) for name in list(more) if name in whole})
    return SimpleNamespace(
        layer_names=["a.0", "a.1"], kv_cache_spec=kind(**{**spec, **more}), **whole
    )


def kv(*groups: SimpleNamespace, clears: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_groups=groups or (group(),),
        kv_cache_layout="LBHNC",
        kv_tp_replicas=1,
        needs_kv_cache_zeroing=clears,
    )


# ------------------------------------------------------------------------------ refused at start


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kv_load_failure_policy": "fail"}, "'fail'.*set it to 'recompute'"),
        ({"kv_role": "kv_producer"}, "'kv_producer'.*'kv_both'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2.*must be 1"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"nnodes": 2}, "nnodes is 2.*on one host"),
        ({"device_type": "cuda"}, "'cuda'.*on no GPU yet.*set try_gpu to true"),
        (
            {
                "device_type": "cuda",
                "enable_sleep_mode": True,
                "kv_connector_extra_config": {"tiers": ["dram:1MiB"], "try_gpu": True},
            },
            "enable_sleep_mode is True.*leave it out",
        ),
        ({"device_type": "xpu"}, "'xpu'; kvtier copies KV of 'cpu' and of 'cuda'"),
        (
            {"device_type": "cuda", "kv_connector_extra_config": {"try_gpu": "yes"}},
            "try_gpu is 'yes'; it is true or false",
        ),
        ({"device_type": "cuda", "kv_connector_extra_config": None}, "set try_gpu to true"),
        ({"kv_connector_extra_config": {}}, "needs its tiers.*dram:8GiB"),
        ({"kv_connector_extra_config": {"tiers": "dram:1MiB"}}, "needs its tiers"),
        ({"kv_connector_extra_config": {"tiers": [1]}}, "needs its tiers"),
        (
            {"kv_connector_extra_config": {"tiers": ["unix:/run/a"], "optional": "yes"}},
            "optional is 'yes'; it is true or false",
        ),
        (
            {"kv_connector_extra_config": {"tiers": ["dram:1MiB"], "optional": True}},
            "'dram:1MiB', not unix:PATH",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_the_remedy(more, said):
    assert checked_tiers(setting()) == ["dram:1MiB"]
    with pytest.raises(ConfigError, match=said):
        checked_tiers(setting(**more))


def test_a_gpu_is_used_where_that_is_said_and_shares_nothing_with_the_cpu():
    extra = {"kv_connector_extra_config": {"tiers": ["dram:1MiB"], "try_gpu": True}}
    on_gpu = setting(device_type="cuda", **extra)
    assert checked_tiers(on_gpu) == ["dram:1MiB"]
    assert namespace_for(on_gpu, kv()).digest != namespace_for(setting(), kv()).digest
    with pytest.raises(ConfigError, match="clears the blocks of this model"):
        namespace_for(on_gpu, kv(clears=True))
    assert namespace_for(setting(), kv(clears=True)).digest == namespace_for(setting(), kv()).digest
    on_cpu = namespace_for(setting(**extra), kv())  # the key itself tells nobody apart
    assert on_cpu.digest == namespace_for(setting(), kv()).digest


def test_another_connector_beside_it_is_refused_with_both_names():
    def named(name: str, **more) -> SimpleNamespace:
        transfer = SimpleNamespace(kv_connector=name, **more)
        return SimpleNamespace(kv_transfer_config=transfer)

    ours = named("KvtierConnector")
    for current in (None, ours, named("KvtierConnector"), SimpleNamespace(kv_transfer_config=None)):
        check_alone(ours, current)
    inside = {"connectors": [{"kv_connector": "KvtierConnector"}, {"kv_connector": "Other"}]}
    both = named("MultiConnector", kv_connector_extra_config=inside)
    with pytest.raises(ConfigError, match="'MultiConnector', with KvtierConnector, Other in it"):
        check_alone(ours, both)


@pytest.mark.parametrize(
    ("more", "is_so"),
    [
        ({}, False),
        ({"distributed_executor_backend": None}, False),
        ({"distributed_executor_backend": "mp"}, True),
        ({"world_size": 2}, True),
    ],
)
def test_workers_are_in_processes_of_their_own_where_vllm_says_so(more, is_so):
    assert apart(setting(**more)) is is_so


@pytest.mark.parametrize(("replicas", "heads"), [(1, 8), (2, 4)])
def test_the_heads_of_all_ranks_are_counted_once(replicas, heads):
    whole = kv()
    whole.kv_tp_replicas = replicas
    geometry = namespace_for(setting(tensor_parallel_size=4), whole).geometry
    assert [one.heads for one in geometry.components] == [heads]


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "0.320.0", "dev", "1.0.32"])
def test_another_vllm_is_refused_with_both_versions(found):
    for good in SUPPORTED:
        check_version(good)
        check_version(f"{good}.0+cpu")
    with pytest.raises(ConfigError, match=rf"vLLM {found} and kvtier \d.*for vLLM 0\.32\.x"):
        check_version(found)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([group(MambaSpec)], "group 0 .a.0 and 1 more. has KV of kind MambaSpec"),
        ([group(), group(block_size=32)], r"block sizes \[16, 32\]"),
        ([group(), group(dtype=torch.float32)], "dtypes .'torch.bfloat16', 'torch.float32'."),
        ([group(dtype=torch.complex64)], "its dtype is torch.complex64"),
        ([group(page_size_bytes=16384)], "pages of 8192 bytes are padded to 16384"),
        ([group(num_states=8, page_size_bytes=4096)], "8 states of 16 tokens"),
        ([group(is_eagle_group=True)], "a drafter's"),
        ([group(host_resident=True)], "stays on the host"),
        ([group(enable_kv_transfer=False)], "stays on the host"),
    ],
)
def test_layers_that_cannot_be_restored_are_refused_by_name(groups, said):
    with pytest.raises(ConfigError, match=said):
        namespace_for(setting(), kv(*groups))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"speculative": "ngram"}, "speculative decoding"),
        ({"scales": True}, "calibrated at run time"),
        ({"kv_connector_extra_config": {"chunk_token": 64}}, "did you mean 'chunk_tokens'"),
        ({"kv_connector_extra_config": {"chunk_tokens": 100}}, "nearest that fits is 96"),
    ],
)
def test_an_engine_that_cannot_be_cached_is_refused(more, said):
    with pytest.raises(ConfigError, match=said):
        namespace_for(setting(**more), kv())


def test_a_model_without_kv_is_refused():
    with pytest.raises(ConfigError, match="has no KV"):
        namespace_for(setting(), SimpleNamespace(kv_cache_groups=[]))


# ------------------------------------------------------------------------------------ namespaces


@pytest.mark.parametrize(
    ("window", "block", "chunk"), [(None, 16, 256), (512, 16, 256), (128, 16, 128), (40, 32, 32)]
)
def test_no_chunk_is_longer_than_a_window(window, block, chunk):
    groups = [group(block_size=block)]
    if window:
        groups.append(group(SlidingWindowSpec, sliding_window=window, block_size=block))
    assert namespace_for(setting(), kv(*groups)).geometry.chunk_tokens == chunk


def test_parts_have_the_size_of_vllms_pages():
    geometry = namespace_for(setting(), kv()).geometry
    assert geometry.bytes_per_token * 16 == 2 * group().kv_cache_spec.page_size_bytes
    assert geometry.layout == "vllm-LBHNC"


@pytest.mark.parametrize(
    "more",
    [
        {"model": "other"},
        {"commit": "1234"},
        {"max_model_len": 128},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"kv_connector_extra_config": {"tenant": "acme"}},
        {"kv_connector_extra_config": {"revision": "b"}},
    ],
)
def test_whatever_changes_kv_makes_another_namespace(more):
    assert namespace_for(setting(**more), kv()).digest != namespace_for(setting(), kv()).digest


def test_other_weights_under_the_same_path_are_another_model(tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    local = setting(model=str(tmp_path))
    first = namespace_for(local, kv()).digest
    assert namespace_for(local, kv()).digest == first
    weights.write_bytes(b"two")
    os.utime(weights, ns=(1, 1))
    assert namespace_for(local, kv()).digest != first
    named = setting(model=str(tmp_path), commit="1234")
    before = namespace_for(named, kv()).digest
    os.utime(weights, ns=(2, 2))
    assert namespace_for(named, kv()).digest == before


# -------------------------------------------------------------------------------------- requests


def request(**more) -> SimpleNamespace:
    plain = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    return SimpleNamespace(**{**plain, "resumable": False, "num_prompt_tokens": 8, **more})


def feature(name: str, offset: int = 3) -> SimpleNamespace:
    place = SimpleNamespace(offset=offset, length=4)
    return SimpleNamespace(modality="image", identifier=name, mm_position=place)


def test_requests_are_told_apart_by_all_that_changes_their_kv():
    identities = Identities()
    different = [
        request(),
        request(cache_salt="a"),
        request(cache_salt="b"),
        request(mm_features=[feature("x")]),
        request(mm_features=[feature("y")]),
        request(mm_features=[feature("x", 4)]),
        request(prompt_embeds=torch.zeros(8, 2)),
        request(prompt_embeds=torch.ones(8, 2)),
        request(prompt_embeds=torch.zeros(8, 2, dtype=torch.bfloat16)),
    ]
    found = [identities.of(one) for one in different]
    assert None not in found
    assert all(found.count(one) == 1 for one in found)
    assert identities.of(request(mm_features=[feature("x")])) == found[3]


def adapter(folder: Path, number: int, content: bytes, **more: bool) -> SimpleNamespace:
    """Return a request of an adapter, as number so and so of vLLM's."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter.safetensors").write_bytes(content)
    plain = {"lora_name": folder.name, "lora_path": str(folder), "load_inplace": False}
    return request(lora_request=SimpleNamespace(lora_int_id=number, **{**plain, **more}))


def test_adapters_are_told_by_content_not_by_name(tmp_path: Path):
    identities = Identities()
    one, same = adapter(tmp_path / "a", 1, b"1"), adapter(tmp_path / "b", 2, b"1")
    other = adapter(tmp_path / "c", 3, b"2")
    assert identities.of(one) == identities.of(same) != identities.of(request())
    assert None is not identities.of(other) != identities.of(one)


def test_an_adapter_that_changes_under_vllm_is_not_cached_any_more(tmp_path: Path, caplog):
    """VLLM goes on with what it has loaded; whoever loads the new files would be given that KV."""
    identities, folder = Identities(), tmp_path / "a"
    assert identities.of(adapter(folder, 1, b"old"))
    for content in (b"newer", b"old", b"newest"):  # vLLM may have loaded any of them meanwhile
        assert identities.of(adapter(folder, 1, content)) is None
    assert caplog.text.count("load them under a new name") == 1
    assert identities.of(adapter(folder, 2, b"newest"))
    assert identities.of(adapter(tmp_path / "b", 2, b"another")) is None


def test_one_that_vllm_is_told_to_load_anew_is_another(tmp_path: Path):
    identities, folder = Identities(), tmp_path / "a"
    before = identities.of(adapter(folder, 1, b"old"))
    after = identities.of(adapter(folder, 1, b"newer", load_inplace=True))
    assert None is not after != before
    assert identities.of(adapter(folder, 1, b"newer")) == after


def test_what_cannot_be_told_apart_is_not_cached(tmp_path: Path, caplog):
    gone = SimpleNamespace(lora_name="far", lora_path=str(tmp_path / "none"), lora_int_id=1)
    assert Identities().of(request(lora_request=gone)) is None
    assert "requests of adapter far are not cached" in caplog.text
    assert Identities().of(request(resumable=True)) is None


def test_states_of_parts_of_a_token_are_refused():
    odd = group(num_states=32, page_size_bytes=32 * 512, tokens_per_state=Fraction(1, 2))
    with pytest.raises(ConfigError, match="32 states of 16 tokens"):
        namespace_for(setting(), kv(odd))
