"""w4a16 for many tokens on a GPU: dequantise into the scratch buffer, multiply with cuBLAS.

The scratch matrix is e2m1 * block_scale, exact in bf16. One global scale for a run of rows is the GEMM's alpha: cuBLAS
applies it, and the bias, to the float32 sum before the one rounding. Rows with scales of their own need an epilogue
that cuBLAS lacks: their sums are written in float32 and finished by PyTorch.

An adapter is more columns of that product, so that base and adapter are one float32 sum:

    y = alpha [x, u_0, u_1, ..] [W, B_0 / alpha, 0, ..  ]^T        u_p = round(scaling_p * (x A_p^T));
                                [W, 0, B_1 / alpha, ..  ]          alpha is a power of two in what qerl quantises:
                                                                   B / alpha is exact; else it is rounded once more

u goes behind the rows of x where its producer has left room (kernels/room.py); else x is copied (widen.py).

(To add the product to what is there, as cuBLAS's beta does, would not do: its kernels for Hopper round the product
first, so that a young adapter, smaller than half a step of bf16, is lost. Seen with all sizes of training on an H200.)

It costs 2.6 bytes of traffic a weight on top of the GEMM's own, so it is the path for a thousand tokens and more.
cuBLAS may split K and add the splits in bf16 unless torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
is off.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16
from torch import Tensor

from qerl.kernels.adapter import PackedAdapter
from qerl.kernels.dequant import dequant
from qerl.kernels.layout import PackedWeight
from qerl.kernels.room import room_for

_LEAST_ALPHA = 2.0**-64  # B over less than that might not be finite


def w4a16_dense(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None = None,
    adapter: PackedAdapter | None = None,
) -> BFloat16[Tensor, "m n"]:
    """x W^T + bias + u B^T on CUDA."""
    if adapter is None:
        return _product(x, dequant(weight, torch.bfloat16), weight, bias, room=0)
    parts, rank, _ = adapter.a.shape
    room = parts * rank
    both = _with_room(x, weight, room, in_place=False)
    x, u = both.tensor_split([-room], dim=1)
    inner = torch.mm(x, adapter.a.flatten(0, 1).T, out_dtype=torch.float32).unflatten(1, (parts, rank))
    torch.mul(inner, adapter.scaling[:, None], out=u.unflatten(1, (parts, rank)))
    dense = dequant(weight, torch.bfloat16, room=room)
    first = dense.shape[1] - room
    dense[:, first:].zero_()
    for part in weight.parts:
        dense[part.start : part.start + part.rows, first : first + rank] = adapter.part_b(part)
        first += rank
    return _product(both, dense, weight, bias, room)


def w4a16_adapted_dense(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None,
    a: BFloat16[Tensor, "r k"],
    b: BFloat16[Tensor, "n r"],
    scaling: float,
    behind: int = 0,
) -> tuple[BFloat16[Tensor, "m n"], BFloat16[Tensor, "m r"]]:
    """x W^T + bias + u B^T, and u, on CUDA; the weight has one part. behind: columns behind x that may be written."""
    rank, in_place = len(a), x.shape[1] == weight.padded_shape[1] and behind >= len(a)
    # All of the room that there is: rows with a gap between them would cost a bias a rounding of its own in torch 2.11.
    room = behind if in_place else room_for(rank)
    both = _with_room(x, weight, room, in_place=in_place)
    u = both[:, -room:]
    torch.addmm(u[:, :rank], x, a.T, beta=0, alpha=scaling, out=u[:, :rank])
    dense = dequant(weight, torch.bfloat16, room=room)
    dense[: len(b), -room:][:, :rank] = b
    if rank < room:
        for matrix in (both, dense):
            matrix[:, rank - room :].zero_()
    return _product(both, dense, weight, bias, room), u[:, :rank].clone()  # not a view, which would hold all of x


def w4a16_input_grad_dense(dy: BFloat16[Tensor, "m n"], weight: PackedWeight) -> BFloat16[Tensor, "m k"]:
    """dy W on CUDA."""
    dense = weight.without_row_padding(dequant(weight, torch.bfloat16))[:, : weight.columns]
    scales = {scale for _, _, scale in weight.runs}
    if len(scales) == 1 and (scale := scales.pop()) is not None:
        return torch.addmm(dy.new_empty(()), dy, dense, beta=0, alpha=scale)
    # K is summed over after the scale: it has to go into dy, which is rounded to bf16 once more.
    return (dy * weight.row_scale).to(dy.dtype) @ dense


def _with_room(
    x: BFloat16[Tensor, "m k"], weight: PackedWeight, room: int, *, in_place: bool
) -> BFloat16[Tensor, "m columns_and_room"]:
    """x in the weight's padded columns with room behind them: where x lies, or a copy."""
    if in_place:  # .data: for autograd, which counts changes, x stays as it is
        return x.data.as_strided((x.shape[0], x.shape[1] + room), x.stride())
    from qerl.kernels.w4a16.widen import widened  # Triton is there where CUDA is

    return widened(x, weight.padded_shape[1], room)


def _product(
    both: BFloat16[Tensor, "m columns_and_room"],
    dense: BFloat16[Tensor, "padded_rows padded_columns_and_room"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None,
    room: int,
) -> BFloat16[Tensor, "m n"]:
    """[x, u] [W, B]^T + bias; u and B are the last `room` columns, B is overwritten."""
    width = both.shape[1]
    columns = width - room
    y, first = both.new_empty(len(both), weight.shape[0]), 0
    for start, rows, scale in weight.runs:
        w, out = dense[start : start + rows, :width], y[:, first : first + rows]
        b = None if bias is None else bias[first : first + rows]
        if scale is None or scale < _LEAST_ALPHA:
            sums = torch.mm(both[:, :columns], w[:, :columns].T, out_dtype=torch.float32)
            sums *= weight.row_scale[first : first + rows]
            if room:
                sums += torch.mm(both[:, columns:], w[:, columns:].T, out_dtype=torch.float32)
            out.copy_(sums if b is None else sums + b)
        else:
            if room:
                w[:, columns:] /= scale
            if b is None:
                torch.addmm(out, both, w.T, beta=0, alpha=scale, out=out)
            elif out.is_contiguous():
                torch.addmm(b, both, w.T, alpha=scale, out=out)
            else:
                # Into a strided output torch 2.11 adds the bias after a rounding of its own (seen on an H200).
                out.copy_(torch.addmm(b, both, w.T, alpha=scale))
        first += rows
    return y
