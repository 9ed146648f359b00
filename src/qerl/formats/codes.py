"""The packed formats behind one small interface, for code that does not care which of them it has.

    quantize(w, "mxfp4", shared=shared_scale([w, ...], ...))  ->  NVFP4Tensor or MXFP4Tensor  ->  dequantize

A format's own module says what its bits mean. Matrices that become one product share what `shared_scale` gives: a
global scale in NVFP4, nothing in MXFP4. `Distortion` says how far codes are from the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from qerl.formats import mxfp4, nvfp4
from qerl.formats.mxfp4 import MXFP4Tensor
from qerl.formats.nvfp4 import NVFP4Tensor

PackedFormat = Literal["nvfp4", "mxfp4"]
Codes = NVFP4Tensor | MXFP4Tensor

BLOCKS: dict[PackedFormat, int] = {"nvfp4": nvfp4.BLOCK, "mxfp4": mxfp4.BLOCK}
"""Values along K that share a scale, by format."""

_PIECE = 1 << 22  # elements at a time in `inner`: bounds the float64 temporaries


def shared_scale(
    weights: Iterable[Float[Tensor, "_ _"]], names: Sequence[str], format: PackedFormat
) -> Float32[Tensor, " 1"] | None:
    """What matrices of one product share. `weights` may be a generator: one at a time is looked at."""
    return nvfp4.shared_global_scale(weights, names) if format == "nvfp4" else None


def quantize(
    weight: Float[Tensor, "n k"],
    format: PackedFormat,
    *,
    scale: Literal["sweep", "amax"] = "sweep",
    shared: Float32[Tensor, " 1"] | None = None,
    name: str = "weight",
) -> Codes:
    """Round a matrix to a format; `scale` is least squares, or the rule that looks at the block's largest value alone.

    ValueError, with `name` in it: K no multiple of the block, NaN or infinity among the weights.
    """
    if format == "nvfp4":
        return nvfp4.quantize(weight, scale=scale, global_scale=shared, name=name)
    return mxfp4.quantize(weight, scale="sweep" if scale == "sweep" else "ocp", name=name)


def dequantize(codes: Codes, dtype: torch.dtype = torch.float32, *, name: str = "weight") -> Float[Tensor, "n k"]:
    """The values that codes stand for, computed in float32 and rounded once. ValueError: a scale that is NaN."""
    if isinstance(codes, NVFP4Tensor):
        return nvfp4.dequantize(codes, dtype)
    return mxfp4.dequantize(codes, dtype, name=name)


class Distortion(NamedTuple):
    """Squared sums over a weight matrix and over what an approximation of it is off by. They add up over matrices."""

    signal: float
    noise: float

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise); infinite where the approximation is exact."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    def __add__(self, other: tuple[float, ...]) -> Distortion:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Both sums."""
        return Distortion(self.signal + other[0], self.noise + other[1])


def distortion(weight: Float[Tensor, "n k"], approximation: Float[Tensor, "n k"]) -> Distortion:
    """sum w^2 and sum (a - w)^2."""
    error = approximation.float() - weight.float()
    return Distortion(inner(weight, weight), inner(error, error))


def inner(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> float:
    """sum a b, in float64."""
    rows = max(1, _PIECE * len(a) // max(a.numel(), 1))
    return sum((a[i : i + rows].double() * b[i : i + rows].double()).sum().item() for i in range(0, len(a), rows))
