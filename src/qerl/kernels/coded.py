"""Products with weights in formats that have no fused kernel (NF4, INT4): dequantised whole, then an ordinary product.

    coded_product      y  = x W^T + bias        W = codes -> scratch buffer (kernels/dequant), in x's dtype
    coded_input_grad   dx = dy W

W is rounded to x's dtype before the product, as bitsandbytes and others do it; packed formats (kernels/w4a16) enter
exactly. Several weights that read the same input are one product: their rows follow each other in the buffer.

A baseline's path: every product writes all of W in x's dtype and reads it again. On a GPU and where bitsandbytes is
installed, NF4 is its own, so that QLoRA is compared at its own speed: for few tokens its 4-bit product, which chooses
between a kernel that reads the codes and a dense copy; for more its dequantisation. Else, as INT4, W is made in a few
PyTorch operations with float32 temporaries on the way. Works on any device and in CUDA graphs, under the scratch
buffer's rules. Neither function records a graph for autograd (nn/linear.py does); under torch.compile they break it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qerl.formats import int4, nf4
from qerl.formats.int4 import INT4Tensor
from qerl.formats.nf4 import NF4Tensor
from qerl.kernels.dequant import scratch


@dataclass(eq=False)
class CodedWeight:
    """A frozen weight [N, K] as its format stores it."""

    codes: NF4Tensor | INT4Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, half = self.codes.packed.shape
        return n, 2 * half

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.packed.device

    def to_(self, device: torch.device | str) -> None:
        """Move the codes."""
        moved = {name: t.to(device) for name, t in self.codes._asdict().items() if t is not None}
        self.codes = self.codes._replace(**moved)


FEW_TOKENS = 64
"""Above that, bitsandbytes' product would make a dense copy of its own on the chips with the fastest memory."""


@torch.compiler.disable()
@torch.no_grad()
def coded_product(
    x: Float[Tensor, "*batch k"], weights: Sequence[CodedWeight], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """x W^T + bias, in x's dtype, of all the weights' rows in order. ValueError: another K, or x on another device."""
    _check(x, weights[0].shape[1], weights)
    if x.is_cuda and 0 < x.numel() <= FEW_TOKENS * x.shape[-1] and _has_product():
        nf4_codes = [w.codes for w in weights if isinstance(w.codes, NF4Tensor)]
        if len(nf4_codes) == len(weights):
            return product_by_bitsandbytes(x, nf4_codes, bias)
    return F.linear(x, _dense(weights, x.dtype), bias)


@torch.compiler.disable()
@torch.no_grad()
def coded_input_grad(dy: Float[Tensor, "*batch n"], weight: CodedWeight) -> Float[Tensor, "*batch k"]:
    """dy W, the gradient of `coded_product` with respect to x. ValueError as there, with N for K."""
    _check(dy, weight.shape[0], [weight])
    return dy @ _dense([weight], dy.dtype)


def _dense(weights: Sequence[CodedWeight], dtype: torch.dtype) -> Float[Tensor, "n k"]:
    """All rows in the scratch buffer, valid until the next product."""
    rows, columns = [w.shape[0] for w in weights], weights[0].shape[1]
    dense = scratch(weights[0].device, dtype, sum(rows) * columns).view(-1, columns)
    for w, out in zip(weights, dense.split(rows), strict=True):
        if isinstance(w.codes, NF4Tensor) and out.is_cuda and _bitsandbytes() is not None:
            dequantize_by_bitsandbytes(w.codes, out)
        elif isinstance(w.codes, NF4Tensor):
            nf4.dequantize(w.codes, out=out)
        else:
            int4.dequantize(w.codes, out=out)
    return dense


def dequantize_by_bitsandbytes(codes: NF4Tensor, out: Float[Tensor, "n k"]) -> None:
    """`nf4.dequantize` by bitsandbytes' kernel, which reads and writes every byte once; needs the package."""
    library = _bitsandbytes()
    assert library is not None
    packed, absmax = codes.packed.view(-1, 1), nf4.maxima(codes)
    library.dequantize_4bit(packed, absmax=absmax, out=out, blocksize=nf4.BLOCK, quant_type="nf4")


def product_by_bitsandbytes(
    x: Float[Tensor, "*batch k"], weights: Sequence[NF4Tensor], bias: Float[Tensor, " n"] | None
) -> Float[Tensor, "*batch n"]:
    """`coded_product` of NF4 by bitsandbytes' product; needs its version 0.50."""
    rows = [len(codes.packed) for codes in weights]
    biases = [None] * len(rows) if bias is None else bias.split(rows)
    parts = []
    for codes, of_rows in zip(weights, biases, strict=True):
        maxima, options = codes.absmax, {"bias": of_rows}
        if codes.absmax_scale is not None:  # the maxima are codes themselves
            table = nf4.dynamic_values_on(x.device)
            maxima = codes.absmax_scale
            options |= {"absmax_8bit": codes.absmax, "absmax_code": table, "absmax_offset": codes.offset}
        shape, product = [len(codes.packed), x.shape[-1]], torch.ops.bitsandbytes.gemm_4bit.default
        parts.append(product(x, codes.packed.view(-1, 1), shape, maxima, nf4.BLOCK, "nf4", **options))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@cache
def _has_product() -> bool:
    return _bitsandbytes() is not None and hasattr(torch.ops.bitsandbytes, "gemm_4bit")


@cache
def _bitsandbytes() -> Any:
    """bitsandbytes.functional; None where it is not installed."""
    try:
        from bitsandbytes import functional
    except ImportError:
        return None
    return functional


def _check(x: Tensor, size: int, weights: Sequence[CodedWeight]) -> None:
    shapes = [list(w.shape) for w in weights]
    if x.shape[-1] != size:
        raise ValueError(f"a tensor of shape {list(x.shape)} against weights of shape {shapes}: wants [.., {size}]")
    if x.device != weights[0].device:
        raise ValueError(f"the tensor is on {x.device}, the weight on {weights[0].device}: move one of them")
