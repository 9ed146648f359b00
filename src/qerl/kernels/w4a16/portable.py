"""w4a16 by mma.m16n8k16 on any CUDA chip from sm_80 on, for 1 to 1,024 tokens; portable.cu has the algorithm.

    x [m, k] --(adapter: u = round(scaling * (x A^T)))--> portable.cu, with the packed weight --> y [m, n]

A variant computes 8, 16, 32 or 64 tokens at a time; more are tiles of 64. In some x stays in shared memory, where a
chip has enough (K of 5,120 takes 80 KiB at 8 tokens); the others fit any chip from sm_80 on, with 24 KiB at most. No
registers are spilled. Instructions a weight (of a lane, in the inner loop, read from the machine code; 1.9 of them
decode): 2.3 to 2.4 up to 8 tokens, 3.1 for 16, 3.5 for 32, 4.5 for 64.

Deterministic: blocks share the work as the shape and the number of multiprocessors say, and their sums are added in a
fixed order. Called by w4a16's dispatcher; beyond 1,024 tokens dense.py is faster.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from qerl.kernels.adapter import SLICE, PackedAdapter
from qerl.kernels.announcement import Announcement
from qerl.kernels.layout import TILE_COLUMNS, TILE_ROWS, PackedWeight, ScaleFormat
from qerl.kernels.nvrtc import (
    Kernel,
    aligned,
    forget_counters,
    kernel,
    multiprocessors,
    shared_memory,
    stream_counters,
)
from qerl.kernels.w4a16 import prepare

SOURCE = Path(__file__).with_name("portable.cu")
_ADAPTER_THREADS, _MAX_BLOCKS, _MAX_PIECES = 256, 1024, 128  # as in portable.cu
_LARGE = 8192  # rows, or columns, from which on a weight is large
_RESERVED = 2 * 1024  # shared memory of a block that is the system's, or static


class Variant(NamedTuple):
    """What portable.cu is compiled for; its text has the meaning of each."""

    tokens: int
    warps_m: int
    warps_k: int
    slices: int
    depth: int
    chunks: int
    stages: int
    blocks: int
    resident: bool = False
    registers: int = 0

    @property
    def rows(self) -> int:
        """Of a block's tile."""
        return 16 * self.slices * self.warps_m

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_m * self.warps_k

    def shared_bytes(self, steps: int) -> int:
        """Dynamic shared memory: x (that of so many steps, or of the stages), sums of the warps that share rows."""
        chunk, sums = self.tokens * TILE_COLUMNS * 2, (self.warps_k - 1) * self.rows * self.tokens * 4
        if self.resident:
            return steps * self.warps_k * chunk + sums
        return max(self.stages * self.chunks * self.warps_k * chunk if self.tokens > 8 else 0, sums)

    @property
    def piece_steps(self) -> int:
        """Steps of x that have a barrier of their own, where x stays."""
        return max(1, self.threads * 16 // (self.warps_k * self.tokens * TILE_COLUMNS * 2))

    def defines(self, scale_format: ScaleFormat) -> dict[str, int]:
        """Of portable.cu."""
        return {name.upper(): int(value) for name, value in self._asdict().items()} | {
            "E8M0": int(scale_format == "e8m0")
        }


# Up to 8 tokens. Narrow tiles give a small weight enough blocks without sharing any: few latencies behind one another.
# Where registers are limited, two blocks leave room for one of prepare.cu, which computes an adapter's u beside them.
_NARROW = Variant(tokens=8, warps_m=1, warps_k=8, slices=2, depth=4, chunks=1, stages=1, blocks=2, registers=112)
_NARROWEST = _NARROW._replace(slices=1, blocks=3, registers=80)
_NARROW_LONG = _NARROW._replace(warps_k=16, depth=2, blocks=1, registers=104)
_WIDE = Variant(tokens=8, warps_m=4, warps_k=2, slices=2, depth=4, chunks=1, stages=1, blocks=2, resident=True)
_WIDE_BESIDE = _WIDE._replace(depth=3, registers=104)
_WIDE_PASSING = Variant(tokens=8, warps_m=4, warps_k=4, slices=2, depth=4, chunks=1, stages=1, blocks=1)
_MORE_TOKENS = (
    Variant(tokens=16, warps_m=4, warps_k=2, slices=2, depth=2, chunks=2, stages=3, blocks=2),
    Variant(tokens=32, warps_m=4, warps_k=1, slices=2, depth=2, chunks=2, stages=3, blocks=3),
    Variant(tokens=64, warps_m=4, warps_k=1, slices=2, depth=2, chunks=1, stages=3, blocks=2),
)
VARIANTS = (_NARROW, _NARROWEST, _NARROW_LONG, _WIDE, _WIDE_BESIDE, _WIDE_PASSING, *_MORE_TOKENS)


class Shares(NamedTuple):
    """How a variant deals out a weight: its tiles, each so many steps of K, among blocks."""

    steps: int
    tiles: int
    blocks: int

    @classmethod
    def of(cls, v: Variant, m: int, rows: int, columns: int, processors: int) -> Shares:
        """Equal shares of all tiles; narrow ones have a block each."""
        steps, tiles = -(-columns // (TILE_COLUMNS * v.warps_k)), rows // v.rows * -(-m // v.tokens)
        return cls(steps, tiles, tiles if v.warps_m == 1 else min(tiles * steps, v.blocks * processors))

    @property
    def most(self) -> int:
        """Steps whose columns of x the block with the longest share needs."""
        return min(self.steps, -(-self.tiles * self.steps // self.blocks))


def choose(m: int, rows: int, columns: int, processors: int, shared_memory: int, adapter: bool = False) -> Variant:
    """The variant for m tokens and a weight of so many rows and columns (as measured on an H200).

    processors: multiprocessors, each with so many bytes of shared memory; adapter: whether there is one.
    """
    if m > 8:
        return next((v for v in _MORE_TOKENS if m <= v.tokens), _MORE_TOKENS[-1])
    if max(rows, columns) <= _LARGE:
        room = _NARROWEST.blocks * processors * 7 // 8  # blocks at a time, beside those that compute an adapter's u
        return _NARROWEST if rows // _NARROWEST.rows <= room else _NARROW
    if columns > _LARGE and processors // 2 < rows // _NARROW_LONG.rows <= processors:
        return _NARROW_LONG
    v = _WIDE_BESIDE if adapter else _WIDE
    steps = Shares.of(v, m, rows, columns, processors).most
    fits = v.blocks * (v.shared_bytes(steps) + _RESERVED) <= shared_memory and steps <= _MAX_PIECES * v.piece_steps
    return v if fits else _WIDE_PASSING


def w4a16_portable(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None = None,
    adapter: PackedAdapter | None = None,
    variant: Variant | None = None,
    announcement: Announcement | None = None,
) -> BFloat16[Tensor, "m n"]:
    """x W^T + bias + u B^T on CUDA. Raises nvrtc.CompilerMissing where the kernel cannot be compiled.

    announcement: of x, by the kernel right before.
    """
    m, k = x.shape
    has_adapter = adapter is not None
    key = "portable", m, has_adapter, variant
    plan = weight.plans.get(key) or _make_plan(weight, m, has_adapter, variant, x.device)
    y = torch.empty(m, plan.n, dtype=torch.bfloat16, device=x.device)
    assert announcement is None or (x.is_contiguous() and x.data_ptr() % 16 == 0), "what is announced is read as it is"
    x = aligned(x)
    partial = counters = u = b = parts = rank = 0
    if plan.shared:
        partial = torch.empty(plan.partial, dtype=torch.float32, device=x.device)
        counters = stream_counters(x.device)[: 2 * _MAX_BLOCKS]
    try:
        if adapter is not None:
            if awaits_count(x.device):
                counter = None
                if announcement is None:  # then the kernel that computes u says that x is there
                    announcement = Announcement(prepare.x_ready_of(stream_counters(x.device)))
                    counter = announcement.by(1)
                u = prepare.adapter_input(x, adapter, plan.variant.tokens, counter)
            else:
                u = _adapter_input(x, adapter, plan.variant)
            b = adapter.b
            parts, rank, _ = adapter.a.shape
        x_ready, publishers = (0, 0) if announcement is None else (announcement.counter, announcement.publishers)
        plan.kernel.launch(
            (plan.blocks, 1, 1), plan.variant.threads, plan.shared_bytes,
            (
                plan.tiles, plan.global_scale, plan.table, x, y, 0 if bias is None else bias.contiguous(), u, b,
                partial, counters, x_ready, publishers, m, k, plan.n, plan.tiles_n, parts, rank, plan.factor,
            ),
            overlap=plan.overlap,
        )  # fmt: skip
    except BaseException:  # an interrupt, say: the product that takes the first kernel's count back may not come
        forget_counters()
        raise
    return y


class _Plan(NamedTuple):
    """What a weight, a number of tokens and whether there is an adapter fix."""

    variant: Variant
    kernel: Kernel
    blocks: int
    shared_bytes: int
    shared: bool
    partial: int
    tiles: int
    global_scale: int
    table: Int32[Tensor, "tiles_n 3"]
    n: int
    tiles_n: int
    factor: float
    overlap: bool


def _make_plan(weight: PackedWeight, m: int, adapter: bool, asked: Variant | None, device: torch.device) -> _Plan:
    rows, k = weight.padded_shape[0], weight.columns
    processors = multiprocessors(device)
    v = asked or choose(m, rows, k, processors, shared_memory(device), adapter)
    shares = Shares.of(v, m, rows, k, processors)
    assert shares.blocks <= _MAX_BLOCKS or v.warps_m == 1
    assert m <= v.tokens or not v.resident, "what stays is the x of one tile of tokens"
    plan = _Plan(
        v,
        _kernel("w4a16", v, weight.scale_format, device),
        shares.blocks,
        v.shared_bytes(shares.most),
        v.warps_m > 1,
        2 * shares.blocks * v.tokens * v.rows,
        weight.tiles.data_ptr(),
        weight.global_scale.data_ptr(),
        weight.tile_table,
        weight.shape[0],
        rows // TILE_ROWS,
        weight.epilogue_factor,
        _has_overlap(device),
    )
    weight.plans["portable", m, adapter, asked] = plan
    return plan


def _adapter_input(
    x: BFloat16[Tensor, "m k"], adapter: PackedAdapter, variant: Variant
) -> BFloat16[Tensor, "token_tiles parts slices tokens 16"]:
    """u = round(scaling * (x A^T)), all parts at once, in tiles of the variant's tokens; rows beyond m undefined."""
    m, k = x.shape
    parts, rank, padded_k = adapter.a.shape
    tiles = parts * rank // SLICE * -(-m // variant.tokens)
    blocks = min(tiles * -(-padded_k // (_ADAPTER_THREADS // 32 * TILE_COLUMNS)), multiprocessors(x.device))
    shape = (-(-m // variant.tokens), parts, rank // SLICE, variant.tokens, SLICE)
    u = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    partial = torch.empty(2 * blocks * _ADAPTER_THREADS * 4, dtype=torch.float32, device=x.device)
    counters = stream_counters(x.device)[2 * _MAX_BLOCKS :]  # the product may start meanwhile, and has its own
    _kernel("adapter_input", variant, "e4m3", x.device).launch(  # it is the same for every format of the weights
        (blocks, 1, 1),
        _ADAPTER_THREADS,
        _ADAPTER_THREADS * variant.tokens * 2,
        (adapter.a, adapter.scaling, x, u, partial, counters, m, k, padded_k, parts, rank),
        overlap=_has_overlap(x.device),
    )
    return u


@cache
def _kernel(name: str, variant: Variant, scale_format: ScaleFormat, device: torch.device) -> Kernel:
    return kernel(SOURCE, name, variant.defines(scale_format), device)


@cache
def awaits_count(device: torch.device) -> bool:
    """Whether a product may wait for x by a count: of prepare.cu, whose clusters sm_90 has, or of who makes x."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _has_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
