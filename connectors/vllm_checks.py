"""Which vLLM this connector is for, how it must be set up, and how vLLM finds it by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from kvtier.daemon.address import SCHEME
from kvtier.errors import ConfigError

SUPPORTED: Final = ("0.32",)
"""Versions whose connector interface was read and whose cases were run: see ``make engines``."""

_NAME: Final = "KvtierConnector"
_MODULE: Final = "kvtier.connectors.vllm"
_EXAMPLE: Final = '"kv_connector_extra_config": {"tiers": ["dram:8GiB"]}'


def check_version(found: str) -> None:
    """Raise ConfigError for a vLLM of another version: its interface changes with each."""
    if not any(found == one or found.startswith(f"{one}.") for one in SUPPORTED):
        raise ConfigError(
            f"vLLM {found} and kvtier {version('kvtier')} do not go together: this connector is "
            f"for vLLM {', '.join(f'{one}.x' for one in SUPPORTED)}; install one of these"
        )


def register() -> None:
    """Make the connector known to vLLM by its name. Called by vLLM, maybe more than once.

    It does not raise: vLLM calls it for users, too, who do without the connector.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        return  # a vLLM without connectors
    if _NAME not in getattr(KVConnectorFactory, "_registry", {_NAME: None}):
        KVConnectorFactory.register_connector(_NAME, _MODULE, _NAME)


def checked_tiers(config: Any) -> list[str]:
    """Return the tiers that a VllmConfig names.

    Raises ConfigError for a setting that cannot work, with the remedy.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}: a load that fails would fail its request; "
            f"set it to 'recompute'"
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"kv_role is {transfer.kv_role!r}; a cache needs 'kv_both'")
    for size in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        _one(size, getattr(parallel, size))
    _one("decode_context_parallel_size", parallel.decode_context_parallel_size)
    _one("nnodes", parallel.nnodes)
    options = transfer.kv_connector_extra_config
    _check_device(config, options)
    tiers = options.get("tiers") if isinstance(options, Mapping) else None
    if not isinstance(tiers, list) or not all(isinstance(one, str) for one in tiers) or not tiers:
        raise ConfigError(f"kvtier needs its tiers, as a list of URLs, DRAM first: {_EXAMPLE}")
    if _said(options, "optional") and not tiers[0].startswith(SCHEME):
        raise ConfigError(
            f"optional is for a daemon that may not be there, and the first tier is {tiers[0]!r}, "
            f"not {SCHEME}PATH: leave it out"
        )
    return tiers


def _check_device(config: Any, options: Any) -> None:
    device = config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"vLLM runs on {device!r}; kvtier copies KV of 'cpu' and of 'cuda'")
    if device == "cuda" and not (isinstance(options, Mapping) and _said(options, "try_gpu")):
        raise ConfigError(
            "vLLM runs on 'cuda', and this connector has run on no GPU yet: to try it, set "
            "try_gpu to true in kv_connector_extra_config, and compare answers with and without it"
        )
    if device == "cuda" and config.model_config.enable_sleep_mode:
        raise ConfigError(
            "enable_sleep_mode is True: it takes vLLM's KV away while kvtier may be copying it; "
            "leave it out"
        )


def _said(options: Mapping[str, Any], key: str) -> bool:
    """Return a setting that is true or false; false where nothing is said."""
    found = options.get(key, False)
    if not isinstance(found, bool):
        raise ConfigError(f"{key} is {found!r}; it is true or false")
    return found


def check_alone(config: Any, current: Any) -> None:
    """Raise ConfigError where another connector has this one beside others.

    Each would load what the other has loaded already, and keep requests waiting for it.
    config: what this connector is given; current: vLLM's own for the process, None if not known.
    """
    own = config.kv_transfer_config.kv_connector
    whole = current.kv_transfer_config if current is not None else None
    if whole is None or whole.kv_connector == own:
        return
    named = whole.kv_connector_extra_config.get("connectors", [])
    others = [one.get("kv_connector") for one in named if isinstance(one, Mapping)]
    raise ConfigError(
        f"kv_connector is {whole.kv_connector!r}, with {', '.join(map(str, others))} in it; kvtier "
        f"goes with no other connector: set kv_connector to {own!r}, with all tiers in kvtier's"
    )


def _one(what: str, value: int) -> None:
    if value != 1:
        raise ConfigError(
            f"{what} is {value}; kvtier restores KV of tensor parallelism on one host alone, so "
            f"it must be 1"
        )


def apart(config: Any) -> bool:
    """Say whether vLLM's workers are in processes of their own."""
    parallel = config.parallel_config
    return parallel.world_size > 1 or parallel.distributed_executor_backend not in (None, "uni")
