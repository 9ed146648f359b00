"""MXFP4: the OCP microscaling format with E2M1 values, a baseline beside NVFP4. Pure PyTorch; on a GPU, e2m1_cuda.py.

A weight matrix [N, K] is cut along K into blocks of 32 values. A weight is

    w = e2m1(code) * 2^(e - 127)

with a 4-bit code (the same as NVFP4's) and one E8M0 byte e for each block, a bare exponent: 4.25 bits a weight. There
is no scale of the tensor. e = 255 is the format's NaN and is refused.

`quantize` chooses e for each block either

    ocp      floor(log2(amax(block))) - 2: amax lands on [4, 8), what lies above 6 becomes 6
    sweep    of that exponent and its two neighbours the one with the least squared error (Gaussian: 5 % less in all);
             with `importance`, each column's squared error is weighted by it

Contract: K is a multiple of 32; results are equal on every device; an all-zero block has e = 0 and codes 0. Source: OCP
Microscaling Formats (MX) Specification 1.0, sections 5 and 6. Files are checkpoint.py's and writing.py's business.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Float32, Int32, UInt8
from torch import Tensor

from qerl.formats.nvfp4 import E2M1_VALUES, e2m1_codes, finite_amax, pack_nibbles, squared_error, unpack_nibbles

BLOCK = 32
"""Values along K that share a scale."""

E8M0_NAN = 255  # the largest number is 254: 2^127

_E2M1_MAX_EXPONENT = 2  # of 6 = 1.5 * 2^2
_MAX_EXPONENT = 252  # 6 * 2^(252 - 127) is the largest E2M1 multiple that float32 holds
_SWEEP = (0, -1, 1)  # the OCP exponent first: it stays where another is no better

_PIECE = 1 << 16  # weights worked on at a time: a few float32 temporaries of this size stay in a core's L2 cache


class MXFP4Tensor(NamedTuple):
    """A quantised matrix [N, K] in the order that files use."""

    packed: UInt8[Tensor, "n k_half"]
    """Two codes a byte: the low nibble is the even k."""
    block_scale: UInt8[Tensor, "n k_blocks"]
    """E8M0: the biased exponent e of 2^(e - 127), one for 32 values along K."""


def quantize(
    weight: Float[Tensor, "n k"],
    *,
    scale: Literal["ocp", "sweep"] = "ocp",
    importance: Float32[Tensor, " k"] | None = None,
    name: str = "weight",
) -> MXFP4Tensor:
    """Round a matrix of bf16, fp16 or fp32 weights to MXFP4; `importance` weighs the columns' errors in the sweep.

    ValueError, with `name` in it: K no multiple of 32, NaN or infinity among the weights.
    """
    n, k = weight.shape
    if k % BLOCK:
        raise ValueError(f"{name} has {k} columns: MXFP4 needs a multiple of {BLOCK}; keep this layer in bf16")
    finite_amax([weight], [name])
    if weight.is_cuda:
        from qerl.formats.e2m1_cuda import mxfp4_pieces  # Triton is there where CUDA is

        return MXFP4Tensor(*mxfp4_pieces(weight, importance, scale == "sweep"))
    codes = torch.empty(n, k // 2, dtype=torch.uint8)
    scales = torch.empty(n, k // BLOCK, dtype=torch.uint8)
    rows = max(1, _PIECE // max(k, 1))
    for piece in range(0, n, rows):
        blocks = weight[piece : piece + rows].float().reshape(-1, k // BLOCK, BLOCK)
        magnitudes = blocks.abs()
        exponents = _ocp_exponents(magnitudes)
        if scale == "sweep":
            exponents = _best_exponents(magnitudes, exponents, importance)
        nibbles = e2m1_codes(blocks * _inverse(exponents))
        codes[piece : piece + rows] = pack_nibbles(nibbles.flatten(1))
        scales[piece : piece + rows] = exponents
    return MXFP4Tensor(codes, scales)


def dequantize(t: MXFP4Tensor, dtype: torch.dtype = torch.float32, *, name: str = "weight") -> Float[Tensor, "n k"]:
    """code * 2^(e - 127), exact in float32 (but infinite from 2^128 on), then one rounding to `dtype`.

    ValueError, with `name` in it: a scale is NaN.
    """
    refuse_nan(t, name)
    values = torch.tensor(E2M1_VALUES, device=t.packed.device)[unpack_nibbles(t.packed).int()]
    exponent = t.block_scale.int()
    # The bits of 2^(e - 127) as a float32: e is its exponent field, and 2^-127 a subnormal number.
    scale = torch.where(exponent > 0, exponent << 23, 1 << 22).view(torch.float32)
    return (values.view(*t.block_scale.shape, BLOCK) * scale.unsqueeze(2)).flatten(1).to(dtype)


def refuse_nan(t: MXFP4Tensor, name: str) -> None:
    """ValueError, with `name` in it, where a scale is E8M0's NaN: no quantiser writes it."""
    if (t.block_scale == E8M0_NAN).any():
        raise ValueError(f"{name} has a block scale of {E8M0_NAN}, which is NaN in E8M0: a damaged checkpoint?")


def _ocp_exponents(magnitudes: Float32[Tensor, "n b 32"]) -> Int32[Tensor, "n b"]:
    """floor(log2(amax)) - 2, biased: a float32's exponent field is floor(log2) + 127, or 0 for 0 and for subnormals."""
    return ((magnitudes.amax(2).view(torch.int32) >> 23) - _E2M1_MAX_EXPONENT).clamp(min=0)


def _inverse(exponents: Int32[Tensor, "n b"]) -> Float32[Tensor, "n b 1"]:
    """2^(127 - e), so that dividing by a scale is exact; a normal number for all e <= 252."""
    return ((254 - exponents) << 23).view(torch.float32).unsqueeze(2)


def _best_exponents(
    magnitudes: Float32[Tensor, "n b 32"], start: Int32[Tensor, "n b"], importance: Float32[Tensor, " k"] | None
) -> Int32[Tensor, "n b"]:
    """Of `start` and its neighbours, the one with the least squared error; `start` where they are no better."""
    best, least = start, torch.full(start.shape, torch.inf, device=start.device)
    for offset in _SWEEP:
        candidate = (start + offset).clamp(0, _MAX_EXPONENT)
        error = torch.ldexp(squared_error(magnitudes * _inverse(candidate), importance), 2 * (candidate - start))
        better = error < least
        best = torch.where(better, candidate, best)
        least = torch.where(better, error, least)
    return best
