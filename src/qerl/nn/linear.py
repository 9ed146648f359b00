"""y = x W^T + b with a frozen 4-bit W, and its gradient, without a dense W that outlives a product.

                                  NVFP4, MXFP4 (PackedWeight)                 NF4, INT4 (CodedWeight)
    forward    y  = x W^T + b     kernels/w4a16: from the codes for few       kernels/coded: from a dense copy in the
                                  tokens, else from a copy in the scratch     scratch buffer
    backward   dx = dy W          kernels/w4a16: from such a copy             kernels/coded: from such a copy

W gets no gradient, so neither x nor a dense W is kept for the backward pass: all that autograd holds is a reference to
the codes. Linears that read the same input (q, k, v; gate, up) are row views of one PackedWeight, so that the engine
can compute them as one product; moving one of them moves the storage under all. Coded weights are one each.

`weight` is the integers that hold the codes: code that looks at `weight.device` works, and a blanket
`.to(torch.bfloat16)` or `.half()`, which casts floating-point parameters only, leaves codes and scales exact. They are
no parameter and in no state_dict: packed models are written by formats/writing.py. Under torch.compile and
torch.export a packed product is one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.formats.codes import Codes
from qerl.formats.int4 import INT4Tensor
from qerl.formats.nf4 import NF4Tensor
from qerl.kernels.coded import CodedWeight, coded_input_grad, coded_product
from qerl.kernels.w4a16 import PackedWeight, pack, w4a16, w4a16_adapted, w4a16_input_grad


def frozen_weights(codes: Sequence[Codes]) -> Sequence[PackedWeight | CodedWeight]:
    """What PackedLinears hold for the matrices of one product, each [N_i, K] and all of one format."""
    coded = [CodedWeight(t) for t in codes if isinstance(t, NF4Tensor | INT4Tensor)]
    if coded:
        return coded
    whole = pack([t for t in codes if not isinstance(t, NF4Tensor | INT4Tensor)])
    return [whole.part(i) for i in range(len(codes))]


class PackedLinear(nn.Linear):
    """A frozen linear whose weight is packed; see the module's text."""

    packed: PackedWeight | CodedWeight
    """The codes: rows of a PackedWeight that other linears may share, or codes of its own."""

    def __init__(self, packed: PackedWeight | CodedWeight, bias: Float[Tensor, " n"] | None = None) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a dense weight
        self.out_features, self.in_features = packed.shape
        self.packed = packed
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> UInt8[Tensor, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The codes' bytes, for code that asks a linear for its weight's device."""
        return self.packed.tiles if isinstance(self.packed, PackedWeight) else self.packed.codes.packed

    def forward(self, input: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """input W^T + bias, in the input's dtype."""
        if torch.compiler.is_compiling() and isinstance(self.packed, PackedWeight):
            return w4a16(input, self.packed, self.bias)  # an operator, which has its own autograd formula
        return _PackedLinear.apply(input, self, self.bias)

    def product(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """`forward`, which no gradient goes through; the result is the caller's to change."""
        if isinstance(self.packed, PackedWeight):
            return w4a16(x, self.packed, self.bias)
        return coded_product(x, [self.packed], self.bias)

    def adapted_product(
        self, x: Float[Tensor, "*batch k"], a: Float[Tensor, "r k"], b: Float[Tensor, "n r"], scaling: float, room: int
    ) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "t r"]]:
        """x W^T + bias + u B^T, one sum in fp32, rounded once; and u = scaling * (x A^T). Not of a CodedWeight.

        room: columns behind x's rows that may be written (kernels/room.py).
        """
        assert isinstance(self.packed, PackedWeight)
        return w4a16_adapted(x, self.packed, self.bias, a, b, scaling, room=room)

    def input_grad(self, dy: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch k"]:
        """dy W; the result is the caller's to change."""
        if isinstance(self.packed, PackedWeight):
            return w4a16_input_grad(dy, self.packed)
        return coded_input_grad(dy, self.packed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """nn.Module's way to move and cast; only a move reaches the codes."""
        super()._apply(fn, recurse)
        self.packed.to_(fn(self.weight[:0]).device)
        return self


def without_view(y: Tensor) -> Tensor:
    """What an autograd function may return that made y as a view.

    Autograd forbids adding in place to a view that is made there, which users of a linear do (PEFT's AdaLoRA). A
    compiler, which makes its own functions, cannot ask for it.
    """
    if torch.compiler.is_compiling() or not y._is_view():
        return y
    return torch.ops.aten._unsafe_view(y, y.shape)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: PackedLinear, bias: Tensor | None) -> Tensor:
        ctx.linear = linear
        return without_view(linear.product(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        grad_x = ctx.linear.input_grad(grad) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias
