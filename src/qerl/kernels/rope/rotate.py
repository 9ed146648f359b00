"""Triton kernel: one program takes one key head of one token, and the query heads that share it.

Compiled without fused multiply-add: each product is rounded before it is added, as torch does it operation by
operation. (A rounding to bf16 in the source is no barrier: multiply, round and subtract become one `fma.rn.bf16`.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from qerl.kernels import e4m3
from qerl.kernels.numerics import e4m3_codes, rounded
from qerl.kernels.overlap import overlapping, overlaps, wait_for_previous
from qerl.kernels.rope.reference import Destination, Rotation

LARGEST, TINY = tl.constexpr(e4m3.LARGEST), tl.constexpr(e4m3.TINY)


def rotate_and_store_bf16_(
    q: Float[Tensor, "t heads d"],
    k: Float[Tensor, "t kv_heads d"],
    v: Float[Tensor, "t kv_heads d"],
    rotation: Rotation,
    destination: Destination | None = None,
) -> None:
    """`rotate_and_store_` on one CUDA device; d is a power of two."""
    tokens, heads, d = q.shape
    kv_heads = k.shape[1]
    cos, sin, norms = rotation
    assert all(x.stride()[1:] == (d, 1) for x in (q, k, v)), "heads of a token must be adjacent"
    assert cos.stride() == sin.stride() and cos.stride(1) == 1 and cos.dtype == sin.dtype == q.dtype
    pages, rows, scales = (None, cos, None) if destination is None else destination
    assert all(x is None or x.is_contiguous() for x in (pages, scales))
    group = heads // kv_heads
    sizes: Any = {"KV_HEADS": kv_heads, "GROUP": group, "ROWS": triton.next_power_of_2(group), "HALF": d // 2}
    which: Any = {
        "NORM": norms is not None,
        "STORE": destination is not None,
        "CODED": scales is not None,
        "PAGE": 1 if pages is None else pages.shape[2],
        "num_warps": 2,
        "enable_fp_fusion": False,
    }
    q_gain, k_gain, eps = (cos, cos, 0.0) if norms is None else norms
    keys, values = (k, v) if pages is None else pages
    key_scales, value_scales = (cos, cos) if scales is None else scales
    with torch.cuda.device_of(q):
        _rotate_kernel[(tokens, kv_heads)](
            q,
            k,
            v,
            cos,
            sin,
            q_gain,
            k_gain,
            keys,
            values,
            key_scales,
            value_scales,
            rows,
            eps,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            cos.stride(0),
            **sizes,
            **which,
            **overlaps(q.device),
        )


@triton.jit
def turned(x, cos, other, sin, dtype: tl.constexpr):
    """x cos + other sin, rounded as `dtype` after each step: x and its other half of the head, float32."""
    return rounded(rounded(x * cos, dtype).to(tl.float32) + rounded(other * sin, dtype).to(tl.float32), dtype)


@triton.jit
def coding(largest):
    """Of a head whose largest |x| this is: the scale of its codes, and what x is multiplied by (kernels/e4m3.py)."""
    largest = tl.maximum(largest, TINY)
    return tl.div_rn(largest, LARGEST), tl.div_rn(LARGEST, largest)


@triton.jit
def _rotate_heads(at, inside, gain_ptr, eps, cos, sin, HALF: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotate the heads at the pointers `at` [heads, half], in place; the new halves."""
    dtype = at.dtype.element_ty
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        column = tl.arange(0, HALF)
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        inverse_rms = tl.rsqrt(mean + eps)[:, None]
        first = rounded(tl.load(gain_ptr + column)[None, :] * (first * inverse_rms), dtype).to(tl.float32)
        second = rounded(tl.load(gain_ptr + HALF + column)[None, :] * (second * inverse_rms), dtype).to(tl.float32)
    first, second = turned(first, cos, second, -sin, dtype), turned(second, cos, first, sin, dtype)
    tl.store(at, first, mask=inside)
    tl.store(at + HALF, second, mask=inside)
    return first, second


@overlapping
@triton.jit
def _rotate_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_gain_ptr,
    k_gain_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    rows_ptr,
    eps,
    q_stride,
    k_stride,
    v_stride,
    angle_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    CODED: tl.constexpr,
    PAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + token * angle_stride + column).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + column).to(tl.float32)
    row = tl.arange(0, ROWS)[:, None]
    at = q_ptr + token * q_stride + (kv_head * GROUP + row) * (2 * HALF) + column
    _rotate_heads(at, row < GROUP, q_gain_ptr, eps, cos, sin, HALF, NORM)
    one = tl.arange(0, 1)[:, None]
    at = k_ptr + token * k_stride + (kv_head + one) * (2 * HALF) + column
    first, second = _rotate_heads(at, one < 1, k_gain_ptr, eps, cos, sin, HALF, NORM)
    if STORE:
        row = tl.load(rows_ptr + token)
        to = (row * KV_HEADS + kv_head) * (2 * HALF)
        whole = tl.arange(0, 2 * HALF)
        v = tl.load(v_ptr + token * v_stride + kv_head * (2 * HALF) + whole)
        if CODED:
            first, second, v = first.to(tl.float32), second.to(tl.float32), v.to(tl.float32)
            k_scale, of_k = coding(tl.max(tl.maximum(tl.abs(first), tl.abs(second))))
            v_scale, of_v = coding(tl.max(tl.abs(v)))
            scale_at = (row // PAGE * KV_HEADS + kv_head) * PAGE + row % PAGE
            tl.store(key_scales_ptr + scale_at, k_scale)
            tl.store(value_scales_ptr + scale_at, v_scale)
            first, second, v = e4m3_codes(first * of_k), e4m3_codes(second * of_k), e4m3_codes(v * of_v)
        tl.store(keys_ptr + to + column, first)
        tl.store(keys_ptr + to + HALF + column, second)
        tl.store(values_ptr + to + whole, v)
