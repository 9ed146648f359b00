"""From hidden states to the log-probability of each next token and the entropy of its distribution.

    logits = hidden W^T + b,   z = logits / temperature
    logprob_t = z_t[target_t] - logsumexp(z_t)          entropy_t = -sum_v p_tv log p_tv,   p_t = softmax(z_t)

A [tokens, vocabulary] matrix would be the largest tensor of a training step by far (16k tokens of a 152k vocabulary:
10 GB in fp32), so it never exists: forward and backward each go through `chunk` tokens at a time, and the backward
pass computes the logits again. Products run in the head's own dtype, without a copy of it; what follows is fp32.

Gradient: to `hidden` only, and through the log-probabilities only. The head is frozen, and the entropy is a metric.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


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

    `chunk` is the number of tokens whose logits exist at a time (two or three fp32 [chunk, V] at the peak). T may be 0.
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
        for part in _chunks(len(hidden), chunk):
            scores = _scores(hidden[part], weight, bias, temperature)
            normalizer[part] = scores.logsumexp(-1)
            scores.sub_(normalizer[part, None])
            logprobs[part] = scores.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = scores.exp().mul_(scores).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for part in _chunks(len(hidden), ctx.chunk):
            # d logprob / d score_v = [v is the target] - softmax_v
            scores = _scores(hidden[part], weight, bias, ctx.temperature)
            grad_scores = scores.sub_(normalizer[part, None]).exp_().neg_()
            grad_scores.scatter_add_(-1, targets[part, None], torch.ones_like(grad_scores[:, :1]))
            grad_scores.mul_(grad[part, None] / ctx.temperature)
            grad_hidden[part] = (grad_scores.to(weight.dtype) @ weight).to(hidden.dtype)
        return grad_hidden, None, None, None, None, None


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Logits / temperature in fp32, from a product in the weight's dtype."""
    return F.linear(hidden.to(weight.dtype), weight, bias).float().div_(temperature)
