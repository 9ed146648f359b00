"""w4a16 for many tokens on a GPU: dequantise into the scratch buffer, multiply with cuBLAS.

The scratch matrix is e2m1 * block_scale, exact in bf16. One global scale for a run of rows is the GEMM's alpha: cuBLAS
applies it, and the bias, to the float32 sum before the one rounding. Rows with scales of their own need an epilogue
that cuBLAS lacks: their sums are written in float32 and finished by PyTorch.

With an adapter its part (in training made by the caller, as it has a gradient; else here) comes first and is rounded to
bf16 (cuBLAS takes no float32 addend); the large product is then added to it in float32, as the GEMM's beta or, with a
bias, by PyTorch, and rounded once. So it costs one rounding of the smaller term beyond the contract. A bias is no part
of that: it may be a hundred times as large, and a young adapter would be lost in its rounding.

It costs 2.6 bytes of traffic a weight on top of the GEMM's own, so it is the path for a thousand tokens and more.
cuBLAS may split K and add the splits in bf16 unless torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
is off, as it is for what is added to an addend.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from jaxtyping import BFloat16
from torch import Tensor

from qerl.kernels.adapter import PackedAdapter
from qerl.kernels.dequant import dequant
from qerl.kernels.layout import PackedWeight


def w4a16_dense(
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None = None,
    adapter: PackedAdapter | None = None,
) -> BFloat16[Tensor, "m n"]:
    """x W^T + bias + u B^T on CUDA."""
    n, k = weight.shape
    y = x.new_empty(x.shape[0], n)
    if adapter is not None:
        _write_adapter(y, x, weight, adapter)
        w4a16_add_dense_(y, x, weight, bias)
        return y
    dense = dequant(weight, torch.bfloat16)[:, :k]
    first = 0
    for start, rows, scale in weight.runs:
        w, out = dense[start : start + rows].T, y[:, first : first + rows]
        b = None if bias is None else bias[first : first + rows]
        if scale is None:
            sums = torch.mm(x, w, out_dtype=torch.float32) * weight.row_scale[first : first + rows]
            out.copy_(sums if b is None else sums + b)
        elif b is None:
            torch.addmm(out, x, w, beta=0, alpha=scale, out=out)
        elif out.is_contiguous():
            torch.addmm(b, x, w, alpha=scale, out=out)
        else:
            # Into a strided output torch 2.11 adds the bias after a rounding of its own (seen on an H200).
            out.copy_(torch.addmm(b, x, w, alpha=scale))
        first += rows
    return y


def w4a16_add_dense_(
    y: BFloat16[Tensor, "m n"],
    x: BFloat16[Tensor, "m k"],
    weight: PackedWeight,
    bias: BFloat16[Tensor, " n"] | None = None,
) -> None:
    """y += x W^T + bias on CUDA, in float32 and rounded once.

    A bias, for which cuBLAS has no room beside y, makes it slower: in front, it would cost y a rounding of its own.
    """
    dense, first = dequant(weight, torch.bfloat16)[:, : weight.columns], 0
    for start, rows, scale in weight.runs:
        w, of_run = dense[start : start + rows].T, slice(first, first + rows)
        out = y[:, of_run]
        if scale is not None and bias is None:
            with splits_in_float32():
                out.addmm_(x, w, alpha=scale)
        else:
            sums = torch.mm(x, w, out_dtype=torch.float32).mul_(weight.row_scale[of_run] if scale is None else scale)
            out.copy_((sums if bias is None else sums.add_(bias[of_run])).add_(out))
        first += rows


@contextmanager
def splits_in_float32() -> Generator[None]:
    """cuBLAS adds no splits of K in bf16; the setting is then as it was before."""
    matmul = torch.backends.cuda.matmul
    if not matmul.allow_bf16_reduced_precision_reduction:
        yield
        return
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True


def w4a16_input_grad_dense(dy: BFloat16[Tensor, "m n"], weight: PackedWeight) -> BFloat16[Tensor, "m k"]:
    """dy W on CUDA."""
    dense = weight.without_row_padding(dequant(weight, torch.bfloat16))[:, : weight.columns]
    scales = {scale for _, _, scale in weight.runs}
    if len(scales) == 1 and (scale := scales.pop()) is not None:
        return torch.addmm(dy.new_empty(()), dy, dense, beta=0, alpha=scale)
    # K is summed over after the scale: it has to go into dy, which is rounded to bf16 once more.
    return (dy * weight.row_scale).to(dy.dtype) @ dense


def _write_adapter(
    y: BFloat16[Tensor, "m n"], x: BFloat16[Tensor, "m k"], weight: PackedWeight, adapter: PackedAdapter
) -> None:
    """y = u B^T, u = scaling * (x A^T) for all parts in one product, scaled in float32 and rounded once."""
    stacked = adapter.a.flatten(0, 1)[:, : weight.columns]
    inner = torch.mm(x, stacked.T, out_dtype=torch.float32).unflatten(1, adapter.a.shape[:2])
    u = (inner * adapter.scaling[:, None]).to(x.dtype)
    first = 0
    for i, part in enumerate(weight.parts):
        rows, b = part.rows, adapter.part_b(part).T
        torch.mm(u[:, i], b, out=y[:, first : first + rows])
        first += rows
