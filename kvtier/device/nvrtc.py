"""NVIDIA's run-time compiler, which makes a cubin without a GPU, and the cache of what it made."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

_MAJORS: Final = (13, 12)  # of CUDA, the newest first
_OPTIONS: Final = ("--std=c++17",)
_DIGEST_BYTES: Final = 32
_PRIVATE: Final = 0o700
_REMEDY: Final = "pip install 'kvtier[cuda]', or put the CUDA toolkit's lib64 on LD_LIBRARY_PATH"


class Nvrtc:
    """The compiler, found where the CUDA toolkit or NVIDIA's wheels put it.

    library: where it is; None: wherever it is found, of no newer a CUDA than the newest. Raises
    ConfigError when it is missing.
    """

    def __init__(self, library: Path | None = None, *, newest: int = _MAJORS[0]) -> None:
        loaded = _loaded(newest) if library is None else _load(str(library))
        if loaded is None:
            raise ConfigError(
                f"NVRTC of CUDA {newest} or before, which compiles the copy kernel, is missing: "
                f"{_REMEDY}"
            )
        self._library = loaded
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def architectures(self) -> tuple[int, ...]:
        """Return what it compiles for, such as 90 for sm_90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(found)

    def compile(self, source: str, architecture: int, *options: str) -> tuple[bytes, str]:
        """Return the cubin and what the compiler said. Blocks for a second or so.

        Raises ConfigError for an architecture that it does not know, and for bad source.
        """
        known = self.architectures()
        if architecture not in known:
            raise ConfigError(
                f"NVRTC {self.version} does not compile for sm_{architecture}, only for "
                f"{', '.join(f'sm_{one}' for one in known)}; install the NVRTC of a CUDA release "
                "that knows this GPU"
            )
        program = ctypes.c_void_p()
        text = source.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, b"copy.cu", 0, None, None)
        try:
            said = (f"--gpu-architecture=sm_{architecture}", *_OPTIONS, *options)
            each = (ctypes.c_char_p * len(said))(*(option.encode() for option in said))
            status = self._library.nvrtcCompileProgram(program, len(said), each)
            log = self._text(program, "nvrtcGetProgramLog").decode(errors="replace")
            if status:
                raise ConfigError(f"NVRTC {self.version} refuses the copy kernel: {log.strip()}")
            return self._text(program, "nvrtcGetCUBIN"), log.rstrip("\0")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(what, program, text)
        return text.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            said = self._library.nvrtcGetErrorString(status).decode()
            raise ConfigError(f"NVRTC's {name} says {said}: {_REMEDY}")


def kernel_source() -> str:
    """Return the text of the copy kernel."""
    return Path(__file__).with_name("copy.cuh").read_text(encoding="utf-8")


def cubin(architecture: int, folder: Path, compiler: Nvrtc | None = None) -> bytes:
    """Return the copy kernel for an architecture: from the folder, or compiled and put there.

    A folder that others can write to is not read, and one that cannot be written is no matter.
    Raises ConfigError as ``Nvrtc`` does.
    """
    compiler = compiler or Nvrtc()
    source = kernel_source()
    path = folder / cubin_name(source, architecture, compiler.version)
    kept = _kept(path)
    if kept is not None:
        return kept
    made, _ = compiler.compile(source, architecture)
    _keep(path, made)
    return made


def cubin_name(source: str, architecture: int, version: str) -> str:
    """Return the name that a cubin has in the cache: other source, GPU or compiler, other name."""
    digest = hashlib.sha256("\0".join([source, *_OPTIONS]).encode()).hexdigest()[:16]
    return f"copy-{digest}-sm_{architecture}-nvrtc{version}.cubin"


def default_folder() -> Path:
    """Return where this user's cubins and measured tables are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"


def _kept(path: Path) -> bytes | None:
    """Return a cubin of the cache, if it is whole and nobody else can have written it."""
    try:
        for one in (path.parent, path):
            found = one.stat()
            others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if found.st_uid != os.getuid() or others:
                return None
        text = path.read_bytes()
    except OSError:
        return None
    digest, made = text[:_DIGEST_BYTES], text[_DIGEST_BYTES:]
    return made if hashlib.sha256(made).digest() == digest else None


def _keep(path: Path, made: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(made).digest() + made)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()


def _places(newest: int) -> Iterator[str]:
    """Yield where the library may be: the loader's places, then NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for name in (f"libnvrtc.so.{major}" for major in _MAJORS if major <= newest):
        yield name
        yield from (str(path) for one in folders for path in Path(one).glob(f"*/lib/{name}"))


@functools.cache
def _loaded(newest: int) -> ctypes.CDLL | None:
    return next(filter(None, map(_load, _places(newest))), None)


def _load(place: str) -> ctypes.CDLL | None:
    """Load the compiler, and what it opens by name later on: the loader may not look there."""
    try:
        for beside in Path(place).parent.glob("libnvrtc-builtins.so.*") if "/" in place else ():
            ctypes.CDLL(str(beside))
        return ctypes.CDLL(place)
    except OSError:
        return None
