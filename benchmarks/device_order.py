"""What copies and compute must wait for, on a GPU's own streams; ``device_gpu.py`` measures it.

The GPU is made to sleep where the one comes first that the other has to wait for. So what does not
wait comes too soon, and its bytes are wrong: each hazard is tried in both ways.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kvtier.device.base import Copy, Fence, Role
from kvtier.device.cuda import CudaDevice

PLANES, BLOCKS, BYTES = 4, 8, 1 << 16
MINE, OTHERS = [1, 5], [2, 6]
KV, SLOT, LATER = 7, 9, 3  # bytes, of blocks and of the slot at first, and what is written later
SECONDS = 60.0


class Hazards:
    """Blocks and a slot. Each hazard says if bytes are right. cycles: how long the GPU sleeps."""

    def __init__(self, torch: Any, device: CudaDevice, arena: Any, cycles: int) -> None:
        self.torch, self.device, self.cycles = torch, device, cycles
        self.kv = torch.zeros(PLANES, BLOCKS, BYTES, dtype=torch.uint8, device="cuda")
        pages = device.pages(self.kv, PLANES, BYTES)
        self.slot = arena[: PLANES * len(MINE) * BYTES].reshape(PLANES, len(MINE), BYTES)
        self.copy, self.back = (Copy(pages, some, self.slot) for some in (MINE, OTHERS))
        # Brought there now: to bring them later would wait for the GPU.
        self.mine, self.others = (torch.tensor(one, device="cuda") for one in (MINE, OTHERS))

    def all(self) -> dict[str, bool]:
        """Try all hazards on the device's way; first waiting, when kernels are loaded, then not."""
        found = {}
        for name in [one for one in vars(Hazards) if one[0] == "h" and one[1].isdigit()]:
            for waits in (True, False):
                self.torch.cuda.synchronize()
                self.kv.fill_(KV)
                self.slot[:] = SLOT
                self.torch.cuda.synchronize()
                title = name.partition("_")[2].replace("_", " ")
                right = getattr(self, name)(waits=waits)
                found[f"{title}, {'waiting' if waits else 'not waiting'}"] = bool(right)
        return found

    def sleep(self, role: Role | None = None) -> None:
        """Let the stream that computes sleep, or the one of loads or stores."""
        on: Any = contextlib.nullcontext()
        if role is not None:
            on = self.torch.cuda.stream(self.device.stream(role).handle)
        with on:
            self.torch.cuda._sleep(self.cycles)  # noqa: SLF001  (there is no public one)

    def computed(self, *, waits: bool = True) -> list[Fence]:
        """Return what a copy waits for that comes after compute."""
        return [self.device.host_fence()] if waits else []

    def store(self, after: list[Fence]) -> Fence:
        """Enqueue a store."""
        return self.device.gather(self.device.stream("store"), [self.copy], after)

    def load(self, after: list[Fence], copy: Copy | None = None) -> Fence:
        """Enqueue a load."""
        copies = [self.copy if copy is None else copy]
        return self.device.scatter(self.device.stream("load"), [copies], after)[-1]

    def holds(self, ids: Any, value: int) -> bool:
        """Say, when all has ended, whether blocks have this in all bytes."""
        self.torch.cuda.synchronize()
        return bool((self.kv.index_select(1, ids) == value).all())

    def stored(self, value: int) -> bool:
        """Say, when all has ended, whether the slot has this in all bytes."""
        self.torch.cuda.synchronize()
        return bool((self.slot == value).all())

    def h1_a_store_after_compute(self, *, waits: bool) -> bool:
        """Blocks are copied that are yet to be written."""
        self.sleep()
        self.kv.fill_(LATER)
        self.store(self.computed(waits=waits))
        return self.stored(LATER)

    def h2_a_block_used_again_after_its_store(self, *, waits: bool) -> bool:
        """Blocks are written that are yet to be copied."""
        self.sleep("store")
        fence = self.store(self.computed())
        if waits:
            self.device.hold(fence, SECONDS)
        self.kv.fill_(LATER)
        return self.stored(KV)

    def h3_compute_after_a_load(self, *, waits: bool) -> bool:
        """Blocks are read that are yet to be loaded."""
        self.sleep("load")
        fence = self.load(self.computed())
        if waits:
            self.device.hold(fence, SECONDS)
        seen = self.kv.index_select(1, self.mine)
        self.torch.cuda.synchronize()
        return bool((seen == SLOT).all())

    def h4_a_load_after_its_readers(self, *, waits: bool) -> bool:
        """Blocks are loaded that are yet to be read."""
        self.sleep()
        seen = self.kv.index_select(1, self.mine)
        self.load(self.computed(waits=waits))
        self.torch.cuda.synchronize()
        return bool((seen == KV).all())

    def h5_a_load_after_zeros(self, *, waits: bool) -> bool:
        """Blocks are loaded that are yet to be cleared."""
        self.sleep()
        self.kv.zero_()
        self.load(self.computed(waits=waits))
        return self.holds(self.mine, SLOT)

    def h6_a_slot_used_again_after_its_load(self, *, waits: bool) -> bool:
        """A slot is written that is yet to be loaded."""
        self.sleep("load")
        fence = self.load(self.computed())
        if waits:
            fence.wait(SECONDS)
        self.slot[:] = LATER
        return self.holds(self.mine, SLOT)

    def h7_the_host_after_a_store(self, *, waits: bool) -> bool:
        """A slot is read that is yet to be written."""
        self.sleep("store")
        fence = self.store(self.computed())
        if waits:
            fence.wait(SECONDS)
        return bool((self.slot == KV).all())

    def h8_a_new_owner_after_a_cancelled_load(self, *, waits: bool) -> bool:
        """Blocks of another request are loaded into."""
        self.sleep("load")
        fence = self.load(self.computed())
        if waits:
            self.device.hold(fence, SECONDS)
        self.kv.fill_(LATER)
        return self.holds(self.mine, LATER)

    def h9_a_load_of_what_is_being_stored(self, *, waits: bool) -> bool:
        """A slot is loaded that is yet to be written."""
        self.sleep("store")
        fence = self.store(self.computed())
        self.load([fence] if waits else [], self.back)
        return self.holds(self.others, KV)
