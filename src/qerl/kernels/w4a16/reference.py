"""w4a16 in PyTorch, float32 throughout: the path of a CPU, and what every kernel is checked against.

The global scale multiplies the finished sums, as in a kernel's epilogue, so that both see the same weights. Autocast,
which would take float32 products to 16 bits, is off within.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from qerl.kernels.adapter import PackedAdapter
from qerl.kernels.dequant import dequant
from qerl.kernels.layout import PackedWeight

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _in_float32(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


@_in_float32
def w4a16_reference(
    x: Float[Tensor, "m k"],
    weight: PackedWeight,
    bias: Float[Tensor, " n"] | None = None,
    adapter: PackedAdapter | None = None,
) -> Float[Tensor, "m n"]:
    """x W^T + bias + u B^T in float32, rounded once to x's dtype, as u is."""
    y = _sums(x, weight)
    if bias is not None:
        y += bias
    if adapter is not None:
        columns = y.split([part.rows for part in weight.parts], dim=1)
        for out, part, a, scaling in zip(columns, weight.parts, adapter.a, adapter.scaling, strict=True):
            u = (scaling * (x.float() @ a[:, : weight.columns].float().T)).to(x.dtype)
            out += u.float() @ adapter.part_b(part).float().T
    return y.to(x.dtype)


@_in_float32
def w4a16_adapted_reference(
    x: Float[Tensor, "m k"],
    weight: PackedWeight,
    bias: Float[Tensor, " n"] | None,
    a: Float[Tensor, "r k"],
    b: Float[Tensor, "n r"],
    scaling: float,
    behind: int = 0,
) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m r"]]:
    """x W^T + bias + u B^T in float32, and u; each rounded once to x's dtype. Nothing is written behind x."""
    u = (x.float() @ a.float().T).mul_(scaling).to(x.dtype)
    y = _sums(x, weight)
    if bias is not None:
        y += bias
    y += u.float() @ b.float().T
    return y.to(x.dtype), u


def _sums(x: Float[Tensor, "m k"], weight: PackedWeight) -> Float32[Tensor, "m n"]:
    """x W^T."""
    dense = dequant(weight, torch.float32)[:, : weight.columns]
    sums = [x.float() @ dense[start : start + rows].T for start, rows, _ in weight.runs]
    return (sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)).mul_(weight.row_scale)


@_in_float32
def w4a16_input_grad_reference(dy: Float[Tensor, "m n"], weight: PackedWeight) -> Float[Tensor, "m k"]:
    """dy W in float32, rounded once to dy's dtype."""
    dense = weight.without_row_padding(dequant(weight, torch.float32))[:, : weight.columns]
    return ((dy * weight.row_scale) @ dense).to(dy.dtype)
