"""What the Triton kernels share: numbers that come out the same from a GPU and from Triton's interpreter on a CPU.

The interpreter (TRITON_INTERPRET=1, which tests set in a process of their own) cuts bf16 off where hardware rounds to
nearest even, and its `tl.dot` is wrong on bf16 operands. So kernels round with `rounded`, and multiply in float32 where
`INTERPRETED`: the products of bf16 numbers are the same, their sums float32 on both. E4M3 codes are bytes in memory,
taken apart by hand but on chips that convert them (sm_89 and newer).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A finite float32 x as dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def e4m3_codes(x):
    """A float32 x, |x| <= 448, as an E4M3 code, to nearest even. In kernels compiled without contraction."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    absolute = magnitude.to(tl.float32, bitcast=True)
    subnormal = (absolute + 16384.0).to(tl.uint32, bitcast=True) & 0xF  # a float32 there counts in steps of 2^-9
    code = tl.where(absolute < 2.0**-6, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """The float32 numbers of E4M3 codes but NaN, exactly."""
    if cuda_capability_geq(8, 9):
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    half = codes.to(tl.uint16)
    half = ((half & 0x80) << 8) | ((half & 0x7F) << 7)  # as float16: 2^-8 of the number
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def product(a, b):
    """a b on the tensor cores, summed in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b)
