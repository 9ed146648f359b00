"""Triton kernels: programs look for candidates in parts of the texts; a second kernel follows the best one.

    _search_kernel    program (row, way, part): of the lines way, way + WAYS, .. those of the row's group, of these the
                      blocks of PLACES places part, part + parts, ..; the largest key of a candidate, 0 if there is none
    _follow_kernel    program (row): the largest of these keys, and what stands behind its place

    key               bits 60 ..    m(e), 1 .. 4
                      bit  59       1: the own line
                      bits 28 ..    e
                      bits  0 ..    2^28 - 1 - j            so that candidates are ordered as their keys are

A group's lines are neighbours as a rule, so each of them goes to another way. A program looks at the groups of all its
way's lines at once, and ends there if none is its row's. Tokens before a place are read only where all behind them were
equal, which then come from the first-level cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Int64
from torch import Tensor

from qerl.kernels.lookup.reference import LONGEST, Texts
from qerl.kernels.overlap import overlapping, overlaps, wait_for_previous

_PLACES = 1024
"""Of a block: eight a thread, whose loads are under way together."""
_WAYS, _PARTS = 16, 4
"""At most. 16 rows then have 1,024 programs, for which an H200's 132 multiprocessors have room at once."""

_LONGEST = tl.constexpr(LONGEST)
_LOW = tl.constexpr((1 << 28) - 1)


def look_up_fused(
    texts: Texts, lines: Int64[Tensor, " b"], num_tokens: int, *, places: int = _PLACES
) -> Int64[Tensor, "b num_tokens"]:
    """`look_up` on one CUDA device; places: a power of two."""
    tokens, b = texts.tokens, len(lines)
    num_lines, columns = tokens.shape
    assert tokens.stride(1) == 1 and all(x.stride() == (1,) for x in (*texts[1:], lines))
    assert max(num_lines, columns) <= 1 << 28  # the bits of a key
    ways, parts = min(_WAYS, num_lines), min(_PARTS, triton.cdiv(columns, places))
    keys = torch.empty(b, ways * parts, dtype=torch.int64, device=lines.device)
    found = torch.empty(b, num_tokens, dtype=torch.int64, device=lines.device)
    sizes: Any = {"LINES": triton.next_power_of_2(triton.cdiv(num_lines, ways)), "PLACES": places, "num_warps": 4}
    more_sizes: Any = {"KEYS": triton.next_power_of_2(ways * parts), "NUM_TOKENS": num_tokens, "num_warps": 1}
    overlap: Any = overlaps(lines.device)
    with torch.cuda.device_of(lines):
        _search_kernel[(b, ways, parts)](*texts, lines, keys, num_lines, tokens.stride(0), **sizes, **overlap)
        _follow_kernel[(b,)](
            tokens, texts.lengths, lines, keys, found, ways * parts, tokens.stride(0), **more_sizes, **overlap
        )
    return found


@overlapping
@triton.jit
def _search_kernel(
    tokens_ptr, lengths_ptr, starts_ptr, groups_ptr, lines_ptr, keys_ptr, num_lines, stride,
    LINES: tl.constexpr, PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    row, way, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = tl.load(lines_ptr + row)
    group = tl.load(groups_ptr + own, mask=own >= 0, other=-1)
    length = tl.load(lengths_ptr + own, mask=own >= 0, other=0)
    end_ptr = tokens_ptr + own * stride + length - 1
    line = way + tl.num_programs(1) * tl.arange(0, LINES)
    related = tl.load(groups_ptr + line, mask=line < num_lines, other=-1) == group
    related = related & (group >= 0)
    best = tl.zeros((), tl.int64)
    j = tl.cast(tl.min(tl.where(related, line, num_lines), 0), tl.int64)
    while j < num_lines:
        text_ptr = tokens_ptr + j * stride
        last = (tl.load(lengths_ptr + j) - 1).to(tl.int32)
        first = tl.where(j == own, 0, tl.maximum(tl.load(starts_ptr + j) - 1, 0)).to(tl.int32)
        longest = tl.zeros((PLACES,), tl.int32)  # (m, e)
        for block in range(first + part * PLACES, last, tl.num_programs(2) * PLACES):
            e = block + tl.arange(0, PLACES)
            equal, matched = e < last, tl.zeros((PLACES,), tl.int32)
            for d in tl.static_range(_LONGEST):  # pyright: ignore[reportGeneralTypeIssues]
                wanted = tl.load(end_ptr - d, mask=length > d, other=-1)  # no token's
                equal = equal & (e >= d)
                equal = equal & (tl.load(text_ptr + e - d, mask=equal, other=-1) == wanted)
                matched += equal.to(tl.int32)
            longest = tl.maximum(longest, tl.where(matched > 0, (matched << 28) + e, 0))
        here = tl.cast(tl.max(longest, 0), tl.int64)
        key = ((here >> 28) << 60) + ((j == own).to(tl.int64) << 59) + ((here & _LOW) << 28) + _LOW - j
        best = tl.maximum(best, tl.where(here > 0, key, 0))
        related = related & (line > j)
        j = tl.cast(tl.min(tl.where(related, line, num_lines), 0), tl.int64)
    at = (row.to(tl.int64) * tl.num_programs(1) + way) * tl.num_programs(2) + part
    tl.store(keys_ptr + at, best)


@overlapping
@triton.jit
def _follow_kernel(
    tokens_ptr, lengths_ptr, lines_ptr, keys_ptr, found_ptr, num_keys, stride,
    KEYS: tl.constexpr, NUM_TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(lines_ptr + row)
    length = tl.load(lengths_ptr + own, mask=own >= 0, other=1)
    i = tl.arange(0, KEYS)
    key = tl.cast(tl.max(tl.load(keys_ptr + row * num_keys + i, mask=i < num_keys, other=0), 0), tl.int64)
    is_found = key > 0
    j = tl.where(is_found, _LOW - (key & _LOW), own)
    e = (key >> 28) & _LOW
    known = tl.where(is_found, tl.load(lengths_ptr + j, mask=is_found, other=0) - 1 - e, 1)
    t = tl.arange(0, NUM_TOKENS) - 1
    guessed = is_found & (t >= 0)
    at = tl.where(guessed, j * stride + e + 1 + t % known, own * stride + length - 1)
    tokens = tl.load(tokens_ptr + at, mask=at >= 0, other=0)  # below 0 where `own` is
    tl.store(found_ptr + row * NUM_TOKENS + t + 1, tokens.to(tl.int64))
