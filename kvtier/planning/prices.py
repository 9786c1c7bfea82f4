"""Prices: what a month of each tier costs. Examples, which an operator replaces by a TOML file.

The object store's are the list prices of Amazon S3 Standard in us-east-1
(aws.amazon.com/s3/pricing); the others are round numbers of the size that clouds ask for, not
anybody's quote.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import msgspec

from kvtier.checks import what_is_wrong
from kvtier.errors import ConfigError, unknown
from kvtier.planning.files import check_regular

DAY: Final = 86_400.0
MONTH: Final = 30 * DAY
_GIB: Final = 1 << 30
_MOST: Final = 1e12
_REMOTE: Final = ("s3",)
_DISKS: Final = ("lmdb", "files", "nvme")


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dollars. drive_writes_a_day, drive_years: what a drive stands of its own capacity."""

    dram_gib_month: float = 3.0
    disk_gib_month: float = 0.10
    object_gib_month: float = 0.023
    object_put_1000: float = 0.005
    object_get_1000: float = 0.0004
    gpu_hour: float = 3.0
    drive_writes_a_day: float = 1.0
    drive_years: float = 5.0

    def a_month(self, tier: str, nbytes: int, reads: int, writes: int, hours: float) -> float:
        """Return the dollars of a month. nbytes: capacity; reads, writes: requests in `hours`."""
        gib = nbytes / _GIB
        if tier.startswith(_REMOTE):
            months = MONTH / (hours * 3600) if hours else 0.0
            requests = reads * self.object_get_1000 + writes * self.object_put_1000
            return gib * self.object_gib_month + requests / 1000 * months
        return gib * (self.disk_gib_month if tier.startswith(_DISKS) else self.dram_gib_month)

    def life_years(self, tier: str, nbytes: int, a_day: float) -> float:
        """Return how long a drive of that capacity lasts at so many bytes a day; 0: it is none."""
        if not tier.startswith(_DISKS) or not a_day:
            return 0.0
        return nbytes * self.drive_writes_a_day * self.drive_years / a_day


def read_prices(path: Path) -> Prices:
    """Read a TOML file of some or all prices. Raises ConfigError that names the key."""
    try:
        check_regular(path)
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {what_is_wrong(error)}") from error
    for key, value in found.items():
        if key not in Prices.__struct_fields__:
            raise unknown("price", key, Prices.__struct_fields__)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < _MOST:
            raise ConfigError(f"{path}: {key} must be a number of 0 or more, not {value!r}")
    return Prices(**{key: float(value) for key, value in found.items()})
