"""What a user gets: the sdist, the wheel built from it, and that wheel installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAPPED = ("connectors", "storage_backends")

LOAD = """
import sys
from importlib.metadata import entry_points
for point in entry_points(group=sys.argv[1]):
    print(point.name, point.load().__name__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run `command` and return what it printed; fail with that when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def copy_checkout(to: Path, *, links: bool = True) -> Path:
    """Copy what git holds or would hold, so that no leftover of an earlier build takes part."""
    listing = run("git", "ls-files", "-zco", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listing.split("\0")):
        source, target = ROOT / name, to / name
        if source.is_symlink() and not links:
            continue
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return to


def build(checkout: Path, out: Path) -> Path:
    """Build sdist and, from it, wheel; return the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out.parent)
    (wheel,) = out.glob("*.whl")
    return wheel


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def modules(checkout: Path) -> set[str]:
    """Return the library's files as they must stand in the wheel."""
    found = set()
    for folder in ("kvtier", *MAPPED):
        for path in (checkout / folder).rglob("*.py"):
            inside = path.relative_to(checkout)
            if not any((checkout / parent).is_symlink() for parent in inside.parents):
                found.add(inside)
    return {str(path if path.parts[0] == "kvtier" else "kvtier" / path) for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging")
    return build(copy_checkout(folder / "checkout"), folder / "dist")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a fresh environment and return its folder of commands.

    The dependencies are lent by the environment that runs the tests, so nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(site.strip()) / "lent.pth").write_text("\n".join(lent) + "\n", encoding="utf-8")
    return python.parent


def test_the_wheel_holds_every_module_once(wheel):
    files = contents(wheel)
    assert len(files) == len(set(files))
    assert {name for name in files if name.endswith(".py")} == modules(
        wheel.parents[1] / "checkout"
    )


def test_the_wheel_holds_the_licence_and_the_type_marker(wheel):
    files = contents(wheel)
    assert "kvtier/py.typed" in files
    for name in ("LICENSE", "NOTICE"):
        assert any(file.endswith(f".dist-info/licenses/{name}") for file in files)


def test_the_wheel_holds_the_copy_kernel_and_what_runs_it_on_a_cpu(wheel):
    assert {"kvtier/device/copy.cuh", "kvtier/testing/on_cpu.h"} < set(contents(wheel))


def test_a_checkout_without_links_builds_the_same_wheel(wheel, tmp_path):
    """Some systems and archives do not keep links."""
    bare = build(copy_checkout(tmp_path / "checkout", links=False), tmp_path / "dist")
    assert sorted(contents(bare)) == sorted(contents(wheel))


def test_the_installed_package_is_the_wheel(installed):
    look = "import kvtier, kvtier.connectors as c; print(kvtier.__file__); print(c.__file__)"
    for line in run(installed / "python", "-c", look, cwd=installed).splitlines():
        assert Path(line).is_relative_to(installed.parent)


@pytest.mark.parametrize("group", sorted(PROJECT["entry-points"]))
def test_every_entry_point_loads(installed, group):
    found = run(installed / "python", "-c", LOAD, group, cwd=installed).split()
    loaded = dict(zip(found[::2], found[1::2], strict=True))
    declared = PROJECT["entry-points"][group]
    assert loaded == {name: target.rpartition(":")[2] for name, target in declared.items()}


def test_the_command_tells_its_version(installed):
    assert PROJECT["version"] in run(installed / "kvtier", "--version", cwd=installed)


def test_the_package_runs_as_a_module(installed):
    module = (installed / "python", "-m", "kvtier")
    assert PROJECT["version"] in run(*module, "--version", cwd=installed)
    assert "bench" in run(*module, "--help", cwd=installed)
