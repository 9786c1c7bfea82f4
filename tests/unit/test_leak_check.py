"""The checks in tests/conftest.py can fail, and say what did not run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LEAKS = {
    "a thread": "threading.Thread(target=time.sleep, args=(60,), daemon=False).start()",
    "a named daemon thread": (
        "threading.Thread(target=time.sleep, args=(60,), daemon=True, name='kvtier-io').start()"
    ),
    "a descriptor": "os.open(os.devnull, os.O_RDONLY)",
    "a socket": "kept.append(socket.socket())",
}
CLEAN = {
    "a stranger's daemon": "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "a thread that ends soon": "threading.Thread(target=time.sleep, args=(0.1,)).start()",
    "a file that is dropped": "open(os.devnull).close()",
}
HEAD = "import os, socket, threading, time\nimport pytest\nkept = []\n"


def outcome(folder: Path, text: str) -> str:
    """Run one test file under our conftest; return what pytest printed.

    Afterwards the process is left at once: leaked threads must not hold it.
    """
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_case.py").write_text(HEAD + text, encoding="utf-8")
    start = "import os, sys, pytest; pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(0)"
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider")
    command = [sys.executable, "-c", start, *map(str, options), str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder).stdout


def test_each_leak_is_found(tmp_path):
    cases = "".join(f"def test_{i}():\n    {code}\n" for i, code in enumerate(LEAKS.values()))
    printed = outcome(tmp_path, cases)
    assert f"{len(LEAKS)} passed, {len(LEAKS)} errors" in printed, printed
    assert "thread 'kvtier-io'" in printed
    assert "/dev/null" in printed
    assert "socket:" in printed


def test_what_winds_down_is_no_leak(tmp_path):
    cases = "".join(f"def test_{i}():\n    {code}\n" for i, code in enumerate(CLEAN.values()))
    printed = outcome(tmp_path, cases)
    assert f"{len(CLEAN)} passed" in printed, printed
    assert "error" not in printed


def test_wider_fixtures_and_the_sockets_of_servers_are_not_counted(tmp_path):
    printed = outcome(
        tmp_path,
        "@pytest.fixture(scope='module')\n"
        "def server():\n"
        "    reader, writer = os.pipe()\n"
        "    yield reader\n"
        "    os.close(reader); os.close(writer)\n"
        "@pytest.mark.server\n"
        "def test_it(server):\n"
        "    kept.append(socket.socket())\n",
    )
    assert "1 passed" in printed, printed
    assert "error" not in printed


def test_what_did_not_run_is_listed_with_its_reason(tmp_path):
    printed = outcome(
        tmp_path,
        "@pytest.mark.skipif(True, reason='moon absent')\ndef test_moon(): ...\n"
        "def test_tide(): pytest.skip('sea absent')\n",
    )
    assert "not run here: 2" in printed, printed
    assert "moon absent (1)\n    test_case.py::test_moon" in printed
    assert "sea absent (1)\n    test_case.py::test_tide" in printed


def test_torch_gets_one_thread():
    torch = pytest.importorskip("torch", reason="torch absent")
    assert torch.get_num_threads() == 1
