"""Triton kernels: a program has WIDTH sequences, one a thread."""

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
    page_table: Int64[Tensor, "b pages"], positions: Int64[Tensor, " b"], page_size: int
) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"]]:
    """`locate` on one CUDA device."""
    assert page_table.stride(1) == positions.stride(0) == 1
    b = len(positions)
    rows, lengths = torch.empty(2, b, dtype=torch.int64, device=positions.device)
    more: Any = {"PAGE": page_size, **_SIZES, **overlaps(positions.device)}
    with torch.cuda.device_of(positions):
        _locate_kernel[(triton.cdiv(b, 32),)](page_table, positions, rows, lengths, b, page_table.stride(0), **more)
    return rows, lengths


def advance_fused_(
    progress: Progress,
    tokens: Int64[Tensor, " b"],
    logprobs: Float32[Tensor, " b"],
    entropies: Float32[Tensor, " b"],
    eos: Int64[Tensor, " ids"],
) -> None:
    """`advance_` on one CUDA device."""
    p, b = progress, len(tokens)
    drawn = (p.drawn_tokens, p.drawn_logprobs, p.drawn_entropies)
    assert len({x.stride() for x in drawn}) == 1 and p.drawn_tokens.stride(1) == 1
    assert all(x.stride() == (1,) for x in (*p[:5], tokens, logprobs, entropies, eos))
    more: Any = {"EOS": triton.next_power_of_2(max(1, len(eos))), **_SIZES, **overlaps(tokens.device)}
    with torch.cuda.device_of(tokens):
        _advance_kernel[(triton.cdiv(b, 32),)](
            *p[:4], p.finished.view(torch.uint8), *drawn, tokens, logprobs, entropies, eos, len(eos), b,
            drawn[0].stride(0), **more,
        )  # fmt: skip


@overlapping
@triton.jit
def _locate_kernel(
    table_ptr, positions_ptr, rows_ptr, lengths_ptr, b, stride,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = i < b
    position = tl.load(positions_ptr + i, mask=inside, other=0)
    page = tl.load(table_ptr + i.to(tl.int64) * stride + position // PAGE, mask=inside, other=0)
    tl.store(rows_ptr + i, page * PAGE + position % PAGE, mask=inside)
    tl.store(lengths_ptr + i, position + 1, mask=inside)


@overlapping
@triton.jit
def _advance_kernel(
    tokens_ptr, positions_ptr, counts_ptr, limits_ptr, finished_ptr,
    drawn_tokens_ptr, drawn_logprobs_ptr, drawn_entropies_ptr,
    new_tokens_ptr, logprobs_ptr, entropies_ptr, eos_ptr, num_eos, b, stride,
    EOS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = i < b
    token = tl.load(new_tokens_ptr + i, mask=inside, other=0)
    count = tl.load(counts_ptr + i, mask=inside, other=0)
    at = i.to(tl.int64) * stride + count
    tl.store(drawn_tokens_ptr + at, token, mask=inside)
    tl.store(drawn_logprobs_ptr + at, tl.load(logprobs_ptr + i, mask=inside, other=0.0), mask=inside)
    tl.store(drawn_entropies_ptr + at, tl.load(entropies_ptr + i, mask=inside, other=0.0), mask=inside)
    tl.store(tokens_ptr + i, token, mask=inside)
    had_ended = tl.load(finished_ptr + i, mask=inside, other=1) != 0
    step = tl.where(had_ended, 0, 1)
    count += step
    tl.store(counts_ptr + i, count, mask=inside)
    tl.store(positions_ptr + i, tl.load(positions_ptr + i, mask=inside, other=0) + step, mask=inside)
    ends = had_ended | (count == tl.load(limits_ptr + i, mask=inside, other=0))
    e = tl.arange(0, EOS)
    ids = tl.load(eos_ptr + e, mask=e < num_eos, other=-1)  # no token is -1
    ends = ends | (tl.sum((token[:, None] == ids[None, :]).to(tl.int32), 1) != 0)
    tl.store(finished_ptr + i, ends.to(tl.uint8), mask=inside)
