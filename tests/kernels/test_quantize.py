"""The quantising kernel gives the bits of formats/nvfp4.py and mxfp4.py on a CPU: every rule, odd blocks and sizes."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.formats import mxfp4, nvfp4

SIZES = [(3, 32), (40, 80), (17, 1024)]


def weights(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks over forty octaves, some of zeros, ties, and one value alone."""
    torch.manual_seed(n)
    weight = torch.randn(n, k) * torch.linspace(-25, 15, n * k // 16).exp2().repeat_interleave(16).view(n, k)
    weight[0, :16] = 0
    weight[1, :16] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2) * torch.tensor([1.0, -1.0] * 8)
    weight[2, 16:31] = 0
    return weight.to(dtype)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["amax", "sweep", "weighted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_the_bits_are_the_references(size, dtype, rule, device):
    from qerl.formats.e2m1_cuda import nvfp4_pieces

    weight = weights(*size, dtype)
    if dtype == torch.float16:
        weight = weight.clamp(-6e4, 6e4)
    scale = "amax" if rule == "amax" else "sweep"
    importance = torch.rand(size[1]).exp() ** 4 if rule == "weighted" else None
    for global_scale in (None, torch.tensor([2.0**-117]), torch.tensor([100.0])):
        expected = nvfp4.quantize(weight, scale=scale, global_scale=global_scale, importance=importance)
        first, last = (0, 0) if rule == "amax" else (nvfp4.SWEEP.start, nvfp4.SWEEP.stop)
        on_device = None if importance is None else importance.to(device)
        codes, scales = nvfp4_pieces(weight.to(device), expected.global_scale.to(device), on_device, first, last)
        assert torch.equal(scales.cpu(), expected.block_scale.view(torch.uint8))
        assert torch.equal(codes.cpu(), expected.packed)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["ocp", "sweep", "weighted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(3, 64), (41, 96), (17, 1024)])
def test_mxfp4s_bits_are_the_references(size, dtype, rule, device):
    from qerl.formats.e2m1_cuda import mxfp4_pieces

    weight = weights(*size, dtype)
    weight[0, :32] = 0
    weight[2, :32], weight[2, 32:64] = 3e38, 1e-38
    if dtype == torch.float32:
        weight[1, :32] = 1e-42  # subnormal
    importance = torch.rand(size[1]).exp() ** 4 if rule == "weighted" else None
    expected = mxfp4.quantize(weight, scale="ocp" if rule == "ocp" else "sweep", importance=importance)
    on_device = None if importance is None else importance.to(device)
    codes, scales = mxfp4_pieces(weight.to(device), on_device, rule != "ocp")
    assert torch.equal(scales.cpu(), expected.block_scale)
    assert torch.equal(codes.cpu(), expected.packed)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_every_scale_code_is_encoded_and_decoded(device):
    """Blocks whose amax is 6 times each E4M3 value, its midpoints, and a little beside them."""
    from qerl.formats.e2m1_cuda import nvfp4_pieces

    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[:-1] + values[1:]) / 2
    amax = (
        torch.cat([values, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(500.0))]) * 6
    )
    weight = torch.zeros(len(amax), 16)
    weight[:, 3] = amax
    one = torch.ones(1)
    expected = nvfp4.quantize(weight, scale="amax", global_scale=one)
    codes, scales = nvfp4_pieces(weight.to(device), one.to(device), None, 0, 0)
    assert torch.equal(scales.cpu(), expected.block_scale.view(torch.uint8)) and scales.unique().numel() == 127
    assert torch.equal(codes.cpu(), expected.packed)


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_compiles(capability, format, monkeypatch):
    """With divisions rounded to nearest, and no multiply-add in place of two operations."""
    from qerl.formats.e2m1_cuda import mxfp4_pieces, nvfp4_pieces

    weight, one, importance = torch.randn(64, 64).bfloat16(), torch.ones(1), torch.ones(64)
    launch = {
        "nvfp4": lambda: nvfp4_pieces(weight, one, importance, -4, 9),
        "mxfp4": lambda: mxfp4_pieces(weight, importance, True),
    }
    (compiled,) = compile_launches(capability, monkeypatch, launch[format])
    ptx = compiled.asm["ptx"]
    assert ("div.rn.f32" in ptx) == (format == "nvfp4") and "div.full.f32" not in ptx and "fma.rn.f32" not in ptx
