from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

from qerl.nn.head import token_logprobs
from qerl.nn.structure import head


def reference(hidden, weight, targets, temperature=1.0, bias=None):
    """The whole [T, V] matrix at once, differentiated by autograd."""
    logprobs = F.log_softmax(F.linear(hidden.double(), weight.double(), bias) / temperature, -1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def problem(tokens=37, vocabulary=101, width=24, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 2).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradient_are_log_softmax(chunk, temperature):
    hidden, weight, targets = problem()
    coefficients = torch.randn(37, generator=torch.Generator().manual_seed(1))
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    (gradient,) = torch.autograd.grad(logprobs @ coefficients, hidden)

    expected, expected_entropy = reference(hidden, weight, targets, temperature)
    (expected_gradient,) = torch.autograd.grad(expected @ coefficients.double(), hidden)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected.float(), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=5e-6, rtol=5e-6)


def test_gradient_raises_the_target():
    hidden, weight, targets = problem(tokens=4)
    logprobs, _ = token_logprobs(hidden, weight, targets)
    logprobs.sum().backward()
    better, _ = token_logprobs(hidden.detach() + 1e-2 * hidden.grad, weight, targets)
    assert (better > logprobs).all()


def test_bias_is_part_of_the_logits():
    hidden, weight, targets = problem()
    bias = torch.randn(101, generator=torch.Generator().manual_seed(2))
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=8, bias=bias)
    expected, expected_entropy = reference(hidden, weight, targets, bias=bias.double())
    torch.testing.assert_close(logprobs, expected.float(), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=2e-6, rtol=1e-5)


def test_bf16_rounds_logits_only():
    hidden, weight, targets = problem(dtype=torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, targets, chunk=7)
    rounded = F.log_softmax((hidden @ weight.T).float(), -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, rounded, atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    (expected,) = torch.autograd.grad(reference(hidden, weight, targets)[0].sum(), hidden)
    assert gradient.dtype == torch.bfloat16
    assert (gradient - expected).norm() < 2e-2 * expected.norm()


def test_large_logits_stay_finite():
    hidden, weight, targets = problem()
    logprobs, entropy = token_logprobs(1e3 * hidden, weight, targets)
    assert logprobs.isfinite().all() and entropy.isfinite().all() and (entropy >= -1e-3).all()


def test_zero_tokens():
    hidden, weight, targets = problem(tokens=0)
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, 24)


def test_entropy_is_a_metric():
    hidden, weight, targets = problem()
    assert not token_logprobs(hidden, weight, targets)[1].requires_grad


def test_nothing_of_size_tokens_by_vocabulary_is_saved_or_made():
    """The largest tensor that any operation returns is one chunk of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return result

    hidden, weight, targets = problem(tokens=64, vocabulary=512, width=4)
    with Largest() as largest:
        token_logprobs(hidden, weight, targets, chunk=8)[0].sum().backward()
    assert largest.numel == 8 * 512


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"chunk": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        token_logprobs(*problem(), **options)


@pytest.mark.parametrize("more", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_a_head_that_peft_trains_is_refused_by_name(more):
    config = LoraConfig(**({"target_modules": ["q_proj"], "r": 4, "task_type": "CAUSAL_LM"} | more))
    with pytest.raises(ValueError, match="leave lm_head out"):
        head(get_peft_model(tiny_model("llama"), config))
