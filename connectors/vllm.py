"""kvtier for vLLM: KV that leaves vLLM's own cache stays in DRAM and the tiers below.

    --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"tiers": ["dram:8GiB"]}}'

vLLM makes two of these objects: one in its scheduler, one in each worker. This module turns its
calls into those of ``vllm_scheduler`` and ``vllm_worker``, and refuses what cannot work.
Loads are asynchronous, and no layer waits for one, so that full CUDA graphs stay.
"""

from __future__ import annotations

from typing import Any, Final, cast

import vllm

from kvtier.cache import Cache
from kvtier.connectors.vllm_absent import AbsentSide
from kvtier.connectors.vllm_checks import apart, check_alone, check_version, checked_tiers
from kvtier.connectors.vllm_figures import Changes, Exported, Watched
from kvtier.connectors.vllm_identity import namespace_for
from kvtier.connectors.vllm_scheduler import SchedulerSide
from kvtier.connectors.vllm_seat import (
    ApartPlace,
    Place,
    SharedPlace,
    open_for,
    open_or_absent,
    take_seat,
)
from kvtier.connectors.vllm_step import Ended, StepPlans
from kvtier.connectors.vllm_worker import WorkerSide
from kvtier.daemon.address import SCHEME

check_version(vllm.__version__)  # before its names are looked for: an older one lacks some

from vllm.config import get_current_vllm_config_or_none  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

_log = init_logger("vllm.kvtier")  # what vLLM shows, from its own name on
_PURGE_SECONDS: Final = 60.0


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See vLLM's KVConnectorBase_V1, whose methods these are. Raises ConfigError at start only.

    vllm_config, role, kv_cache_config: as vLLM passes them.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        tiers = checked_tiers(vllm_config)
        check_alone(vllm_config, get_current_vllm_config_or_none())
        super().__init__(vllm_config, role, kv_cache_config)
        namespace = namespace_for(vllm_config, kv_cache_config)
        engine, alone = vllm_config.kv_transfer_config.engine_id, not apart(vllm_config)
        parallel = vllm_config.parallel_config
        shards = parallel.tensor_parallel_size
        self._several = len(kv_cache_config.kv_cache_groups) > 1
        self._bad: set[int] = set()
        self._watched: Watched | None = None
        self._side: SchedulerSide | WorkerSide | AbsentSide
        place: Place
        if alone or role == KVConnectorRole.SCHEDULER:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            opening = open_or_absent if extra.get("optional") else open_for

            def opened() -> Cache | None:
                return opening(tiers, namespace, engine, shards, apart=not alone)

            self._seat = take_seat(engine, role.name, opened, namespace.digest)
            if self._seat.given is None:
                self._side = AbsentSide()
                return
        if role == KVConnectorRole.SCHEDULER:
            digest, chunk = namespace.digest.hex()[:16], namespace.geometry.chunk_tokens
            _log.info("kvtier serves namespace %s in chunks of %d tokens", digest, chunk)
            self._side = SchedulerSide(self._seat.cache, vllm_config.max_concurrent_batches)
            if not tiers[0].startswith(SCHEME):  # a daemon's figures are of all its engines
                self._watched = Watched(self._seat.cache.figures)
            return
        if alone:
            place = SharedPlace(self._seat)
        else:
            place = ApartPlace(tiers, namespace, engine, (parallel.rank, shards))
        self._side = WorkerSide(place, kv_cache_config)

    @property
    def cache(self) -> Cache:
        """The cache behind the scheduler's object, to look at: ``explain``, ``figures``.

        Raises MisuseError where an optional daemon was not there.
        """
        return self._seat.cache

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is a later miss."""
        return False

    # ---- the scheduler's

    @property
    def _scheduler(self) -> SchedulerSide:
        return cast("SchedulerSide", self._side)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer what lies in leased DRAM; ask for time while it is on its way there."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load that was offered."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlans:
        """Hand a step's plans to the workers."""
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers say of plans that have ended."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Ended):
            self._scheduler.ended(report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks are vLLM's again at once."""
        del block_ids
        self._scheduler.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks are vLLM's again at once."""
        del block_ids
        self._scheduler.finish(request)
        return False, None

    def get_kv_connector_stats(self) -> Changes | None:
        """Return what the cache has counted, now and then. Never waits."""
        return self._watched.changes() if self._watched is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Changes:
        """Return what came from the scheduler's process."""
        return Changes(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Exported:
        """Return what gives the cache's figures to Prometheus, with vLLM's own."""
        del vllm_config
        return Exported(metric_types, labelnames, per_engine_labelvalues)

    def has_pending_push_work(self) -> bool:
        """Ask for steps until all copies have been reported, so that saves are not left open."""
        return self._scheduler.busy

    def reset_cache(self) -> bool:
        """Take this model's KV out of all tiers, as after a change of its weights. Blocks.

        Requests that wait are offered none of it any more.
        """
        if self._seat.given is None:
            return True
        self._scheduler.reset()
        try:
            self._seat.cache.purge(timeout=_PURGE_SECONDS)
        except TimeoutError:
            return False
        return True

    # ---- the worker's

    @property
    def _worker(self) -> WorkerSide:
        return cast("WorkerSide", self._side)

    @property
    def _plans(self) -> StepPlans:
        return cast("StepPlans", self._get_connector_metadata())

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the tensors of vLLM's KV."""
        self._worker.bind(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: StepPlans) -> None:
        """Let saves end whose blocks this step gives to others."""
        self._worker.before(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads."""
        del forward_context, kwargs
        self._worker.load(self._plans)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM computes no request whose load has not ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are saved when all layers are computed."""

    def wait_for_save(self) -> None:
        """Start this step's saves."""
        self._worker.save(self._plans)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Say whose loads have ended, and which failed.

        A failed load is told by its blocks, so that vLLM keeps what it had before them; where
        there are several groups of layers, by its request.
        """
        del finished_req_ids
        arrived, failed = self._worker.arrived(idle=self._plans.idle)
        if not self._several:
            self._bad.update(block for blocks in failed.values() for block in blocks)
        return KVConnectorTransferResults(
            finished_recving=arrived, failed_recving=set(failed) if self._several else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose loads have failed since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    def build_connector_worker_meta(self) -> Ended | None:
        """Tell the scheduler which plans have ended."""
        return self._worker.report()

    def shutdown(self) -> None:
        """Wait for copies, bounded; the last of the objects closes the cache."""
        if isinstance(self._side, WorkerSide):
            self._side.close()
            return
        if isinstance(self._side, AbsentSide):
            self._seat.leave(self._role.name)
            return
        if self._watched is not None:
            self._watched.close()
        last = {plan: [cause] for plan, cause in self._seat.ended.items()}
        self._side.ended(Ended(last))
        self._side.close()
        self._seat.leave("SCHEDULER")
