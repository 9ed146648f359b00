"""Quantising NVFP4 and MXFP4 on a GPU, as one Triton kernel: each weight read once, all scales tried in registers.

    2,048 weights a program:   amax of each block -> its scale's code -> for each code nearby: the squared error
                               -> best code -> nibbles

PyTorch would pass over memory some ten times for each of the 13 (MXFP4: 3) scales. The bits are those of nvfp4.py and
mxfp4.py on a CPU, which rests on three things: every division is rounded to nearest (Triton's `/` is not), no product
is contracted into a fused multiply-add (`enable_fp_fusion=False`), and a block's errors are added in the order of
`sum_by_halves`. tests/kernels/test_quantize.py compares all of it.
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

_WEIGHTS = 2048  # of a program: with 4 warps, a thread has 16


def nvfp4_pieces(
    weight: Float[Tensor, "n k"],
    global_scale: Float32[Tensor, " 1"],
    importance: Float32[Tensor, " k"] | None,
    first: int,
    last: int,
) -> tuple[UInt8[Tensor, "n k_half"], UInt8[Tensor, "n k_blocks"]]:
    """Packed codes and E4M3 scale codes of finite weights; the best of amax's code + `first` .. `last` - 1.

    An empty range takes amax's own.
    """
    return _quantize(weight, global_scale, importance, first, last, size=16)


def mxfp4_pieces(
    weight: Float[Tensor, "n k"], importance: Float32[Tensor, " k"] | None, sweep: bool
) -> tuple[UInt8[Tensor, "n k_half"], UInt8[Tensor, "n k_blocks"]]:
    """Packed codes and E8M0 exponents of finite weights; the OCP exponent, or the best of it and its neighbours."""
    return _quantize(weight, None, importance, 0, 3 if sweep else 0, size=32)


def _quantize(
    weight: Tensor, global_scale: Tensor | None, importance: Tensor | None, first: int, last: int, *, size: int
) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // size, dtype=torch.uint8, device=weight.device)
    blocks = _WEIGHTS // size
    options: Any = {"BLOCKS": blocks, "SIZE": size, "SWEEP": last > first, "WEIGHTED": importance is not None}
    options |= {"num_warps": 4, "enable_fp_fusion": False}
    weight = weight.contiguous()
    with torch.cuda.device_of(weight):
        _quantize_kernel[(triton.cdiv(scales.numel(), blocks),)](
            weight,
            weight if global_scale is None else global_scale,
            weight if importance is None else importance.contiguous(),
            codes,
            scales,
            scales.numel(),
            k // size,
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
    SIZE: tl.constexpr,
    SWEEP: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """SIZE 16: NVFP4, SIZE 32: MXFP4."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    present = block < num_blocks
    column = tl.arange(0, SIZE)
    values = tl.load(weight_ptr + block[:, None] * SIZE + column, mask=present[:, None], other=0.0).to(tl.float32)
    importance = values
    if WEIGHTED:
        importance = tl.load(importance_ptr + (block % row_blocks)[:, None] * SIZE + column)
    magnitudes = tl.abs(values)
    amax = tl.max(magnitudes, axis=1)
    global_scale = 1.0
    if SIZE == 16:
        global_scale = tl.load(global_scale_ptr)
        scale = tl.div_rn(tl.div_rn(amax, tl.full([BLOCKS], 6.0, tl.float32)), global_scale)
        start = tl.maximum(_e4m3_codes(tl.minimum(scale, 448.0)), tl.where(amax != 0, 1, 0))  # 0 if all is zero
    else:
        start = tl.maximum(_exponent(amax) - 2, 0)
    best = start
    if SWEEP:
        least = tl.full([BLOCKS], float("inf"), tl.float32)
        for i in range(first, last):
            if SIZE == 16:
                candidate = tl.minimum(tl.maximum(start + i, 1), 126)  # up to the code of 448
                unit = _e4m3_values(candidate)
            else:
                candidate = tl.minimum(tl.maximum(start + (i >> 1) - (i & 1), 0), 252)  # start, then below, then above
                unit = _power_of_two(candidate - start)
            y = _scaled(magnitudes, candidate, global_scale, BLOCKS, SIZE)
            # Rounded to a multiple of the step at its magnitude, as nvfp4.squared_error does it.
            top = tl.minimum(y, 6.0)
            power = tl.maximum(top, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
            shift = (power + 0x0B400000).to(tl.float32, bitcast=True)
            error = top + shift - shift - y
            error = error * error
            if WEIGHTED:
                error = error * importance
            total = sum_by_halves(error, BLOCKS, SIZE) * (unit * unit)
            better = total < least
            best = tl.where(better, candidate, best)
            least = tl.where(better, total, least)
        if SIZE == 16:
            best = tl.where(start > 0, best, start)
    even, odd = tl.split(
        tl.reshape(_e2m1_codes(_scaled(values, best, global_scale, BLOCKS, SIZE)), (BLOCKS, SIZE // 2, 2))
    )
    packed = (even | (odd << 4)).to(tl.uint8)
    tl.store(codes_ptr + block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2), packed, mask=present[:, None])
    tl.store(scales_ptr + block, best.to(tl.uint8), mask=present)


@triton.jit
def _scaled(x, code, global_scale, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Values of blocks [BLOCKS, SIZE] in units of their scale; 1 for a scale of 0."""
    if SIZE == 16:
        step = _e4m3_values(code) * global_scale
        step = tl.where(step > 0, step, 1.0)
        return tl.div_rn(x, tl.broadcast_to(step[:, None], (BLOCKS, SIZE)))
    return x * _power_of_two(127 - code)[:, None]


@triton.jit
def _exponent(x):
    """The biased exponent of x >= 0."""
    return x.to(tl.int32, bitcast=True) >> 23


@triton.jit
def _power_of_two(exponent):
    """Of -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


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
def sum_by_halves(x, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """nvfp4.sum_by_halves of [BLOCKS, SIZE], SIZE 16 .. 128."""
    if SIZE >= 128:
        a, b = tl.split(tl.trans(tl.reshape(x, (BLOCKS, 2, 64)), 0, 2, 1))
        x = a + b
    if SIZE >= 64:
        a, b = tl.split(tl.trans(tl.reshape(x, (BLOCKS, 2, 32)), 0, 2, 1))
        x = a + b
    if SIZE >= 32:
        a, b = tl.split(tl.trans(tl.reshape(x, (BLOCKS, 2, 16)), 0, 2, 1))
        x = a + b
    a, b = tl.split(tl.trans(tl.reshape(x, (BLOCKS, 2, 8)), 0, 2, 1))
    a, b = tl.split(tl.trans(tl.reshape(a + b, (BLOCKS, 2, 4)), 0, 2, 1))
    a, b = tl.split(tl.trans(tl.reshape(a + b, (BLOCKS, 2, 2)), 0, 2, 1))
    a, b = tl.split(a + b)
    return a + b
