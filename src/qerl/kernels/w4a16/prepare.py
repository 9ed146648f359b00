"""What the products on sm_90 read besides weights, by prepare.cu, beside the product itself.

    x [m, k], adapter --> u = round(scaling * (x A^T))                   for portable.py, which reads x itself
    x [m, k] --> x in tiles of wgmma's order; with an adapter u, too    for hopper.py, in one launch

The kernel lets the product start at once. Without an adapter the product waits for this kernel's end; with one it waits
for x by a count in memory (`x_ready_of`), which it takes back, and for u when it needs that. So whoever launches this
kernel with an adapter launches a product behind it, or forgets the counters.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from qerl.kernels.adapter import SLICE, PackedAdapter
from qerl.kernels.nvrtc import Kernel, kernel

SOURCE = Path(__file__).with_name("prepare.cu")
TURNS = 4
"""16-byte pieces of x's tiles that a thread writes at a time."""
CLUSTER = 8
"""Blocks of a cluster, which split K of u; a launch has a multiple of it."""
ROOM = 32, 56
"""Registers of a thread that the products leave room for: without an adapter, with one."""


def adapter_input(
    x: BFloat16[Tensor, "m k"], adapter: PackedAdapter, tokens: int, x_ready: Int32[Tensor, " two"]
) -> BFloat16[Tensor, "token_tiles parts slices tokens 16"]:
    """u = round(scaling * (x A^T)) alone, in tiles of so many tokens; x contiguous. Rows beyond m are undefined.

    Counts 1 in x_ready when the stream's kernels before it are over, for a kernel behind it that needs u only late.
    """
    m, k = x.shape
    parts, rank, padded_k = adapter.a.shape
    u = torch.empty(-(-m // tokens), parts, rank // SLICE, tokens, SLICE, dtype=torch.bfloat16, device=x.device)
    prepare_kernel(tokens, rank // SLICE, x.device).launch(
        (adapter_blocks(m, tokens, parts * rank // SLICE), 1, 1),
        threads(rank // SLICE, tokens),
        0,
        (x, 0, adapter.a, adapter.scaling, u, m, k, 0, padded_k, parts, 0, 0, x_ready),
        overlap=True,
    )
    return u


def x_ready_of(counters: Int32[Tensor, " counters"]) -> Int32[Tensor, " two"]:
    """Of a stream's zeros, those by which prepare.cu tells the product behind it that x is there."""
    return counters[-2:]


def prepare_kernel(tokens: int, slices: int, device: torch.device) -> Kernel:
    """For tiles of so many tokens, and an adapter of so many slices of 16 ranks (0: none)."""
    return kernel(SOURCE, "w4a16_prepare", defines(tokens, slices), device, cluster=CLUSTER)


def defines(tokens: int, slices: int) -> dict[str, int]:
    """Of prepare.cu."""
    beside = ROOM[slices > 0]
    registers = beside if slices == 0 or tokens <= 16 else 112 if tokens < 128 else 128
    return {
        "TOKENS": tokens,
        "SLICES": slices,
        "THREADS": threads(slices, tokens),
        "REGISTERS": registers,
        "TURNS": TURNS,
        "BATCH": _batch(tokens),
        "CLUSTER": CLUSTER,
    }


def threads(slices: int, tokens: int = 16) -> int:
    """Of a block."""
    return 256 if slices and tokens > 16 else 128


def _batch(tokens: int) -> int:
    """Tokens whose u a cluster computes."""
    return 8 if tokens <= 16 else 16 if tokens < 128 else 32


def adapter_blocks(m: int, tokens: int, slices: int) -> int:
    """That compute u; slices: of all parts."""
    return slices * -(-m // _batch(tokens)) * CLUSTER
