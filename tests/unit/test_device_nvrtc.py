"""The cache of cubins, and what is said where the compiler is missing or old."""

from __future__ import annotations

import pytest

from kvtier.device import nvrtc as module
from kvtier.device.nvrtc import Nvrtc, cubin, cubin_name, kernel_source
from kvtier.errors import ConfigError


class Counting:
    """In the place of NVRTC, which few machines without a GPU have."""

    version = "13.0"

    def __init__(self):
        self.calls = 0

    def compile(self, source, architecture):
        self.calls += 1
        return f"{architecture} {len(source)}".encode(), ""


class Library:
    """In the place of NVRTC's library: it knows two architectures. status: of all that it does."""

    def __init__(self, status=0, compiled=0):
        self.asked = []

        def said(number):
            return f"error {number}".encode()

        def version(major, minor):
            major._obj.value, minor._obj.value = 13, 0
            return 0

        def count(found):
            found._obj.value = 2
            return 0

        def known(found):
            found[:] = 80, 90
            return 0

        def create(*_arguments):
            self.asked.append("a program")
            return status

        def size(_program, found):
            found._obj.value = 9
            return 0

        def log(_program, text):
            text.raw = b"nonsense\0"
            return 0

        self.nvrtcGetErrorString, self.nvrtcVersion = said, version
        self.nvrtcGetNumSupportedArchs, self.nvrtcGetSupportedArchs = count, known
        self.nvrtcCreateProgram = create
        self.nvrtcCompileProgram = lambda *_arguments: compiled
        self.nvrtcGetProgramLogSize, self.nvrtcGetProgramLog = size, log
        self.nvrtcGetCUBINSize, self.nvrtcGetCUBIN = size, log
        self.nvrtcDestroyProgram = lambda _program: self.asked.append("none any more") or 0


@pytest.fixture
def compiler():
    return Counting()


@pytest.fixture
def real():
    try:
        return Nvrtc()
    except ConfigError as missing:
        pytest.skip(f"NVRTC absent: {missing}")


def test_a_cubin_is_compiled_once(compiler, tmp_path):
    folder = tmp_path / "new" / "cubins"
    made = cubin(90, folder, compiler)
    assert cubin(90, folder, compiler) == made
    assert compiler.calls == 1
    assert cubin(80, folder, compiler) != made
    assert compiler.calls == 2
    assert folder.stat().st_mode & 0o077 == 0


def test_other_source_architecture_or_compiler_is_another_cubin():
    names = {
        cubin_name(source, architecture, version)
        for source in ("a", "b")
        for architecture in (80, 90)
        for version in ("12.8", "13.0")
    }
    assert len(names) == 8


@pytest.mark.parametrize("spoil", ["cut", "changed", "empty"])
def test_a_spoiled_cubin_is_made_anew(compiler, tmp_path, spoil):
    made = cubin(90, tmp_path, compiler)
    (path,) = tmp_path.iterdir()
    text = path.read_bytes()
    path.write_bytes({"cut": text[:-1], "changed": text[:-1] + b"?", "empty": b""}[spoil])
    assert cubin(90, tmp_path, compiler) == made
    assert compiler.calls == 2
    assert path.read_bytes() == text


@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_can_write_to_is_not_trusted(compiler, tmp_path, which):
    cubin(90, tmp_path, compiler)
    (path,) = tmp_path.iterdir()
    (tmp_path if which == "folder" else path).chmod(0o777)
    cubin(90, tmp_path, compiler)
    assert compiler.calls == 2


def test_what_is_another_users_is_not_trusted(compiler, tmp_path, monkeypatch):
    cubin(90, tmp_path, compiler)
    user = module.os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: user + 1)
    cubin(90, tmp_path, compiler)
    assert compiler.calls == 2


def test_a_folder_that_cannot_be_written_is_no_matter(compiler, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cubins"
    assert cubin(90, folder, compiler) == cubin(90, folder, compiler)
    assert compiler.calls == 2


def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_loaded", lambda newest: None)
    with pytest.raises(
        ConfigError, match=r"NVRTC of CUDA 13 .* is missing: pip install 'kvtier\[cuda\]'"
    ):
        cubin(90, tmp_path)
    with pytest.raises(ConfigError, match="is missing"):
        Nvrtc(tmp_path / "libnvrtc.so")


def test_no_newer_compiler_is_looked_for_than_the_driver_takes():
    assert any("libnvrtc.so.13" in place for place in module._places(13))
    assert list(module._places(12)) == [one for one in module._places(13) if ".so.13" not in one]
    assert list(module._places(11)) == []


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_real_compiler_takes_the_kernel(real, tmp_path, architecture):
    assert cubin(architecture, tmp_path, real).startswith(b"\x7fELF")


def test_the_real_compiler_refuses_what_it_does_not_know(real):
    with pytest.raises(ConfigError, match=r"does not compile for sm_7, only for .*sm_90"):
        real.compile(kernel_source(), 7)
    with pytest.raises(ConfigError, match=r"refuses the copy kernel: .*error"):
        real.compile("nonsense", 90)


def test_a_gpu_that_the_compiler_does_not_know_is_told_with_those_that_it_knows(monkeypatch):
    library = Library()
    monkeypatch.setattr(module, "_load", lambda _place: library)
    with pytest.raises(
        ConfigError,
        match=r"NVRTC 13\.0 does not compile for sm_120, only for sm_80, sm_90; install",
    ):
        Nvrtc(tmp := module.Path("libnvrtc.so")).compile(kernel_source(), 120)
    assert library.asked == []
    with pytest.raises(ConfigError, match="does not compile for sm_120"):
        cubin(120, tmp / "none", Nvrtc(tmp))


def test_what_the_compiler_says_goes_wrong_is_told_with_the_remedy(monkeypatch):
    library = Library(status=7)
    monkeypatch.setattr(module, "_load", lambda _place: library)
    with pytest.raises(ConfigError, match=r"nvrtcCreateProgram says error 7: pip install"):
        Nvrtc(module.Path("libnvrtc.so")).compile(kernel_source(), 90)
    assert library.asked == ["a program"]


def test_source_that_is_refused_is_told_and_leaves_no_program(monkeypatch):
    library = Library(compiled=6)
    monkeypatch.setattr(module, "_load", lambda _place: library)
    with pytest.raises(ConfigError, match=r"NVRTC 13\.0 refuses the copy kernel: nonsense"):
        Nvrtc(module.Path("libnvrtc.so")).compile(kernel_source(), 90)
    assert library.asked == ["a program", "none any more"]
