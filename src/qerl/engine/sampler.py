"""From logits to the next token, its log-probability and the entropy that it was drawn from.

    p     = softmax(logits / temperature)                            fp32; logprob and entropy are those of p
    kept  = top-k, then top-p of what top-k left, and min-p          only if set; at least one token stays
    token = argmax over kept of (log p + gumbel)                     a draw from p restricted to kept (Gumbel-max)

The Gumbel number of vocabulary entry v is philox.gumbel at key = the completion's seed, counter = how many tokens the
completion has so far. It depends on nothing else, so a completion stays the same whatever else is in the batch, as long
as its logits do. Logprobs are taken before truncation: they compare with the trainer's, which knows of none.

kernels/sample draws: on a GPU it reads the logits once. Truncation ranks the vocabulary before, in PyTorch, and hands
over a mask. Called by the runner once a decode step, for all slots at once, and by engine/hf.py. No transfer between
host and device. Leaves out repetition penalties and other edits of the logits: the trainer's policy has none.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from qerl.engine.blocks import in_blocks
from qerl.kernels.sample import Sampled
from qerl.kernels.sample import sample as draw
from qerl.types import SamplingParams


def sample(
    logits: Float[Tensor, "b v"],
    seeds: Int64[Tensor, " b"],
    counts: Int64[Tensor, " b"],
    params: SamplingParams,
    *,
    batch_invariant: bool = False,
) -> Sampled:
    """Draw one token a row.

    seeds: the completions' 64-bit keys, as signed numbers; counts: how many tokens each completion has so far;
    batch_invariant: truncation, too, sums in an order that does not depend on b, as the draw always does.
    Ties of greedy decoding, and at the edge of top-k or top-p, go to the lower token id.
    """
    temperatures = torch.full(logits.shape[:1], params.temperature, device=logits.device)
    kept = None
    if params.truncates and not params.greedy:

        def truncated(rows: Float[Tensor, "rows v"]) -> list[Bool[Tensor, "rows v"]]:
            return [kept_tokens((rows.float() / params.temperature).log_softmax(-1), params)]

        (kept,) = in_blocks(truncated, logits) if batch_invariant else truncated(logits)
    return draw(logits, temperatures, seeds, counts, greedy=params.greedy, kept=kept)


def kept_tokens(logprobs: Float32[Tensor, "b v"], params: SamplingParams) -> Bool[Tensor, "b v"]:
    """Which tokens truncation leaves: those that pass top-k, top-p (nucleus, arXiv 1904.09751) and min-p (2407.01082).

    top-p looks at the distribution that top-k left, renormalised, and keeps the fewest tokens that reach `top_p`;
    min-p compares with the most likely token. All three keep that one.
    """
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if params.top_k > 0:
        kept[:, params.top_k :] = False
    if params.top_p < 1:
        probs = ranked.masked_fill(~kept, -torch.inf).softmax(-1)
        kept &= probs.cumsum(-1) - probs < params.top_p
    if params.min_p > 0:
        kept &= ranked.exp() >= params.min_p * ranked[:, :1].exp()
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def signed_key(seed: int) -> int:
    """A 64-bit seed as an int64 holds it."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
