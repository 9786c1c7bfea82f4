"""GETs of ranges, signed by botocore and sent by ``s3_send``, straight into buffers.

boto3's own ``get_object`` takes 1.5 ms of a core a request, three times this, and its body copies
each byte once more under the interpreter lock. Signatures, credentials and their renewal, and what
an error is called are botocore's here, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from kvtier.storage_backends.s3_send import Answer, Request, Sender
from kvtier.storage_backends.s3_service import Place, Settings, new_session

_CODE: Final = re.compile(rb"<Code>([^<]{1,64})</Code>")
_MESSAGE: Final = re.compile(rb"<Message>([^<]{1,512})</Message>")


class Getter:
    """GETs from one place. Thread-safe; each call blocks.

    client: the boto3 client of that place, whose settings hold here, too.
    """

    def __init__(self, client: Any, place: Place, sender: Sender) -> None:
        from botocore.auth import S3SigV4Auth

        self._credentials = new_session().get_credentials()
        self._region = client.meta.region_name or "us-east-1"
        self._signer = S3SigV4Auth
        self._url = f"{bucket_url(client, place.bucket)}/{quote(place.prefix, safe='/~')}"
        self._sender = sender

    def get(self, name: str, start: int, length: int, etag: str = "") -> Answer:
        """Ask for a range of the object of that name, below the prefix.

        etag: that it must have. Raises what botocore raises: ClientError with the server's code,
        and the errors of connections; LateError and BrokenError.
        """
        from botocore.awsrequest import AWSRequest

        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        if etag:
            headers["If-Match"] = etag
        request = AWSRequest("GET", self._url + name, headers)
        signer = self._signer(self._credentials.get_frozen_credentials(), "s3", self._region)
        signer.add_auth(request)
        answer = self._sender.send(Request("GET", request.url, dict(request.headers.items())))
        if answer.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            return answer
        raise _refusal(answer)


def sender_for(url: str, settings: Settings, most: int) -> Sender:
    """Return what sends to a bucket: certificates and proxies as boto3 would have them.

    most: connections kept. Raises ConfigError.
    """
    from botocore.utils import get_environ_proxies

    session = new_session()
    trusted = session._session.get_config_variable("ca_bundle") or ""  # noqa: SLF001
    timeouts = (settings.connect_timeout, settings.read_timeout)
    return Sender(timeouts, most, trusted, get_environ_proxies(url))


def bucket_url(client: Any, bucket: str) -> str:
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


def _refusal(answer: Answer) -> Exception:
    """Return the error that an answer stands for, its body read, so that the connection is kept."""
    from botocore.exceptions import ClientError

    with answer:
        body = answer.all()
    code, message = _CODE.search(body), _MESSAGE.search(body)
    said = {
        "Code": code[1].decode(errors="replace") if code else str(answer.status),
        "Message": message[1].decode(errors="replace") if message else "",
    }
    headers = {name.lower(): value for name, value in answer.headers.items()}
    metadata = {"HTTPStatusCode": answer.status, "HTTPHeaders": headers}
    error: Exception = ClientError({"Error": said, "ResponseMetadata": metadata}, "GetObject")
    return error
