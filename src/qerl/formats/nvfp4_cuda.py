"""nvfp4.quantize on a GPU as one Triton kernel: the same bits, each weight read once, all scales tried in registers.

    128 blocks of 16 a program:   amax -> E4M3 code -> for each code nearby: the squared error -> best code -> nibbles

PyTorch would pass over memory some ten times for each of the 13 scales. That the bits are those of nvfp4.py, on a CPU,
rests on three things: every division is rounded to nearest (Triton's `/` is not), no product is contracted into a fused
multiply-add (`enable_fp_fusion=False`), and a block's errors are added in the order of `sum_by_halves`.
tests/kernels/test_quantize.py compares all of it.
"""

# pyright: basic
# (Triton has no types for what is inside a kernel.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

_BLOCKS = 128  # of a program: with 4 warps, a thread has as many weights as a block


def quantize_pieces(
    weight: Float[Tensor, "n k"],
    global_scale: Float32[Tensor, " 1"],
    importance: Float32[Tensor, " k"] | None,
    first: int,
    last: int,
) -> tuple[UInt8[Tensor, "n k_half"], UInt8[Tensor, "n k_blocks"]]:
    """Packed codes and E4M3 scale codes of finite weights; the best of amax's code + `first` .. `last` - 1.

    An empty range takes amax's own.
    """
    n, k = weight.shape
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // 16, dtype=torch.uint8, device=weight.device)
    options: Any = {"BLOCKS": _BLOCKS, "SWEEP": last > first, "WEIGHTED": importance is not None}
    options |= {"num_warps": 4, "enable_fp_fusion": False}
    weight = weight.contiguous()
    with torch.cuda.device_of(weight):
        _quantize_kernel[(triton.cdiv(scales.numel(), _BLOCKS),)](
            weight,
            global_scale,
            weight if importance is None else importance.contiguous(),
            codes,
            scales,
            scales.numel(),
            k // 16,
            first,
            last,
            **options,
        )
    return codes, scales


@triton.jit
def _quantize_kernel(
    weight_ptr,
    global_scale_ptr,
    importance_ptr,
    codes_ptr,
    scales_ptr,
    num_blocks,
    row_blocks,
    first,
    last,
    BLOCKS: tl.constexpr,
    SWEEP: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    present = block < num_blocks
    column = tl.arange(0, 16)
    values = tl.load(weight_ptr + block[:, None] * 16 + column, mask=present[:, None], other=0.0).to(tl.float32)
    importance = values
    if WEIGHTED:
        importance = tl.load(importance_ptr + (block % row_blocks)[:, None] * 16 + column)
    magnitudes = tl.abs(values)
    global_scale = tl.load(global_scale_ptr)
    amax = tl.max(magnitudes, axis=1)
    start = _e4m3_codes(tl.minimum(tl.div_rn(tl.div_rn(amax, tl.full([BLOCKS], 6.0, tl.float32)), global_scale), 448.0))
    start = tl.maximum(start, tl.where(amax != 0, 1, 0))  # at least the smallest scale, unless all is zero
    best = start
    if SWEEP:
        least = tl.full([BLOCKS], float("inf"), tl.float32)
        for offset in range(first, last):
            candidate = tl.minimum(tl.maximum(start + offset, 1), 126)  # up to the code of 448
            value = _e4m3_values(candidate)
            y = tl.div_rn(magnitudes, tl.broadcast_to((value * global_scale)[:, None], (BLOCKS, 16)))
            # Rounded to a multiple of the step at its magnitude, as nvfp4.squared_error does it.
            top = tl.minimum(y, 6.0)
            power = tl.maximum(top, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
            shift = (power + 0x0B400000).to(tl.float32, bitcast=True)
            error = top + shift - shift - y
            error = error * error
            if WEIGHTED:
                error = error * importance
            total = _sum_by_halves(error, BLOCKS) * (value * value)
            better = total < least
            best = tl.where(better, candidate, best)
            least = tl.where(better, total, least)
        best = tl.where(start > 0, best, start)
    step = _e4m3_values(best) * global_scale
    step = tl.where(step > 0, step, 1.0)
    scaled = tl.div_rn(values, tl.broadcast_to(step[:, None], (BLOCKS, 16)))
    even, odd = tl.split(tl.reshape(_e2m1_codes(scaled), (BLOCKS, 8, 2)))
    packed = (even | (odd << 4)).to(tl.uint8)
    tl.store(codes_ptr + block[:, None] * 8 + tl.arange(0, 8), packed, mask=present[:, None])
    tl.store(scales_ptr + block, best.to(tl.uint8), mask=present)


@triton.jit
def _e4m3_codes(x):
    """Nearest E4M3 code, ties to even, of 0 <= x <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the spacing of float32 at 1.5 * 2^14.
    subnormal = (x + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def _e4m3_values(code):
    """The value of an E4M3 code of 0 .. 126."""
    normal = (((code >> 3) + 120) << 23 | (code & 7) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)  # 2^-9


@triton.jit
def _e2m1_codes(x):
    """nvfp4.e2m1_codes."""
    y = tl.abs(x)
    code = (x < 0).to(tl.int32) << 3
    code += (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32) + (y >= 1.75).to(tl.int32)
    return code + (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32) + (y > 5.0).to(tl.int32)


@triton.jit
def _sum_by_halves(x, BLOCKS: tl.constexpr):
    """nvfp4.sum_by_halves of [BLOCKS, 16]."""
    a, b = tl.split(tl.trans(tl.reshape(x, (BLOCKS, 2, 8)), 0, 2, 1))
    a, b = tl.split(tl.trans(tl.reshape(a + b, (BLOCKS, 2, 4)), 0, 2, 1))
    a, b = tl.split(tl.trans(tl.reshape(a + b, (BLOCKS, 2, 2)), 0, 2, 1))
    a, b = tl.split(a + b)
    return a + b
