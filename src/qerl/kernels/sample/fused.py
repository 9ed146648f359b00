"""Triton kernels: the logits are read once, by several programs a row; a second kernel joins what they found.

    _chunk_kernel (row, chunk)    of CHUNK entries:  m = max x,  s = sum e^(x - m),  t = sum e^(x - m) (x - m),
                                  the best score and its entry
    _join_kernel  (row)           M = max m,  S = sum e^(m - M) s,  T = sum e^(m - M) (t + (m - M) s)
                                  token = entry of the best score
                                  logprob = x[token] - M - ln S,  entropy = ln S - T / S

The random integers are those of philox.py: the entries 4 b .. 4 b + 3 of a row are the four lanes of block b, from
Triton's own Philox4x32-10. Within a chunk, scores are compared as e^(x - m) / E, where E = e^-gumbel is an exponential
number: the order of x + gumbel for one logarithm an entry instead of two. The arithmetic, some 90 instructions an
entry, takes longer than reading the logits.

Compiled without contraction; fused multiply-adds are written out. x is a rounded product, and x - m in one fused step
would differ from 0 at the maximum by that rounding, which is 4e30 where a logit is -1e38.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from qerl.kernels.overlap import overlapping, overlaps, wait_for_previous
from qerl.kernels.sample.reference import Sampled

_CHUNK = 2048
"""Entries of a program: 75 programs for a row of 152k, so that even a single row keeps many multiprocessors busy."""

_LOWEST = tl.constexpr(-3.0e38)  # stands for a maximum of -inf, which could not be subtracted


def sample_fused(
    logits: Float[Tensor, "b v"],
    temperatures: Float32[Tensor, " b"],
    seeds: Int64[Tensor, " b"],
    counts: Int64[Tensor, " b"],
    *,
    greedy: bool,
    kept: Bool[Tensor, "b v"] | None,
    chunk: int = _CHUNK,
) -> Sampled:
    """The kernels, on CUDA. Entries of a row are neighbours in memory; chunk: a power of two."""
    rows, size = logits.shape
    chunks = -(-size // chunk)
    mask = logits if kept is None else kept.view(torch.uint8)
    assert logits.stride(1) == mask.stride(1) == 1
    assert all(x.is_contiguous() for x in (temperatures, seeds, counts))
    m, s, t, best = torch.empty(4, rows, chunks, dtype=torch.float32, device=logits.device)
    entries = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs, entropies = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    constants: dict[str, Any] = {"CHUNK": chunk, "GREEDY": greedy, "TRUNCATED": kept is not None}
    more: Any = {"enable_fp_fusion": False, **overlaps(logits.device)}
    padded: Any = triton.next_power_of_2(chunks)
    with torch.cuda.device_of(logits):
        _chunk_kernel[(rows, chunks)](
            logits, logits.stride(0), mask, mask.stride(0), temperatures, seeds, counts, m, s, t, best, entries, size,
            **constants, **more,
        )  # fmt: skip
        _join_kernel[(rows,)](
            logits, logits.stride(0), temperatures, m, s, t, best, entries, chunks, tokens, logprobs, entropies,
            CHUNKS=padded, **more,
        )  # fmt: skip
    return Sampled(tokens, logprobs, entropies)


@triton.jit
def random_integers(seed, count, first, SIZE: tl.constexpr):
    """The uint32 of a row's entries first .. first + SIZE - 1; first and SIZE are multiples of four."""
    block = (first // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    site = tl.zeros_like(block)
    lanes = tl.philox(seed, block, site, count.to(tl.uint32), (count >> 32).to(tl.uint32))
    return tl.interleave(tl.interleave(lanes[0], lanes[2]), tl.interleave(lanes[1], lanes[3]))


@triton.jit
def _exponential(integers):
    """e^-gumbel = -ln(1 - v), v = (integer + 0.5) * 2^-32, as philox.gumbel has it."""
    v = tl.minimum((integers.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # 1 - v would drop the last bits of a small v, and winners have small ones: a series there.
    series = tl.fma(v, 1 / 6, 1 / 5)
    series = tl.fma(v, series, 1 / 4)
    series = tl.fma(v, series, 1 / 3)
    series = tl.fma(v, series, 1 / 2)
    series = tl.fma(v, series, 1.0)
    return tl.where(v < 1 / 16, v * series, -tl.log(1 - v))


@overlapping
@triton.jit
def _chunk_kernel(
    logits_ptr,
    logits_stride,
    kept_ptr,
    kept_stride,
    temperatures_ptr,
    seeds_ptr,
    counts_ptr,
    m_ptr,
    s_ptr,
    t_ptr,
    best_ptr,
    entries_ptr,
    size,
    CHUNK: tl.constexpr,
    GREEDY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = chunk * CHUNK
    entry = first + tl.arange(0, CHUNK)
    inside = entry < size
    logits = tl.load(logits_ptr + row * logits_stride + entry, mask=inside, other=float("-inf")).to(tl.float32)
    x = logits * tl.div_rn(1.0, tl.load(temperatures_ptr + row))
    m = tl.maximum(tl.max(x, 0), _LOWEST)
    weight = tl.exp(x - m)
    if GREEDY:
        score = x
    else:
        seed, count = tl.load(seeds_ptr + row), tl.load(counts_ptr + row)
        score = weight / _exponential(random_integers(seed, count, first, CHUNK))
        if TRUNCATED:
            kept = tl.load(kept_ptr + row * kept_stride + entry, mask=inside, other=0)
            score = tl.where(kept != 0, score, 0.0)
    best, place = tl.max(score, 0, return_indices=True)
    if not GREEDY:
        best = m + tl.log(best)
    at = row * tl.num_programs(1) + chunk
    tl.store(m_ptr + at, m)
    tl.store(s_ptr + at, tl.sum(weight, 0))
    tl.store(t_ptr + at, tl.sum(tl.where(weight > 0, weight * (x - m), 0.0), 0))
    tl.store(best_ptr + at, best)
    tl.store(entries_ptr + at, tl.minimum(first + place, size - 1))  # among NaN, the best may lie in the padding


@overlapping
@triton.jit
def _join_kernel(
    logits_ptr,
    logits_stride,
    temperatures_ptr,
    m_ptr,
    s_ptr,
    t_ptr,
    best_ptr,
    entries_ptr,
    chunks,
    tokens_ptr,
    logprobs_ptr,
    entropies_ptr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    at, inside = row * chunks + chunk, chunk < chunks
    m = tl.load(m_ptr + at, mask=inside, other=_LOWEST)
    s = tl.load(s_ptr + at, mask=inside, other=0.0)
    t = tl.load(t_ptr + at, mask=inside, other=0.0)
    best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    token = tl.load(entries_ptr + row * chunks + tl.minimum(tl.argmax(best, 0), chunks - 1))
    largest = tl.max(m, 0)
    weight = tl.exp(m - largest)
    total = tl.sum(weight * s, 0)
    moment = tl.sum(tl.where(weight > 0, weight * (t + (m - largest) * s), 0.0), 0)
    x = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)
    x *= tl.div_rn(1.0, tl.load(temperatures_ptr + row))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, x - largest - tl.log(total))
    tl.store(entropies_ptr + row, tl.log(total) - tl.fdiv(moment, total))
