"""The door: policies by the names under which they are installed.

A plug-in is what an entry point of the group ``kvtier.policies`` names: called without arguments
it makes an empty Policy. Its class may have ``together``, a class method that returns such a
function, for policies of one tier of which each row is in one at most. The built-in ones come
through the same door, but for the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError, unknown
from kvtier.policies.base import Policy
from kvtier.policies.lru import Lru

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEFAULT: Final = "lru"
_GROUP: Final = "kvtier.policies"


def policy_types() -> dict[str, EntryPoint]:
    """Return the policies that are installed, by name, without loading them."""
    from importlib.metadata import entry_points  # 20 ms, which `import kvtier` need not take

    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def check_policy(name: str) -> None:
    """Raise ConfigError for a policy that is not installed, naming the nearest."""
    if name != DEFAULT and name not in (types := policy_types()):
        raise unknown("policy", name, types)


def load_policy(name: str) -> Callable[[], Policy]:
    """Return what makes empty policies of one tier.

    Raises ConfigError for one that is not installed, cannot be loaded, or is none.
    """
    if name == DEFAULT:  # without a look at what is installed, which would slow each start
        return Lru.together()
    types = policy_types()
    if name not in types:
        raise unknown("policy", name, types)
    try:
        kind = types[name].load()
        make: Callable[[], Policy] = kind.together() if hasattr(kind, "together") else kind
        one: object = make()
    except Exception as error:  # a stranger's code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"policy {name!r} cannot be loaded: {cause}") from error
    if not isinstance(one, Policy):
        raise ConfigError(
            f"policy {name!r} makes a {type(one).__name__}, which lacks some of a Policy: see "
            "kvtier.policies.base"
        )
    return make
