"""Triton kernels: paged decode attention in splits of a sequence, and the sum of the splits.

    _split_kernel   one program a (split, or several; key head; sequence): the query heads of a key head, of TOKENS
                    queries, are the rows of one product with the SPLIT tokens' keys, whose softmax, in float32, weights
                    their values
    _join_kernel    one program a (query head, query): sum of its splits' results, AT_ONCE at a time, first to last

A split is always SPLIT tokens, counted from the sequence's start, so what is summed in which order is a function of
the query's length alone. A query of one split is finished by the first kernel. The grid depends on the width of
the page table, never on lengths, so a CUDA graph holds for all sequences that the table can describe; programs past a
sequence's end return at once. At small batches latency is all that a decode step's attention costs: a program has one
split, whose keys and values it asks for at once, and one sequence of 1,280 tokens keeps 10 programs a key head busy. At
large ones it is memory's bandwidth: a program takes TURNS splits, one after the other, and asks for the next one's keys
and values while it multiplies this one's. The bits are the same.

A split leaves, in float32 and base 2: its largest score m, l = sum 2^(s - m), a = sum 2^(s - m) v. Then

    y = sum_i 2^(m_i - M) a_i / sum_i 2^(m_i - M) l_i        M = max m_i

Weights 2^(s - m) enter the product with V rounded to its dtype, their sum l unrounded. Of 8-bit pages the codes are
the operands, exact in bf16: a key's scale multiplies its score, a value's its weight before that is rounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from qerl.kernels.announcement import Announcement
from qerl.kernels.attention import SPLIT_TOKENS as SPLIT
from qerl.kernels.numerics import e4m3_values, product, rounded
from qerl.kernels.nvrtc import multiprocessors
from qerl.kernels.overlap import announce, overlapping, overlaps, start_next, wait, wait_for_previous

AT_ONCE = 16
"""Splits' results added at a time."""
MIN_ROWS = 16
"""Rows of the smallest product on tensor cores; fewer query heads are padded."""
MAX_ROWS = 32
"""Of several tokens' query heads. Twice as many were no faster for 8 tokens of a sequence (registers spilled), and with
two splits a program Triton 3.6 does not compile them."""


def paged_attention(
    q: Float[Tensor, "queries heads d"],
    pages: Float[Tensor, "2 pages page_size kv_heads d"] | UInt8[Tensor, "2 pages page_size kv_heads d"],
    page_table: Int64[Tensor, "b columns"],
    lengths: Int64[Tensor, " queries"],
    scales: Float32[Tensor, "2 pages kv_heads page_size"] | None = None,
    announcement: Announcement | None = None,
    *,
    alone: bool = False,
) -> Float[Tensor, "queries heads d"]:
    """`decode_attention` on one CUDA device; d is a power of two from 16 on, `pages` contiguous, q's heads adjacent."""
    queries, heads, d = q.shape
    _, _, page_size, kv_heads, _ = pages.shape
    group = heads // kv_heads
    new = queries // len(page_table)  # tokens of each sequence that kernels before may still write
    assert pages.is_contiguous() and q.stride()[1:] == (d, 1) and page_table.stride(1) == 1
    assert heads % kv_heads == 0 and queries == new * len(page_table) > 0
    assert (scales is not None) == (pages.dtype == torch.uint8) and (scales is None or scales.is_contiguous())
    key_scales, value_scales = (lengths, lengths) if scales is None else scales
    num_splits = -(-page_table.shape[1] * page_size // SPLIT)
    fitting = max(1, MAX_ROWS // group)
    tokens = 1 if alone else min(new, 1 << (fitting.bit_length() - 1))
    b = queries // tokens
    rows = max(MIN_ROWS, triton.next_power_of_2(tokens * group))
    turns = turns_of(b * kv_heads * num_splits, q.device)
    out = torch.empty(queries, heads, d, dtype=q.dtype, device=q.device)
    sums = torch.empty(queries, heads, num_splits, d, dtype=torch.float32, device=q.device)
    largest, weights = torch.empty(2, queries, heads, num_splits, dtype=torch.float32, device=q.device)
    sizes: Any = {"D": d, "SPLIT": SPLIT}
    more_sizes: Any = {"GROUP": group, "ROWS": rows, "KV_HEADS": kv_heads, "PAGE": page_size}
    more_sizes |= {"TOKENS": tokens, "NEW": new, "num_warps": 4}
    more_sizes |= {"CODED": scales is not None, "TURNS": turns, "num_stages": 2}
    join_sizes: Any = {"AT_ONCE": AT_ONCE, "num_warps": 2}
    overlap: Any = overlaps(q.device)
    with torch.cuda.device_of(q):
        _split_kernel[(-(-num_splits // turns), kv_heads, b)](
            q,
            pages[0],
            pages[1],
            key_scales,
            value_scales,
            page_table,
            lengths,
            out,
            sums,
            largest,
            weights,
            math.log2(math.e) / math.sqrt(d),
            q.stride(0),
            page_table.stride(0),
            num_splits,
            **sizes,
            **more_sizes,
            **overlap,
        )
        if num_splits > 1:
            counter = out if announcement is None else announcement.by(heads * queries)
            join_sizes["ANNOUNCE"] = announcement is not None
            _join_kernel[(heads, queries)](
                out, sums, largest, weights, lengths, counter, num_splits, **sizes, **join_sizes, **overlap
            )
    return out


def turns_of(splits: int, device: torch.device) -> int:
    """Splits that a program takes one after the other, where there are so many in all; as measured on an H200."""
    return 2 if device.type == "cuda" and splits >= 4 * multiprocessors(device) else 1


@overlapping
@triton.jit(do_not_specialize=["num_splits"])
def _split_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    sums_ptr,
    largest_ptr,
    weights_ptr,
    scale,
    q_stride,
    table_stride,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    NEW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    CODED: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    first, kv_head, program = tl.program_id(0) * TURNS, tl.program_id(1), tl.program_id(2)
    query = program.to(tl.int64) * TOKENS
    shortest = tl.load(lengths_ptr + query).to(tl.int32)  # of the program's first query; each next one sees one more
    length = shortest + TOKENS - 1
    if first * SPLIT >= length:
        return
    row = tl.arange(0, ROWS)
    is_row = row < TOKENS * GROUP
    lengths = shortest + row // GROUP if TOKENS > 1 else shortest
    query += row // GROUP
    head = kv_head * GROUP + row % GROUP
    to = query * (KV_HEADS * GROUP) + head
    q_ptr += query[:, None] * q_stride + head[:, None] * D + tl.arange(0, D)[None, :]
    table_ptr += (program // (NEW // TOKENS)).to(tl.int64) * table_stride
    if TURNS == 1:
        token, at, scale_at = _places(first, table_ptr, length, kv_head, KV_HEADS, D, PAGE, SPLIT)
        is_old = token < shortest - NEW
        is_new = (token < length) & (is_old == 0)
        keys = tl.load(keys_ptr + at, mask=is_old[:, None], other=0)
        values = tl.load(values_ptr + at, mask=is_old[:, None], other=0)
        key_scales = tl.load(key_scales_ptr + scale_at, mask=is_old & CODED, other=0.0)
        value_scales = tl.load(value_scales_ptr + scale_at, mask=is_old & CODED, other=0.0)
        wait(OVERLAP)
        # Codes from a branch would be laid out for the products in another way than in the loop below, and summed in
        # another order; of bf16 a branch spares the others half a microsecond.
        if CODED or (first + 1) * SPLIT > shortest - NEW:
            keys = tl.where(is_new[:, None], tl.load(keys_ptr + at, mask=is_new[:, None], other=0), keys)
            values = tl.where(is_new[:, None], tl.load(values_ptr + at, mask=is_new[:, None], other=0), values)
            if CODED:
                key_scales = tl.where(is_new, tl.load(key_scales_ptr + scale_at, mask=is_new, other=0.0), key_scales)
                new = tl.load(value_scales_ptr + scale_at, mask=is_new, other=0.0)
                value_scales = tl.where(is_new, new, value_scales)
        q = tl.load(q_ptr, mask=is_row[:, None], other=0.0)
        result = _attend(q, keys, values, key_scales, value_scales, token, lengths, scale, CODED, TOKENS)
        _keep(
            result, out_ptr, sums_ptr, largest_ptr, weights_ptr, to, shortest, lengths, is_row, first, num_splits,
            D, SPLIT, TOKENS,
        )  # fmt: skip
    else:
        wait(OVERLAP)
        q = tl.load(q_ptr, mask=is_row[:, None], other=0.0)
        for split in range(first, tl.minimum(first + TURNS, tl.cdiv(length, SPLIT))):
            token, at, scale_at = _places(split, table_ptr, length, kv_head, KV_HEADS, D, PAGE, SPLIT)
            is_token = token < length
            keys = tl.load(keys_ptr + at, mask=is_token[:, None], other=0)
            values = tl.load(values_ptr + at, mask=is_token[:, None], other=0)
            key_scales = tl.load(key_scales_ptr + scale_at, mask=is_token & CODED, other=0.0)
            value_scales = tl.load(value_scales_ptr + scale_at, mask=is_token & CODED, other=0.0)
            result = _attend(q, keys, values, key_scales, value_scales, token, lengths, scale, CODED, TOKENS)
            _keep(
                result, out_ptr, sums_ptr, largest_ptr, weights_ptr, to, shortest, lengths, is_row, split, num_splits,
                D, SPLIT, TOKENS,
            )  # fmt: skip


@triton.jit
def _places(
    split,
    table_ptr,
    length,
    kv_head,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A split's tokens, and where each one's key or value is, and that one's scale."""
    token = split * SPLIT + tl.arange(0, SPLIT)
    page = tl.load(table_ptr + token // PAGE, mask=token < length, other=0)
    at = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * D
    return token, at[:, None] + tl.arange(0, D)[None, :], (page * KV_HEADS + kv_head) * PAGE + token % PAGE


@triton.jit
def _attend(
    q, keys, values, key_scales, value_scales, token, lengths, scale, CODED: tl.constexpr, TOKENS: tl.constexpr
):
    """a, m and l of a split, for each row of q, which sees so many tokens (NaN: none of the split's)."""
    if CODED:
        keys, values = e4m3_values(keys).to(q.dtype), e4m3_values(values).to(q.dtype)
    scores = product(q, tl.trans(keys)) * scale
    if CODED:
        scores *= key_scales[None, :]
    is_seen = token[None, :] < lengths[:, None] if TOKENS > 1 else (token < lengths)[None, :]
    scores = tl.where(is_seen, scores, -float("inf"))
    largest = tl.max(scores, 1)
    weight = tl.exp2(scores - tl.expand_dims(largest, 1))
    weights = tl.sum(weight, 1)
    if CODED:
        weight *= value_scales[None, :]
    return product(rounded(weight, values.dtype), values), largest, weights


@triton.jit
def _keep(
    result,
    out_ptr,
    sums_ptr,
    largest_ptr,
    weights_ptr,
    to,
    shortest,
    lengths,
    is_row,
    split,
    num_splits,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Stores a split's result for the sum of all; the only one's is y."""
    sums, largest, weights = result
    column = tl.arange(0, D)[None, :]
    if shortest <= SPLIT:
        is_only = is_row & (lengths <= SPLIT) & (lengths > split * SPLIT) if TOKENS > 1 else is_row
        y = rounded(sums / tl.expand_dims(weights, 1), out_ptr.dtype.element_ty)
        tl.store(out_ptr + to[:, None] * D + column, y, mask=is_only[:, None])
    if shortest + TOKENS - 1 > SPLIT:
        is_part = is_row & (lengths > SPLIT) if TOKENS > 1 else is_row
        at = to * num_splits + split
        tl.store(largest_ptr + at, largest, mask=is_part)
        tl.store(weights_ptr + at, weights, mask=is_part)
        tl.store(sums_ptr + at[:, None] * D + column, sums, mask=is_part[:, None])


@overlapping
@triton.jit(do_not_specialize=["num_splits"])
def _join_kernel(
    out_ptr,
    sums_ptr,
    largest_ptr,
    weights_ptr,
    lengths_ptr,
    counter_ptr,
    num_splits,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ANNOUNCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    if length <= SPLIT:
        announce(counter_ptr, ANNOUNCE)
        return
    column = tl.arange(0, D)
    row = sequence * tl.num_programs(0) + tl.program_id(0)
    at = row * num_splits
    largest = tl.load(largest_ptr + at)
    weights = tl.zeros_like(largest)
    sums = tl.zeros([D], tl.float32)
    for first in range(0, tl.cdiv(length, SPLIT), AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        is_split = split * SPLIT < length
        new = tl.load(largest_ptr + at + split, mask=is_split, other=-float("inf"))
        more = tl.load(sums_ptr + (at + split[:, None]) * D + column[None, :], mask=is_split[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(new, 0))
        old_shrink, new_shrink = tl.exp2(largest - new_largest), tl.exp2(new - new_largest)
        of_new = tl.load(weights_ptr + at + split, mask=is_split, other=0.0)
        weights = weights * old_shrink + tl.sum(of_new * new_shrink, 0)
        sums = sums * old_shrink + tl.sum(more * new_shrink[:, None], 0)
        largest = new_largest
    tl.store(out_ptr + row * D + column, rounded(sums / weights, out_ptr.dtype.element_ty))
    announce(counter_ptr, ANNOUNCE)
