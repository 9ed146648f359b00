"""RMSNorm with an optional noise vector on its weight: the one place where exploration noise meets the forward pass.

    y = (w + Z) * x / sqrt(mean(x^2) + eps)          all in float32, rounded once to x's dtype

Z is `noise.rows[noise.index[t]]` for token t, or the single row for all tokens (spec: RMSNorm_noisy, arXiv 2510.11696
section 3.3). It is added on the fly: the weight itself is never written, so turning noise off restores it bit for bit.

Contract: weight fp32 [H]; x [..., H] in any float dtype; noise rows fp32 [S, H]. With an index, its T entries belong
to the tokens of x in row-major order ([T, H], [1, T, H] or [B, 1, H]). The noise is read when forward runs, so whoever
sets it must keep it for the backward pass as well, where layers may run again. Z gets no gradient. `fold` is what a
calibration has divided the weight by (formats/folding.py): qerl/noise.py divides Z by it.
The backward pass keeps x alone; both passes are kernels/norm's.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.kernels.norm import add_rms_norm_, rms_norm_grad
from qerl.kernels.room import mark
from qerl.nn.linear import without_view
from qerl.noise import NoiseRows


class RMSNorm(nn.Module):
    """y = (weight + Z) * x / rms(x); see the module's text."""

    noise: NoiseRows | None
    """Z of the forward passes from now on; None: clean."""
    room: int
    """Columns to leave behind the rows of the result, for the products that read it (kernels/room.py)."""
    fold: Tensor | None
    """fp32 [h]: the factors that `weight` was divided by; None: all ones."""

    def __init__(self, weight: Float[Tensor, " h"], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        self.eps = eps
        self.noise, self.room = None, 0
        self.register_buffer("fold", None, persistent=False)

    def forward(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        """Normalise the last dimension of x."""
        rows, index = (None, None) if self.noise is None else (self.noise.rows, self.noise.index)
        return mark(rms_norm(x, self.weight, self.eps, rows, index, self.room), self.room)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.weight.numel()}, eps={self.eps}"


def rms_norm(
    x: Float[Tensor, "*batch h"],
    weight: Float[Tensor, " h"],
    eps: float,
    noise: Float[Tensor, "s h"] | None = None,
    index: Int64[Tensor, " t"] | None = None,
    room: int = 0,
) -> Float[Tensor, "*batch h"]:
    """(weight + noise[index]) * x / rms(x). Without an index, `noise` is one row for every token."""
    if noise is not None:
        if index is None and len(noise) != 1:
            raise ValueError(f"{len(noise)} noise rows but no index: say which row each token takes")
        if index is not None and index.numel() * x.shape[-1] != x.numel():
            raise ValueError(f"the noise index has {index.numel()} entries for {x.numel() // x.shape[-1]} tokens")
    return _RMSNorm.apply(x, weight, eps, noise, index, room)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, noise: Tensor | None, index: Tensor | None, room: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, noise, index)
        ctx.eps = eps
        tokens, gain = x.reshape(-1, x.shape[-1]), _gain(weight, noise)
        y = add_rms_norm_(tokens, None, gain, eps, index, new_gain=noise is not None, room=room)
        return without_view(y.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, noise, index = ctx.saved_tensors
        tokens, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = rms_norm_grad(grad, tokens, _gain(weight, noise), ctx.eps, index).view(x.shape)
        if ctx.needs_input_grad[1]:
            wide = tokens.float()
            inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
            grad_weight = (grad.float() * (wide * inverse_rms)).sum(0)
        return grad_x, grad_weight, None, None, None, None


def _gain(weight: Tensor, noise: Tensor | None) -> Float32[Tensor, "s h"]:
    """w + Z, the rows that an index chooses from; one without."""
    return weight[None] if noise is None else weight + noise
