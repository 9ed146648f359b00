"""sample in PyTorch, float32 throughout: the path of a CPU, and what the kernel is checked against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from qerl import philox


class Sampled(NamedTuple):
    """One token a row, with the statistics of its distribution before truncation."""

    tokens: Int64[Tensor, " b"]
    logprobs: Float32[Tensor, " b"]
    entropies: Float32[Tensor, " b"]
    """In nats."""


def sample_reference(
    logits: Float[Tensor, "b v"],
    temperatures: Float32[Tensor, " b"],
    seeds: Int64[Tensor, " b"],
    counts: Int64[Tensor, " b"],
    *,
    greedy: bool,
    kept: Bool[Tensor, "b v"] | None,
) -> Sampled:
    """The contract's equations, one after another."""
    x = logits.float() / temperatures[:, None]
    logprobs = x.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(-1)  # a logit of -inf adds 0, not 0 * inf
    if greedy:
        tokens = x.argmax(-1)
    else:
        scores = x + philox.gumbel(seeds, counts, x.shape[-1])
        tokens = (scores if kept is None else scores.masked_fill(~kept, -torch.inf)).argmax(-1)
    return Sampled(tokens, logprobs.gather(-1, tokens[:, None])[:, 0], entropies)
