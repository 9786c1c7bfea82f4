"""Namespace and Request: all that identifies KV bytes besides the tokens.

A namespace says which model, in which form, on which engine layout, for which tenant. A
request adds what may differ from one prompt to the next: adapter, salt, images. Their
encoding is canonical and length-prefixed, so that no two identities encode alike.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvtier.checks import check_kind
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Geometry

FORMAT_VERSION: Final = 1
"""Version of the key derivation. A change makes every cache cold: see CHANGELOG."""

_DIGEST_BYTES: Final = 16
_MAX_TOKEN: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) whose content is not in their ids: an image, or embeddings.

    digest: the full digest of that content, at least 16 bytes.
    """

    start: int
    stop: int
    digest: bytes

    def __post_init__(self) -> None:
        check_kind("a span's start", self.start, int, ConfigError)
        check_kind("a span's stop", self.stop, int, ConfigError)
        if not 0 <= self.start < self.stop <= _MAX_TOKEN:
            raise ConfigError(f"a span must have 0 <= start < stop, not {self.start}..{self.stop}")
        _only_bytes("a span's digest", self.digest)
        if len(self.digest) < _DIGEST_BYTES:
            raise ConfigError(
                f"a span's digest has {len(self.digest)} bytes; pass the full digest of its "
                f"content, at least {_DIGEST_BYTES}"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """What differs per request.

    adapter: digest of the adapter's content, not its name. salt: any bytes that separate users.
    """

    adapter: bytes = b""
    salt: bytes = b""
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        _only_bytes("a request's adapter", self.adapter)
        _only_bytes("a request's salt", self.salt)
        check_kind("a request's spans", self.spans, tuple, ConfigError)
        for span in self.spans:
            check_kind("a span", span, Span, ConfigError)


@dataclass(frozen=True)
class Namespace:
    """What identifies KV bytes for all requests of one engine. Two namespaces never share.

    model and revision name the weights; config_digest covers the model's configuration with its
    overrides; quantisation, kv_scales and draft say what else changes KV. secret roots the keys
    of a tenant: without it, nobody can tell whether a prompt is cached. It is never stored.
    """

    model: str
    geometry: Geometry
    revision: str = ""
    config_digest: bytes = b""
    quantisation: str = ""
    kv_scales: str = ""
    draft: str = ""
    tenant: str = ""
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for text in ("model", "revision", "quantisation", "kv_scales", "draft", "tenant"):
            check_kind(f"a namespace's {text}", getattr(self, text), str, ConfigError)
        if not self.model:
            raise ConfigError("a namespace needs the name of a model")
        check_kind("a namespace's geometry", self.geometry, Geometry, ConfigError)
        _only_bytes("a namespace's config_digest", self.config_digest)
        _only_bytes("a namespace's secret", self.secret)
        if self.kv_scales.lower() == "calibrated":
            raise ConfigError(
                "KV scales that are calibrated at run time differ from run to run and cannot be "
                "shared; use fixed scales and name them by their digest"
            )

    @cached_property
    def encoding(self) -> bytes:
        """The canonical encoding, without the secret."""
        return _fields(
            (
                b"kvtier namespace",
                str(FORMAT_VERSION).encode(),
                self.model.encode(),
                self.revision.encode(),
                self.config_digest,
                self.quantisation.encode(),
                self.geometry.encoding().encode(),
                self.kv_scales.encode(),
                self.draft.encode(),
                self.tenant.encode(),
            )
        )

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the encoding, 32 bytes: what records carry."""
        return hashlib.sha256(self.encoding).digest()


def root_key(namespace: Namespace, request: Request) -> bytes:
    """Return the 32 bytes from which a prefix's keys are chained.

    HMAC-SHA256 under the tenant's secret, so that keys cannot be guessed from a prompt.
    """
    identity = _fields((namespace.encoding, request.adapter, request.salt))
    secret = hashlib.sha256(namespace.secret).digest()  # HMAC pads with zeros: b"a" would be b"a\0"
    return hmac.digest(secret, identity, "sha256")


def _only_bytes(what: str, value: object) -> None:
    """Refuse a name or a hexdigest where the bytes of a digest are meant."""
    if not isinstance(value, bytes):
        raise ConfigError(f"{what} must be bytes, not {type(value).__name__}")


def _fields(values: Iterable[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(value)) + value for value in values)
