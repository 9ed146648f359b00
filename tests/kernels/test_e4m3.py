"""8-bit keys and values: the codec by its definition, and Triton's side of it code by code."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton_runs import DEVICES, outer_run, run_interpreted  # noqa: E402

from qerl.kernels.e4m3 import decode, encode  # noqa: E402
from qerl.kernels.numerics import e4m3_codes, e4m3_values  # noqa: E402


def test_codes_are_the_nearest_and_scales_of_a_head() -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    x[:, 1] *= 1e-3
    x[7, 2, 5] = 3e4  # next to it, numbers become subnormal or zero; in other heads they do not
    codes, scales = encode(x)
    error, largest = (decode(codes, scales, torch.float32) - x).abs(), x.abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(x.abs() / 16, largest / 448 / 1024) * (1 + 1e-6)).all()
    assert error[:, 0].amax() > largest[:, 0].amax() / 64  # codes, not the numbers themselves
    zeros, scales = encode(torch.zeros(2, 8))
    assert not decode(zeros, scales, torch.float32).any()


@triton.jit
def _both_ways(codes_ptr, values_ptr, x_ptr, rounded_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(values_ptr + at, e4m3_values(tl.load(codes_ptr + at)))
    tl.store(rounded_ptr + at, e4m3_codes(tl.load(x_ptr + at)))


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_is_read_and_numbers_between_two_are_rounded_to_nearest_even(device: str) -> None:
    """All codes but NaN; the numbers half-way between neighbours, and the float32 numbers beside those."""
    codes = torch.arange(1024, device=device).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    exact = codes.view(torch.float8_e4m3fn).float()
    half_way = (exact + exact.roll(-1)) / 2
    which = torch.arange(1024, device=device) // 256
    x = torch.where(which == 0, exact, half_way * (1 + (which - 2) * 2.0**-23))
    values, rounded = torch.empty_like(exact), torch.empty_like(codes)
    _both_ways[(1,)](codes, values, x, rounded, SIZE=1024, enable_fp_fusion=False)
    assert torch.equal(values, exact) and torch.equal(rounded, x.to(torch.float8_e4m3fn).view(torch.uint8))


@outer_run
def test_in_tritons_interpreter() -> None:
    run_interpreted(__file__)
