"""What ``device_gpu.py`` measures, the sizes of it, and on which machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvtier.device.cuda import CudaDevice
from kvtier.device.driver import Driver

KIB = 1 << 10


class Sizes(NamedTuple):
    """What is measured. Bytes, but for grid, turns, near_runs, prompts and sleep.

    link: of one copy; the arena has two. total: of the chunks of one call. geometries: planes,
    bytes of a block in each, blocks of a chunk of 256 tokens. near, near_runs: of a run, and how
    many of them. matrix: its side. products: so many. prompts: tokens. hidden: of each of so many
    layers, whose heads have 128. sleep: cycles of the GPU.
    """

    link: int
    total: int
    geometries: Mapping[str, tuple[int, int, int]]
    grids: Sequence[int]
    near: Sequence[int]
    near_runs: Sequence[int]
    matrix: int
    products: int
    prompts: Sequence[int]
    hidden: int
    layers: int
    sleep: int


HERE = Sizes(
    link=1 << 30,
    total=512 << 20,
    geometries={
        "llama-8b, blocks of 16": (64, 32 << 10, 16),
        "llama-8b, blocks of 64": (64, 128 << 10, 4),
        "llama-8b, blocks of 256": (64, 512 << 10, 1),
        "llama-70b tp4, blocks of 16": (160, 8 << 10, 16),
        "mla, blocks of 16": (61, 18 << 10, 16),
        "mla, blocks of 64": (61, 72 << 10, 4),
    },
    grids=(2, 4, 8, 16, 32, 132),
    near=(16 * KIB, 24 * KIB, 28 * KIB, 32 * KIB),
    near_runs=(16, 512, 4096, 32768),
    matrix=8192,
    products=80,
    prompts=(1024, 4096, 16384, 32768),
    hidden=4096,
    layers=32,
    sleep=200_000_000,
)
REHEARSAL = Sizes(
    link=1 << 18,
    total=1 << 17,
    geometries={"llama": (8, 1024, 4), "mla": (3, 1152, 4)},
    grids=(2,),
    near=(16 * KIB,),
    near_runs=(8,),
    matrix=64,
    products=2,
    prompts=(32,),
    hidden=128,
    layers=2,
    sleep=10_000_000,
)


def machine(torch: Any, device: CudaDevice, driver: Driver) -> dict[str, Any]:
    """Describe the GPU and its place, as far as the system tells."""
    asked = "driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"not told: {error}"
    return {
        "name": device.name,
        "torch": torch.__version__,
        "processors": driver.processors,
        "batches": driver.batches,
        "numa_node": driver.node,
        asked: said,
    }


class Layer:
    """One layer of as many sizes as Llama-3-8B's where `hidden` is 4096, with random weights."""

    def __init__(self, torch: Any, hidden: int) -> None:
        self.torch, self.hidden = torch, hidden
        self.heads, self.kept = hidden // 128, max(hidden // 512, 1)
        into, wide = 128 * (self.heads + 2 * self.kept), 7 * hidden // 2
        shapes = ((hidden, into), (hidden, hidden), (hidden, 2 * wide), (wide, hidden))
        self.weights = [self.draw(*shape) * 0.01 for shape in shapes]

    def draw(self, *shape: int) -> Any:
        """Return random numbers in bf16."""
        return self.torch.randn(shape, dtype=self.torch.bfloat16, device="cuda")

    def prompt(self, tokens: int) -> Any:
        """Return hidden states."""
        return self.draw(tokens, self.hidden)

    def __call__(self, hidden: Any) -> Any:
        functional = self.torch.nn.functional
        into, out, up, down = self.weights
        heads, kept = self.heads, self.kept
        projected = (hidden @ into).view(1, len(hidden), heads + 2 * kept, 128).transpose(1, 2)
        queries, keys, values = projected.split((heads, kept, kept), dim=1)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        hidden = mixed.transpose(1, 2).reshape(len(hidden), self.hidden) @ out
        gate, wide = (hidden @ up).chunk(2, -1)
        return (functional.silu(gate) * wide) @ down
