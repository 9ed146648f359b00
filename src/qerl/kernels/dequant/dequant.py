"""Triton kernel: one program decodes one tile (128 x 64, 4608 contiguous bytes) into bf16.

A program holds its 1024 code words as [256 threads' lanes (i, g, t), 4 words w]: 16 bytes a lane, which become 16
consecutive columns (32 bytes) of row g and of row g + 8. Four lanes t make up the 128 bytes of a row's tile, so loads
and stores are whole lines.

Numbers are built as float32 bit patterns: a bf16 number is the upper half of one. A masked code is e2m1 * 2^-126, an
E4M3 byte shifted by 20 is e4m3 * 2^-120; both may be subnormal, and Triton does not flush float32 subnormals. The
scale is brought to e4m3 * 2^118 first, the product to e2m1 * e4m3 last: nothing overflows or loses a bit. An E8M0 byte
shifted by 23 is 2^(b - 127), and the product e2m1 * 2^(b - 253) is what is asked for. The result's lower 16 bits are
zero, so cutting them off is exact.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, UInt8
from torch import Tensor

from qerl.kernels import layout

_TILE_ROWS, _TILE_COLUMNS = tl.constexpr(layout.TILE_ROWS), tl.constexpr(layout.TILE_COLUMNS)
_TILE_BYTES, _CODE_BYTES = tl.constexpr(layout.TILE_BYTES), tl.constexpr(layout.CODE_BYTES)


def dequant_bf16(
    tiles: UInt8[Tensor, "tiles_n tiles_k 4608"],
    scale_format: layout.ScaleFormat,
    out: BFloat16[Tensor, "padded_rows padded_columns_or_more"],
) -> None:
    """Write e2m1 * block_scale of every tile to `out`, whose rows may go on. Both contiguous, on one CUDA device."""
    n_tiles, k_tiles, _ = tiles.shape
    with torch.cuda.device_of(tiles):
        e8m0: Any = scale_format == "e8m0"
        words, pairs = tiles.view(torch.int32), out.view(torch.int32)
        _dequant_kernel[(n_tiles * k_tiles,)](words, tiles, pairs, k_tiles, pairs.shape[1], e8m0)


@triton.jit
def _code(words, a: tl.constexpr):
    """Code `a` of each half word as bf16 e2m1 * 2^-126, where layout.py's table has its bits."""
    if a == 3:
        return ((words << 1) & 0x80008000) | ((words >> 3) & 0x01800180) | ((words >> 7) & 0x00400040)
    return (words << (3 * a)) & 0x81C081C0


@triton.jit
def _scale(byte, E8M0: tl.constexpr):
    """block_scale * 2^126, for E4M3 times another 2^-8: 448 * 2^126 would overflow."""
    if E8M0:
        return (byte << 23).to(tl.float32, bitcast=True)
    return (byte << 20).to(tl.float32, bitcast=True) * 2.0**119 * 2.0**119


@triton.jit
def _scaled_pair(pair, scale, E8M0: tl.constexpr):
    """Two bf16 lanes, e2m1 * 2^-126, times what `_scale` gave."""
    up = 1.0 if E8M0 else 256.0
    low = (pair << 16).to(tl.float32, bitcast=True) * scale * up
    high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True) * scale * up
    return (low.to(tl.uint32, bitcast=True) >> 16) | high.to(tl.uint32, bitcast=True)


@triton.jit
def _dequant_kernel(words_ptr, bytes_ptr, out_ptr, k_tiles, pairs_of_row, E8M0: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 256)  # 32 i + 4 g + t
    word = tl.arange(0, 4)
    at = words_ptr + tile * (_TILE_BYTES // 4) + lane[:, None] * 4 + word[None, :]
    words = tl.load(at).to(tl.uint32, bitcast=True)
    row = tile // k_tiles * _TILE_ROWS + lane // 32 * 16 + lane % 32 // 4
    column = tile % k_tiles * (_TILE_COLUMNS // 2) + lane % 4 * 8  # of pairs: two bf16 a 32-bit element
    for h in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        byte = tl.load(bytes_ptr + tile * _TILE_BYTES + _CODE_BYTES + lane * 2 + h).to(tl.uint32)
        scale = _scale(byte, E8M0)[:, None]
        first = _scaled_pair(_code(words, h), scale, E8M0)
        second = _scaled_pair(_code(words, h + 2), scale, E8M0)
        eight = tl.interleave(first, second)  # [256, 8]: pairs of columns in order
        to = out_ptr + (row + 8 * h)[:, None] * pairs_of_row + column[:, None] + tl.arange(0, 8)[None, :]
        tl.store(to, eight.to(tl.int32, bitcast=True))
