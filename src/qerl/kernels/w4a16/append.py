"""Triton kernel: x and u = round(scaling * (x A^T)) side by side, for a product whose weight has B beside W.

    [m, columns + room]    x (zeros from its true K on) | u of all parts | zeros

One program copies ROWS tokens and multiplies what it copies with A, so x is read once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float32
from torch import Tensor

from qerl.kernels.numerics import product, rounded

ROWS = 32
"""Tokens of a program: few, so that some thousand keep every multiprocessor busy."""


def append_inner(
    x: BFloat16[Tensor, "m k"],
    a: BFloat16[Tensor, "ranks k_or_more"],
    scaling: Float32[Tensor, " parts"],
    columns: int,
    room: int,
) -> BFloat16[Tensor, "m columns_and_room"]:
    """[x, u] for a weight of so many columns with padding; all parts have the same rank. On one CUDA device."""
    (m, k), ranks = x.shape, len(a)
    assert x.stride(1) == a.stride(1) == 1 and k <= columns and k <= a.shape[1] and ranks <= room
    out = torch.empty(m, columns + room, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    width = max(16, triton.next_power_of_2(room))
    sizes: Any = {"RANKS": width, "ROWS": ROWS, "COLUMNS": 128 if width <= 128 else 64, "num_warps": 4}
    with torch.cuda.device_of(x):
        _append_kernel[(triton.cdiv(m, ROWS),)](
            x, a, scaling, out, m, k, columns, room, ranks, ranks // len(scaling),
            x.stride(0), a.stride(0), columns + room, **sizes,
        )  # fmt: skip
    return out


@triton.jit
def _append_kernel(
    x_ptr, a_ptr, scaling_ptr, out_ptr, m, k, columns, room, ranks, rank, x_stride, a_stride, out_stride,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = (token < m)[:, None]
    r = tl.arange(0, RANKS)
    from_row, to_row = x_ptr + token[:, None] * x_stride, out_ptr + token[:, None] * out_stride
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = (column < k)[None, :]
        x = tl.load(from_row + column[None, :], mask=is_token & is_column, other=0.0)
        a = tl.load(a_ptr + r[:, None] * a_stride + column[None, :], mask=(r < ranks)[:, None] & is_column, other=0.0)
        tl.store(to_row + column[None, :], x, mask=is_token & (column < columns)[None, :])
        sums += product(x, tl.trans(a))
    u = sums * tl.load(scaling_ptr + r // rank, mask=r < ranks, other=0.0)[None, :]
    tl.store(to_row + columns + r[None, :], rounded(u, out_ptr.dtype.element_ty), mask=is_token & (r < room)[None, :])
