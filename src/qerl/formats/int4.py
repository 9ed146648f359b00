"""INT4: sixteen equal steps, a scale and (unless symmetric) a zero point for each group.

Pure PyTorch, any device; where Triton is too, a GPU quantises by int4_cuda.py's kernel.

A weight matrix [N, K] is cut along K into groups of 32, 64 or 128 values. A weight is

    w = (code - zero_point) * scale                               code, zero_point in 0 .. 15; scale in bf16

    asymmetric    scale = (max - min) / 15,  zero_point = round(-min / scale)     max >= 0 >= min, so that 0 is exact
    symmetric     scale = max |w| / 7.5,     zero_point = 8, not stored           the largest positive value is clipped

    bits a weight (group 128)     asymmetric 4 + (16 + 8) / 128 = 4.19        symmetric 4 + 16 / 128 = 4.13

`quantize` rounds w / scale + zero_point to the nearest code, a tie to the even one. `sweep` tries smaller and larger
scales, which clip the outermost values or leave room beyond them, and keeps that of the least squared error; with
`importance`, each column's squared error is weighted by it.

Contract: K is a multiple of the group; results are equal on every device; an all-zero group gives exact zeros. The
rules are those of compressed-tensors' group strategy (whose codes count from -8); all is computed in float32, and the
scale is rounded before it is used. Its product with a code has up to 12 significant bits, so a bf16 matrix of them is
rounded. compressed-tensors' folders are coded_files.py's business.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from jaxtyping import BFloat16, Complex64, Float, Float32, UInt8
from torch import Tensor

from qerl.formats.nvfp4 import divide, finite_amax, pack_nibbles, sum_by_halves

GROUPS = (32, 64, 128)
"""Values along K that may share a scale."""

_MAX_CODE = 15
_SYMMETRIC_ZERO = 8

_SWEEP = range(18, 42)  # 32nds of the scale that the sweep tries

# Weights worked on at a time: a few float32 temporaries of this size stay in a core's (a GPU's) second-level cache.
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 22}


class INT4Tensor(NamedTuple):
    """A quantised matrix [N, K]."""

    packed: UInt8[Tensor, "n k_half"]
    """Two codes a byte: the low nibble is the even k."""
    scale: BFloat16[Tensor, "n groups"]
    """The step of each group along K."""
    zero_point: UInt8[Tensor, "n groups"] | None
    """The code that stands for 0; None in a symmetric matrix, where it is 8."""


def quantize(
    weight: Float[Tensor, "n k"],
    *,
    group: int = 128,
    symmetric: bool = False,
    scale: Literal["sweep", "amax"] = "sweep",
    importance: Float32[Tensor, " k"] | None = None,
    name: str = "weight",
) -> INT4Tensor:
    """Round a matrix of bf16, fp16 or fp32 weights to INT4; `importance` weighs the columns' errors in the sweep.

    ValueError, with `name` in it: an unknown group size, K no multiple of it, NaN or infinity among the weights.
    """
    n, k = weight.shape
    if group not in GROUPS:
        raise ValueError(f"{name}: INT4 has groups of {', '.join(map(str, GROUPS))}, not {group}")
    if k % group:
        raise ValueError(f"{name} has {k} columns: INT4 needs a multiple of its group of {group}; keep it in bf16")
    finite_amax([weight], [name])
    if weight.is_cuda and find_spec("triton") is not None:
        from qerl.formats.int4_cuda import int4_pieces

        tried = _SWEEP if scale == "sweep" else range(0)
        return INT4Tensor(*int4_pieces(weight, importance, group, symmetric, tried.start, tried.stop))
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // group, dtype=torch.bfloat16, device=weight.device)
    zeros = None if symmetric else torch.empty(n, k // group, dtype=torch.uint8, device=weight.device)
    rows = max(1, _PIECE.get(weight.device.type, _PIECE["cpu"]) // max(k, 1))
    for piece in range(0, n, rows):
        groups = weight[piece : piece + rows].float().reshape(-1, k // group, group)
        low, step = _range(groups, symmetric)
        best = _grid(low, step, symmetric)
        if scale == "sweep":
            best = _best(groups, low, step, symmetric, best, importance)
        packed[piece : piece + rows] = pack_nibbles(_codes(groups, best).to(torch.uint8).flatten(1))
        scales[piece : piece + rows] = best.scale
        if zeros is not None:
            zeros[piece : piece + rows] = best.zero.to(torch.uint8)
    return INT4Tensor(packed, scales, zeros)


def dequantize(
    t: INT4Tensor, dtype: torch.dtype = torch.float32, *, out: Float[Tensor, "n k"] | None = None
) -> Float[Tensor, "n k"]:
    """(code - zero_point) * scale in float32, rounded once to `dtype`, or to that of `out`."""
    n, half = t.packed.shape
    if out is None:
        out = torch.empty(n, 2 * half, dtype=dtype, device=t.packed.device)
    groups, table = t.scale.shape[1], _pair_values(t.packed.device)
    rows = max(1, _PIECE.get(t.packed.device.type, _PIECE["cpu"]) // max(2 * half, 1))
    for piece in range(0, n, rows):
        part = slice(piece, piece + rows)
        pairs = table.index_select(0, t.packed[part].flatten().int())
        codes = pairs.view(torch.float32).view(-1, groups, 2 * half // groups)
        codes -= _SYMMETRIC_ZERO if t.zero_point is None else t.zero_point[part, :, None]
        torch.mul(codes, t.scale[part, :, None].float(), out=out[part].view(codes.shape))
    return out


class _Grid(NamedTuple):
    """What the codes of groups stand for."""

    scale: BFloat16[Tensor, "n g"]
    zero: Float32[Tensor, "n g"]


def _range(
    groups: Float32[Tensor, "n g group"], symmetric: bool
) -> tuple[Float32[Tensor, "n g"], Float32[Tensor, "n g"]]:
    """The value that code 0 stands for, and the step between codes."""
    low, high = groups.aminmax(dim=2)
    if symmetric:
        high = torch.maximum(high, -low)
        return -high, divide(high, _MAX_CODE / 2)
    low, high = low.clamp(max=0), high.clamp(min=0)
    return low, divide(high, _MAX_CODE) - divide(low, _MAX_CODE)  # high - low may be more than float32 holds


def _grid(low: Float32[Tensor, "n g"], step: Float32[Tensor, "n g"], symmetric: bool) -> _Grid:
    scale = step.to(torch.bfloat16)
    scale = torch.where(scale > 0, scale, 1)  # all zero, or too small for any step
    zero = torch.full_like(low, _SYMMETRIC_ZERO) if symmetric else (-low / scale.float()).round().clamp(0, _MAX_CODE)
    return _Grid(scale, zero)


def _codes(groups: Float32[Tensor, "n g group"], grid: _Grid) -> Float32[Tensor, "n g group"]:
    """The nearest codes, still in float32."""
    # A quotient and a sum, each rounded: the factor of 1 between them makes a fused multiply-add no other.
    codes = torch.addcdiv(grid.zero.unsqueeze(2), groups, grid.scale.float().unsqueeze(2))
    return codes.round_().clamp_(0, _MAX_CODE)


def _best(
    groups: Float32[Tensor, "n g group"],
    low: Float32[Tensor, "n g"],
    step: Float32[Tensor, "n g"],
    symmetric: bool,
    start: _Grid,
    importance: Float32[Tensor, " k"] | None,
) -> _Grid:
    """Of `start` and of scales around its own, the one with the least squared error; `start` where none is better."""
    best, least = start, _squared_error(groups, start, importance)
    for factor in (i / 32 for i in _SWEEP if i != 32):  # 1 is `start`
        candidate = _grid(low * factor, step * factor, symmetric)
        error = _squared_error(groups, candidate, importance)
        better = error < least
        least = torch.where(better, error, least)
        best = _Grid(*(torch.where(better, new, old) for new, old in zip(candidate, best, strict=True)))
    return best


def _squared_error(
    groups: Float32[Tensor, "n g group"], grid: _Grid, importance: Float32[Tensor, " k"] | None
) -> Float32[Tensor, "n g"]:
    error = _codes(groups, grid).sub_(grid.zero.unsqueeze(2)).mul_(grid.scale.float().unsqueeze(2))
    error = error.sub_(groups).square_()  # in place: the time goes into reading and writing
    if importance is not None:
        error *= importance.view(error.shape[1:])
    return sum_by_halves(error)


@cache
def _pair_values(device: torch.device) -> Complex64[Tensor, " 256"]:
    """The two codes of each byte as float32, as one 8-byte element: looked up in half of the time."""
    byte = torch.arange(256)
    return torch.view_as_complex(torch.stack((byte & 15, byte >> 4), 1).float()).to(device)
