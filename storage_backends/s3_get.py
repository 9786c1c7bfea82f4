"""GETs of ranges, signed by botocore and sent over its connections, straight into buffers.

boto3's own ``get_object`` takes 1.5 ms of a core a request, three times this, and its body copies
each byte once more under the interpreter lock. Signatures, credentials and their renewal, TLS,
proxies and what an error is called are botocore's here, too.

What is tried again: a request that the server refused for now (a 5xx or 429), or dropped before
it answered, once, after a pause of full jitter, if it still comes within the time that the server
may be silent. See "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final, Self
from urllib.parse import quote

from kvtier.clock import monotonic
from kvtier.events import Causes
from kvtier.storage_backends.s3_service import BrokenError, Place

__all__ = ["Answer", "Getter"]

_PIECE: Final = 1 << 20  # bytes between two looks at the clock
_PAUSE_SECONDS: Final = 0.2  # at most, before the second try
_ERROR_BYTES: Final = 64 << 10
_CODE: Final = re.compile(rb"<Code>([^<]{1,64})</Code>")
_MESSAGE: Final = re.compile(rb"<Message>([^<]{1,512})</Message>")


class Answer:
    """What the server answers with: a range of an object, to be read once, and closed."""

    def __init__(self, raw: Any, until: float) -> None:
        self._raw = raw
        self._body = getattr(raw, "_fp", raw)  # urllib3's own readinto copies every byte
        self._until = until
        self._left = int(raw.headers.get("Content-Length", -1))
        self.range: str = raw.headers.get("Content-Range", "")
        self.etag: str = raw.headers.get("ETag", "")

    def fill(self, into: memoryview) -> None:
        """Read the next bytes. Raises BrokenError when there are not so many, or not in time."""
        from botocore.exceptions import ReadTimeoutError

        filled = 0
        while filled < len(into):
            if monotonic() > self._until:
                raise BrokenError("the server is too slow to answer with a range")
            try:
                got = self._body.readinto(into[filled : filled + _PIECE])
            except TimeoutError as error:
                raise ReadTimeoutError(endpoint_url="the server", error=error) from error
            except (OSError, HTTPException) as error:
                raise BrokenError(f"the answer broke off: {error}") from error
            if not got:
                raise BrokenError(f"the answer ended after {filled} of {len(into)} bytes")
            filled += got
        self._left -= filled

    def close(self) -> None:
        """Keep the connection if all was read, or end it."""
        if self._left == 0:
            with contextlib.suppress(Exception):
                self._body.read()  # which lets http.client see that the answer has ended
            self._raw.release_conn()
        else:
            self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Getter:
    """GETs from one place. Thread-safe; each call blocks.

    client: the boto3 client of that place, whose settings hold here, too. timeouts: for a
    connection, and for the silence of the server; range_seconds: for the whole of one answer;
    counts: of requests sent.
    """

    def __init__(
        self,
        client: Any,
        place: Place,
        timeouts: tuple[float, float],
        connections: int,
        range_seconds: float,
        counts: Causes,
    ) -> None:
        import boto3
        from botocore.auth import S3SigV4Auth
        from botocore.httpsession import URLLib3Session
        from botocore.utils import get_environ_proxies

        session = boto3.session.Session()
        self._credentials = session.get_credentials()
        self._counts = counts
        self._region = client.meta.region_name or "us-east-1"
        self._signer = S3SigV4Auth
        self._url = f"{_bucket_url(client, place.bucket)}/{quote(place.prefix, safe='/~')}"
        self._http = URLLib3Session(
            verify=session._session.get_config_variable("ca_bundle") or True,  # noqa: SLF001
            proxies=get_environ_proxies(self._url),
            timeout=timeouts,
            max_pool_connections=connections,
        )
        self._patience = timeouts[1]
        self._range_seconds = range_seconds

    def get(self, name: str, start: int, length: int, etag: str = "") -> Answer:
        """Ask for a range of the object of that name, below the prefix.

        etag: that it must have. Raises what botocore raises: ClientError with the server's code,
        and the errors of connections.
        """
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        if etag:
            headers["If-Match"] = etag
        begun = monotonic()
        try:
            return self._try(name, headers)
        except Exception as error:
            pause = random.uniform(0.0, _PAUSE_SECONDS)  # noqa: S311  (hosts must not come at once)
            if not _passes(error) or monotonic() + pause - begun > self._patience:
                raise
        time.sleep(pause)
        return self._try(name, headers)

    def _try(self, name: str, headers: dict[str, str]) -> Answer:
        from botocore.awsrequest import AWSRequest

        request = AWSRequest("GET", self._url + name, dict(headers), stream_output=True)
        signer = self._signer(self._credentials.get_frozen_credentials(), "s3", self._region)
        signer.add_auth(request)
        self._counts.note("GET")
        response = self._http.send(request.prepare())
        if response.status_code in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            return Answer(response.raw, monotonic() + self._range_seconds)
        raise _refusal(response)

    def close(self) -> None:
        """End the connections. Idempotent."""
        self._http.close()


def _bucket_url(client: Any, bucket: str) -> str:
    """Return the URL of a bucket as the client would ask for it. Nothing is sent."""
    from botocore.awsrequest import AWSResponse

    seen: list[str] = []

    def answer(request: Any, **_: object) -> Any:
        seen.append(request.url)
        return AWSResponse(request.url, HTTPStatus.OK, {}, _Nothing())

    client.meta.events.register_first("before-send.s3.HeadBucket", answer)
    try:
        client.head_bucket(Bucket=bucket)
    finally:
        client.meta.events.unregister("before-send.s3.HeadBucket", answer)
    return seen[0].partition("?")[0].rstrip("/")


class _Nothing:
    """The body of an answer that has none."""

    def stream(self) -> Iterator[bytes]:
        yield from ()


def _passes(error: Exception) -> bool:
    """Say whether an error may be gone the next moment; who is silent has had its time."""
    from botocore.exceptions import ClientError, ConnectionClosedError

    if isinstance(error, ClientError):
        status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(error, ConnectionClosedError)


def _refusal(response: Any) -> Exception:
    """Return the error that an answer stands for, its body read, so that the connection is kept."""
    from botocore.exceptions import ClientError

    body = response.raw.read(_ERROR_BYTES)
    code, message = _CODE.search(body), _MESSAGE.search(body)
    said = {
        "Code": code[1].decode(errors="replace") if code else str(response.status_code),
        "Message": message[1].decode(errors="replace") if message else response.raw.reason or "",
    }
    response.raw.release_conn()
    metadata = {"HTTPStatusCode": response.status_code}
    error: Exception = ClientError({"Error": said, "ResponseMetadata": metadata}, "GetObject")
    return error
