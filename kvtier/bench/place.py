"""Where a benchmark's tiers live: a directory for each cache, and a bucket."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from kvtier.bench.bucket import bucket_url
from kvtier.bench.filesystem import disk_directory
from kvtier.bench.settings import Settings
from kvtier.config import load_store, parse_tier, store_types
from kvtier.errors import ConfigError
from kvtier.testing.proxy import CHAOS, DelayProxy
from kvtier.testing.seaweed import SeaweedServer

LEAST_DISK: Final = 64 << 20
"""Bytes of an lmdb tier that is told no capacity, at least."""

_BUCKET: Final = "kvtier-bench"
_IMPATIENT: Final = "&connect_timeout=1s&read_timeout=1s"
_STRANGER: Final = b"what another program keeps under that name " * 4096
_ALL: Final = "admission=through&write_budget=unlimited"  # whatever the runs before have written
_FOREIGN: Final = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION")
_FILES: Final = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")


class Place:
    """A temporary directory and, where an arm needs it, a bucket. A context manager.

    ``__enter__`` tries both, and raises ConfigError with cause and remedy. All that was written
    goes with it; an existing bucket is left to whoever emptied the cache.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seeds = itertools.count(settings.seed)  # of bad weather
        self._stack = contextlib.ExitStack()
        self._server: SeaweedServer | None = None
        self._proxy: DelayProxy | None = None
        self._url = ""
        self.directory = Path()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.directory = self._temporary(stack)
            if "lmdb" in self._settings.arms or "s3" in self._settings.arms:
                _try(self.tiers(("lmdb",), "probe", 0, self._settings.disk or LEAST_DISK)[0])
            if "s3" in self._settings.arms:
                self._reach(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def env(self) -> Mapping[str, str | None]:
        """What processes need in their environment to reach the bucket; None: must not be set."""
        if self._server is None:
            return {}
        unset: dict[str, str | None] = dict.fromkeys(_FOREIGN)
        return {**unset, **dict.fromkeys(_FILES, os.devnull), **self._server.env()}

    def tiers(self, names: Sequence[str], lmdb: str, dram: int, disk: int) -> list[str]:
        """Return the URLs of tiers. lmdb: the name of the directory; dram, disk: bytes."""
        urls = {
            "dram": f"dram:{dram}B",
            "lmdb": f"lmdb:{self.directory / lmdb}?capacity={disk}B&{_ALL}",
            "s3": self._url,
        }
        return [urls[name] for name in names]

    def s3_bytes(self) -> int | None:
        """Return the body bytes that the S3 server counted; None where they mean nothing.

        That is for a server that is not ours, and for answers that were spoilt on the way.
        """
        if self._server is None or self._settings.chaos is not None:
            return None
        return self._server.traffic().bytes_sent

    def spoil(self, *, bad: bool) -> None:
        """Begin or end the bad weather between the bucket and whoever uses it, if it is to be."""
        if self._proxy is not None and self._settings.chaos is not None:
            # Each time another: with one seed all would begin with the same few faults.
            self._proxy.storm(CHAOS if bad else {}, next(self._seeds), other=_STRANGER)

    def spoilt(self) -> dict[str, int]:
        """Return how many requests met which fault, and how many none."""
        if self._proxy is None:
            return {}
        met = sorted(self._proxy.broken.items(), key=lambda item: item[0].value)
        return {fault.value: count for fault, count in met}

    def _temporary(self, stack: contextlib.ExitStack) -> Path:
        parent = self._settings.directory or disk_directory()
        try:
            made = tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=parent)
            directory = Path(stack.enter_context(made))
            # It may stand in a checkout: nobody's `git status` should list it.
            (directory / ".gitignore").write_text("*\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write to {parent} ({error.strerror}); name another directory with --dir"
            ) from error
        return directory

    def _reach(self, stack: contextlib.ExitStack) -> None:
        settings = self._settings
        if settings.s3 is not None:
            self._url = bucket_url(settings.s3, f"bench-{uuid.uuid4().hex[:12]}")
            _try(self._url)
            return
        server = stack.enter_context(SeaweedServer())
        self._server = server
        endpoint = server.endpoint
        if settings.s3_delay or settings.chaos is not None:
            self._proxy = stack.enter_context(DelayProxy(server.port, settings.s3_delay))
            endpoint = self._proxy.endpoint
        if settings.chaos is not None:
            endpoint += _IMPATIENT
        bucket = server.create_bucket(_BUCKET)
        self._url = (
            f"s3://{bucket}/records?capacity=unbounded&admission=through"
            f"&codec=raw&endpoint={endpoint}"  # what it claims is compared with what was sent
        )


def _try(url: str) -> None:
    """Open and close a tier's Store, which says what is wrong with it."""
    tier = parse_tier(url)
    store = load_store(store_types()[tier.scheme])
    store.open(tier.location, tier.capacity, tier.options).close()
