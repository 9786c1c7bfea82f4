"""How long `match` and `import kvtier` take, beside the arithmetic that bounds them.

    python benchmarks/match.py [--json FILE] [--plot FILE.png]

match: 131,072 tokens as an int32 array, all 512 chunks cached, hashing included; its bound is
sha256 over the same bytes. import: in a fresh interpreter, alone and with what `kvtier.open`
needs, beside numpy alone.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from plot import kept, option

import kvtier

TOKENS = 131_072
ROUNDS = 21


def cached(tokens: np.ndarray) -> kvtier.Cache:
    """Return a cache that has every chunk of the prompt; a small part each, for the memory."""
    geometry = kvtier.Geometry((kvtier.Component(layers=1, heads=1, head_size=8),))
    cache = kvtier.open("dram:16MiB", namespace=kvtier.Namespace("bench", geometry))
    catalog = cache._desk.catalog  # noqa: SLF001
    taken, _ = catalog.reserve(cache.prefix(tokens).parts(0))
    for part, slot in taken:
        catalog.commit(part.name, slot, bytes(16))
    return cache


def milliseconds(call: Callable[[], object]) -> float:
    """Time one call."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def spread(values: list[float]) -> dict[str, float]:
    """Summarise: median, least, most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def interpreter(code: str) -> float:
    """Time a statement inside a fresh interpreter, so that starting it does not count."""
    timed = f"import time; t = time.perf_counter(); {code}; print((time.perf_counter() - t) * 1e3)"
    return float(
        subprocess.run([sys.executable, "-c", timed], capture_output=True, check=True).stdout
    )


def main() -> None:
    """Measure, interleaved, and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option(arguments)
    options = arguments.parse_args()
    tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS).astype(np.int32)
    names = ("match", "sha256", "import", "import_for_open", "import_numpy")
    figures: dict[str, list[float]] = {name: [] for name in names}
    with cached(tokens) as cache:
        if cache.match(tokens).tokens != TOKENS - 16:
            sys.exit("the prompt is not wholly cached")
        for _ in range(ROUNDS):
            figures["match"].append(milliseconds(lambda: cache.match(tokens)))
            figures["sha256"].append(milliseconds(lambda: hashlib.sha256(tokens.data).digest()))
    for _ in range(ROUNDS):
        figures["import"].append(interpreter("import kvtier"))
        figures["import_for_open"].append(interpreter("import kvtier; kvtier.open"))
        figures["import_numpy"].append(interpreter("import numpy"))
    report = {name: spread(values) for name, values in figures.items()}
    for name, row in report.items():
        print(f"{name:15} {row['median']:8.2f} ms   ({row['min']:.2f} to {row['max']:.2f})")
    print("limits: match 2 ms, import 150 ms")
    kept(
        report,
        options,
        {
            "ms": "{match,sha256}@2",
            "ms in a new process": "{import,import_for_open,import_numpy}@150",
        },
    )


if __name__ == "__main__":
    main()
