"""Keys: the same in every process and from every kind of token array, different when they must be.

Run as a script it derives the golden cases: in this process, or in a child of it that is started
by `spawn` or `fork`. ``python tests/unit/test_keys.py write`` writes the golden file anew.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import multiprocessing
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import MisuseError
from kvtier.identity import keys as module
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.keys import as_tokens, chunk_keys
from kvtier.identity.namespace import Namespace, Request, Span, root_key
from kvtier.identity.shape import chunk_shape
from kvtier.prefix import Namer

GOLDEN = Path(__file__).parent / "golden" / "keys-v1.json"
ROOT, CHUNK = b"r" * 32, 8
TOKENS = np.arange(100, 164, dtype=np.int32)  # eight chunks


# ---------------------------------------------------------------------------------------- golden


def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def identity(case: dict[str, Any]) -> tuple[Namespace, Request]:
    shape = case["geometry"]
    components = tuple(Component(**component) for component in shape["components"])
    sizes = {"block_tokens": tuple(shape["block_tokens"]), "chunk_tokens": shape["chunk_tokens"]}
    geometry = Geometry(components, shape["dtype"], **sizes)
    fields = dict(case["namespace"])
    for name in ("config_digest", "secret"):
        fields[name] = bytes.fromhex(fields.get(name, ""))
    request = case["request"]
    spans = tuple(Span(a, b, bytes.fromhex(digest)) for a, b, digest in request["spans"])
    adapter, salt = bytes.fromhex(request["adapter"]), bytes.fromhex(request["salt"])
    return Namespace(geometry=geometry, **fields), Request(adapter, salt, spans)


def derive(case: dict[str, Any], tokens: Any) -> dict[str, Any]:
    namespace, request = identity(case)
    root = root_key(namespace, request)
    size = namespace.geometry.chunk_tokens
    found = chunk_keys(root, as_tokens(tokens), size, request.spans)
    return {
        "namespace": namespace.digest.hex(),
        "root": root.hex(),
        "keys": [key.hex() for key in found],
    }


def derive_all() -> list[dict[str, Any]]:
    data = golden()
    return [derive(case, data["tokens"]) for case in data["cases"]]


def by_hand(case: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """Derive keys from what the module's text says, with the standard library only."""

    def fields(*values: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(value)) + value for value in values)

    namespace, request = identity(case)
    names = (namespace.quantisation, namespace.geometry.encoding(), namespace.kv_scales)
    encoding = fields(
        *(b"kvtier namespace", b"1", namespace.model.encode(), namespace.revision.encode()),
        namespace.config_digest,
        *(name.encode() for name in (*names, namespace.draft, namespace.tenant)),
    )
    secret = hashlib.sha256(namespace.secret).digest()
    words = fields(encoding, request.adapter, request.salt)
    parent = root = hmac.new(secret, words, hashlib.sha256).digest()
    size, found = namespace.geometry.chunk_tokens, []
    for start in range(0, len(tokens) - size + 1, size):
        text = parent + struct.pack(f"<{size}i", *tokens[start : start + size])
        for span in sorted(request.spans, key=lambda span: (span.start, span.stop)):
            if span.start < start + size and span.stop > start:
                place = struct.pack("<qq", span.start - start, span.stop - start)
                text += place + fields(span.digest)
        parent = hashlib.sha256(text).digest()
        found.append(parent.hex())
    return {
        "namespace": hashlib.sha256(encoding).hexdigest(),
        "root": root.hex(),
        "keys": found,
    }


def expected() -> list[dict[str, Any]]:
    return [case["expected"] for case in golden()["cases"]]


def test_the_keys_are_the_golden_ones():
    assert derive_all() == expected()
    everything = [key for case in expected() for key in case["keys"]]
    assert len(everything) == 20
    assert len(set(everything)) == 19, "only the text before the image is shared"


def test_the_golden_keys_follow_from_the_text_alone():
    data = golden()
    assert [by_hand(case, data["tokens"]) for case in data["cases"]] == expected()


def test_every_kind_of_token_array_gives_the_golden_keys():
    import torch

    data = golden()
    tokens, case = data["tokens"], data["cases"][0]
    kinds = [np.int32, np.int64, np.uint16, np.uint32, np.uint64, np.dtype(">i4"), np.dtype(">i8")]
    arrays: list[Any] = [tuple(tokens), *(np.array(tokens, kind) for kind in kinds)]
    arrays += [torch.tensor(tokens, dtype=kind) for kind in (torch.int32, torch.int64)]
    arrays.append(np.repeat(np.array(tokens, np.int32), 2)[::2])  # not contiguous
    for array in arrays:
        assert derive(case, array) == case["expected"], getattr(array, "dtype", type(array))


@pytest.mark.parametrize("seed", [None, "0", "random"])
@pytest.mark.parametrize("start", ["here", "spawn", "fork"])
def test_every_process_derives_the_golden_keys(seed: str | None, start: str):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, __file__, start]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=50)
    assert json.loads(done.stdout) == expected()


# ------------------------------------------------------------------------- what enters, and where


def keys(tokens: Any = TOKENS, spans: tuple[Span, ...] = (), root: bytes = ROOT) -> list[bytes]:
    return chunk_keys(root, as_tokens(tokens), CHUNK, spans)


def shared(one: list[bytes], other: list[bytes]) -> int:
    """Count the leading keys that two prompts have in common; after them none may be."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert not set(one[count:]) & set(other[count:])
    return count


def test_a_changed_token_changes_its_chunk_and_all_after_it():
    for place in range(len(TOKENS)):
        other = TOKENS.copy()
        other[place] += 1
        assert shared(keys(), keys(other)) == place // CHUNK


def test_an_incomplete_chunk_has_no_key():
    for count in range(len(TOKENS) + 1):
        assert keys(TOKENS[:count]) == keys()[: count // CHUNK]


def test_known_keys_are_not_hashed_again_and_change_nothing(monkeypatch):
    spans = (Span(3, 20, b"i" * 32), Span(30, 31, b"j" * 32))
    whole = keys(spans=spans)
    for count in range(len(whole) + 1):
        assert chunk_keys(ROOT, TOKENS, CHUNK, spans, known=whole[:count]) == whole
    monkeypatch.setattr(module.hashlib, "sha256", None)
    assert chunk_keys(ROOT, TOKENS, CHUNK, spans, known=whole) == whole


def test_more_known_keys_than_chunks_is_misuse():
    with pytest.raises(MisuseError, match="known keys"):
        chunk_keys(ROOT, TOKENS[:CHUNK], CHUNK, known=keys()[:2])


def test_adapters_and_salts_never_meet():
    namespace = Namespace("m", Geometry((Component(1, 1, 8),), chunk_tokens=16))
    requests = [Request(), Request(b"A"), Request(b"B"), Request(salt=b"A"), Request(b"A", b"B")]
    seen = [chunk_keys(root_key(namespace, one), TOKENS, 16) for one in requests]
    assert len({key for found in seen for key in found}) == sum(map(len, seen))
    again = chunk_keys(root_key(namespace, Request(b"A")), TOKENS, 16)
    assert again == seen[1], "unloaded and loaded again, an adapter hits what it stored"


def test_a_known_prefix_of_another_adapter_is_not_used():
    geometry = Geometry((Component(1, 1, 8),), chunk_tokens=16)
    namer = Namer(Namespace("m", geometry), chunk_shape(geometry))
    mine, base = namer.prefix(TOKENS, Request(b"A"), None), namer.prefix(TOKENS[:32], None, None)
    assert namer.prefix(TOKENS, Request(b"A"), base).keys == mine.keys
    assert namer.prefix(TOKENS, None, base).keys[:2] == base.keys


def test_an_image_changes_the_chunks_from_its_first_on():
    one = keys(spans=(Span(20, 30, b"1" * 32),))
    assert shared(one, keys(spans=(Span(20, 30, b"2" * 32),))) == 2
    assert shared(one, keys()) == 2, "the text before the image is shared with plain text"
    assert one == keys(spans=(Span(20, 30, b"1" * 32),))


@pytest.mark.parametrize("bits", [16, 64, 248])
def test_images_whose_digests_end_or_begin_alike_differ(bits: int):
    common = b"c" * (bits // 8)
    size = 32 - len(common)
    for one, other in (
        (b"1" * size + common, b"2" * size + common),
        (common + b"1" * size, common + b"2" * size),
    ):
        assert shared(keys(spans=(Span(9, 12, one),)), keys(spans=(Span(9, 12, other),))) == 1


def test_a_cut_digest_would_serve_the_wrong_image(monkeypatch):
    class Cut(Span):
        digest = property(lambda self: b"c" * 8)  # the last 64 bits only

    one, other = Cut.__new__(Cut), Cut.__new__(Cut)
    for span in (one, other):
        object.__setattr__(span, "start", 9)
        object.__setattr__(span, "stop", 12)
    assert keys(spans=(one,)) == keys(spans=(other,))


def test_the_place_of_a_span_matters_and_its_order_in_the_list_does_not():
    digest = b"d" * 32
    places = [(9, 12), (9, 13), (10, 12), (10, 13), (8, 16)]
    found = {tuple(keys(spans=(Span(start, stop, digest),))[1:]) for start, stop in places}
    assert len(found) == len(places)
    a, b = Span(1, 5, b"a" * 32), Span(20, 44, b"b" * 32)
    assert keys(spans=(a, b)) == keys(spans=(b, a))
    swapped = (Span(1, 5, b"b" * 32), Span(20, 44, b"a" * 32))
    assert shared(keys(spans=(a, b)), keys(spans=swapped)) == 0


def test_a_long_span_is_in_every_chunk_that_it_overlaps():
    one = keys(spans=(Span(7, 25, b"1" * 32),))
    plain, parent = keys(), ROOT
    for index in range(4):
        alone = chunk_keys(parent, TOKENS[index * CHUNK : (index + 1) * CHUNK], CHUNK)
        assert one[index] != alone[0], f"chunk {index} overlaps the span"
        parent = one[index]
    rest = chunk_keys(parent, TOKENS[4 * CHUNK :], CHUNK)
    assert one[4:] == rest, "what follows the span is hashed as text, on top of its parent"
    assert shared(one, plain) == 0


# ------------------------------------------------------------------------------------ bad tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        [1, 2.5],
        [True, False],
        np.array([1.0]),
        np.array([True]),
        [-1],
        np.array([5, -1], np.int32),
        np.array([-1], np.int64),
        [2**31],
        [2**63],
        [2**70],
        [[1, 2], [3, 4]],
        np.zeros((2, 2), np.int32),
        np.zeros((0, 2), np.int64),
        [[1], [2, 3]],
        ["1"],
        "12",
        b"12",
        None,
        [None],
        7,
        {1, 2},
    ],
    ids=repr,
)
def test_what_is_no_token_array_is_misuse(tokens: Any):
    with pytest.raises(MisuseError, match="token id"):
        as_tokens(tokens)


def test_a_torch_tensor_of_floats_is_misuse():
    import torch

    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)):
        with pytest.raises(MisuseError, match="token ids"):
            as_tokens(tensor)


def test_no_tokens_have_no_keys():
    for tokens in ([], (), np.empty(0, np.int64), np.empty(0, np.float64)):
        array = as_tokens(tokens)
        assert array.dtype == np.int32
        assert chunk_keys(ROOT, array, CHUNK) == []


def test_the_largest_token_is_kept_and_an_int32_array_is_not_copied():
    assert as_tokens([0, 2**31 - 1]).tolist() == [0, 2**31 - 1]
    assert np.shares_memory(as_tokens(TOKENS), TOKENS)


# ------------------------------------------------------------------------------------- as a script


def _send(pipe: Any) -> None:
    pipe.send_bytes(json.dumps(derive_all()).encode())
    pipe.close()


def _main(start: str) -> None:
    if start == "write":
        data = golden()
        for case in data["cases"]:
            case["expected"] = by_hand(case, data["tokens"])
        GOLDEN.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    elif start == "here":
        sys.stdout.write(json.dumps(derive_all()))
    else:
        context = multiprocessing.get_context(start)
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_send, args=(theirs,))
        child.start()
        theirs.close()
        sys.stdout.write(ours.recv_bytes().decode())
        child.join(30)
        sys.exit(child.exitcode)


if __name__ == "__main__":
    _main(sys.argv[1])
