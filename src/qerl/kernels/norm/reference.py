"""The addition and the norm by torch, operation by operation."""

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
