"""NF4: 16 levels at the quantiles of a normal distribution, as QLoRA (arXiv 2305.14314) and bitsandbytes have it.

A weight matrix [N, K] is read row by row as one list of numbers, which is cut into blocks of 64. A weight is

    w = NF4_VALUES[code] * absmax                                 absmax: the block's largest magnitude, float32

With double quantization the maxima are quantised too, in groups of 256 of them, to an 8-bit table of both signs whose
steps grow with the magnitude (`dynamic_values`; arXiv 1511.04561):

    absmax = dynamic_values()[absmax_code] * absmax_scale + offset          offset: the mean of the matrix's maxima

    bits a weight     4 + 32/64 = 4.5          double quantization: 4 + 8/64 + 32/(64 * 256) = 4.127

Bit for bit what bitsandbytes makes of a matrix: the high nibble of a byte is the even k (in all other formats here it
is the low one), w / absmax is computed as w * (1 / absmax), a tie goes to the lower code, values are multiplied in
float32 and rounded once. (Its CPU kernel takes the second nearest of the 256 values for some 0.2 % of the maxima; here
it is the nearest.)

Contract: N * K is a multiple of 64 and K is even, so blocks may go on into the next row; an all-zero block gives exact
zeros. Equal on every device but for `offset`, a sum whose order is the device's. There is no choice of scales: the
levels are made for the largest value. bitsandbytes' folders are coded_files.py's business.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Complex64, Float, Float32, UInt8
from torch import Tensor

from qerl.formats.nvfp4 import finite_amax

BLOCK = 64
"""Values that share an absmax."""

ABSMAX_GROUP = 256
"""Maxima that share a scale under double quantization."""

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The value of each code (arXiv 2305.14314, appendix E): 8 levels up to 0, 9 from 0 on, outermost at 1."""

_TINY = 1e-38  # what a smaller absmax is taken for when dividing; its inverse is finite

# Weights worked on at a time: a few float32 temporaries of this size stay in a core's (a GPU's) second-level cache.
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 23}


class NF4Tensor(NamedTuple):
    """A quantised matrix [N, K] in bitsandbytes' order."""

    packed: UInt8[Tensor, "n k_half"]
    """Two codes a byte: the high nibble is the even k."""
    absmax: Float32[Tensor, " blocks"] | UInt8[Tensor, " blocks"]
    """Each block's largest magnitude; its 8-bit code under double quantization."""
    absmax_scale: Float32[Tensor, " groups"] | None = None
    """Under double quantization, what 1 in the table of a group of 256 codes stands for."""
    offset: Float32[Tensor, " 1"] | None = None
    """Under double quantization, what is added to every decoded maximum."""


def quantize(weight: Float[Tensor, "n k"], *, double_quant: bool = True, name: str = "weight") -> NF4Tensor:
    """Round a matrix of bf16, fp16 or fp32 weights to NF4.

    ValueError, with `name` in it: K odd or N * K no multiple of 64, NaN or infinity among the weights.
    """
    n, k = weight.shape
    if not fits(n, k):
        raise ValueError(
            f"{name} is {n} x {k}: NF4 needs an even K and a multiple of {BLOCK} weights; keep this layer in bf16"
        )
    finite_amax([weight], [name])
    bounds = _midpoints(torch.tensor(NF4_VALUES, device=weight.device))
    flat = weight.reshape(-1)
    packed = torch.empty(n * k // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(n * k // BLOCK, device=weight.device)
    size = _PIECE.get(weight.device.type, _PIECE["cpu"])
    for start in range(0, n * k, size):
        blocks = flat[start : start + size].float().view(-1, BLOCK)
        codes, largest = _nearest(blocks, bounds)
        absmax[start // BLOCK : (start + size) // BLOCK] = largest
        pairs = codes.view(-1, 2)
        packed[start // 2 : (start + size) // 2] = pairs[:, 0] << 4 | pairs[:, 1]
    packed = packed.view(n, k // 2)
    if not double_quant:
        return NF4Tensor(packed, absmax)
    offset = absmax.mean().reshape(1)
    centred = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % ABSMAX_GROUP))
    codes, scale = _nearest(centred.view(-1, ABSMAX_GROUP), _midpoints(dynamic_values().to(weight.device)))
    return NF4Tensor(packed, codes.flatten()[: absmax.numel()].clone(), scale, offset)


def dequantize(
    t: NF4Tensor, dtype: torch.dtype = torch.float32, *, out: Float[Tensor, "n k"] | None = None
) -> Float[Tensor, "n k"]:
    """NF4_VALUES[code] * absmax in float32, rounded once to `dtype`, or to that of `out`, which must be contiguous."""
    n, half = t.packed.shape
    if out is None:
        out = torch.empty(n, 2 * half, dtype=dtype, device=t.packed.device)
    absmax, table = maxima(t), _pair_values(t.packed.device)
    packed, blocks = t.packed.view(-1), out.view(-1, BLOCK)
    size = _PIECE.get(t.packed.device.type, _PIECE["cpu"]) // BLOCK
    for start in range(0, len(blocks), size):
        stop = start + size
        pairs = table.index_select(0, packed[start * BLOCK // 2 : stop * BLOCK // 2].int())
        torch.mul(pairs.view(torch.float32).view(-1, BLOCK), absmax[start:stop, None], out=blocks[start:stop])
    return out


def maxima(t: NF4Tensor) -> Float32[Tensor, " blocks"]:
    """Each block's absmax, as the values are scaled by."""
    if t.absmax_scale is None or t.offset is None:
        return t.absmax
    values = dynamic_values_on(t.absmax.device)[t.absmax.int()]
    return values * t.absmax_scale.repeat_interleave(ABSMAX_GROUP)[: values.numel()] + t.offset


def fits(n: int, k: int) -> bool:
    """Whether a matrix [n, k] is whole bytes a row and whole blocks."""
    return k % 2 == 0 and n * k % BLOCK == 0


@cache
def dynamic_values() -> Float32[Tensor, " 256"]:
    """The 8-bit table for the maxima, ascending, on the host: 0, 1, and 127 magnitudes of either sign.

    Between 10^(d-1) and 10^d, d = -6 .. 0, lie 2^(d+6) of them: the centres of equal intervals of [0.1, 1], times 10^d.
    """
    magnitudes: list[Tensor] = []
    for d in range(-6, 1):
        edges = torch.linspace(0.1, 1, 2 ** (d + 6) + 1)
        magnitudes.append((edges[:-1] + edges[1:]) / 2 * 10.0**d)
    positive = torch.cat(magnitudes)
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values


@cache
def dynamic_values_on(device: torch.device) -> Float32[Tensor, " 256"]:
    """Copied once: a CUDA graph cannot copy from the host."""
    return dynamic_values().to(device)


def _midpoints(values: Float32[Tensor, " v"]) -> Float32[Tensor, " v_less_1"]:
    return (values[:-1] + values[1:]) / 2


def _nearest(
    blocks: Float32[Tensor, "b size"], bounds: Float32[Tensor, " v_less_1"]
) -> tuple[UInt8[Tensor, "b size"], Float32[Tensor, " b"]]:
    """Codes of the nearest values, a tie to the lower, and the largest magnitude of each block, which stands for 1."""
    largest = blocks.abs().amax(1)
    scaled = (blocks * (1 / largest.clamp(min=_TINY)).unsqueeze(1)).clamp(-1, 1)
    return torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8), largest


@cache
def _pair_values(device: torch.device) -> Complex64[Tensor, " 256"]:
    """The two values of each byte, as one 8-byte element: looked up in half of the time."""
    byte = torch.arange(256)
    values = torch.tensor(NF4_VALUES)[torch.stack((byte >> 4, byte & 15), 1)]
    return torch.view_as_complex(values).to(device)
