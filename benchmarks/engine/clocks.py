"""When the blocks of a decode step's products start, see x, have multiplied, and end, by their own clocks.

    python benchmarks/engine/clocks.py [--model 32B] [--batch 8] [--rank 32 0] [--prompt 640]

Launches overlap, so how long a kernel took says little. Copies of portable.cu and prepare.cu (up to 8 tokens) get some
lines more, at the places that MARKS names: there thread 0 of a block reads %globaltimer, and writes a record when the
block ends. The engine decodes as always, with these. The table has, for each product, its first block, its last one and
three between, in microseconds from the moment at which the first sees x; medians over the launches. "x ->" is the time
from there to the same moment of the next product.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

sys.path += [str(Path(__file__).parents[1] / "kernels"), str(Path(__file__).parent)]
from bench_decode import policy, requests, timed

from qerl.bench.models import SIZES
from qerl.config import RolloutConfig
from qerl.engine.engine import PagedEngine
from qerl.kernels.w4a16 import portable, prepare
from qerl.types import SamplingParams

RECORDS, WORDS = 1 << 18, 8  # of 64 bits: times[6], grid and k, number
SHARES = (0, 10, 50, 90, 100)

CLOCKS = """#define BUFFER reinterpret_cast<unsigned long long*>({address}ull)
__device__ __forceinline__ unsigned long long clock_now() {{
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory");
    return t;
}}
#define CLOCK_START \\
    unsigned long long clocks[6] = {{clock_now()}}, clock_record = 0; \\
    if (threadIdx.x == 0) clock_record = atomicAdd(BUFFER, 1ull);
#define CLOCK(i) if (threadIdx.x == 0) clocks[i] = clock_now();
#define CLOCK_END(kind, k) \\
    if (threadIdx.x == 0) {{ \\
        unsigned long long* to = BUFFER + {words} * (1 + clock_record % {records}); \\
        clocks[5] = clock_now(); \\
        for (int i = 0; i < 6; ++i) to[i] = clocks[i]; \\
        to[6] = (static_cast<unsigned long long>(gridDim.x) << 32) | static_cast<unsigned>(k); \\
        to[7] = 2 * clock_record + kind; \\
    }}
"""

MARKS: Mapping[Path, tuple[tuple[str, str], ...]] = {  # what stands there once, and what is put in front of it
    portable.SOURCE: (
        ("constexpr int THREADS = ", '#include "clocks.cuh"\n'),
        ("    const int chunks = (k + TILE_COLUMNS - 1)", "    CLOCK_START\n"),
        ("            if constexpr (RESIDENT)\n#pragma unroll 1\n", "            CLOCK(1)\n"),
        ("        // Sums of the warps of one r, in the order of q.", "        CLOCK(2)\n"),
        ("        if (!is_last || q > 0) continue;", "        CLOCK(3)\n"),
        ("            for (int slice = 0; slice < rank / 16; ++slice) {  // lane t", "            CLOCK(4)\n"),
        ("}\n\n// u = round(scaling * (x A^T)) for all parts", "    CLOCK_END(0, k)\n"),
    ),
    prepare.SOURCE: (
        ("constexpr int WARPS = ", '#include "clocks.cuh"\n'),
        ("    // The product starts at once.", "    CLOCK_START\n"),
        ("    if (!AT_ONCE && blockIdx.x >= tile_blocks)", "    CLOCK(1)\n"),
        ("        for (int i = threadIdx.x; i < 16 * BATCH; i += THREADS) {", "        CLOCK(2)\n"),
        ("        cluster_sync();  // nobody leaves while its sums are read", "        CLOCK_END(1, k)\n"),
    ),
}
PRODUCT = "starts", "sees x", "multiplied", "has sums", "has u", "ends"
U = "starts", "sees x", "multiplied", "-", "-", "ends"


def instrumented(address: int, folder: Path) -> dict[Path, Path]:
    """Copies of the sources, with clocks that write to the buffer at `address`."""
    copies = {}
    for source, marks in MARKS.items():
        text = source.read_text()
        for place, line in marks:
            assert text.count(place) == 1, f"{source.name} has {place!r} {text.count(place)} times"
            text = text.replace(place, line + place)
        for header in source.parent.glob("*.cuh"):
            shutil.copy(header, folder)
        copies[source] = folder / source.name
        copies[source].write_text(text)
    (folder / "clocks.cuh").write_text(CLOCKS.format(address=hex(address), words=WORDS, records=RECORDS))
    return copies


class Launch(NamedTuple):
    """Of one kernel; a row of nanoseconds a block, 0 where it did not come by."""

    is_product: bool
    grid: int
    k: int
    times: NDArray[np.int64]

    @property
    def sees_x(self) -> int:
        """The first of its blocks."""
        return int(self.times[:, 1].min())


def launches(records: NDArray[np.int64]) -> list[Launch]:
    """Of records in any order, those launches all of whose blocks are there, by when they see x.

    Two of the same weight shape are a layer apart: sorted by that moment their blocks do not mix.
    """
    records = records[records[:, 0] > 0]
    found = []
    kinds = np.stack([records[:, 7] % 2, records[:, 6] >> 32, records[:, 6] & 0xFFFFFFFF], 1)
    for kind, grid, k in np.unique(kinds, axis=0):
        rows = records[(kinds == (kind, grid, k)).all(1), :6]
        rows = rows[np.argsort(rows[:, 1])]
        rows = rows[len(rows) % grid :]  # the oldest may have been written over in part
        found += [Launch(kind == 0, int(grid), int(k), times) for times in rows.reshape(-1, grid, 6)]
    return sorted(found, key=lambda launch: launch.sees_x)


def table(found: list[Launch]) -> Iterator[str]:
    """A product's lines: its own, and those of the kernel that computes its u."""
    products = [launch for launch in found if launch.is_product]
    us = [launch for launch in found if not launch.is_product]
    for grid, k in sorted({(launch.grid, launch.k) for launch in products}):
        numbers = [i for i, p in enumerate(products[:-1]) if (p.grid, p.k) == (grid, k)]
        if not numbers:
            continue
        own = [products[i] for i in numbers]
        until_next = np.median([products[i + 1].sees_x - products[i].sees_x for i in numbers]) / 1e3
        yield f"{grid} blocks, k {k}: {len(own)} launches, x -> {until_next:.1f}"
        yield from _lines("", PRODUCT, [p.times - p.sees_x for p in own])
        before = [(p, u) for p in own if (u := _latest(us, p)) is not None]
        if before:
            yield from _lines("u ", U, [u.times - p.sees_x for p, u in before])


def _latest(us: list[Launch], product: Launch) -> Launch | None:
    earlier = [u for u in us if u.k == product.k and u.sees_x < product.sees_x + 1000]
    return earlier[-1] if earlier and product.sees_x - earlier[-1].sees_x < 50_000 else None


def _lines(whose: str, names: tuple[str, ...], times: list[NDArray[np.int64]]) -> Iterator[str]:
    for i, name in enumerate(names):
        seen = [rows[rows[:, i] > -(10**9), i] for rows in times]  # a block that did not come by: very long ago
        shares = [np.percentile(column, SHARES) for column in seen if len(column)]
        if shares and name != "-":
            yield f"  {whose + name:14s}" + "".join(f"{us:8.1f}" for us in np.median(shares, 0) / 1e3)


def measure(model: str, batch: int, rank: int, prompt: int, buffer: torch.Tensor) -> None:
    """Decode, and print."""
    sampling, vocabulary = SamplingParams(temperature=1.0), SIZES[model].vocabulary
    engine = PagedEngine(
        policy(model, "nvfp4", rank), eos_ids=[vocabulary], config=RolloutConfig(max_completion_length=64)
    )
    asked: Any = requests(batch, prompt, 64, vocabulary)
    for _ in range(2):
        timed(engine, asked, sampling)
    records = buffer.cpu().numpy().reshape(-1, WORDS)[1:]
    found = launches(records)
    last = max((launch.sees_x for launch in found), default=0)
    found = [launch for launch in found if launch.sees_x > last - 50_000_000]  # the last decode steps: 50 ms
    print(f"\n{model}, batch {batch}, rank {rank}: us, blocks {' '.join(f'{share} %' for share in SHARES)}")
    print(*table(found), sep="\n", flush=True)
    buffer.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="32B")
    parser.add_argument("--batch", type=int, choices=range(1, 9), default=8)
    parser.add_argument("--rank", nargs="+", type=int, default=[32, 0], help="of the adapters; 0: none")
    parser.add_argument("--prompt", type=int, default=640)
    args = parser.parse_args()
    buffer = torch.zeros((1 + RECORDS) * WORDS, dtype=torch.int64, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        copies = instrumented(buffer.data_ptr(), Path(folder))
        portable.SOURCE, prepare.SOURCE = copies[portable.SOURCE], copies[prepare.SOURCE]
        for rank in args.rank:
            measure(args.model, args.batch, rank, args.prompt, buffer)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
