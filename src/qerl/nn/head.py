"""From hidden states to the log-probability of each next token and the entropy of its distribution.

    logits = hidden W^T + b,   z = logits / temperature
    logprob_t = z_t[target_t] - logsumexp(z_t)          entropy_t = -sum_v p_tv log p_tv,   p_t = softmax(z_t)

A [tokens, vocabulary] matrix would be the largest tensor of a training step by far (16k tokens of a 152k vocabulary:
10 GB in fp32), so it never exists: forward and backward each go through `chunk` tokens at a time, and the backward
pass computes the logits again. Products run in the head's own dtype, without a copy of it, all into the same memory;
what follows is fp32 (kernels/logprobs).

Gradient: to `hidden` only, and through the log-probabilities only. The head is frozen, and the entropy is a metric.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.logprobs import logprob_grad_, token_statistics


def token_logprobs(
    hidden: Float[Tensor, "t h"],
    weight: Float[Tensor, "v h"],
    targets: Int[Tensor, " t"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    bias: Float[Tensor, " v"] | None = None,
) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """Log-probability of `targets` and entropy in nats, both fp32, of softmax((hidden weight^T + bias) / temperature).

    `chunk` is the number of tokens whose logits exist at a time: one [chunk, V] in the head's dtype, and outside of the
    kernel's reach (kernels/logprobs) two in fp32. T may be 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normalizer = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for part, scores in _scores(hidden, weight, bias, chunk):
            of_part = token_statistics(scores, targets[part], temperature)
            for whole, values in zip((logprobs, entropy, normalizer), of_part, strict=True):
                whole[part] = values
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        grad_hidden, grad = torch.empty_like(hidden), grad.contiguous()
        for part, scores in _scores(hidden, weight, bias, ctx.chunk):
            logprob_grad_(scores, targets[part], normalizer[part], grad[part], ctx.temperature)
            grad_hidden[part] = (scores @ weight).to(hidden.dtype)
        return grad_hidden, None, None, None, None, None


def _scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> Iterator[tuple[slice, Float[Tensor, "chunk v"]]]:
    """Logits in the weight's dtype, chunk by chunk, all in the same memory."""
    buffer = weight.new_empty(min(chunk, len(hidden)), len(weight))
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        rows = hidden[part].to(weight.dtype)
        scores = buffer[: len(rows)]
        if bias is None:
            torch.mm(rows, weight.T, out=scores)
        else:
            torch.addmm(bias, rows, weight.T, out=scores)
        yield part, scores
