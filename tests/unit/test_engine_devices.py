"""The engine on a GPU that is none: every tensor is made where it computes. And who is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

from kvtier.engine import Engine, Model, ModelConfig, Sampling, Span, plain_prefill, random_weights
from kvtier.engine import attention as attention_module
from kvtier.engine import compute as compute_module
from kvtier.engine import decode as decode_module
from kvtier.engine import model as model_module
from kvtier.engine.compute import CpuCompute, compute_on
from kvtier.engine.hybrid import HybridConfig, Kind, random_hybrid
from kvtier.errors import ConfigError, MisuseError
from kvtier.gpus import gpu_index, torch_for_gpu
from kvtier.testing.fakegpu import FAKE_GPU, fake_gpu
from kvtier.testing.serving import small_model

SIZES = ModelConfig(
    vocab_size=97,
    layers=4,
    hidden_size=48,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate_size=80,
    context_tokens=1024,
)
PROMPTS = [np.random.default_rng(length).integers(0, 97, length).tolist() for length in (1, 40)]


def models():
    return {
        "full": Model(random_weights(dataclasses.replace(SIZES, layers=2))),
        "hybrid": random_hybrid(HybridConfig(SIZES, tuple(Kind), window=20)),
    }


def served(model, compute, **options):
    """Serve prompts to their end; the answers mean nothing here."""
    options = {"num_blocks": 120, "chunk_tokens": 32, **options}
    engine = Engine(model, device=compute, **options)
    sampling = Sampling(3), Sampling(3, temperature=1.0)
    for each in sampling:
        assert [len(one.tokens) for one in engine.generate(PROMPTS, each)] == [3] * len(PROMPTS)
    return engine


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("full", torch.float32), ("full", torch.bfloat16), ("hybrid", torch.float32)],
)
def test_all_tensors_of_a_serving_engine_are_on_its_device(kind, dtype):
    with fake_gpu() as compute:
        model = models()[kind]
        shape = [model.shape] if kind == "hybrid" else []
        model = type(model)(*shape, model.weights.to(dtype))
        engine = served(model, compute)
        assert {pool.device for pool in engine.kv} == {FAKE_GPU}
        assert engine.model.device == FAKE_GPU
        assert model.device.type == "cpu", "the caller's model stays where it is"
    assert compute.calls["replay"] > 0
    assert compute.calls["download"] > 0


def test_embeddings_of_its_own_are_given_on_the_device():
    def louder(hidden, position):
        assert hidden.device == FAKE_GPU
        return hidden * 2

    with fake_gpu() as compute:
        engine = Engine(models()["full"], num_blocks=8, device=compute)
        engine.submit([1, 2, 3], Sampling(2), inputs=louder)
        while engine.unfinished:
            engine.step()


def test_plain_torch_computes_where_the_model_is():
    meta = torch.device("meta")
    assert plain_prefill(models()["full"].to(meta), [1, 2, 3]).device == meta


def on_the_cpu(module, name):
    """Return a torch whose function `name` forgets the device that it is given."""

    class Forgetful:
        def __getattr__(self, asked):
            found = getattr(torch, asked)
            if asked != name:
                return found
            return lambda *args, **more: found(*args, **{**more, "device": None})

    return Forgetful()


@pytest.mark.parametrize(
    ("module", "name"), [(attention_module, "arange"), (decode_module, "arange")]
)
def test_a_tensor_that_is_left_on_the_cpu_is_noticed(monkeypatch, module, name):
    monkeypatch.setattr(module, "torch", on_the_cpu(module, name))
    with fake_gpu() as compute, pytest.raises(FakeTensorDeviceMismatchError):
        served(models()["full"], compute)


def test_numbers_that_are_left_on_the_cpu_are_noticed(monkeypatch):
    monkeypatch.setattr(
        model_module,
        "placed",
        lambda spans, rows, device: [torch.zeros(rows, dtype=torch.int64)] * 2,
    )
    with fake_gpu() as compute, pytest.raises(FakeTensorDeviceMismatchError):
        served(models()["full"], compute)


def test_a_copy_that_nobody_asked_for_is_noticed():
    with fake_gpu(), pytest.raises(MisuseError, match="that nobody asked for"):
        torch.zeros(4, device=FAKE_GPU)[1:] = torch.zeros(3)


def test_a_forward_pass_needs_no_bytes():
    """On meta, where a tensor of the CPU in its midst is refused as well."""
    meta = torch.device("meta")
    model = models()["full"].to(meta)
    kv = torch.zeros(2, 2, 20, 16, 2, 16, dtype=torch.bfloat16, device=meta)
    logits = model.forward([Span([1, 2, 3], 0, [[0]], logits=2)], [kv])
    assert logits.device == meta
    assert logits.shape == (2, 97)


# --------------------------------------------------------------------------------- names, refusals


def test_names_of_devices():
    assert [gpu_index(name) for name in ("cpu", "cuda", "cuda:0", "cuda:11")] == [None, 0, 0, 11]
    assert isinstance(compute_on("cpu"), CpuCompute)


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "CUDA", "mps"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"there is no device .*: give cpu, cuda, or a GPU like"):
        Engine(small_model(), num_blocks=8, device=name)


def test_a_torch_without_cuda_is_refused_when_the_engine_is_made(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r'built without CUDA: install .* device="cpu"'):
        Engine(small_model(), num_blocks=8, device="cuda")


def test_a_gpu_that_is_not_there_is_refused_when_the_engine_is_made(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert torch_for_gpu(0, "") is torch
    with pytest.raises(ConfigError, match=r'GPU 1 is not there, of 1 .* device="cpu"'):
        Engine(small_model(), num_blocks=8, device="cuda:1")


def test_the_workspace_of_cublas_is_fixed_before_cuda_starts(monkeypatch):
    seen = []

    def refuse(index, otherwise):
        seen.append(compute_module.os.environ["CUBLAS_WORKSPACE_CONFIG"])
        raise ConfigError(otherwise)

    monkeypatch.setitem(compute_module.os.environ, "CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delitem(compute_module.os.environ, "CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(compute_module, "torch_for_gpu", refuse)
    with pytest.raises(ConfigError):
        compute_on("cuda")
    assert seen == [":4096:8"]
