"""The adapters' second half: the reference against the equation, the Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.lora import Expansion, add_expanded_

CASES = [((64,), (16,)), ((100, 30, 30), (8, 8, 8)), ((200, 70), (32, 5)), ((64, 64, 64), (16, 0, 32))]


def problem(sizes, ranks, tokens, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(sum(sizes) + tokens)
    expansion = Expansion.empty(sizes, ranks, dtype, torch.device(device))
    for rows, rank in zip(expansion.b.split(list(sizes)), ranks, strict=True):
        rows[:, :rank] = torch.randn(len(rows), rank, generator=generator)
    expansion.scaling.copy_(torch.linspace(0.5, 1.5, len(sizes)))
    y = torch.randn(tokens, sum(sizes), generator=generator).to(device, dtype)
    u = torch.randn(tokens, sum(ranks), generator=generator).to(device, dtype)
    return y, u, expansion


@pytest.mark.parametrize("sizes, ranks", CASES)
def test_the_reference_is_each_parts_own_adapter(sizes, ranks):
    y, u, expansion = problem(sizes, ranks, 5, torch.float32)
    expected = []
    for part, (rows, rank) in enumerate(zip(y.split(sizes, 1), ranks, strict=True)):
        inner, b = u.split(ranks, 1)[part], expansion.b.split(sizes)[part][:, :rank]
        scaling = expansion.scaling[part].item()
        expected.append(rows + scaling * inner @ b.T)
    torch.testing.assert_close(add_expanded_(y.clone(), u, expansion), torch.cat(expected, 1))
    twice = add_expanded_(y.clone(), u, expansion, 2.0) - y
    torch.testing.assert_close(twice, 2 * (torch.cat(expected, 1) - y), rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 16, 70])
@pytest.mark.parametrize("sizes, ranks", CASES)
def test_the_kernel_is_the_reference_but_for_one_rounding(sizes, ranks, tokens, device):
    from qerl.kernels.lora.expand import add_expanded_bf16_
    from qerl.kernels.lora.reference import add_expanded_reference_

    y, u, expansion = problem(sizes, ranks, tokens, torch.bfloat16, device)
    wide = torch.full((tokens, y.shape[1] + 8), torch.nan, dtype=y.dtype, device=device)
    view = wide[:, :-8].copy_(y)
    add_expanded_bf16_(view, u, expansion, 1.0)
    add_expanded_reference_(y, u, expansion, 1.0)
    torch.testing.assert_close(view, y, rtol=2**-7, atol=2**-5)
    assert wide[:, -8:].isnan().all()


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_compiles(capability, monkeypatch):
    from qerl.kernels.lora import expand

    y, u, expansion = problem((128, 64), (32, 32), 4, torch.bfloat16)
    (kernel,) = compile_launches(capability, monkeypatch, lambda: expand.add_expanded_bf16_(y, u, expansion, 1.0))
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
