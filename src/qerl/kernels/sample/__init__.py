"""sample: one token a row of logits, its log-probability, and the entropy of the row.

    x        = logits / temperature                      float32; logprob and entropy are those of softmax(x)
    token    = argmax over kept of (x + gumbel)          Gumbel-max: a draw from softmax(x) restricted to kept
             = argmax of x, if greedy
    logprob  = x[token] - logsumexp(x)
    entropy  = logsumexp(x) - sum(softmax(x) * x)        in nats; a logit of -inf adds 0

The Gumbel number of entry v is philox.gumbel at key = the row's seed, counter = the row's count: it depends on nothing
else, and not on the device but for the last bits of `log`. Of equal scores the lowest entry wins.

    device    path
    CUDA      fused.py: Triton, one pass over the logits and a short second kernel
    other     reference.py: PyTorch

No transfer between host and device, shapes alone decide what runs, and sums have a fixed order: fit for CUDA graphs,
and the same bits each time. A row with NaN gives some token of the vocabulary and a logprob of NaN.

Called by engine/sampler.py, which makes `kept` from top-k, top-p and min-p.
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from qerl.kernels.sample.reference import Sampled, sample_reference

__all__ = ["Sampled", "sample"]


def sample(
    logits: Float[Tensor, "b v"],
    temperatures: Float32[Tensor, " b"],
    seeds: Int64[Tensor, " b"],
    counts: Int64[Tensor, " b"],
    *,
    greedy: bool = False,
    kept: Bool[Tensor, "b v"] | None = None,
) -> Sampled:
    """Draw one token a row, or take the most likely one.

    temperatures: above 0, also for `greedy`, as logprobs are taken at it; seeds: 64-bit keys, as signed numbers;
    counts: tokens drawn so far under each; kept: which tokens can be drawn, the most likely one always among them
    (None: all). The entries of a row are neighbours in memory.
    """
    if logits.device.type == "cuda":
        from qerl.kernels.sample.fused import sample_fused  # Triton is there where CUDA is

        return sample_fused(logits, temperatures, seeds, counts, greedy=greedy, kept=kept)
    return sample_reference(logits, temperatures, seeds, counts, greedy=greedy, kept=kept)
