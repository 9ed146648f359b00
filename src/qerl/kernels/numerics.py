"""What the Triton kernels share: numbers that come out the same from a GPU and from Triton's interpreter on a CPU.

The interpreter (TRITON_INTERPRET=1, which tests set in a process of their own) cuts bf16 off where hardware rounds to
nearest even, and its `tl.dot` is wrong on bf16 operands. So kernels round with `rounded`, and multiply in float32 where
`INTERPRETED`: the products of bf16 numbers are the same, their sums float32 on both.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

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
def product(a, b):
    """a b on the tensor cores, summed in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b)
