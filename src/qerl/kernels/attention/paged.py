"""Triton kernel: rotation, the new token's key and value into its page, and attention in splits of a sequence.

One program a (split, key head, sequence). It rotates the query heads of its key head, which are the rows of one product
with the keys of SPLIT tokens, whose softmax, in float32, weights their values. The program whose split has the
sequence's newest token rotates that key before, and stores key and value where it then reads them.

A split is always SPLIT tokens, counted from the sequence's start, so what is summed in which order is a function of
the sequence's length alone. The grid depends on the width of the page table, never on lengths, so a CUDA graph holds
for all sequences that the table can describe; programs past a sequence's end return at once. Keys and values are asked
for at once, without a loop, and one sequence of 1,280 tokens keeps 10 programs a key head busy, since at small batches
latency is all that a decode step's attention costs.

A sequence of one split is finished by its program. Else a split leaves, in float32 and base 2: its largest score m,
l = sum 2^(s - m), a = sum 2^(s - m) v. The last program of a key head and sequence to come, by a counter that it sets
back to zero, adds them, AT_ONCE at a time, from first to last:

    y = sum_i 2^(m_i - M) a_i / sum_i 2^(m_i - M) l_i        M = max m_i

Weights 2^(s - m) enter the product with V rounded to its dtype, their sum l unrounded. Of 8-bit pages the codes are
the operands, exact in bf16: a key's scale multiplies its score, a value's its weight before that is rounded.

Compiled without fused multiply-add, for the rotation's sake (kernels/rope/rotate.py).

Overlap (kernels/overlap.py): while the q, k, v product ends, a program reads length and table, and has keys and values
brought to the second-level cache. No kernel since the look-up of the embedding, which lets nobody start early, writes
any of them but the new token's, which are read behind the wait.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

from qerl.kernels.numerics import e4m3_codes, e4m3_values, product, rounded
from qerl.kernels.nvrtc import zeros
from qerl.kernels.overlap import overlaps, wait_for_previous
from qerl.kernels.rope import Destination, Rotation
from qerl.kernels.rope.rotate import coding, turned

SPLIT = 128
"""Tokens a program reads: its float32 result is 6 % of that (7 query heads a key head)."""
MIN_ROWS = 16
"""Rows of the smallest product on tensor cores; fewer query heads are padded."""
_JOINED = 8192
"""Numbers that the last program adds at a time: 32 a thread."""
_LINE_BYTES = 128
"""Of a line of the caches."""


def paged_attention(
    q: Float[Tensor, "b heads d"],
    k: Float[Tensor, "b kv_heads d"],
    v: Float[Tensor, "b kv_heads d"],
    rotation: Rotation,
    destination: Destination,
    page_table: Int64[Tensor, "b columns"],
    lengths: Int64[Tensor, " b"],
) -> Float[Tensor, "b heads d"]:
    """`decode_attention` on one CUDA device; d is a power of two from 16 on. q and k stay as they are."""
    b, heads, d = q.shape
    pages, rows, scales = destination
    cos, sin, norms = rotation
    _, _, page_size, kv_heads, _ = pages.shape
    assert all(x.stride()[1:] == (d, 1) for x in (q, k, v)), "heads of a token must be adjacent"
    assert cos.stride() == sin.stride() and cos.stride(1) == 1 and cos.dtype == sin.dtype == q.dtype
    assert pages.is_contiguous() and page_table.stride(1) == rows.stride(0) == lengths.stride(0) == 1
    assert heads % kv_heads == 0 and b > 0
    assert (scales is not None) == (pages.dtype == torch.uint8) and (scales is None or scales.is_contiguous())
    key_scales, value_scales = (lengths, lengths) if scales is None else scales
    q_gain, k_gain, eps = (cos, cos, 0.0) if norms is None else norms
    group = heads // kv_heads
    num_splits = -(-page_table.shape[1] * page_size // SPLIT)
    out = torch.empty(b, heads, d, dtype=q.dtype, device=q.device)
    sums = torch.empty(b, heads, num_splits, d, dtype=torch.float32, device=q.device)
    largest, totals = torch.empty(2, b, heads, num_splits, dtype=torch.float32, device=q.device)
    counters = zeros(q.device)[:-2]  # the last two tell products with adapters that x is there
    assert b * kv_heads <= len(counters)
    joined_rows = triton.next_power_of_2(group)
    sizes: Any = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "ROWS": max(MIN_ROWS, joined_rows),
        "D": d,
        "PAGE": page_size,
        "SPLIT": SPLIT,
        "JOINED_ROWS": joined_rows,
        "AT_ONCE": max(1, _JOINED // (joined_rows * d)),
        "LINES": max(1, d * pages.element_size() // _LINE_BYTES),
    }
    which: Any = {"NORM": norms is not None, "CODED": scales is not None, "num_warps": 8, "enable_fp_fusion": False}
    with torch.cuda.device_of(q):
        _attention_kernel[(num_splits, kv_heads, b)](
            q,
            k,
            v,
            cos,
            sin,
            q_gain,
            k_gain,
            pages[0],
            pages[1],
            key_scales,
            value_scales,
            rows,
            page_table,
            lengths,
            out,
            sums,
            largest,
            totals,
            counters,
            math.log2(math.e) / math.sqrt(d),
            eps,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            cos.stride(0),
            page_table.stride(0),
            num_splits,
            **sizes,
            **which,
            **overlaps(q.device),
        )
    return out


@triton.jit
def _fetch(rows, STEP: tl.constexpr, STEPS: tl.constexpr):
    """Have the memory at these addresses [rows] and at STEPS steps from there brought to the second-level cache."""
    at = rows[:, None] + STEP * tl.arange(0, STEPS)[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, False, 1)


@triton.jit
def _rotated(at, inside, gain_ptr, eps, cos, sin, D: tl.constexpr, NORM: tl.constexpr):
    """The heads at the pointers `at` [heads, 1], normed and rotated [heads, d]; sin: negative in the first half."""
    dtype = at.dtype.element_ty
    column = tl.arange(0, D)
    partner = (column + D // 2) % D
    x = tl.load(at + column[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = rounded(tl.load(gain_ptr + column)[None, :] * (x * inverse_rms), dtype).to(tl.float32)
        other = rounded(tl.load(gain_ptr + partner)[None, :] * (other * inverse_rms), dtype).to(tl.float32)
    return turned(x, cos, other, sin, dtype)


@triton.jit
def _join(out_ptr, sums_ptr, largest_ptr, totals_ptr, first_head, splits, num_splits,
          GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """The results of a group's heads from those of their splits. Rows too many are the last head again."""
    column = tl.arange(0, D)
    head = first_head + tl.minimum(tl.arange(0, ROWS), GROUP - 1)
    at = head * num_splits
    largest = tl.load(largest_ptr + at)
    weights = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        from_ = at[None, :] + split[:, None]
        is_split = (split < splits)[:, None]
        new = tl.load(largest_ptr + from_, mask=is_split, other=-float("inf"))
        of_new = tl.load(totals_ptr + from_, mask=is_split, other=0.0)
        more = tl.load(sums_ptr + from_[:, :, None] * D + column[None, None, :], mask=is_split[:, :, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(new, 0))
        old_shrink, new_shrink = tl.exp2(largest - new_largest), tl.exp2(new - new_largest[None, :])
        weights = weights * old_shrink + tl.sum(of_new * new_shrink, 0)
        sums = sums * old_shrink[:, None] + tl.sum(more * new_shrink[:, :, None], 0)
        largest = new_largest
    y = rounded(sums / weights[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + head[:, None] * D + column[None, :], y)


@triton.jit(do_not_specialize=["num_splits"])
def _attention_kernel(
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
    table_ptr,
    lengths_ptr,
    out_ptr,
    sums_ptr,
    largest_ptr,
    totals_ptr,
    counters_ptr,
    scale,
    eps,
    q_stride,
    k_stride,
    v_stride,
    angle_stride,
    table_stride,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LINES: tl.constexpr,
    NORM: tl.constexpr,
    CODED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    start = split * SPLIT
    if start >= length:
        return  # without a wait, but a sequence's first program waits: the kernel is not over before the previous one
    row = tl.arange(0, ROWS)
    column = tl.arange(0, D)
    token = start + tl.arange(0, SPLIT)
    is_token = token < length
    page = tl.load(table_ptr + sequence * table_stride + token // PAGE, mask=is_token, other=0)
    at = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * D
    if OVERLAP:
        _fetch(keys_ptr + at, D // LINES, LINES)
        _fetch(values_ptr + at, D // LINES, LINES)
    at = at[:, None] + column[None, :]

    wait_for_previous(OVERLAP)
    angle = sequence * angle_stride + column % (D // 2)
    cos = tl.load(cos_ptr + angle).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle).to(tl.float32)[None, :]
    sin = tl.where(column[None, :] < D // 2, -sin, sin)
    head = kv_head * GROUP + row
    is_head = row < GROUP
    q = _rotated(q_ptr + sequence * q_stride + head[:, None] * D, is_head[:, None], q_gain_ptr, eps, cos, sin, D, NORM)
    if length <= start + SPLIT:
        one = tl.arange(0, 1)[:, None]
        k = _rotated(k_ptr + sequence * k_stride + kv_head * D + one, one < 1, k_gain_ptr, eps, cos, sin, D, NORM)
        v = tl.load(v_ptr + sequence * v_stride + kv_head * D + column[None, :])
        to_row = tl.load(rows_ptr + sequence)
        if CODED:
            k, v = k.to(tl.float32), v.to(tl.float32)
            k_scale, of_k = coding(tl.max(tl.abs(k)))
            v_scale, of_v = coding(tl.max(tl.abs(v)))
            k, v = e4m3_codes(k * of_k), e4m3_codes(v * of_v)
            scale_to = (to_row // PAGE * KV_HEADS + kv_head) * PAGE + to_row % PAGE
            tl.store(key_scales_ptr + scale_to, k_scale)
            tl.store(value_scales_ptr + scale_to, v_scale)
        to = (to_row * KV_HEADS + kv_head) * D + column[None, :]
        tl.store(keys_ptr + to, k)
        tl.store(values_ptr + to, v)
        tl.debug_barrier()  # other threads read them now

    keys = tl.load(keys_ptr + at, mask=is_token[:, None], other=0)
    values = tl.load(values_ptr + at, mask=is_token[:, None], other=0)
    if CODED:
        scale_at = (page * KV_HEADS + kv_head) * PAGE + token % PAGE
        key_scales = tl.load(key_scales_ptr + scale_at, mask=is_token, other=0.0)
        value_scales = tl.load(value_scales_ptr + scale_at, mask=is_token, other=0.0)
        keys, values = e4m3_values(keys).to(q.dtype), e4m3_values(values).to(q.dtype)
    scores = product(q, tl.trans(keys)) * scale
    if CODED:
        scores *= key_scales[None, :]
    scores = tl.where(is_token[None, :], scores, -float("inf"))
    largest = tl.max(scores, 1)  # finite: a split has a token
    weights = tl.exp2(scores - tl.expand_dims(largest, 1))
    total = tl.sum(weights, 1)
    if CODED:
        weights *= value_scales[None, :]
    sums = product(rounded(weights, values.dtype), values)
    first_head = sequence * (KV_HEADS * GROUP) + kv_head * GROUP
    if length <= SPLIT:
        y = rounded(sums / tl.expand_dims(total, 1), out_ptr.dtype.element_ty)
        tl.store(out_ptr + (first_head + row)[:, None] * D + column[None, :], y, mask=is_head[:, None])
    else:
        part = (first_head + row) * num_splits + split
        tl.store(largest_ptr + part, largest, mask=is_head)
        tl.store(totals_ptr + part, total, mask=is_head)
        tl.store(sums_ptr + part[:, None] * D + column[None, :], sums, mask=is_head[:, None])
        counter = counters_ptr + sequence * KV_HEADS + kv_head
        splits = tl.cdiv(length, SPLIT)
        tl.debug_barrier()  # all threads' stores come before the arrival, which one thread makes known
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter, 0)
            _join(out_ptr, sums_ptr, largest_ptr, totals_ptr, first_head, splits, num_splits,
                  GROUP, D, JOINED_ROWS, AT_ONCE)  # fmt: skip
