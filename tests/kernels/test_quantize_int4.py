"""The quantising kernel gives the bits of formats/int4.py on a CPU: every group size and rule, extremes, odd sizes."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.formats import int4

RULES = ["amax", "sweep", "weighted"]


def weights(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Groups over forty octaves, of zeros, of one sign, of ties, below any step, and as wide as float32."""
    torch.manual_seed(n)
    weight = torch.randn(n, k) * torch.linspace(-25, 15, n * k // 32).exp2().repeat_interleave(32).view(n, k)
    weight[0, :128] = 0
    weight[1, :128] = weight[1, :128].abs()
    weight[2, :128] = -weight[2, :128].abs()
    weight[3, :128] = torch.tensor([15.0, *torch.arange(-7.5, 7.5, 0.5), -7.5]).repeat(4)
    # Steps that are subnormal; the weights are not, since the interpreter misreads such bf16 numbers.
    weight[4, :128] = torch.linspace(1.2e-38, 8e-38, 128) * torch.tensor([1.0, -1.0]).repeat(64)
    weight[5, :128] = 1e-45  # no bf16 number is as small as its step; 0 but in float32
    weight[6, :128] = torch.linspace(-1, 1, 128) * 3.3e38
    weight[7, :128] = 0
    weight[7, 0] = 1.2e21  # off by too much for float32 to hold the square, under the first scale and not under all
    return (weight.clamp(-6e4, 6e4) if dtype == torch.float16 else weight).to(dtype)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", int4.GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bits_are_the_references(dtype, group, symmetric, rule, device):
    from qerl.formats.int4_cuda import int4_pieces

    weight = weights(11, 384, dtype)
    importance = None
    if rule == "weighted":
        importance = torch.rand(384).exp() ** 4
        importance[0] = 0  # which makes NaN of an error without bound
    expected = int4.quantize(
        weight, group=group, symmetric=symmetric, scale="amax" if rule == "amax" else "sweep", importance=importance
    )
    first, last = (0, 0) if rule == "amax" else (int4._SWEEP.start, int4._SWEEP.stop)
    on_device = None if importance is None else importance.to(device)
    codes, scales, zeros = int4_pieces(weight.to(device), on_device, group, symmetric, first, last)
    assert torch.equal(scales.cpu(), expected.scale)
    assert torch.equal(codes.cpu(), expected.packed)
    assert (zeros is None) if expected.zero_point is None else torch.equal(zeros.cpu(), expected.zero_point)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_between_two_bf16_numbers(symmetric, device):
    """Ranges of few bits: 15/16 of their steps, and other shares, are often ties, where a last bit decides."""
    from qerl.formats.int4_cuda import int4_pieces

    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = int4.quantize(weight, symmetric=symmetric)
    codes, scales, _ = int4_pieces(weight.to(device), None, 128, symmetric, int4._SWEEP.start, int4._SWEEP.stop)
    assert torch.equal(scales.cpu(), expected.scale) and torch.equal(codes.cpu(), expected.packed)


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("group", int4.GROUPS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_compiles(capability, group, monkeypatch):
    """With divisions rounded to nearest, no multiply-add in place of two operations, and all of it in registers."""
    from qerl.formats.int4_cuda import int4_pieces

    weight, importance = torch.randn(64, 128).bfloat16(), torch.ones(128)
    (compiled,) = compile_launches(
        capability, monkeypatch, lambda: int4_pieces(weight, importance, group, False, 18, 42)
    )
    ptx = compiled.asm["ptx"]
    assert "div.rn.f32" in ptx and "div.full.f32" not in ptx and "fma.rn.f32" not in ptx and ".ftz" not in ptx
    assert "STL" not in compiled.asm["sass"]
