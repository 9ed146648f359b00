"""w4a16 on sm_90a from a few tokens to 1,024: prepare.cu, then hopper.cu (which has the algorithm), overlapping.

    x [m, k] -- prepare --> tiles of x, u -- hopper, with the packed weight --> y [m, n]

A launch is a variant (what a block computes, and how deep its ring is) and a schedule (which block takes which share).
Both depend on the shape and on the number of multiprocessors alone, so a product has the same bits each time. What the
two kernels share lies in one allocation, made anew for each call: torch's allocator keeps it apart from that of other
streams and graphs.

Called by w4a16's dispatcher. Fewer tokens are portable.py's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from qerl.kernels.adapter import SLICE, PackedAdapter
from qerl.kernels.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, PackedWeight, ScaleFormat
from qerl.kernels.nvrtc import Kernel, aligned, forget_counters, kernel, multiprocessors, stream_counters
from qerl.kernels.w4a16 import prepare

SOURCE = Path(__file__).with_name("hopper.cu")
_SHARED_MEMORY = 227 * 1024  # of a multiprocessor, for blocks
_RESERVED = 3 * 1024  # of a block: the system's, the barriers, the ring's alignment
_STEP_CHUNKS = 2
_MOST_SHARERS = 4  # of a tile


class Variant(NamedTuple):
    """What hopper.cu is compiled for; its text has the meaning of each."""

    tokens: int
    cluster: int
    blocks: int
    warpgroups: int

    @property
    def panels(self) -> int:
        """Rows of packed tiles that a block computes."""
        return self.warpgroups // 2

    @property
    def threads(self) -> int:
        """Of a block: those that compute, and a warpgroup for the one that copies."""
        return 128 * (self.warpgroups + 1)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one step."""
        return _STEP_CHUNKS * (self.tokens * TILE_COLUMNS * 2 + self.panels * TILE_BYTES)

    @property
    def stages(self) -> int:
        """Steps in the ring."""
        return (_SHARED_MEMORY // self.blocks - _RESERVED) // self.stage_bytes

    def defines(self, slices: int, other: prepare.Shape, scale_format: ScaleFormat) -> dict[str, int]:
        """Of hopper.cu. other: prepare.cu's blocks for the same product."""
        # What blocks of the product leave free is for one of prepare.cu, so that the next product's is ready in time.
        # Wide blocks have no registers to spare.
        if not other.beside or self.panels > 1:
            other = prepare.TILES_ALONE
        first, registers, words = self._registers(other.threads * other.registers)
        return {
            "TOKENS": self.tokens,
            "WARPGROUPS": self.warpgroups,
            "STAGES": self.stages,
            "CLUSTER": self.cluster,
            "BLOCKS": self.blocks,
            "WORDS": words,
            "FIRST_REGISTERS": first,
            "REGISTERS": registers,
            "PRODUCER_REGISTERS": first * (self.warpgroups + 1) - registers * self.warpgroups,
            "SLICES": slices,
            "E8M0": int(scale_format == "e8m0"),
        }

    def _registers(self, spare: int) -> tuple[int, int, int]:
        """Where so many are left over: of any thread at first, then of one that computes; words decoded at a time."""
        # A block's warpgroups divide what it starts with, in eights.
        first = (65536 - spare) // (self.threads * self.blocks) // 8 * 8
        registers = min(232, (first * (self.warpgroups + 1) - 40) // self.warpgroups // 8 * 8)
        # Two buffers of four registers a word, where sums and all the rest leave so many.
        return first, registers, 4 if self.tokens // 2 + 32 + 8 * 4 <= registers else 1


# Narrow: 128 rows a block, two blocks to a multiprocessor where shared memory allows it, so that one computes while the
# other begins or ends. Wide: 256 rows, one block; x is read half as often, but there are fewer tiles to deal out.
_NARROW = {tokens: Variant(tokens, 1, blocks=1 if tokens == 128 else 2, warpgroups=2) for tokens in (16, 32, 64, 128)}
_WIDE = {tokens: Variant(tokens, 1, blocks=1, warpgroups=4) for tokens in (32, 64, 128)}
# Blocks of a cluster split K: (most tiles, cluster) for products with too few tiles to go round, by blocks to a
# multiprocessor. The sizes are those of which an H200 runs enough clusters at once.
_CLUSTERS = {2: ((32, 8), (44, 5), (66, 4)), 1: ((32, 4), (36, 3), (66, 2))}
VARIANTS = (
    *(v._replace(cluster=c) for v in _NARROW.values() for c in (1, *(c for _, c in _CLUSTERS[v.blocks]))),
    *_WIDE.values(),
)


def choose(m: int, supertiles: int, chunks: int, processors: int) -> Variant:
    """The variant for m tokens and a weight of 128 * supertiles rows, 64 * chunks columns (as measured on an H200)."""
    tokens = next((t for t in _NARROW if m <= t), 128)
    narrow, token_tiles = _NARROW[tokens], -(-m // tokens)
    if tokens in _WIDE and (supertiles > 64 if m <= 64 else m > 256):
        wide = _WIDE[tokens]
        shape = supertiles, token_tiles, chunks, processors
        if m <= 64 or _turns(wide, *shape) * _WIDE_COST <= _turns(narrow, *shape):
            return wide
    tiles = supertiles * token_tiles
    cluster = next((c for most, c in _CLUSTERS[narrow.blocks] if tiles <= most), 1)
    if chunks > 128 and tiles * cluster < 100 * narrow.blocks:
        cluster = 1  # so much work that idle multiprocessors cost more than sharing tiles through memory
    return narrow._replace(cluster=cluster)


_WIDE_COST = 1.85  # a tile of 256 rows x 128 tokens, in tiles of 128 rows


def _turns(v: Variant, supertiles: int, token_tiles: int, chunks: int, processors: int) -> float:
    """How many tiles one after the other a product takes."""
    waves = -(-supertiles // v.panels) * token_tiles / processors
    return min(math.ceil(waves), _shared(waves, chunks))


def _shared(waves: float, chunks: int) -> float:
    """The same where the last tiles are shared: adding their sums takes as long as 28 chunks of K."""
    return waves + 28 / chunks


def w4a16_hopper(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None = None,
    adapter: PackedAdapter | None = None,
    variant: Variant | None = None,
) -> BFloat16[Tensor, "m n"]:
    """x W^T + bias + u B^T on CUDA. Raises nvrtc.CompilerMissing where the kernels cannot be compiled."""
    m, k = x.shape
    slices = 0 if adapter is None else adapter.b.shape[0]
    plan, launch = weight.plans.get(("hopper", m, slices, variant)) or _make_plan(weight, m, slices, variant)
    y = torch.empty(m, plan.n, dtype=torch.bfloat16, device=x.device)
    x = aligned(x)
    counters = stream_counters(x.device) if launch.sharers else 0
    x_ready = prepare.x_ready_of(stream_counters(x.device)) if slices else 0
    workspace = torch.empty(launch.bytes, dtype=torch.uint8, device=x.device)  # ours until both kernels are launched
    tiles = workspace.data_ptr()
    u, partial = tiles + launch.u, tiles + launch.partial
    a, b, scaling = (0, 0, 0) if adapter is None else (adapter.a, adapter.b, adapter.scaling)
    chunks = plan.steps * _STEP_CHUNKS
    try:
        plan.prepare.launch(
            (launch.prepare_blocks, 1, 1), plan.shape.threads, 0,
            (
                x, tiles, a, scaling, u, m, k, chunks, plan.chunks * TILE_COLUMNS, plan.parts, launch.tile_blocks,
                launch.pieces, x_ready,
            ),
            overlap=True,
        )  # fmt: skip
        plan.product.launch(
            (launch.blocks, 1, 1), plan.variant.threads, plan.variant.stages * plan.variant.stage_bytes + 1024,
            (
                plan.tiles, tiles, u, b, plan.global_scale, plan.table, 0 if bias is None else bias.contiguous(), y,
                partial, counters, x_ready, launch.tile_blocks, m, plan.n, plan.supertiles, plan.chunks,
                launch.token_tiles, plan.parts, launch.shared_tiles, launch.sharers, plan.factor,
            ),
            overlap=True,
        )  # fmt: skip
    except BaseException:  # an interrupt, say: the product that takes the first kernel's count back may not come
        forget_counters()
        raise
    return y


class _Launch(NamedTuple):
    """What the number of tokens adds to a plan: grids, shares, places in the workspace."""

    token_tiles: int
    pieces: int
    tile_blocks: int
    prepare_blocks: int
    shared_tiles: int
    sharers: int
    blocks: int
    u: int
    partial: int
    bytes: int

    @classmethod
    def of(cls, plan: _Plan, m: int) -> _Launch:
        v = plan.variant
        token_tiles = -(-m // v.tokens)
        x_bytes = token_tiles * plan.steps * _STEP_CHUNKS * v.tokens * TILE_COLUMNS * 2
        tile_blocks = -(-x_bytes // (16 * plan.shape.threads * prepare.TURNS))
        # Large x needs the bandwidth of many blocks; of a small one, the product should not wait for them to start.
        tile_blocks = min(tile_blocks, plan.multiprocessors * (1 if x_bytes < 1 << 22 else 8))
        tile_blocks = _round_up(tile_blocks, plan.shape.cluster)
        tiles = -(-plan.supertiles // v.panels) * token_tiles
        most = plan.multiprocessors * v.blocks
        shared_tiles = sharers = 0
        blocks = tiles * v.cluster
        if v.cluster == 1:
            waves = tiles / most
            shared_tiles = tiles % most if _shared(waves, plan.chunks) < math.ceil(waves) else 0
            # Who comes last reads the sums of all that share a tile, one after the other.
            sharers = min(most, shared_tiles * min(_MOST_SHARERS, plan.steps + plan.slices // _STEP_CHUNKS))
            blocks = min(tiles, most) if tiles >= most or not sharers else sharers
        partial = _round_up(x_bytes + token_tiles * plan.parts * plan.slices * v.tokens * 2 * SLICE, 256)
        return cls(
            token_tiles,
            x_bytes // 16,
            tile_blocks,
            tile_blocks + plan.shape.blocks(m, plan.parts * plan.slices),
            shared_tiles,
            sharers,
            blocks,
            x_bytes,
            partial,
            partial + sharers * 2 * v.panels * TILE_ROWS * v.tokens * 4,
        )


class _Plan(NamedTuple):
    """What a weight, a variant, an adapter's rank and whether there is more than one tile of tokens fix."""

    variant: Variant
    slices: int
    shape: prepare.Shape
    product: Kernel
    prepare: Kernel
    tiles: int
    global_scale: int
    table: Int32[Tensor, "supertiles 3"]
    n: int
    supertiles: int
    chunks: int
    parts: int
    factor: float
    multiprocessors: int
    steps: int


def _make_plan(weight: PackedWeight, m: int, slices: int, asked: Variant | None) -> tuple[_Plan, _Launch]:
    device = weight.device
    supertiles, chunks, _ = weight.tiles.shape
    v = asked or choose(m, supertiles, chunks, multiprocessors(device))
    shape = prepare.shape_of(m, v.tokens, slices, weight.columns, multiprocessors(device))
    plan = _Plan(
        v,
        slices,
        shape,
        kernel(SOURCE, "w4a16_hopper", v.defines(slices, shape, weight.scale_format), device, cluster=v.cluster),
        prepare.prepare_kernel(shape, v.tokens, slices, device),
        weight.tiles.data_ptr(),
        weight.global_scale.data_ptr(),
        weight.tile_table,
        weight.shape[0],
        supertiles,
        chunks,
        len(weight.parts),
        weight.epilogue_factor,
        multiprocessors(device),
        -(-chunks // _STEP_CHUNKS),
    )
    both = weight.plans["hopper", m, slices, asked] = plan, _Launch.of(plan, m)
    return both


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
