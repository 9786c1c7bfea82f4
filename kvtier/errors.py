"""Every exception kvtier raises, as one tree.

KvtierError
├── ConfigError         bad input at the door: option, URL, size, file, credentials
│   └── Unreachable     what a tier's URL names does not answer: it may be away for now
├── NamespaceMismatch   two parties of one cache disagree about what the bytes mean
├── ProtocolError       a malformed plan, record or message
├── MisuseError         a caller broke a documented rule (released twice, used after fork)
└── StoreError          raised by a Store to its Tier only; an engine never sees one
    ├── Unavailable     the medium did not answer, or refused
    ├── Full            there is no room
    └── Corrupt         what was read is not what was written
        └── Newer       it is of a version that this kvtier does not read yet

Weather is a value, not an exception: a miss, a busy arena, an expired lease or a failed tier
come back as a status. An exception means that the caller's code or configuration is wrong.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import ClassVar, Final

_SECRETIVE: Final = re.compile(r"secret|token|passw|pwd|credential|user|key(_?id)?$")


class KvtierError(Exception):
    """Base of all kvtier exceptions."""


class ConfigError(KvtierError):
    """Bad input at the door. The message names the cause and the remedy."""


class Unreachable(ConfigError):  # noqa: N818  (as Unavailable is)
    """What a tier's URL names does not answer. A cache opens without it, and tries again."""


class NamespaceMismatch(KvtierError):  # noqa: N818  (the published name)
    """Geometry or namespace differ between two parties of one cache."""


class ProtocolError(KvtierError):
    """Bytes that should be a plan, a record or a message are not."""


class MisuseError(KvtierError):
    """A documented rule was broken by the calling code."""


class StoreError(KvtierError):
    """A Store's word to its Tier. It never reaches an engine."""


class Unavailable(StoreError):  # noqa: N818  (the published name)
    """The medium did not answer, or refused."""


class Full(StoreError):  # noqa: N818  (the published name)
    """There is no room for the record."""


class Corrupt(StoreError):  # noqa: N818  (the published name)
    """What was read is not what was written. cause: what it is counted as."""

    cause: ClassVar[str] = "corrupt"


class Newer(Corrupt):
    """What was read is of a version that this kvtier does not read yet: it is left as it is."""

    cause: ClassVar[str] = "newer version"


def check_known(
    kind: str, names: Iterable[str], choices: Collection[str], credentials: str = ""
) -> None:
    """Raise ConfigError for the first of the names that is not among `choices`.

    credentials: where a secret belongs, for who gives it by one of these names.
    """
    for name in names:
        if name not in choices:
            if credentials and _SECRETIVE.search(name.lower()):
                raise ConfigError(f"credentials do not belong in a URL; {credentials}")
            raise unknown(kind, name, choices)


def unknown(kind: str, name: str, choices: Iterable[str]) -> ConfigError:
    """Build the error for a name that is not among `choices`, naming the nearest one.

    The caller raises it: ``raise unknown("tier", "lmbd", TIERS)``.
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(known)}"
    return ConfigError(f"unknown {kind} {name!r}; {hint}")
