"""Raw S3 clients for ``object_store.py``: GETs with nothing of kvtier in their way."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from typing import Any

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from kvtier.identity.record import HEADER_BYTES
from kvtier.seams import IoPool
from kvtier.testing.seaweed import SeaweedServer

MIB = 1 << 20
LARGE, RANGE = 16 * MIB, 4 * MIB
IN_FLIGHT = 16


@contextlib.contextmanager
def raw_clients(server: SeaweedServer) -> Iterator[dict[str, Callable[[], int]]]:
    """Yield reads of the objects that the Tier wrote by clients alone: no check, no slots."""
    listed = server.client().list_objects_v2(Bucket="bench", Prefix="records")["Contents"]
    keys = [one["Key"] for one in listed if one["Size"] == LARGE + HEADER_BYTES]
    pool = IoPool("raw", IN_FLIGHT)
    buffers = [memoryview(bytearray(LARGE)) for _ in keys]
    client = raw_boto(server)
    signed = Signed(server)

    def boto(key: str, into: memoryview, start: int) -> None:
        span = f"bytes={start}-{start + len(into) - 1}"
        body = client.get_object(Bucket="bench", Key=key, Range=span)["Body"]
        filled = 0
        while got := body.readinto(into[filled : filled + (256 << 10)]):
            filled += got

    def reader(get: Callable[[str, memoryview, int], None], step: int) -> Callable[[], int]:
        jobs = [
            (key, into[at : at + step], at)
            for key, into in zip(keys, buffers, strict=True)
            for at in range(0, LARGE, step)
        ]

        def run() -> int:
            pool.map(lambda job: get(*job), jobs)
            return LARGE * len(keys)

        return run

    try:
        yield {
            "raw boto3 whole": reader(boto, LARGE),
            "raw boto3 ranges": reader(boto, RANGE),
            "raw http.client whole": reader(signed.get, LARGE),
            "raw http.client ranges": reader(signed.get, RANGE),
        }
    finally:
        pool.close()
        client.close()


def raw_boto(server: SeaweedServer) -> Any:
    """Return a boto3 client tuned as the store's is."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        config=Config(
            max_pool_connections=IN_FLIGHT,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


class Signed:
    """GETs by http.client, a connection a thread, signed by botocore."""

    def __init__(self, server: SeaweedServer) -> None:
        self._port = server.port
        credentials = Credentials(server.access_key, server.secret_key)
        self._auth = S3SigV4Auth(credentials, "s3", "us-east-1")
        self._local = threading.local()

    def get(self, key: str, into: memoryview, start: int) -> None:
        """Read a range of an object into a buffer."""
        if not hasattr(self._local, "link"):
            self._local.link = http.client.HTTPConnection("127.0.0.1", self._port)
        url = f"http://127.0.0.1:{self._port}/bench/{key}"
        request = AWSRequest("GET", url, {"Range": f"bytes={start}-{start + len(into) - 1}"})
        request.context["payload_signing_enabled"] = False
        self._auth.add_auth(request)
        self._local.link.request("GET", f"/bench/{key}", headers=dict(request.headers))
        answer = self._local.link.getresponse()
        filled = 0
        while filled < len(into) and (got := answer.readinto(into[filled:])):
            filled += got
        answer.read()
        if filled < len(into):
            raise SystemExit(f"{answer.status}: {filled} of {len(into)} bytes")
