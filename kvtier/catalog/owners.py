"""Owners: the namespaces whose parts lie in one catalog, and how much of it is whose.

A tenant with a Quota has a share of each tier that is counted apart: what lies below its floor
nobody takes from it, and above its ceiling it takes from itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.checks import check_kind, is_number
from kvtier.errors import ConfigError

NOBODY: Final = 0
"""The owner of parts of more namespaces than can be told apart; they are never served."""

_MOST: Final = 1 << 16
_DIGITS: Final = 9  # of sums of fractions


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's part of every tier, as fractions of its capacity.

    floor: what other tenants cannot take from it; ceiling: what it cannot exceed.
    """

    floor: float = 0.0
    ceiling: float = 1.0

    def __post_init__(self) -> None:
        numbers = is_number(self.floor) and is_number(self.ceiling)
        if not numbers or not 0.0 <= self.floor <= self.ceiling <= 1.0:
            raise ConfigError(
                f"a quota needs 0 <= floor <= ceiling <= 1, as fractions of a tier, not floor "
                f"{self.floor!r} and ceiling {self.ceiling!r}"
            )


def check_floors(quotas: Mapping[str, Quota]) -> None:
    """Raise ConfigError when the floors of all tenants cannot be kept together."""
    check_kind("quotas", quotas, Mapping, ConfigError)
    for tenant, quota in quotas.items():
        check_kind("a tenant's name", tenant, str, ConfigError)
        check_kind(f"the quota of tenant {tenant!r}", quota, Quota, ConfigError)
    floors = math.fsum(quota.floor for quota in quotas.values())
    if round(floors, _DIGITS) > 1:
        named = ", ".join(repr(tenant) for tenant, quota in quotas.items() if quota.floor)
        raise ConfigError(
            f"the floors of tenants {named} add up to {floors:.0%} of each tier; lower some, to "
            "100% together"
        )


class Owners:
    """Namespaces by number. quotas: by tenant. tenants: names, by share; 0 is all the others."""

    def __init__(self, quotas: Mapping[str, Quota] | None = None) -> None:
        quotas = quotas or {}
        check_floors(quotas)
        self.tenants = ("", *quotas)
        self.quotas = (Quota(), *quotas.values())
        self.digests = [b""]
        self.shares = [0]
        self._tenants = {tenant: number for number, tenant in enumerate(quotas, 1)}
        self._numbers: dict[bytes, int] = {}

    def number(self, digest: bytes) -> int:
        """Return the number of a namespace, from now on if it is new."""
        number = self._numbers.get(digest)
        if number is None:
            if len(self.digests) == _MOST:
                return NOBODY
            number = self._numbers[digest] = len(self.digests)
            self.digests.append(digest)
            self.shares.append(0)
        return number

    def find(self, digest: bytes) -> int | None:
        """Return the number of a namespace; None when it has none."""
        return self._numbers.get(digest)

    def share_of(self, tenant: str) -> int:
        """Return the number of a tenant's share: 0, the common one, for one without a quota."""
        return self._tenants.get(tenant, 0)
