"""Geometry: the size of KV from published shapes, chunks that fit blocks, a canonical text."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from kvtier.errors import ConfigError
from kvtier.identity.geometry import Component, Geometry, Needs, chunk_tokens_for
from kvtier.identity.record import PartName

# KV bytes per token = layers x planes x KV heads x head size x bytes per element, after
# Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
# (SOSP 2023), section 3, whose example is the first row. Each row: shape as published, and the
# product by hand.
PUBLISHED = {
    # OPT-13B: 40 layers, hidden 5120 = 40 heads x 128, fp16. The paper: "800 KB" (of 1024).
    # 2 x 5120 x 40 x 2 = 819,200
    "OPT-13B": (Component(40, 40, 128), "float16", 819_200),
    # GPT-3 175B (Brown et al. 2020, table 2.1): 96 layers, 96 heads, head size 128; fp16.
    # 2 x 96 x (96 x 128 = 12,288) x 2 = 4,718,592
    "GPT-3 175B": (Component(96, 96, 128), "float16", 4_718_592),
    # Llama-2 7B (config.json): 32 layers, 32 heads, no grouping, head size 128; fp16.
    # 2 x 32 x (32 x 128 = 4,096) x 2 = 524,288
    "Llama-2 7B": (Component(32, 32, 128), "float16", 524_288),
    # Llama-3 8B (Dubey et al. 2024, table 3): 32 layers, 8 KV heads, head size 128; bf16.
    # 2 x 32 x (8 x 128 = 1,024) x 2 = 131,072
    "Llama-3 8B": (Component(32, 8, 128), "bfloat16", 131_072),
    # Llama-3 70B (same table): 80 layers, 8 KV heads, head size 128; bf16.
    # 2 x 80 x 1,024 x 2 = 327,680
    "Llama-3 70B": (Component(80, 8, 128), "bfloat16", 327_680),
    # Mixtral 8x7B (Jiang et al. 2024, table 1): 32 layers, 8 KV heads, head size 128; bf16. The
    # experts share one attention. 2 x 32 x 1,024 x 2 = 131,072
    "Mixtral 8x7B": (Component(32, 8, 128), "bfloat16", 131_072),
    # DeepSeek-V3 (technical report, section 4.2): 61 layers, MLA: one latent of 512 and a shared
    # RoPE key of 64, one plane; bf16. 61 x (512 + 64 = 576) x 2 = 70,272
    "DeepSeek-V3": (Component(61, 1, 576, planes=1), "bfloat16", 70_272),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_bytes_per_token_of_published_models(model: str):
    component, dtype, expected = PUBLISHED[model]
    geometry = Geometry((component,), dtype)
    assert geometry.bytes_per_token == expected
    assert geometry.part_bytes(PartName()) == 256 * expected


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3", 1), ("int8", 1)],
)
def test_bytes_follow_the_element(dtype: str, size: int):
    assert Geometry((Component(3, 2, 5),), dtype).bytes_per_token == 3 * 2 * 2 * 5 * size


def test_components_add_up_and_shards_divide():
    geometry = Geometry((Component(4, 8, 16), Component(2, 1, 8, planes=1)), chunk_tokens=64)
    first, second = 4 * 2 * 8 * 16 * 2 * 64, 2 * 8 * 2 * 64
    assert geometry.bytes_per_token * 64 == first + second
    assert geometry.part_bytes(PartName(0, 3, 4)) == first // 4
    assert geometry.part_bytes(PartName(1)) == second


@pytest.mark.parametrize(
    "part", [PartName(2), PartName(0, 1, 1), PartName(0, 0, 0), PartName(0, 0, 3)]
)
def test_a_part_that_does_not_exist_is_refused(part: PartName):
    geometry = Geometry((Component(4, 8, 16), Component(4, 8, 16)), chunk_tokens=64)
    with pytest.raises(ConfigError):
        geometry.part_bytes(part)


# ---------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((16,), 256),
        ((1,), 256),
        ((48,), 240),  # 240 is nearer to 256 than 288
        ((100,), 300),
        ((16, 24), 240),  # the least common multiple is 48
        ((171,), 171),
        ((512,), 512),
        ((8192,), 8192),
    ],
)
def test_the_chunk_is_the_multiple_nearest_to_256(blocks: tuple[int, ...], expected: int):
    assert chunk_tokens_for(blocks) == expected


def test_no_other_multiple_is_nearer():
    for block in range(1, 600):
        chosen = chunk_tokens_for((block,))
        assert chosen == min(range(block, 1200, block), key=lambda size: abs(size - 256))


@pytest.mark.parametrize(
    ("blocks", "configured", "remedy"),
    [
        ((16,), 250, "nearest that fits is 256"),
        ((16,), 0, "nearest that fits is 16"),
        ((16,), -16, "nearest that fits is 16"),
        ((48,), 9000, "nearest that fits is 8160"),  # not 8192, which 48 does not divide
        ((16,), 100_000, "nearest that fits is 8192"),
        ((8191, 2), 16_382, "no chunk of at most 8192 tokens"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_with_the_nearest(
    blocks: tuple[int, ...], configured: int, remedy: str
):
    with pytest.raises(ConfigError, match=remedy):
        chunk_tokens_for(blocks, configured)


def test_blocks_that_no_chunk_fits_are_refused():
    with pytest.raises(ConfigError, match="no chunk of at most 8192 tokens fits"):
        chunk_tokens_for((127, 128))
    with pytest.raises(ConfigError, match="one block size at least"):
        chunk_tokens_for(())
    for blocks in ((0,), (-16,), (16, 0)):
        with pytest.raises(ConfigError, match="whole number from 1 on"):
            chunk_tokens_for(blocks)


# -------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    "broken",
    [
        {"components": ()},
        {"dtype": "bfloat61"},
        {"chunk_tokens": 100},
        {"block_tokens": ()},
    ],
)
def test_an_impossible_geometry_is_refused(broken: dict[str, object]):
    with pytest.raises(ConfigError):
        Geometry(**{"components": (Component(1, 1, 1),), **broken})


def test_an_impossible_component_is_refused():
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ConfigError, match="whole number from 1"):
            Component(*sizes)
    with pytest.raises(ConfigError, match="whole number from 1"):
        Component(1, 1, 1, planes=0)
    with pytest.raises(ConfigError, match="window"):
        Component(1, 1, 1, window=4)
    with pytest.raises(ConfigError, match="window"):
        Component(1, 1, 1, needs=Needs.TRAILING)


PLAIN = Component(2, 4, 8, planes=3)
OTHER_COMPONENTS = [
    dataclasses.replace(PLAIN, **change)
    for change in (
        {"layers": 3},
        {"heads": 5},
        {"head_size": 9},
        {"planes": 4},
        {"name": "other"},
        {"replicated": True},
        {"needs": Needs.LAST},
        {"needs": Needs.TRAILING, "window": 5},
        {"needs": Needs.TRAILING, "window": 6},
    )
]
OTHERS = [
    *(Geometry((component,)) for component in (PLAIN, *OTHER_COMPONENTS)),
    Geometry((PLAIN, PLAIN)),
    Geometry((PLAIN,), dtype="float16"),
    Geometry((PLAIN,), block_tokens=(32,)),
    Geometry((PLAIN,), block_tokens=(16, 32)),
    Geometry((PLAIN,), chunk_tokens=512),
    Geometry((PLAIN,), layout="token-plane-layer"),
]


def test_every_field_of_a_geometry_is_in_its_text():
    fields = {field.name for field in dataclasses.fields(Geometry)}
    assert fields == {"components", "dtype", "block_tokens", "chunk_tokens", "layout"}
    fields = {field.name for field in dataclasses.fields(Component)}
    assert fields == {
        "layers",
        "heads",
        "head_size",
        "planes",
        "name",
        "needs",
        "window",
        "replicated",
    }
    texts = [geometry.encoding() for geometry in OTHERS]
    assert len(set(texts)) == len(texts)


def test_free_names_cannot_imitate_other_geometries():
    inside = "2:3:4:8:all:0:1:b"
    names = ["a", "b", "a;" + inside, f"9:a;{inside}", "", ";", "/", "1:a/"]
    layouts = ["l", "l/", "1:l/" + inside, "l/" + inside]
    geometries = [
        Geometry(tuple(dataclasses.replace(PLAIN, name=name) for name in chosen), layout=layout)
        for count in (1, 2)
        for chosen in itertools.product(names, repeat=count)
        for layout in layouts
    ]
    assert len({geometry.encoding() for geometry in geometries}) == len(geometries)


def test_without_lengths_they_would(monkeypatch):
    monkeypatch.setattr("kvtier.identity.geometry._sized", lambda text: text)
    two = Geometry((dataclasses.replace(PLAIN, name="a"), dataclasses.replace(PLAIN, name="b")))
    one = Geometry((dataclasses.replace(PLAIN, name="a;2:3:4:8:all:0:b"),))
    assert two.encoding() == one.encoding()
