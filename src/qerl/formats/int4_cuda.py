"""Quantising INT4 on a GPU, as one Triton kernel: each weight read once, all scales tried in registers.

    2,048 weights a program:   range of each group -> for each of 24 scales: zero point -> squared error
                               -> best scale and zero point -> nibbles

PyTorch passes over memory some ten times for each scale. The bits are those of int4.py on a CPU, for the reasons that
e2m1_cuda.py names. tests/kernels/test_quantize_int4.py compares all of it.
"""

# pyright: basic
# (Triton has no types for what is inside a kernel.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float, Float32, UInt8
from torch import Tensor

from qerl.formats.e2m1_cuda import sum_by_halves

_WEIGHTS = 2048  # of a program: with 4 warps, a thread has 16


def int4_pieces(
    weight: Float[Tensor, "n k"],
    importance: Float32[Tensor, " k"] | None,
    group: int,
    symmetric: bool,
    first: int,
    last: int,
) -> tuple[UInt8[Tensor, "n k_half"], BFloat16[Tensor, "n groups"], UInt8[Tensor, "n groups"] | None]:
    """Packed codes, scales and (unless symmetric) zero points of finite weights.

    Beside the range's own scale, `first` .. `last` - 1 32nds of it are tried; none in an empty range.
    """
    n, k = weight.shape
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // group, dtype=torch.bfloat16, device=weight.device)
    zeros = None if symmetric else torch.empty(n, k // group, dtype=torch.uint8, device=weight.device)
    groups = _WEIGHTS // group
    options: Any = {"GROUPS": groups, "SIZE": group, "SYMMETRIC": symmetric}
    options |= {"SWEEP": last > first, "WEIGHTED": importance is not None}
    options |= {"num_warps": 4, "enable_fp_fusion": False}
    weight = weight.contiguous()
    with torch.cuda.device_of(weight):
        _quantize_kernel[(triton.cdiv(scales.numel(), groups),)](
            weight,
            weight if importance is None else importance.contiguous(),
            codes,
            scales.view(torch.int16),
            codes if zeros is None else zeros,
            scales.numel(),
            k // group,
            first,
            last,
            **options,
        )
    return codes, scales, zeros


@triton.jit
def _quantize_kernel(
    weight_ptr,
    importance_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    num_groups,
    row_groups,
    first,
    last,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SWEEP: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    present = group < num_groups
    column = tl.arange(0, SIZE)
    values = tl.load(weight_ptr + group[:, None] * SIZE + column, mask=present[:, None], other=0.0).to(tl.float32)
    importance = values
    if WEIGHTED:
        importance = tl.load(importance_ptr + (group % row_groups)[:, None] * SIZE + column)
    low, high = tl.minimum(tl.min(values, axis=1), 0.0), tl.maximum(tl.max(values, axis=1), 0.0)
    if SYMMETRIC:
        high = tl.maximum(high, -low)
        low = -high
        step = tl.div_rn(high, tl.full([GROUPS], 7.5, tl.float32))
    else:
        fifteen = tl.full([GROUPS], 15.0, tl.float32)
        step = tl.div_rn(high, fifteen) - tl.div_rn(low, fifteen)
    best_scale, best_zero = _grid(low, step, GROUPS, SYMMETRIC)
    if SWEEP:
        least = tl.full([GROUPS], float("inf"), tl.float32)
        for i in range(first - 1, last):
            # The range's own scale comes first, and stays where no other has a smaller error: also where its error is
            # no number, which nothing is less than.
            own = i < first
            factor = tl.where(own, 32, i).to(tl.float32) * 0.03125  # 32nds
            scale, zero = _grid(low * factor, step * factor, GROUPS, SYMMETRIC)
            error = (_codes(values, scale, zero, GROUPS, SIZE) - zero[:, None]) * scale[:, None] - values
            error = error * error
            if WEIGHTED:
                error = error * importance
            total = sum_by_halves(error, GROUPS, SIZE)
            better = own | (total < least)
            best_scale = tl.where(better, scale, best_scale)
            best_zero = tl.where(better, zero, best_zero)
            least = tl.where(better, total, least)
    codes = _codes(values, best_scale, best_zero, GROUPS, SIZE).to(tl.int32)
    even, odd = tl.split(tl.reshape(codes, (GROUPS, SIZE // 2, 2)))
    packed = (even | (odd << 4)).to(tl.uint8)
    tl.store(codes_ptr + group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2), packed, mask=present[:, None])
    tl.store(scales_ptr + group, (best_scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=present)
    if not SYMMETRIC:
        tl.store(zeros_ptr + group, best_zero.to(tl.uint8), mask=present)


@triton.jit
def _grid(low, step, GROUPS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """int4._grid: the scale, a bf16 number in float32, and the zero point."""
    bits = step.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000  # to the nearest bf16, ties to even
    scale = bits.to(tl.float32, bitcast=True)
    scale = tl.where(scale > 0, scale, 1.0)
    if SYMMETRIC:
        return scale, tl.full([GROUPS], 8.0, tl.float32)
    return scale, _nearest(tl.div_rn(-low, scale))


@triton.jit
def _codes(values, scale, zero, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """int4._codes of [GROUPS, SIZE], in float32."""
    return _nearest(zero[:, None] + tl.div_rn(values, tl.broadcast_to(scale[:, None], (GROUPS, SIZE))))


@triton.jit
def _nearest(x):
    """The nearest of 0 .. 15, ties to even: float32 has a spacing of 1 at 1.5 * 2^23."""
    return tl.minimum(tl.maximum(x, 0.0), 15.0) + 12582912.0 - 12582912.0
