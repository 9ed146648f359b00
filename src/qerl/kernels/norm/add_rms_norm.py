"""Triton kernel: one program adds and normalises one token, whose whole row it holds.

Overlap (kernels/overlap.py): gain and index are read while the kernel before runs. No kernel that overlaps writes them;
and a gain comes from memory, where x and delta are in the cache. What the kernel right before has written is there only
behind the wait, even where that kernel lets nobody start early: behind a new gain this one does not overlap.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from qerl.kernels.announcement import Announcement
from qerl.kernels.numerics import rounded
from qerl.kernels.overlap import announce, overlapping, overlaps, wait_for_previous
from qerl.kernels.room import empty_with_room


def add_rms_norm_bf16_(
    x: Float[Tensor, "t h"],
    delta: Float[Tensor, "t h"] | None,
    gain: Float32[Tensor, "*rows h"],
    eps: float,
    index: Int64[Tensor, " t"] | None = None,
    *,
    new_gain: bool = False,
    announcement: Announcement | None = None,
    room: int = 0,
) -> Float[Tensor, "t h"]:
    """`add_rms_norm_` on one CUDA device; all rows contiguous."""
    tokens, h = x.shape
    rows = gain.view(-1, h)
    assert x.stride(1) == 1 and rows.stride(1) == 1 and (delta is None or delta.stride(1) == 1)
    assert index is not None or len(rows) in (1, tokens)
    out = empty_with_room(x, tokens, h, room)
    width = triton.next_power_of_2(h)
    warps = min(max(width // 256, 4), 16)  # 8 columns a thread, up to 4,096
    sizes: Any = {"H": h, "WIDTH": width, "num_warps": warps}
    which: Any = {"ADD": delta is not None, "INDEXED": index is not None, "ANNOUNCE": announcement is not None}
    overlap: Any = {"OVERLAP": False} if new_gain else overlaps(x.device)
    with torch.cuda.device_of(x):
        _add_rms_norm_kernel[(tokens,)](
            x,
            x if delta is None else delta,
            rows,
            rows if index is None else index,
            out,
            x if announcement is None else announcement.by(tokens),
            eps,
            x.stride(0),
            x.stride(0) if delta is None else delta.stride(0),
            0 if len(rows) == 1 else rows.stride(0),
            out.stride(0),
            **sizes,
            **which,
            **overlap,
        )
    return out


@overlapping
@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    delta_ptr,
    gain_ptr,
    index_ptr,
    out_ptr,
    counter_ptr,
    eps,
    x_stride,
    delta_stride,
    gain_stride,
    out_stride,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    INDEXED: tl.constexpr,
    ANNOUNCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < H
    row = token
    if INDEXED:
        row = tl.load(index_ptr + token)
    gain = tl.load(gain_ptr + row * gain_stride + column, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + token * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        new_x = rounded(x, dtype)
        tl.store(x_ptr + token * x_stride + column, new_x, mask=inside)
        x = new_x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + token * out_stride + column, rounded(gain * (x * inverse_rms), dtype), mask=inside)
    announce(counter_ptr, ANNOUNCE)
