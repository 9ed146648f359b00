"""Every format behind one small interface, for code that does not care which of them it has.

    format = NVFP4(), MXFP4(), NF4(), INT4() or BF16()          with the format's settings; or format_named("nvfp4")
    shared = format.share([q, k, v], names)                     what matrices of one product have in common
    codes = format.quantize(q, shared=shared, name="q")         -> dequantize(codes)

A format's own module says what its bits mean; docs/formats.md has the table of all of them. nn/load.py makes linears of
the codes (nn/linear.py), writing.py files. `Distortion` says how far codes are from the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor

from qerl.formats import int4, mxfp4, nf4, nvfp4
from qerl.formats.int4 import INT4Tensor
from qerl.formats.mxfp4 import MXFP4Tensor
from qerl.formats.nf4 import NF4Tensor
from qerl.formats.nvfp4 import NVFP4Tensor

FormatName = Literal["nvfp4", "mxfp4", "nf4", "int4", "bf16"]

PackedFormat = Literal["nvfp4", "mxfp4"]
"""Those that fused kernels take."""

PackedCodes = NVFP4Tensor | MXFP4Tensor
Codes = PackedCodes | NF4Tensor | INT4Tensor
"""A quantised matrix; one of bf16 is a plain tensor."""

Scale = Literal["sweep", "amax"]
"""Least squares over the scales nearby, or the rule that looks at the block's largest value alone."""

BLOCKS: dict[PackedFormat, int] = {"nvfp4": nvfp4.BLOCK, "mxfp4": mxfp4.BLOCK}
"""Values along K that share a scale, by format."""

_PIECE = 1 << 22  # elements at a time in `inner`: bounds the float64 temporaries


class Format(Protocol):
    """A way to store a frozen matrix [N, K]."""

    name: ClassVar[FormatName]

    @property
    def bits(self) -> float:
        """Bits a weight of a large matrix: codes, scales, zero points."""
        ...

    def fits(self, n: int, k: int) -> bool:
        """Whether a matrix [n, k] is whole blocks; what is not stays in bf16."""
        ...

    def share(self, weights: Iterable[Float[Tensor, "_ _"]], names: Sequence[str]) -> Float32[Tensor, " 1"] | None:
        """What matrices of one product share: in most formats nothing.

        `weights` may be a generator: one at a time is looked at. ValueError names one with NaN or infinity.
        """
        return None

    def quantize(
        self, weight: Float[Tensor, "n k"], *, shared: Float32[Tensor, " 1"] | None = None, name: str = "weight"
    ) -> Codes | BFloat16[Tensor, "n k"]:
        """Round a matrix of bf16, fp16 or fp32 weights.

        ValueError, with `name` in it: it does not fit, or holds NaN or infinity.
        """
        ...


@dataclass(frozen=True)
class NVFP4(Format):
    """formats/nvfp4.py; matrices of one product share the global scale."""

    name = "nvfp4"

    scale: Scale = "sweep"

    @property
    def bits(self) -> float:
        """See `Format`."""
        return 4 + 8 / nvfp4.BLOCK

    def fits(self, n: int, k: int) -> bool:
        """See `Format`."""
        return k % nvfp4.BLOCK == 0

    def share(self, weights: Iterable[Float[Tensor, "_ _"]], names: Sequence[str]) -> Float32[Tensor, " 1"]:
        """See `Format`."""
        return nvfp4.shared_global_scale(weights, names)

    def quantize(
        self,
        weight: Float[Tensor, "n k"],
        *,
        shared: Float32[Tensor, " 1"] | None = None,
        importance: Float32[Tensor, " k"] | None = None,
        name: str = "weight",
    ) -> NVFP4Tensor:
        """See `Format`; `importance` weighs the columns' errors in a sweep."""
        return nvfp4.quantize(weight, scale=self.scale, global_scale=shared, importance=importance, name=name)


@dataclass(frozen=True)
class MXFP4(Format):
    """formats/mxfp4.py."""

    name = "mxfp4"

    scale: Scale = "sweep"

    @property
    def bits(self) -> float:
        """See `Format`."""
        return 4 + 8 / mxfp4.BLOCK

    def fits(self, n: int, k: int) -> bool:
        """See `Format`."""
        return k % mxfp4.BLOCK == 0

    def quantize(
        self,
        weight: Float[Tensor, "n k"],
        *,
        shared: Float32[Tensor, " 1"] | None = None,
        importance: Float32[Tensor, " k"] | None = None,
        name: str = "weight",
    ) -> MXFP4Tensor:
        """See `Format`; `importance` weighs the columns' errors in a sweep."""
        scale = "sweep" if self.scale == "sweep" else "ocp"
        return mxfp4.quantize(weight, scale=scale, importance=importance, name=name)


@dataclass(frozen=True)
class NF4(Format):
    """formats/nf4.py."""

    name = "nf4"

    double_quant: bool = True

    @property
    def bits(self) -> float:
        """See `Format`."""
        return 4 + (8 + 32 / nf4.ABSMAX_GROUP if self.double_quant else 32) / nf4.BLOCK

    def fits(self, n: int, k: int) -> bool:
        """See `Format`."""
        return nf4.fits(n, k)

    def quantize(
        self, weight: Float[Tensor, "n k"], *, shared: Float32[Tensor, " 1"] | None = None, name: str = "weight"
    ) -> NF4Tensor:
        """See `Format`."""
        return nf4.quantize(weight, double_quant=self.double_quant, name=name)


@dataclass(frozen=True)
class INT4(Format):
    """formats/int4.py."""

    name = "int4"

    group: int = 128
    symmetric: bool = False
    scale: Scale = "sweep"

    @property
    def bits(self) -> float:
        """See `Format`."""
        return 4 + (16 if self.symmetric else 16 + 8) / self.group

    def fits(self, n: int, k: int) -> bool:
        """See `Format`."""
        return k % self.group == 0

    def quantize(
        self,
        weight: Float[Tensor, "n k"],
        *,
        shared: Float32[Tensor, " 1"] | None = None,
        importance: Float32[Tensor, " k"] | None = None,
        name: str = "weight",
    ) -> INT4Tensor:
        """See `Format`; `importance` weighs the columns' errors in a sweep."""
        return int4.quantize(
            weight,
            group=self.group,
            symmetric=self.symmetric,
            scale=self.scale,
            importance=importance,
            name=name,
        )


@dataclass(frozen=True)
class BF16(Format):
    """The baseline: the weights as they are, rounded to bf16."""

    name = "bf16"

    @property
    def bits(self) -> float:
        """See `Format`."""
        return 16.0

    def fits(self, n: int, k: int) -> bool:
        """See `Format`."""
        return True

    def quantize(
        self, weight: Float[Tensor, "n k"], *, shared: Float32[Tensor, " 1"] | None = None, name: str = "weight"
    ) -> BFloat16[Tensor, "n k"]:
        """See `Format`."""
        nvfp4.finite_amax([weight], [name])
        return weight.to(torch.bfloat16)


Swept = NVFP4 | MXFP4 | INT4
"""Those with a choice of scales, which the importance of columns can weigh: what a calibration is for."""

FourBits = NVFP4 | MXFP4 | NF4 | INT4
"""What `qerl quantize` writes."""


def format_named(
    name: FormatName,
    *,
    scale: Scale = "sweep",
    double_quant: bool = True,
    group_size: int = 128,
    symmetric: bool = False,
) -> FourBits | BF16:
    """The format of that name with those of the settings that it has; their names are those of a config's [model]."""
    match name:
        case "nvfp4":
            return NVFP4(scale)
        case "mxfp4":
            return MXFP4(scale)
        case "nf4":
            return NF4(double_quant)
        case "int4":
            return INT4(group_size, symmetric, scale)
        case "bf16":
            return BF16()


def dequantize(
    codes: Codes | BFloat16[Tensor, "n k"], dtype: torch.dtype = torch.float32, *, name: str = "weight"
) -> Float[Tensor, "n k"]:
    """The values that codes stand for, computed in float32 and rounded once. ValueError: a scale that is NaN."""
    match codes:
        case NVFP4Tensor():
            return nvfp4.dequantize(codes, dtype)
        case MXFP4Tensor():
            return mxfp4.dequantize(codes, dtype, name=name)
        case NF4Tensor():
            return nf4.dequantize(codes, dtype)
        case INT4Tensor():
            return int4.dequantize(codes, dtype)
        case Tensor():
            return codes.to(dtype)


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


def distortion(weight: Float[Tensor, "*shape"], approximation: Float[Tensor, "*shape"]) -> Distortion:
    """sum w^2 and sum (a - w)^2."""
    error = approximation.float() - weight.float()
    return Distortion(inner(weight, weight), inner(error, error))


def inner(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> float:
    """sum a b, in float64."""
    rows = max(1, _PIECE * len(a) // max(a.numel(), 1))
    return sum((a[i : i + rows].double() * b[i : i + rows].double()).sum().item() for i in range(0, len(a), rows))
