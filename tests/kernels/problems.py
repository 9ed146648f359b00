"""Weights, adapters and activations for the tests of the products, and what a result must be."""

from collections.abc import Callable

import torch

from qerl.formats.nvfp4 import BLOCK, quantize
from qerl.kernels.adapter import PackedAdapter, pack_adapter
from qerl.kernels.layout import PackedWeight, pack

TOLERANCE = 2e-3
"""Relative, of a whole result: rounding it to bf16 makes 1.7e-3 of it."""


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers, few enough that float32 sums of their products are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def random_weight(rows: tuple[int, ...], k: int, device: str = "cpu") -> PackedWeight:
    """A part for each number of rows, with a global scale of its own."""
    return pack([quantize(draw(n, k, seed=n + i).to(device)) for i, n in enumerate(rows)])


def random_adapter(weight: PackedWeight, rank: int) -> PackedAdapter:
    """Every part but the second has factors. In whatever order u is summed, of `whole` activations, it is the same."""
    k = weight.columns
    factors = [
        None if i == 1 else (whole(rank, k, seed=i) / 32, draw(p.rows, rank, seed=i + 9), 0.5 + i)
        for i, p in enumerate(weight.parts)
    ]
    return pack_adapter(weight, factors)


ADVERSARIAL = ["subnormal scales", "largest scales", "blocks of zeros", "all six", "outliers in x"]


def adversarial(name: str, m: int, n: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, PackedWeight]:
    """Activations and a weight."""
    values = draw(n, k).to(device)
    x, t = draw(m, k, seed=m).to(device).bfloat16(), quantize(values)
    scale = t.block_scale.view(torch.uint8).clone()
    if name == "subnormal scales":
        scale = (torch.arange(scale.numel(), device=device) % 8).view(scale.shape).to(torch.uint8)
    if name == "largest scales":
        scale.fill_(0x7E)
    if name == "blocks of zeros":
        packed = t.packed.clone().view(n, k // BLOCK, BLOCK // 2)
        packed[:, ::2] = 0
        scale[:, ::2] = 0
        t = t._replace(packed=packed.view(n, -1))
    if name == "all six":
        t = t._replace(packed=torch.where(values[:, ::2] > 0, 0x7F, 0xF7).to(torch.uint8))
    if name == "outliers in x":
        x[:, ::97] *= 1e4
    return x, pack([t._replace(block_scale=scale.view(torch.float8_e4m3fn))])


def check(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    adapter: PackedAdapter | None = None,
) -> None:
    """y is x W^T + bias + u B^T in float64, but for one rounding of the result and float32's of the sums."""
    dense, scale = weight.dequantize(torch.float64)
    expected = x.double() @ dense.T * scale.double()
    magnitude = x.double().abs() @ dense.abs().T * scale.double()
    if bias is not None:
        expected += bias.double()
        magnitude += bias.double().abs()
    if adapter is not None:
        rows = [p.rows for p in weight.parts]
        for i, (columns, sizes) in enumerate(zip(expected.split(rows, 1), magnitude.split(rows, 1), strict=True)):
            a, b = adapter.a[i, :, : x.shape[1]].double(), adapter.part_b(weight.parts[i]).double()
            u = (adapter.scaling[i].double() * (x.double() @ a.T)).bfloat16().double()
            columns += u @ b.T
            sizes += u.abs() @ b.abs().T
    assert y.shape == expected.shape and y.dtype == torch.bfloat16
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 4e-6 * magnitude).all()
    rounding = relative_error(expected.bfloat16(), expected)  # a result of a few numbers may be unlucky
    assert relative_error(y, expected) <= max(TOLERANCE, 1.01 * rounding)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def empty_is_nan(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.empty with memory as bad as it can be: what nobody has written is NaN, in every dtype."""

    def empty_with_nan(*size: int, **more: object) -> torch.Tensor:
        out = empty(*size, **more)
        return out.fill_(torch.nan) if out.is_floating_point() else out.fill_(255 if out.dtype == torch.uint8 else 0)

    return empty_with_nan
