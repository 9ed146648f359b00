"""Log-probabilities, entropies, their gradient: the reference against autograd, the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.logprobs.reference import logprob_grad_reference_, token_statistics_reference

CASES = [(1, 50), (5, 4096), (3, 9001)]


def problem(tokens: int, v: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(v)
    scores = 4 * torch.randn(tokens, v, generator=generator)
    scores[0, v - 1] = 60.0  # all but certain, and in the last piece of the row
    targets = torch.randint(0, v, (tokens,), generator=generator)
    return scores.to(device, dtype), targets.to(device), torch.randn(tokens, generator=generator).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, v", CASES)
def test_the_reference_is_autograds(tokens, v, dtype):
    scores, targets, grad = problem(tokens, v, dtype=dtype)
    exact = scores.double().requires_grad_()
    of_all = (exact / 0.7).log_softmax(-1)
    expected = of_all.gather(-1, targets[:, None])[:, 0]
    logprobs, entropy, normalizer = token_statistics_reference(scores.clone(), targets, 0.7)
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(of_all.exp() * of_all).sum(-1).float(), rtol=1e-5, atol=1e-5)
    (of_scores,) = torch.autograd.grad(expected @ grad.double(), exact)
    found = logprob_grad_reference_(scores, targets, normalizer, grad, 0.7)
    assert found is scores
    torch.testing.assert_close(found, of_scores.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens, v", CASES)
def test_the_kernels_are_the_reference(tokens, v, temperature, device):
    from qerl.kernels.logprobs.fused import logprob_grad_fused_, token_statistics_fused

    scores, targets, grad = problem(tokens, v, device)
    expected = token_statistics_reference(scores.clone(), targets, temperature)
    found = token_statistics_fused(scores, targets, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
    of_scores = logprob_grad_reference_(scores.clone(), targets, expected[2], grad, temperature)
    logprob_grad_fused_(scores, targets, expected[2], grad, temperature)
    torch.testing.assert_close(scores, of_scores, rtol=2**-7, atol=1e-6)


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_compile(capability, monkeypatch):
    from qerl.kernels.logprobs.fused import logprob_grad_fused_, token_statistics_fused

    scores, targets, grad = problem(4, 152064)

    def call() -> None:
        token_statistics_fused(scores, targets, 1.0)
        logprob_grad_fused_(scores, targets, grad, grad, 1.0)

    statistics, gradient = compile_launches(capability, monkeypatch, call)
    assert "ld.global.v4" in statistics.asm["ptx"] and "st.global.v4" in gradient.asm["ptx"]
