"""SwiGLU: the reference against the trainer's order of rounding, the Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.activation import swiglu
from qerl.kernels.activation.reference import swiglu_reference


def halves(tokens: int, n: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """gate and up as views of one product's output."""
    product = 4 * torch.randn(tokens, 2 * n, generator=torch.Generator().manual_seed(n))
    return product.to(device, torch.bfloat16).split(n, dim=1)


def test_the_reference_rounds_silu_first():
    gate, up = halves(9, 48)
    silu = (gate.double() / (1 + (-gate.double()).exp())).bfloat16()
    assert torch.equal(swiglu(gate, up), silu * up)
    assert not torch.equal(swiglu(gate, up), (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, n", [(1, 96), (5, 1024), (3, 4864)])
def test_the_kernel_is_the_reference_but_for_the_last_bits_of_exp(tokens, n, device):
    from qerl.kernels.activation.swiglu import swiglu_bf16

    gate, up = halves(tokens, n, device)
    y, expected = swiglu_bf16(gate, up), swiglu_reference(gate, up)
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=0)  # one place in silu, one in the product
    assert (y != expected).float().mean() < 1e-3


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_at_the_ends_of_the_range(device):
    from qerl.kernels.activation.swiglu import swiglu_bf16

    gate = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]], dtype=torch.bfloat16, device=device)
    ones = torch.ones_like(gate)
    assert torch.equal(swiglu_bf16(gate, ones), gate.clamp(min=0))


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_compiles(capability, monkeypatch):
    from qerl.kernels.activation.swiglu import swiglu_bf16

    (compiled,) = compile_launches(capability, monkeypatch, lambda: swiglu_bf16(*halves(8, 18944)))
    assert "st.global.v4" in compiled.asm["ptx"]
