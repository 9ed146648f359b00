"""SwiGLU: the reference against the trainer's order of rounding, the Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.activation import swiglu
from qerl.kernels.activation.reference import swiglu_grad_reference, swiglu_reference
from qerl.kernels.announcement import Announcement


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


def test_the_reference_gradient_is_autograds():
    gate, up = (x.float().requires_grad_() for x in halves(9, 48))
    dy = torch.randn(9, 48)
    expected = torch.autograd.grad(swiglu_reference(gate, up), [gate, up], dy)
    for found, exact in zip(swiglu_grad_reference(dy, gate, up), expected, strict=True):
        torch.testing.assert_close(found, exact)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, n", [(1, 96), (3, 1030)])
def test_the_gradients_kernel_is_the_reference_but_for_rounding(tokens, n, device):
    from qerl.kernels.activation.swiglu_grad import swiglu_grad_bf16

    gate, up = halves(tokens, n, device)
    dy = torch.randn(tokens, n, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    found = swiglu_grad_bf16(dy, gate, up)
    for one, exact in zip(found, swiglu_grad_reference(dy, gate, up), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, exact, rtol=2**-6, atol=1e-6)
        assert (one != exact).float().mean() < 1e-2
    ends = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]], dtype=torch.bfloat16, device=device)
    ones = torch.ones_like(ends)
    dgate, dup = swiglu_grad_bf16(ones, ends, ones)
    assert dgate.tolist() == [[0, 0, 0.5, 1, 1]] and torch.equal(dup, ends.clamp(min=0))


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_each_program_announces_its_part(device):
    from qerl.kernels.activation.swiglu import swiglu_bf16

    gate, up = halves(3, 1500, device)
    announcement = Announcement(torch.zeros(2, dtype=torch.int32, device=device))
    assert torch.equal(swiglu_bf16(gate, up, announcement), swiglu_bf16(gate, up))
    assert announcement.publishers == 6 and announcement.counter.tolist() == [6, 0]


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_compiles(capability, monkeypatch):
    from qerl.kernels.activation.swiglu import swiglu_bf16
    from qerl.kernels.activation.swiglu_grad import swiglu_grad_bf16

    gate, up = halves(8, 18944)
    calls = lambda: (swiglu_bf16(gate, up), swiglu_grad_bf16(gate, gate, up))  # noqa: E731
    forward, backward = compile_launches(capability, monkeypatch, calls)
    assert "st.global.v2" in forward.asm["ptx"] and "st.global.v4" in backward.asm["ptx"]
