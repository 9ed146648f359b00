"""Triton kernel: one program adds the adapter's part of TILE columns of y for TOKENS tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.lora.reference import TILE, Expansion
from qerl.kernels.numerics import product, rounded
from qerl.kernels.overlap import overlapping, overlaps, wait_for_previous


def add_expanded_bf16_(y: Float[Tensor, "t n"], u: Float[Tensor, "t ranks"], expansion: Expansion, gain: float) -> None:
    """`add_expanded_` on one CUDA device; rows contiguous."""
    assert y.stride(1) == u.stride(1) == 1 and u.shape[1] == sum(expansion.ranks)
    tokens, num_tiles = len(y), len(expansion.tiles)
    if not tokens or not num_tiles:
        return
    at_once = 16 if tokens <= 16 else 64
    rank = expansion.b.shape[1]
    sizes: Any = {
        "RANK": rank,
        "WIDTH": max(16, triton.next_power_of_2(rank)),
        "TOKENS": at_once,
        "TILE": TILE,
        "num_warps": 2 if at_once == 16 else 4,
    }
    with torch.cuda.device_of(y):
        _expand_kernel[(num_tiles, triton.cdiv(tokens, at_once))](
            y,
            u,
            expansion.b,
            expansion.scaling,
            expansion.tiles,
            gain,
            tokens,
            u.shape[1],
            y.stride(0),
            u.stride(0),
            **sizes,
            **overlaps(y.device),
        )


@overlapping
@triton.jit
def _expand_kernel(
    y_ptr,
    u_ptr,
    b_ptr,
    scaling_ptr,
    tiles_ptr,
    gain,
    tokens,
    ranks,
    y_stride,
    u_stride,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    at = tiles_ptr + 4 * tl.program_id(0)
    first, stop, offset, part = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = first + tl.arange(0, TILE)
    r = tl.arange(0, WIDTH)
    is_token, is_row, is_rank = token < tokens, row < stop, r < RANK
    b = tl.load(b_ptr + row[:, None] * RANK + r[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
    # Beyond the part's own rank B is zero; what u has there is another part's.
    in_u = is_rank & (offset + r < ranks)
    u = tl.load(
        u_ptr + token.to(tl.int64)[:, None] * u_stride + offset + r[None, :],
        mask=is_token[:, None] & in_u[None, :],
        other=0.0,
    )
    added = rounded(product(u, tl.trans(b)), y_ptr.dtype.element_ty).to(tl.float32)
    to = y_ptr + token.to(tl.int64)[:, None] * y_stride + row[None, :]
    inside = is_token[:, None] & is_row[None, :]
    y = tl.load(to, mask=inside, other=0.0).to(tl.float32) + added * (tl.load(scaling_ptr + part) * gain)
    tl.store(to, rounded(y, y_ptr.dtype.element_ty), mask=inside)
