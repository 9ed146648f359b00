"""Triton kernel: one program makes WIDTH columns of one token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.announcement import Announcement
from qerl.kernels.numerics import rounded
from qerl.kernels.overlap import announce, overlapping, overlaps, wait_for_previous
from qerl.kernels.room import empty_with_room

WIDTH = 1024
"""Columns of a program, four a thread: with more, what a few tokens wait for is the code of one."""


def swiglu_bf16(
    gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"], announcement: Announcement | None = None, room: int = 0
) -> Float[Tensor, "t n"]:
    """`swiglu` on one CUDA device; rows contiguous."""
    assert gate.shape == up.shape and gate.stride(1) == up.stride(1) == 1
    tokens, n = gate.shape
    out = empty_with_room(gate, tokens, n, room)
    grid = tokens, triton.cdiv(n, WIDTH)
    counter = out if announcement is None else announcement.by(grid[0] * grid[1])
    sizes: Any = {"WIDTH": WIDTH, "ANNOUNCE": announcement is not None, "num_warps": 8, **overlaps(gate.device)}
    with torch.cuda.device_of(gate):
        _swiglu_kernel[grid](gate, up, out, counter, gate.stride(0), up.stride(0), out.stride(0), n, **sizes)
    return out


@overlapping
@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, out_ptr, counter_ptr, gate_stride, up_stride, out_stride, n,
    WIDTH: tl.constexpr, ANNOUNCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < n
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    silu = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out_ptr + token * out_stride + column, rounded(silu * up, dtype), mask=inside)
    announce(counter_ptr, ANNOUNCE)
