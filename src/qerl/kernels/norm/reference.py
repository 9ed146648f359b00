"""The addition, the norm and its gradient by torch, operation by operation."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor


def rms_norm_reference(
    x: Float[Tensor, "*batch h"], gain: Float32[Tensor, "*rows h"], eps: float
) -> Float[Tensor, "*batch h"]:
    """gain * x / rms(x) in fp32, rounded once to x's dtype."""
    wide = x.float()
    return (gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def add_rms_norm_reference_(
    x: Float[Tensor, "t h"],
    delta: Float[Tensor, "t h"] | None,
    gain: Float32[Tensor, "*rows h"],
    eps: float,
    index: Int64[Tensor, " t"] | None = None,
) -> Float[Tensor, "t h"]:
    """`add_rms_norm_`."""
    if delta is not None:
        x += delta
    return rms_norm_reference(x, gain if index is None else gain[index], eps)


def rms_norm_grad_reference(
    dy: Float[Tensor, "t h"], x: Float[Tensor, "t h"], gain: Float32[Tensor, "*rows h"], eps: float
) -> Float[Tensor, "t h"]:
    """`rms_norm_grad`, with a row of `gain` for all tokens or one for each."""
    # With n = x * r and r = 1 / rms: dr/dx = -r^3 x / h, so dx = r * (s - n * mean(s * n)) for s = gain * dy.
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed, scaled = wide * inverse_rms, gain * dy.float()
    return (inverse_rms * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(x.dtype)
