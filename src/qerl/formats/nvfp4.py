"""NVFP4: what its bits mean, and the two ways to choose a block's scale. Pure PyTorch; on a GPU, e2m1_cuda.py.

A weight matrix [N, K] is cut along K into blocks of 16 values. A weight is

    w = e2m1(code) * block_scale * global_scale

with a 4-bit code, one E4M3 scale for each block and one float32 scale for the tensor (or for each output row):
4.5 bits a weight. Every product e2m1 * block_scale has at most six significant bits, so it is exact in bf16.

`quantize` takes global_scale = 2^ceil(log2(amax(tensor) / (6 * 448))): the smallest power of two under which every
block's scale is an E4M3 number. So a weight is exact in bf16 too, in whatever order others multiply or divide.
Then for each block either

    amax    block_scale = e4m3(amax(block) / 6 / global_scale): the largest value lands on 6
    sweep   the E4M3 code near that one with the least squared error over the block (data-free, 21-27 % less weight MSE)
            with `importance`, each column's squared error is weighted by it

Contract: K is a multiple of 16; codes and scales are deterministic and equal on every device; rows are worked through
in pieces, so that memory beyond the result is a few MB. docs/nvfp4.md draws the bits and works
a block by hand.
Files are formats/checkpoint.py's and writing.py's business, the order of bytes in memory kernels/layout.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, UInt8
from torch import Tensor

BLOCK = 16
"""Values along K that share a scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code: sign, two exponent bits, one mantissa bit. Code 8 is -0 and decodes as 0."""

E2M1_MAX = 6.0  # largest E2M1 value
E4M3_MAX = 448.0  # largest E4M3 value; torch's cast turns what lies above into NaN
E4M3_MAX_CODE = 126  # its code; 127 is NaN
MIN_GLOBAL_SCALE = 2.0**-117  # times 2^-9, the smallest E4M3 value, this is the smallest normal float32

# A magnitude's code is the number of these thresholds that it reaches. They are the midpoints between neighbouring
# values; a tie goes to the even code, so the midpoint itself counts where the upper code is even.
_REACHED_AT = (0.75, 1.75, 3.5)  # midpoints below codes 2, 4, 6
_REACHED_ABOVE = (0.25, 1.25, 2.5, 5.0)  # midpoints below codes 1, 3, 5, 7

# E4M3 codes that the sweep tries, counted from amax's own. Eight codes are a factor of two. On Gaussian, Laplace,
# Student-t and uniform blocks and on layers of Qwen2.5 the best of all 126 was never more than 3 below or 7 above. (A
# block of few distinct values may have a better one farther up; the one chosen is still no worse than amax's.)
SWEEP = range(-4, 9)

_PIECE = 1 << 16  # weights worked on at a time: a few float32 temporaries of this size stay in a core's L2 cache


class NVFP4Tensor(NamedTuple):
    """A quantised matrix [N, K] in the order that files use."""

    packed: UInt8[Tensor, "n k_half"]
    """Two codes a byte: the low nibble is the even k."""
    block_scale: Float8e4m3fn[Tensor, "n k_blocks"]
    """One E4M3 scale for 16 values along K."""
    global_scale: Float32[Tensor, " one_or_n"]
    """[1], or [N] with one value an output row. It multiplies (some files store its inverse)."""


def quantize(
    weight: Float[Tensor, "n k"],
    *,
    scale: Literal["sweep", "amax"] = "sweep",
    global_scale: Float32[Tensor, " 1"] | None = None,
    importance: Float32[Tensor, " k"] | None = None,
    name: str = "weight",
) -> NVFP4Tensor:
    """Round a matrix of bf16, fp16 or fp32 weights to NVFP4.

    `global_scale` is given where several matrices share one (see `shared_global_scale`); by default it comes from this
    matrix alone. `importance` weighs the columns' squared errors in the sweep: the mean squares of the inputs that they
    multiply. All-zero blocks and matrices come back as exact zeros.
    ValueError, with `name` in it: K no multiple of 16, NaN or infinity among the weights.
    """
    n, k = weight.shape
    if k % BLOCK:
        raise ValueError(f"{name} has {k} columns: NVFP4 needs a multiple of {BLOCK}; keep this layer in bf16")
    if global_scale is None:
        global_scale = shared_global_scale([weight], [name])
    else:
        finite_amax([weight], [name])
    if weight.is_cuda:
        from qerl.formats.e2m1_cuda import nvfp4_pieces  # Triton is there where CUDA is

        tried = SWEEP if scale == "sweep" else range(0)
        codes, scales = nvfp4_pieces(weight, global_scale, importance, tried.start, tried.stop)
        return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), global_scale)
    codes = torch.empty(n, k // 2, dtype=torch.uint8)
    scales = torch.empty(n, k // BLOCK, dtype=torch.uint8)
    rows = max(1, _PIECE // max(k, 1))
    for piece in range(0, n, rows):
        blocks = weight[piece : piece + rows].float().reshape(-1, k // BLOCK, BLOCK)
        magnitudes = blocks.abs()
        scale_codes = _amax_scale_codes(magnitudes, global_scale)
        if scale == "sweep":
            scale_codes = _best_scale_codes(magnitudes, scale_codes, global_scale, importance)
        step = _e4m3_values(scale_codes) * global_scale
        nibbles = e2m1_codes(blocks / torch.where(step > 0, step, 1.0).unsqueeze(2))
        codes[piece : piece + rows] = pack_nibbles(nibbles.flatten(1))
        scales[piece : piece + rows] = scale_codes
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), global_scale)


def shared_global_scale(weights: Iterable[Float[Tensor, "_ _"]], names: Sequence[str]) -> Float32[Tensor, " 1"]:
    """The global scale of matrices that become one product, from the amax over all of them.

    `weights` may be a generator: one at a time is looked at. ValueError names the matrix that holds a NaN or an
    infinity.
    """
    return global_scale_of(finite_amax(weights, names))


def global_scale_of(amax: Float32[Tensor, ""]) -> Float32[Tensor, " 1"]:
    """The smallest power of two that is at least amax / (6 * 448); 1 where amax is 0.

    The quotient itself would lift the largest block's scale to 448, and leave the smallest blocks up to an octave more
    of E4M3: 0.03 % of the squared error of Qwen2.5-Coder-0.5B. A power of two keeps weights exact in bf16, and its
    inverse, which files store, exact too.
    """
    # PAPER: QeRL, as NVIDIA's own recipes, takes the quotient.
    quotient = divide(amax.reshape(1), E2M1_MAX * E4M3_MAX).clamp(min=MIN_GLOBAL_SCALE)
    exponent = (quotient.view(torch.int32) + 0x7FFFFF) & 0x7F800000  # rounded up to the next float32 without mantissa
    return torch.where(amax > 0, exponent.view(torch.float32), 1.0)


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n k"]:
    """code * block_scale * global_scale, in float32 and in this order, then one rounding to `dtype`.

    Nothing is rounded in float32 or bf16 where `quantize` chose the global scale; others choose ones that round.
    """
    values = torch.tensor(E2M1_VALUES, device=t.packed.device)[unpack_nibbles(t.packed).int()]
    scaled = values.view(*t.block_scale.shape, BLOCK) * t.block_scale.float().unsqueeze(2)
    return (scaled.flatten(1) * t.global_scale.unsqueeze(1)).to(dtype)


def e2m1_codes(values: Float32[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Nearest E2M1 code of each value: ties to the even code, magnitudes above 5 to 6; the sign is kept on a zero."""
    magnitudes = values.abs()
    codes = (values < 0).to(torch.uint8) << 3
    for threshold in _REACHED_AT:
        codes += magnitudes >= threshold
    for threshold in _REACHED_ABOVE:
        codes += magnitudes > threshold
    return codes


def finite_amax(weights: Iterable[Float[Tensor, ...]], names: Sequence[str]) -> Float32[Tensor, ""]:
    """The largest magnitude over all tensors; ValueError names one with a NaN or an infinity."""
    each = [torch.stack(w.aminmax()).abs().amax().float() for w in weights]
    for amax, name in zip(each, names, strict=True):
        if not amax.isfinite():
            raise ValueError(f"{name} contains {'NaN' if amax.isnan() else 'an infinity'}: a damaged checkpoint?")
    return torch.stack(each).amax()


def divide(x: Float32[Tensor, "*shape"], divisor: float) -> Float32[Tensor, "*shape"]:
    """x / divisor, rounded to nearest on every device: on a GPU, torch's x / number is x times the number's inverse."""
    return x / torch.full((), divisor, device=x.device)


def pack_nibbles(codes: UInt8[Tensor, "n k"]) -> UInt8[Tensor, "n k_half"]:
    """Two codes a byte, the even k in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: UInt8[Tensor, "n k_half"]) -> UInt8[Tensor, "n k"]:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def squared_error(
    y: Float32[Tensor, "n b block"], importance: Float32[Tensor, " k"] | None = None
) -> Float32[Tensor, "n b"]:
    """Sum over the block of importance * (y - nearest E2M1 magnitude)^2, for y >= 0; k = b * block.

    E2M1 has steps of 0.5 below 2, of 1 below 4 and of 2 up to 6: half of 2^floor(log2 y), y held within [1, 6]. Adding
    and taking away 1.5 * 2^23 steps rounds to a multiple of a step. (A tie may round either way: same error.)
    """
    top = y.clamp(max=E2M1_MAX)
    power = top.clamp(min=1.0).view(torch.int32) & 0x7F800000  # bits of 1, 2 or 4
    shift = (power + ((22 << 23) | (1 << 22))).view(torch.float32)  # power * 2^22 * 1.5 = step * 2^23 * 1.5
    error = top.add_(shift).sub_(shift).sub_(y).square_()
    if importance is not None:
        error *= importance.view(error.shape[1:])
    return sum_by_halves(error)


def sum_by_halves(x: Float32[Tensor, "n b block"]) -> Float32[Tensor, "n b"]:
    """Sum over a block, a power of two, in a fixed order: so every device chooses the same codes."""
    while (size := x.shape[2]) > 1:
        x = x[..., : size // 2] + x[..., size // 2 :]
    return x.squeeze(2)


def _e4m3_values(codes: UInt8[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    return codes.view(torch.float8_e4m3fn).float()


def _amax_scale_codes(
    magnitudes: Float32[Tensor, "n b 16"], global_scale: Float32[Tensor, " 1"]
) -> UInt8[Tensor, "n b"]:
    """E4M3 codes of amax(block) / 6 / global_scale: at most 448, and at least 2^-9 (code 1) unless all values are 0."""
    amax = magnitudes.amax(2)
    codes = (amax / E2M1_MAX / global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.maximum(codes, (amax > 0).to(torch.uint8))


def _best_scale_codes(
    magnitudes: Float32[Tensor, "n b 16"],
    start: UInt8[Tensor, "n b"],
    global_scale: Float32[Tensor, " 1"],
    importance: Float32[Tensor, " k"] | None,
) -> UInt8[Tensor, "n b"]:
    """Of the E4M3 codes around `start`, the one with the least squared error; the smallest of equals; 0 stays 0."""
    best, least = start.clone(), torch.full(start.shape, torch.inf, device=start.device)
    for offset in SWEEP:
        candidate = (start.int() + offset).clamp(1, E4M3_MAX_CODE).to(torch.uint8)
        value = _e4m3_values(candidate)
        error = squared_error(magnitudes / (value * global_scale).unsqueeze(2), importance) * value.square()
        better = error < least
        best = torch.where(better, candidate, best)
        least = torch.where(better, error, least)
    return torch.where(start > 0, best, start)
