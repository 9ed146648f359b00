from __future__ import annotations

import pytest
import torch

from qerl.nn.rmsnorm import RMSNorm
from qerl.noise import NoiseRows

EPS = 1e-5


def reference(x, weight, eps=EPS):
    """In float64, differentiated by autograd."""
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def problem(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
    return x, RMSNorm(1 + 0.3 * torch.randn(shape[-1], generator=generator), EPS)


@pytest.mark.parametrize("shape", [(7, 33), (1, 7, 33), (2, 3, 4, 16), (0, 8)])
def test_clean_is_w_x_over_rms(shape):
    x, norm = problem(*shape)
    torch.testing.assert_close(norm(x), reference(x, norm.weight).float())


def test_eps_counts_where_x_is_small():
    x, norm = problem(3, 16)
    small = 1e-3 * x
    torch.testing.assert_close(norm(small), reference(small, norm.weight).float())
    assert norm(small).norm() < 0.5 * norm(x).norm()


def test_gradients_are_autograds():
    x, norm = problem(1, 9, 24)
    rows, index = torch.randn(3, 24), torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 2])
    norm.noise = NoiseRows(rows, index)
    norm.weight.requires_grad_()
    grad = torch.randn(1, 9, 24)
    actual = torch.autograd.grad(norm(x), [x, norm.weight], grad)
    expected = torch.autograd.grad(reference(x, norm.weight + rows[index]), [x, norm.weight], grad.double())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.float(), atol=2e-6, rtol=1e-5)


def test_frozen_weight_gets_no_gradient():
    x, norm = problem(4, 8)
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is None


@pytest.mark.parametrize("shape", [(6, 16), (1, 6, 16), (6, 1, 16)])
def test_each_token_takes_its_row(shape):
    x, norm = problem(*shape)
    rows, index = torch.randn(4, 16), torch.tensor([3, 0, 0, 2, 1, 3])
    norm.noise = NoiseRows(rows, index)
    expected = reference(x.view(6, 16), norm.weight + rows[index]).float().view(shape)
    torch.testing.assert_close(norm(x), expected)


def test_one_row_is_for_every_token():
    x, norm = problem(1, 6, 16)
    row = torch.randn(1, 16)
    norm.noise = NoiseRows(row, None)
    torch.testing.assert_close(norm(x), reference(x, norm.weight + row).float())


def test_noise_comes_and_goes_without_a_trace():
    x, norm = problem(5, 16)
    clean, weight = norm(x), norm.weight.clone()
    norm.noise = NoiseRows(torch.randn(1, 16), None)
    assert not torch.equal(norm(x), clean)
    norm.noise = None
    assert torch.equal(norm(x), clean) and torch.equal(norm.weight, weight)


def test_bf16_is_rounded_once():
    """The product of gain and normed x is rounded, not its factors: late noise would vanish in a bf16 weight."""
    x, norm = problem(50, 64, dtype=torch.bfloat16)
    assert torch.equal(norm(x), reference(x, norm.weight).to(torch.bfloat16))
    row = 1e-3 * torch.randn(1, 64)
    norm.noise = NoiseRows(row, None)
    assert torch.equal(norm(x), reference(x, norm.weight + row).to(torch.bfloat16))


def test_bf16_gradient():
    x, norm = problem(50, 64, dtype=torch.bfloat16)
    grad = torch.randn(50, 64).bfloat16()
    (actual,) = torch.autograd.grad(norm(x), x, grad)
    (expected,) = torch.autograd.grad(reference(x, norm.weight), x, grad.double())
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)


def test_recomputation_sees_the_noise_of_its_time():
    """A checkpointed norm reads `.noise` again in the backward pass, and notices that the noise is gone."""
    from torch.utils.checkpoint import checkpoint

    x, norm = problem(5, 16)
    noise = NoiseRows(torch.randn(1, 16), None)

    def gradient(checkpointed: bool, keep: bool):
        norm.noise = noise
        y = checkpoint(norm, x, use_reentrant=False) if checkpointed else norm(x)
        norm.noise = noise if keep else None
        return torch.autograd.grad(y.square().sum(), x)[0]

    assert torch.equal(gradient(True, keep=True), gradient(False, keep=True))
    assert torch.equal(gradient(False, keep=False), gradient(False, keep=True))
    with pytest.raises(torch.utils.checkpoint.CheckpointError):  # fewer tensors are saved than the first time
        gradient(True, keep=False)


def test_a_sum_of_weight_and_noise_is_a_new_gain(monkeypatch):
    """The norm's kernel follows at once, and must not read the sum before it is there."""
    from qerl.nn import rmsnorm

    seen, real = [], rmsnorm.add_rms_norm_
    monkeypatch.setattr(
        rmsnorm, "add_rms_norm_", lambda *args, new_gain, room: seen.append(new_gain) or real(*args, new_gain=new_gain)
    )
    x, norm = problem(3, 16)
    norm(x)
    norm.noise = NoiseRows(torch.zeros(1, 16), None)
    norm(x)
    assert seen == [False, True]


def test_rows_and_tokens_must_agree():
    x, norm = problem(6, 16)
    norm.noise = NoiseRows(torch.zeros(2, 16), None)
    with pytest.raises(ValueError, match="no index"):
        norm(x)
    norm.noise = NoiseRows(torch.zeros(2, 16), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="5 entries for 6 tokens"):
        norm(x)
