"""Log-probabilities, entropies and their gradient by torch, operation by operation."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor


def token_statistics_reference(
    scores: Float[Tensor, "t v"], targets: Int64[Tensor, " t"], temperature: float
) -> tuple[Float32[Tensor, " t"], Float32[Tensor, " t"], Float32[Tensor, " t"]]:
    """`token_statistics`; fp32 scores become log-probabilities in place."""
    logprobs = scores.float().div_(temperature)
    normalizer = logprobs.logsumexp(-1)
    logprobs.sub_(normalizer[:, None])
    of_target = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return of_target, logprobs.exp().mul_(logprobs).sum(-1).neg_(), normalizer


def logprob_grad_reference_(
    scores: Float[Tensor, "t v"],
    targets: Int64[Tensor, " t"],
    normalizer: Float32[Tensor, " t"],
    grad: Float32[Tensor, " t"],
    temperature: float,
) -> Float[Tensor, "t v"]:
    """`logprob_grad_`."""
    of_scores = scores.float().div_(temperature).sub_(normalizer[:, None]).exp_().neg_()
    of_scores.scatter_add_(-1, targets[:, None], torch.ones_like(normalizer)[:, None])
    return scores.copy_(of_scores.mul_(grad[:, None] / temperature))
