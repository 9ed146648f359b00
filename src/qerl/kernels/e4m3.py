"""Keys and values in 8 bits: E4M3 codes with a float32 scale for each head of a token.

    scale = max |x| / 448          448: the largest E4M3 number; over the head's d numbers
    code  = e4m3(x * (448 / max |x|))                  to nearest even
    x'    = code * scale                               |x' - x| <= |x| / 16, or scale / 1024 if that is more

A head of zeros has a tiny scale. Nothing is calibrated: a scale is of its own token, so codes are written once, and a
bias that is a hundred times the rest (the keys of Qwen2.5) costs no other token its bits.

What the references of kernels/rope (which writes) and kernels/attention (which reads) compute, and the engine where it
reads a prompt's pages; numerics.py has the same for Triton.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

LARGEST = 448.0
TINY = 2.0**-100
"""Stands for the largest of a head of zeros."""


def encode(x: Float[Tensor, "*heads d"]) -> tuple[UInt8[Tensor, "*heads d"], Float32[Tensor, "*heads"]]:
    """(codes, scales) of heads."""
    x = x.float()
    largest = x.abs().amax(-1).clamp_min(TINY)
    top = torch.full_like(largest, LARGEST)  # torch divides by a number, or a number, as it multiplies by a reciprocal
    codes = (x * (top / largest)[..., None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), largest / top


def decode(
    codes: UInt8[Tensor, "*heads d"], scales: Float32[Tensor, "*heads"], dtype: torch.dtype
) -> Float[Tensor, "*heads d"]:
    """code * scale, rounded to a dtype."""
    return (codes.view(torch.float8_e4m3fn).float() * scales[..., None]).to(dtype)
