"""Triton kernel: one program makes WIDTH columns of both gradients of one token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.numerics import rounded
from qerl.kernels.overlap import overlapping, overlaps, wait_for_previous

WIDTH: Any = 1024
"""16 bytes of each operand a thread."""


def swiglu_grad_bf16(
    dy: Float[Tensor, "t n"], gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"]
) -> tuple[Float[Tensor, "t n"], Float[Tensor, "t n"]]:
    """`swiglu_grad` on one CUDA device; rows contiguous."""
    assert dy.shape == gate.shape == up.shape and dy.stride(1) == gate.stride(1) == up.stride(1) == 1
    tokens, n = gate.shape
    dgate, dup = (torch.empty(tokens, n, dtype=gate.dtype, device=gate.device) for _ in range(2))
    with torch.cuda.device_of(gate):
        strides = dy.stride(0), gate.stride(0), up.stride(0)
        grid = (tokens, triton.cdiv(n, WIDTH))
        _swiglu_grad_kernel[grid](dy, gate, up, dgate, dup, *strides, n, WIDTH, **overlaps(gate.device))
    return dgate, dup


@overlapping
@triton.jit
def _swiglu_grad_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    n,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < n
    dtype = dgate_ptr.dtype.element_ty
    dy = tl.load(dy_ptr + token * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(dgate_ptr + token * n + column, rounded(dy * up * (s * (1.0 + gate * (1.0 - s))), dtype), mask=inside)
    silu = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(dup_ptr + token * n + column, rounded(dy * silu, dtype), mask=inside)
