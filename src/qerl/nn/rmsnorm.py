"""RMSNorm with an optional noise vector on its weight: the one place where exploration noise meets the forward pass.

    y = (w + Z) * x / sqrt(mean(x^2) + eps)          all in float32, rounded once to x's dtype

Z is `noise.rows[noise.index[t]]` for token t, or the single row for all tokens (spec: RMSNorm_noisy, arXiv 2510.11696
section 3.3). It is added on the fly: the weight itself is never written, so turning noise off restores it bit for bit.

Contract: weight fp32 [H]; x [..., H] in any float dtype; noise rows fp32 [S, H]. With an index, its T entries belong
to the tokens of x in row-major order ([T, H], [1, T, H] or [B, 1, H]). The noise is read when forward runs, so whoever
sets it must keep it for the backward pass as well, where layers may run again. Z gets no gradient. `fold` is what a
calibration has divided the weight by (formats/folding.py): qerl/noise.py divides Z by it.
The backward pass keeps x and one float a token; the float32 copies are recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.noise import NoiseRows


class RMSNorm(nn.Module):
    """y = (weight + Z) * x / rms(x); see the module's text."""

    noise: NoiseRows | None
    """Z of the forward passes from now on; None: clean."""
    fold: Tensor | None
    """fp32 [h]: the factors that `weight` was divided by; None: all ones."""

    def __init__(self, weight: Float[Tensor, " h"], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        self.eps = eps
        self.noise = None
        self.register_buffer("fold", None, persistent=False)

    def forward(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        """Normalise the last dimension of x."""
        if self.noise is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps, self.noise.rows, self.noise.index)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.weight.numel()}, eps={self.eps}"


def rms_norm(
    x: Float[Tensor, "*batch h"],
    weight: Float[Tensor, " h"],
    eps: float,
    noise: Float[Tensor, "s h"] | None = None,
    index: Int[Tensor, " t"] | None = None,
) -> Float[Tensor, "*batch h"]:
    """(weight + noise[index]) * x / rms(x). Without an index, `noise` is one row for every token."""
    if noise is not None:
        if index is None and len(noise) != 1:
            raise ValueError(f"{len(noise)} noise rows but no index: say which row each token takes")
        if index is not None and index.numel() * x.shape[-1] != x.numel():
            raise ValueError(f"the noise index has {index.numel()} entries for {x.numel() // x.shape[-1]} tokens")
    return _RMSNorm.apply(x, weight, eps, noise, index)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, noise: Tensor | None, index: Tensor | None) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1]).float()
        inverse_rms = torch.rsqrt(tokens.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse_rms, noise, index)
        return (_gain(weight, noise, index) * (tokens * inverse_rms)).to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # With n = x * r and r = 1 / rms: dr/dx = -r^3 x / h, so dx = r * (g - n * mean(g * n)) for g = gain * dy.
        x, weight, inverse_rms, noise, index = ctx.saved_tensors
        normed = x.reshape(-1, x.shape[-1]).float() * inverse_rms
        grad = grad.reshape(-1, x.shape[-1]).float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            scaled = _gain(weight, noise, index) * grad
            grad_x = (
                (inverse_rms * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(x.dtype).view(x.shape)
            )
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).sum(0)
        return grad_x, grad_weight, None, None, None


def _gain(weight: Tensor, noise: Tensor | None, index: Tensor | None) -> Tensor:
    """w + Z: [1, H], or [T, H] with an index."""
    if noise is None:
        return weight[None]
    noisy = weight + noise
    return noisy if index is None else noisy[index]
