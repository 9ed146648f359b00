"""w4a16 for many tokens on a GPU: dequantise into the scratch buffer, multiply with cuBLAS.

The scratch matrix is e2m1 * block_scale, exact in bf16. One global scale for a run of rows is the GEMM's alpha: cuBLAS
applies it, and the bias, to the float32 sum before the one rounding. Rows with scales of their own need an epilogue
that cuBLAS lacks: their sums are written in float32 and finished by PyTorch.

An adapter is more columns of that product, so that base and adapter are one float32 sum:

    y = alpha [x, u_0, u_1, ..] [W, B_0 / alpha, 0, ..  ]^T        u_p = round(scaling_p * (x A_p^T)): append.py
                                [W, 0, B_1 / alpha, ..  ]          alpha is a power of two in what qerl quantises:
                                                                   B / alpha is exact; else it is rounded once more

(To add the product to what is there, as cuBLAS's beta does, would not do: its kernels for Hopper round the product
first, so that a young adapter, smaller than half a step of bf16, is lost. Seen with all sizes of training on an H200.)

It costs 2.6 bytes of traffic a weight on top of the GEMM's own, so it is the path for a thousand tokens and more.
cuBLAS may split K and add the splits in bf16 unless torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
is off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import BFloat16, Float32
from torch import Tensor

from qerl.kernels.adapter import PackedAdapter
from qerl.kernels.dequant import dequant
from qerl.kernels.layout import PackedWeight

ROOM_STEP = 8
"""Columns behind W and x are a multiple of it: rows of both then start at multiples of 16 bytes."""
_LEAST_ALPHA = 2.0**-64  # B over less than that might not be finite


def w4a16_dense(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None = None,
    adapter: PackedAdapter | None = None,
) -> BFloat16[Tensor, "m n"]:
    """x W^T + bias + u B^T on CUDA."""
    if adapter is None:
        return _product(x, None, dequant(weight, torch.bfloat16), weight, bias)
    return _adapted(x, weight, bias, adapter.a.flatten(0, 1), adapter.scaling, [*map(adapter.part_b, weight.parts)])[0]


def w4a16_adapted_dense(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None,
    a: BFloat16[Tensor, "r k"],
    b: BFloat16[Tensor, "n r"],
    scaling: float,
) -> tuple[BFloat16[Tensor, "m n"], BFloat16[Tensor, "m r"]]:
    """x W^T + bias + u B^T, and u, on CUDA; the weight has one part."""
    y, u = _adapted(x, weight, bias, a, torch.full((1,), scaling, device=x.device), [b])
    return y, u[:, : len(a)].clone()  # not a view, which would hold x's copy


def w4a16_input_grad_dense(dy: BFloat16[Tensor, "m n"], weight: PackedWeight) -> BFloat16[Tensor, "m k"]:
    """dy W on CUDA."""
    dense = weight.without_row_padding(dequant(weight, torch.bfloat16))[:, : weight.columns]
    scales = {scale for _, _, scale in weight.runs}
    if len(scales) == 1 and (scale := scales.pop()) is not None:
        return torch.addmm(dy.new_empty(()), dy, dense, beta=0, alpha=scale)
    # K is summed over after the scale: it has to go into dy, which is rounded to bf16 once more.
    return (dy * weight.row_scale).to(dy.dtype) @ dense


def _adapted(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None,
    a: BFloat16[Tensor, "ranks k_or_more"],
    scaling: Float32[Tensor, " parts"],
    b_of_parts: Sequence[BFloat16[Tensor, "n r"]],
) -> tuple[BFloat16[Tensor, "m n"], BFloat16[Tensor, "m room"]]:
    """The product, and u, of which all parts have as many columns; what follows them is zero."""
    from qerl.kernels.w4a16.append import append_inner  # Triton is there where CUDA is

    columns, room = weight.padded_shape[1], -(-len(a) // ROOM_STEP) * ROOM_STEP
    x, u = append_inner(x, a, scaling, columns, room).tensor_split([columns], dim=1)
    dense = dequant(weight, torch.bfloat16, room=room)
    first = columns
    dense[:, first:].zero_()
    for part, b in zip(weight.parts, b_of_parts, strict=True):
        dense[part.start : part.start + part.rows, first : first + b.shape[1]] = b
        first += b.shape[1]
    return _product(x, u, dense, weight, bias), u


def _product(
    x: BFloat16[Tensor, "m k"],
    u: BFloat16[Tensor, "m room"] | None,
    dense: BFloat16[Tensor, "padded_rows padded_columns_and_room"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None,
) -> BFloat16[Tensor, "m n"]:
    """x W^T + bias + u B^T. u: in memory right behind x, row by row, as B is behind W; B is overwritten."""
    columns = x.shape[1]
    both = x if u is None else x.as_strided((len(x), columns + u.shape[1]), x.stride())
    y, first = x.new_empty(len(x), weight.shape[0]), 0
    for start, rows, scale in weight.runs:
        of_run = slice(first, first + rows)
        w, b, out = dense[start : start + rows, :columns], dense[start : start + rows, columns:], y[:, of_run]
        shift = None if bias is None else bias[of_run]
        if scale is None or scale < _LEAST_ALPHA:
            sums = torch.mm(x, w.T, out_dtype=torch.float32) * weight.row_scale[of_run]
            if u is not None:
                sums += torch.mm(u, b.T, out_dtype=torch.float32)
            out.copy_(sums if shift is None else sums + shift)
        else:
            if u is not None:
                b /= scale
                w = dense[start : start + rows]
            if shift is None:
                torch.addmm(out, both, w.T, beta=0, alpha=scale, out=out)
            elif out.is_contiguous():
                torch.addmm(shift, both, w.T, alpha=scale, out=out)
            else:
                # Into a strided output torch 2.11 adds the bias after a rounding of its own (seen on an H200).
                out.copy_(torch.addmm(shift, both, w.T, alpha=scale))
        first += rows
    return y
