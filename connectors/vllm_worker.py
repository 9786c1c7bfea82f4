"""The connector's half in vLLM's worker: it executes plans on the blocks of one rank."""

from __future__ import annotations

import logging
import math
from typing import Any, Final

from kvtier.clock import monotonic
from kvtier.connectors.vllm_seat import Place
from kvtier.connectors.vllm_step import Ended, StepPlans
from kvtier.copier import Pages
from kvtier.copyplan import CopyPlan
from kvtier.device.base import Device
from kvtier.device.cpu import CpuDevice
from kvtier.device.torch_driver import cuda_device
from kvtier.errors import ConfigError, ProtocolError
from kvtier.transfer import CopyStatus, CopyTransfer

_log = logging.getLogger("kvtier")
_SLOW_SECONDS: Final = 10.0
_OVERTAKEN: Final = "its blocks were given to others before they were copied"
_IDLE_SECONDS: Final = 0.003


class WorkerSide:
    """One rank's. Calls come from the thread that runs the model."""

    def __init__(self, place: Place, kv: Any) -> None:
        self._place = place
        self._kv = kv
        self._groups = [group.layer_names for group in kv.kv_cache_groups]
        self._tensors: list[list[Any]] = []
        self._pages: Pages | None = None
        self._device: Device | None = None
        self._loads: dict[int, tuple[str, CopyTransfer]] = {}
        self._saves: dict[int, CopyTransfer] = {}
        self._arrived: list[str] = []
        self._failed: dict[str, tuple[int, ...]] = {}
        self._causes: dict[int, str] = {}
        self._void: dict[int, str] = {}  # saves under way that come to nothing: why

    def bind(self, tensors: dict[str, Any]) -> None:
        """Take vLLM's KV, by layer: on the CPU, or all of it on one GPU.

        Raises ConfigError for pages that are not in one piece, and for a GPU that cannot be used.
        """
        count = self._kv.num_blocks
        each = [[_bytes(name, tensors[name], count) for name in names] for names in self._groups]
        if self._device is None:
            self._device = device_of(each[0][0])
        self._place.check(each, self._device)
        self._tensors, self._pages = each, None

    # ---- a step, in vLLM's order

    def before(self, plans: StepPlans) -> None:
        """Let saves end whose blocks this step writes. Blocks, ten seconds at most.

        One that takes longer comes to nothing: vLLM gives a step up after a while, and itself.
        """
        until = monotonic() + _SLOW_SECONDS
        for number in plans.reused:
            transfer = self._saves.get(number)
            if transfer is None or number in self._void:
                continue
            left = max(until - monotonic(), 0.0)
            if transfer.result(left).status is CopyStatus.TIMEOUT:
                self._void[number] = _OVERTAKEN
                _log.warning("a save is dropped: %s, in %g s", _OVERTAKEN, _SLOW_SECONDS)

    def load(self, plans: StepPlans) -> None:
        """Start this step's loads, into blocks that nothing reads yet."""
        self._failed.update(plans.late)
        for request, data in plans.loads:
            plan = CopyPlan.decode(data)
            transfer = self._execute(plan)
            if transfer is None:
                blocks = tuple(block for part in plan.parts for block in part.blocks)
                self._failed[request] = blocks
            else:
                self._loads[plan.id] = request, transfer

    def save(self, plans: StepPlans) -> None:
        """Start this step's saves, after all that it has computed."""
        for data in plans.saves:
            plan = CopyPlan.decode(data)
            transfer = self._execute(plan)
            if transfer is not None:
                self._saves[plan.id] = transfer

    def arrived(self, *, idle: bool) -> tuple[set[str], dict[str, tuple[int, ...]]]:
        """Return the requests whose loads have ended, and those that failed, with their blocks.

        idle: there is nothing to compute, so that a moment may be spent on waiting.
        """
        if idle and self._loads:
            next(iter(self._loads.values()))[1].result(_IDLE_SECONDS)
        for number, (request, transfer) in list(self._loads.items()):
            if not transfer.poll():
                continue
            result = transfer.result(0)
            del self._loads[number]
            self._note(number, _cause(transfer))
            if result.status is CopyStatus.OK:
                self._arrived.append(request)
            else:
                self._failed[request] = result.failed_blocks
        arrived, self._arrived = self._arrived, []
        failed, self._failed = self._failed, {}
        return {*arrived, *failed}, failed

    def report(self) -> Ended | None:
        """Return what has ended since the last step, if anything has."""
        for number, transfer in list(self._saves.items()):
            if transfer.poll():
                del self._saves[number]
                self._note(number, self._void.pop(number, "") or _cause(transfer))
        causes, self._causes = self._causes, {}
        return Ended({number: [cause] for number, cause in causes.items()}) if causes else None

    def close(self) -> None:
        """Wait for copies in flight, bounded, and leave word of how they ended."""
        until = monotonic() + _SLOW_SECONDS
        for transfer in (*self._saves.values(), *(one for _, one in self._loads.values())):
            transfer.result(max(until - monotonic(), 0.0))
        self.arrived(idle=False)
        last = self.report()
        if self._device is not None:
            self._device.close()  # before the memory goes that it has pinned
        self._place.close(
            {number: cause for number, (cause,) in last.causes.items()} if last else {}
        )

    def _note(self, plan: int, cause: str) -> None:
        """Note how a plan has ended here."""
        self._causes[plan] = cause
        self._place.ended(plan)

    def _bound(self) -> tuple[Pages, Device]:
        """Return vLLM's KV and what copies it. The first time blocks, as ``Place.pages`` does."""
        if self._device is None:
            raise ConfigError("a plan came before vLLM has shown its KV")
        if self._pages is None:
            self._pages = self._place.pages(self._tensors, self._device)
        return self._pages, self._device

    def _execute(self, plan: CopyPlan) -> CopyTransfer | None:
        """Enqueue a plan's copies; None, and a cause, for one that cannot be executed here.

        They come after all that this thread has computed or begun to compute: what fills the blocks
        of a save, and what has read or filled those of a load for the request before.
        """
        try:
            pages, device = self._bound()
            return pages.execute(plan, after=(device.host_fence(),))
        except (ConfigError, ProtocolError) as error:
            cause = str(error)
        _log.warning("a plan was refused: %s", cause)
        self._note(plan.id, cause)
        return None


def device_of(tensor: Any) -> Device:
    """Return what copies KV where a tensor is. Raises ConfigError for a GPU it cannot use."""
    where = tensor.device
    return CpuDevice() if where.type == "cpu" else cuda_device(where.index or 0)


def _cause(transfer: CopyTransfer) -> str:
    result = transfer.result(0)
    if result.status is CopyStatus.OK:
        return ""
    return result.cause or "the copy failed"


def _bytes(name: str, tensor: Any, blocks: int) -> Any:
    """View one layer's KV as bytes [blocks, bytes of a block], whatever is inside a block."""
    import torch

    parts = tensor.shape[0] // max(blocks, 1)  # a kernel may cut a block into several
    size = tensor.element_size()
    page = parts * math.prod(tensor.shape[1:]) * size
    stride = parts * tensor.stride(0) * size
    spread = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    dense = 1 + sum((length - 1) * step for length, step in spread) == math.prod(tensor.shape[1:])
    if not parts or page != stride or not dense:
        raise ConfigError(
            f"{name}: a block's {page} bytes lie {stride} bytes apart, not in one piece; set "
            f"VLLM_KV_CACHE_LAYOUT to a layout with the layers outermost, such as LBHNC"
        )
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * size
    return flat.set_(tensor.untyped_storage(), start, (blocks, page), (page, 1))
