"""What the products on sm_90 read besides weights, by prepare.cu, beside the product itself.

    x [m, k], adapter --> u = round(scaling * (x A^T))                   for portable.py, which reads x itself
    x [m, k] --> x in tiles of wgmma's order; with an adapter u, too    for hopper.py, in one launch

The kernel lets the product start at once (of several tiles of tokens, when they are there). Without an adapter the
product waits for this kernel's end; with one it waits for x by a count in memory (`x_ready_of`), which it takes back,
and for u when it needs that. Who makes x may count (announcement.py); else this kernel does, and whoever launches it
launches a product behind it, or forgets the counters.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from qerl.kernels.adapter import SLICE, PackedAdapter
from qerl.kernels.nvrtc import Kernel, kernel, multiprocessors

SOURCE = Path(__file__).with_name("prepare.cu")
TURNS = 4
"""16-byte pieces of x's tiles that a thread writes at a time."""
_LONG = 8192  # columns above which clusters for many tokens are larger
_LARGE_CLUSTERS_FROM = 100  # multiprocessors: 16 of a cluster have to be neighbours, which small chips may not have


class Shape(NamedTuple):
    """What prepare.cu's blocks are like."""

    threads: int
    registers: int
    """Of a thread."""
    batch: int
    """Tokens whose u a cluster computes."""
    ahead: int
    """Steps that are loaded at a time."""
    at_once: bool
    """The product may start when this kernel does, and not only when x's tiles are there."""
    beside: bool
    """The product's blocks leave registers for a block of these on each multiprocessor: both run side by side."""
    cluster: int = 8
    """Blocks of a cluster, which split K of u; a launch has a multiple of it."""

    def blocks(self, m: int, slices: int) -> int:
        """That compute u of m tokens; slices: of all parts."""
        return slices * -(-m // self.batch) * self.cluster

    def defines(self, tokens: int, slices: int) -> dict[str, int]:
        """Of prepare.cu, for tiles of so many tokens and an adapter of so many slices."""
        return {
            "TOKENS": tokens,
            "SLICES": slices,
            "TURNS": TURNS,
            "CLUSTER": self.cluster,
            "THREADS": self.threads,
            "REGISTERS": self.registers,
            "BATCH": self.batch,
            "AHEAD": self.ahead,
            "AT_ONCE": int(self.at_once),
        }


TILES_ALONE = Shape(threads=128, registers=32, batch=8, ahead=4, at_once=True, beside=True)
"""Without an adapter."""
_FEW = Shape(threads=128, registers=48, batch=8, ahead=3, at_once=True, beside=True)
_SOME = Shape(threads=256, registers=112, batch=16, ahead=4, at_once=True, beside=False)
_MANY = Shape(threads=256, registers=64, batch=16, ahead=2, at_once=True, beside=True)
_MORE = Shape(threads=128, registers=64, batch=16, ahead=2, at_once=False, beside=True)
_WITH_ADAPTER = {8: _FEW, 16: _FEW, 32: _SOME, 64: _SOME}


def shape_of(m: int, tokens: int, slices: int, columns: int, processors: int) -> Shape:
    """For m tokens in tiles of so many, an adapter of so many slices of 16 ranks (0: none), and so many columns of K.

    As measured on an H200; processors: multiprocessors of the chip.
    """
    if not slices:
        return TILES_ALONE
    if tokens < 128:
        return _WITH_ADAPTER[tokens]
    shape = _MANY if m <= 128 else _MORE
    return shape._replace(cluster=16) if columns > _LONG and processors >= _LARGE_CLUSTERS_FROM else shape


def adapter_input(
    x: BFloat16[Tensor, "m k"], adapter: PackedAdapter, tokens: int, x_ready: Int32[Tensor, " two"] | None
) -> BFloat16[Tensor, "token_tiles parts slices tokens 16"]:
    """u = round(scaling * (x A^T)) alone, in tiles of so many tokens; x contiguous. Rows beyond m are undefined.

    Counts 1 in x_ready when the stream's kernels before it are over, for a kernel behind it that needs u only late;
    None: who makes x counts.
    """
    m, k = x.shape
    parts, rank, padded_k = adapter.a.shape
    slices = rank // SLICE
    shape = shape_of(m, tokens, slices, k, multiprocessors(x.device))
    u = torch.empty(-(-m // tokens), parts, slices, tokens, SLICE, dtype=torch.bfloat16, device=x.device)
    prepare_kernel(shape, tokens, slices, x.device).launch(
        (shape.blocks(m, parts * slices), 1, 1),
        shape.threads,
        0,
        (x, 0, adapter.a, adapter.scaling, u, m, k, 0, padded_k, parts, 0, 0, 0 if x_ready is None else x_ready),
        overlap=True,
    )
    return u


def x_ready_of(counters: Int32[Tensor, " counters"]) -> Int32[Tensor, " two"]:
    """Of a stream's zeros, those by which prepare.cu tells the product behind it that x is there."""
    return counters[-2:]


def prepare_kernel(shape: Shape, tokens: int, slices: int, device: torch.device) -> Kernel:
    """For tiles of so many tokens, and an adapter of so many slices of 16 ranks (0: none)."""
    return kernel(SOURCE, "w4a16_prepare", shape.defines(tokens, slices), device, cluster=shape.cluster)
