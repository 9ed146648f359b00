"""Triton kernel: one program computes one token's gradient; x, dy and dx pass through memory once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from qerl.kernels.numerics import rounded
from qerl.kernels.overlap import overlapping, overlaps, wait_for_previous


def rms_norm_grad_bf16(
    dy: Float[Tensor, "t h"],
    x: Float[Tensor, "t h"],
    gain: Float32[Tensor, "*rows h"],
    eps: float,
    index: Int64[Tensor, " t"] | None = None,
) -> Float[Tensor, "t h"]:
    """`rms_norm_grad` on one CUDA device; all rows contiguous."""
    tokens, h = x.shape
    rows = gain.view(-1, h)
    assert x.stride(1) == 1 and rows.stride(1) == 1 and dy.stride(1) == 1
    assert index is not None or len(rows) in (1, tokens)
    dx = torch.empty(tokens, h, dtype=x.dtype, device=x.device)
    sizes: Any = {"H": h, "WIDTH": triton.next_power_of_2(h), "num_warps": 4 if h <= 2048 else 8}
    which: Any = {"INDEXED": index is not None}
    with torch.cuda.device_of(x):
        _rms_norm_grad_kernel[(tokens,)](
            dy,
            x,
            rows,
            rows if index is None else index,
            dx,
            eps,
            dy.stride(0),
            x.stride(0),
            0 if len(rows) == 1 else rows.stride(0),
            **sizes,
            **which,
            **overlaps(x.device),
        )
    return dx


@overlapping
@triton.jit
def _rms_norm_grad_kernel(
    dy_ptr,
    x_ptr,
    gain_ptr,
    index_ptr,
    dx_ptr,
    eps,
    dy_stride,
    x_stride,
    gain_stride,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEXED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < H
    row = token
    if INDEXED:
        row = tl.load(index_ptr + token)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + token * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.load(gain_ptr + row * gain_stride + column, mask=inside, other=0.0) * dy
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    normed = x * inverse_rms
    dx = inverse_rms * (scaled - normed * (tl.sum(scaled * normed, 0) / H))
    tl.store(dx_ptr + token * H + column, rounded(dx, dx_ptr.dtype.element_ty), mask=inside)
