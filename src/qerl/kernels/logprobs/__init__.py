"""logprobs: from the scores of all tokens of the vocabulary to a target's log-probability and the entropy, and back.

    z = scores / temperature,   normalizer = log sum_v exp z_v
    logprob = z_target - normalizer                     entropy = -sum_v p_v log p_v,  p = softmax(z)
    d logprob / d scores_v = ([v is the target] - p_v) / temperature

Contract: scores in the head's dtype, one row a token, rows contiguous; everything after them is fp32. A gradient is
written over the scores, rounded once: scores are a training step's largest matrix, and there is one of them. On the
reference's path `token_statistics` may change the scores, too.

    device, dtype           path
    CUDA, 16 bits           fused.py: Triton; statistics read the scores once, the gradient reads and writes them once
    anything else           reference.py: two fp32 matrices of the same shape at the most

Called by nn/head.py, chunk by chunk. Leaves out the product that makes the scores, and gradients of the entropy.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from qerl.kernels.logprobs.reference import logprob_grad_reference_, token_statistics_reference


def token_statistics(
    scores: Float[Tensor, "t v"], targets: Int64[Tensor, " t"], temperature: float
) -> tuple[Float32[Tensor, " t"], Float32[Tensor, " t"], Float32[Tensor, " t"]]:
    """Log-probability of the targets, entropy in nats, and the normalizer that `logprob_grad_` wants."""
    if _is_fused(scores):
        from qerl.kernels.logprobs.fused import token_statistics_fused  # Triton is there where CUDA is

        return token_statistics_fused(scores, targets, temperature)
    return token_statistics_reference(scores, targets, temperature)


def logprob_grad_(
    scores: Float[Tensor, "t v"],
    targets: Int64[Tensor, " t"],
    normalizer: Float32[Tensor, " t"],
    grad: Float32[Tensor, " t"],
    temperature: float,
) -> Float[Tensor, "t v"]:
    """Write the gradient with respect to the scores over them; grad: that with respect to the log-probabilities."""
    if _is_fused(scores):
        from qerl.kernels.logprobs.fused import logprob_grad_fused_

        return logprob_grad_fused_(scores, targets, normalizer, grad, temperature)
    return logprob_grad_reference_(scores, targets, normalizer, grad, temperature)


def _is_fused(scores: Tensor) -> bool:
    return scores.is_cuda and scores.dtype in (torch.bfloat16, torch.float16)
