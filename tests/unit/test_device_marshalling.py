"""What the driver's own function is given, by a library of its documented prototype; no GPU.

It shows that arguments arrive where CUDA says, and nothing of what a driver does with them.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtier.device import torch_driver as module
from kvtier.device.torch_driver import batched_copies
from kvtier.testing.kernels import compiler

STREAM = 0x7FFF_1234_5678_9AB0  # all of a pointer's bits have to arrive
INVALID_VALUE = 1
TYPES = """
typedef unsigned long long CUdeviceptr, cuuint64_t;
typedef struct CUstream_st* CUstream;
typedef int CUresult, CUdriverProcAddressQueryResult;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NOT_FOUND = 500 };
enum CUmemcpySrcAccessOrder { CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1 };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_INVALID = 0 };
struct CUmemLocation { CUmemLocationType type; int id; };
struct CUmemcpyAttributes {
  CUmemcpySrcAccessOrder srcAccessOrder;
  CUmemLocation srcLocHint, dstLocHint;
  unsigned int flags;
};
#define cuGetProcAddress cuGetProcAddress_v2
"""
LIBRARY = """
#include <cstddef>
#include <cstring>
{types}
struct Told {{ unsigned long long stream, count; int version, flags; }};
extern "C" {{ Told told; int known = 1; }}

static CUresult copies(int version, CUdeviceptr* to, CUdeviceptr* of, size_t* sizes, size_t count,
                       CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds,
                       CUstream stream) {{
  told = Told{{(unsigned long long)stream, count, version, (int)attributes->flags}};
  bool good = kinds == 1 && firsts[0] == 0 && kinds <= count && stream &&
              attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
              attributes->srcLocHint.type == 0 && attributes->dstLocHint.type == 0;
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  for (size_t at = 0; at < count; ++at) memcpy((void*)to[at], (void*)of[at], sizes[at]);
  return CUDA_SUCCESS;
}}

static CUresult of_12080(CUdeviceptr* to, CUdeviceptr* of, size_t* sizes, size_t count,
                         CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds,
                         size_t* failed, CUstream stream) {{
  *failed = 0;
  return copies(12080, to, of, sizes, count, attributes, firsts, kinds, stream);
}}

static CUresult of_13000(CUdeviceptr* to, CUdeviceptr* of, size_t* sizes, size_t count,
                         CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds,
                         CUstream stream) {{
  return copies(13000, to, of, sizes, count, attributes, firsts, kinds, stream);
}}
{checked}
extern "C" CUresult cuGetProcAddress(const char* name, void** found, int version,
                                     cuuint64_t flags, CUdriverProcAddressQueryResult* status) {{
  *status = (CUdriverProcAddressQueryResult)0;
  *found = nullptr;
  if (strcmp(name, "cuMemcpyBatchAsync") || flags || !known) return CUDA_ERROR_NOT_FOUND;
  *found = version >= 13000 ? (void*)of_13000 : (void*)of_12080;
  return CUDA_SUCCESS;
}}
"""
CHECKED = """
PFN_cuMemcpyBatchAsync_v12080 first_prototype = of_12080;
PFN_cuMemcpyBatchAsync_v13000 later_prototype = of_13000;
static_assert(sizeof(CUmemcpyAttributes) == {size}, "the size of attributes");
static_assert(offsetof(CUmemcpyAttributes, flags) == {flags}, "where their flags are");
"""


class Told(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("version", ctypes.c_int),
        ("flags", ctypes.c_int),
    )


def built(folder: Path, types: str, checked: str = "", *options: str) -> Path:
    if compiler() is None:
        pytest.skip("g++ absent")
    text, library = folder / "libcuda.cpp", folder / "libcuda.so.1"
    text.write_text(LIBRARY.format(types=types, checked=checked))
    common = ("-std=c++17", "-shared", "-fPIC", *options, "-o", str(library), str(text))
    command = [str(compiler()), *common]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert not done.returncode, done.stderr
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return str(built(tmp_path_factory.mktemp("driver"), TYPES))


def copied(library: str, version: int) -> tuple[int, Told, bool]:
    """Copy three runs; return the status, what arrived, and whether all bytes are right."""
    batch = batched_copies(version, library)
    source, target = np.arange(96, dtype=np.uint8), np.zeros(96, np.uint8)
    places = np.array([64, 0, 32], np.uint64)
    sizes = np.array([32, 7, 16], np.uint64)
    ends = [places + np.uint64(one.ctypes.data) for one in (target, source)]
    status = batch(*ends, sizes, STREAM)
    right = all(
        np.array_equal(target[at : at + size], source[at : at + size])
        for at, size in zip(places.tolist(), sizes.tolist(), strict=True)
    )
    return status, Told.in_dll(ctypes.CDLL(library), "told"), right


@pytest.mark.parametrize(
    ("version", "prototype"), [(12080, 12080), (12090, 12080), (13000, 13000), (13010, 13000)]
)
def test_each_version_of_the_batched_copy_is_given_what_its_prototype_says(
    library, version, prototype
):
    status, told, right = copied(library, version)
    assert (status, right) == (0, True)
    assert (told.version, told.stream, told.count, told.flags) == (prototype, STREAM, 3, 0)


def test_another_order_of_access_is_only_had_where_it_is_asked_for(library):
    places, sizes = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    assert batched_copies(13000, library)(places, places, sizes, STREAM) == 0
    assert batched_copies(13000, library, order=3)(places, places, sizes, STREAM) == INVALID_VALUE


def test_attributes_that_lie_otherwise_are_noticed(library, monkeypatch):
    """The twin: the order of access is not where the driver looks for it."""

    class Otherwise(ctypes.Structure):
        _fields_ = tuple(reversed(module._Attributes._fields_))

    monkeypatch.setattr(module, "_Attributes", Otherwise)
    status, _, right = copied(library, 13000)
    assert (status, right) == (INVALID_VALUE, False)


def test_a_driver_that_does_not_know_it_has_no_batched_copies(library, tmp_path):
    known = ctypes.c_int.in_dll(ctypes.CDLL(library), "known")
    known.value = 0
    try:
        assert batched_copies(13000, library) is None
    finally:
        known.value = 1
    assert batched_copies(13000, str(tmp_path / "libcuda.so.1")) is None
    assert batched_copies(13000, "libm.so.6") is None, "before 12.0 there is no way to ask"


def test_the_prototypes_are_those_of_cudas_own_headers(tmp_path):
    headers = sorted(Path("/usr/local").glob("cuda*/include/cudaTypedefs.h"))
    if not headers or "v13000" not in headers[-1].read_text():
        pytest.skip("the headers of CUDA 13 absent")
    attributes = module._Attributes
    sizes = {"size": ctypes.sizeof(attributes), "flags": attributes.flags.offset}
    types = "#include <cuda.h>\n#include <cudaTypedefs.h>"
    library = built(tmp_path, types, CHECKED.format(**sizes), f"-I{headers[-1].parent}")
    status, told, right = copied(str(library), 13000)
    assert (status, right, told.stream) == (0, True, STREAM)
