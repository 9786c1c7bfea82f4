"""The bucket that ``--s3`` names, as the URL of a tier."""

from __future__ import annotations

from kvtier.config import parse_tier
from kvtier.errors import ConfigError


def bucket_url(url: str, below: str = "") -> str:
    """Return the URL of an s3 tier, unbounded unless `url` has a capacity, which admits all.

    below: added to the prefix. Reaches nothing. Raises ConfigError for what is no such URL.
    """
    place, _, query = url.partition("?")
    if not place.startswith("s3://") or not place.removeprefix("s3://"):
        raise ConfigError("--s3 takes the URL of a bucket, like s3://bucket/prefix")
    if "admission=" in query:
        raise ConfigError("leave admission= out of --s3: what is asked here is written in any case")
    given = [query, "admission=through"]
    if "capacity=" not in query:
        given.append("capacity=unbounded")
    whole = "/".join(filter(None, (place.rstrip("/"), below))) + "?" + "&".join(filter(None, given))
    parse_tier(whole)
    return whole
