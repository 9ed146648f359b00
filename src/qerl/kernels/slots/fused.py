"""Triton kernels: a program has WIDTH tokens (locate) or sequences (advance_), one a thread."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int64
from torch import Tensor

from qerl.kernels.overlap import overlapping, overlaps, wait_for_previous
from qerl.kernels.slots.reference import Progress

_SIZES: dict[str, Any] = {"WIDTH": 32, "num_warps": 1}


def locate_fused(
    page_table: Int64[Tensor, "b pages"], positions: Int64[Tensor, " tokens"], page_size: int
) -> tuple[Int64[Tensor, " tokens"], Int64[Tensor, " tokens"]]:
    """`locate` on one CUDA device."""
    assert page_table.stride(1) == positions.stride(0) == 1 and len(positions) % len(page_table) == 0
    tokens = len(positions)
    rows, lengths = torch.empty(2, tokens, dtype=torch.int64, device=positions.device)
    more: Any = {"PAGE": page_size, "EACH": tokens // len(page_table), **_SIZES, **overlaps(positions.device)}
    with torch.cuda.device_of(positions):
        _locate_kernel[(triton.cdiv(tokens, 32),)](
            page_table, positions, rows, lengths, tokens, page_table.stride(0), **more
        )
    return rows, lengths


def advance_fused_(
    progress: Progress,
    tokens: Int64[Tensor, " tokens"],
    logprobs: Float32[Tensor, " tokens"],
    entropies: Float32[Tensor, " tokens"],
    eos: Int64[Tensor, " ids"],
    fed: Int64[Tensor, "b t"] | None = None,
) -> None:
    """`advance_` on one CUDA device."""
    p, b = progress, len(progress.tokens)
    assert p.drawn_logprobs.stride() == p.drawn_entropies.stride()
    assert p.texts.stride(1) == p.drawn_logprobs.stride(1) == 1 and (fed is None or fed.is_contiguous())
    assert all(x.stride() == (1,) for x in (*p[:6], p.lengths, tokens, logprobs, entropies, eos))
    more: Any = {"EOS": triton.next_power_of_2(max(1, len(eos))), "EACH": len(tokens) // b, **_SIZES}
    with torch.cuda.device_of(tokens):
        _advance_kernel[(triton.cdiv(b, 32),)](
            *p[:5], p.finished.view(torch.uint8), *p[6:], tokens, logprobs, entropies, tokens if fed is None else fed,
            eos, len(eos), b, p.drawn_logprobs.stride(0), p.texts.stride(0), **more, **overlaps(tokens.device),
        )  # fmt: skip


@overlapping
@triton.jit
def _locate_kernel(
    table_ptr, positions_ptr, rows_ptr, lengths_ptr, tokens, stride,
    PAGE: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = i < tokens
    position = tl.load(positions_ptr + i, mask=inside, other=0)
    page = tl.load(table_ptr + (i // EACH).to(tl.int64) * stride + position // PAGE, mask=inside, other=0)
    tl.store(rows_ptr + i, page * PAGE + position % PAGE, mask=inside)
    tl.store(lengths_ptr + i, position + 1, mask=inside)


@overlapping
@triton.jit
def _advance_kernel(
    tokens_ptr, positions_ptr, counts_ptr, limits_ptr, lines_ptr, finished_ptr,
    drawn_logprobs_ptr, drawn_entropies_ptr, texts_ptr, lengths_ptr,
    new_tokens_ptr, logprobs_ptr, entropies_ptr, fed_ptr, eos_ptr, num_eos, b, stride, texts_stride,
    EOS: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = i < b
    e = tl.arange(0, EOS)
    ids = tl.load(eos_ptr + e, mask=e < num_eos, other=-1)  # no token is -1
    goes_on = inside & (tl.load(finished_ptr + i, mask=inside, other=1) == 0)
    counts_next = goes_on
    count = tl.load(counts_ptr + i, mask=inside, other=0)
    position = tl.load(positions_ptr + i, mask=inside, other=0)
    limit = tl.load(limits_ptr + i, mask=inside, other=0)
    last = tl.load(tokens_ptr + i, mask=inside, other=0)
    line = tl.load(lines_ptr + i, mask=inside, other=0)
    ended = i < 0
    for t in tl.static_range(EACH):  # pyright: ignore[reportGeneralTypeIssues]
        new = i * EACH + t
        token = tl.load(new_tokens_ptr + new, mask=inside, other=0)
        at = i.to(tl.int64) * stride + count
        tl.store(drawn_logprobs_ptr + at, tl.load(logprobs_ptr + new, mask=inside, other=0.0), mask=counts_next)
        tl.store(drawn_entropies_ptr + at, tl.load(entropies_ptr + new, mask=inside, other=0.0), mask=counts_next)
        tl.store(texts_ptr + line * texts_stride + position + 1, token.to(tl.int32), mask=counts_next)
        step = tl.where(counts_next, 1, 0)
        count += step
        position += step
        last = tl.where(counts_next, token, last)
        ends = (count == limit) | (tl.sum((token[:, None] == ids[None, :]).to(tl.int32), 1) != 0)
        ended = ended | (counts_next & ends)
        if t + 1 < EACH:
            counts_next = counts_next & (ends == 0) & (token == tl.load(fed_ptr + new + 1, mask=inside, other=0))
    tl.store(counts_ptr + i, count, mask=goes_on)
    tl.store(positions_ptr + i, position, mask=goes_on)
    tl.store(tokens_ptr + i, last, mask=goes_on)
    tl.store(lengths_ptr + line, position + 1, mask=goes_on)
    tl.store(finished_ptr + i, ended.to(tl.uint8), mask=goes_on)
