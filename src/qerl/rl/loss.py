"""The policy-gradient losses, on flat packed tokens: [T] over the completion tokens of some sequences, no padding.

With r = policy/old probability of a token, A its sequence's advantage:

    type      token loss l_t                               weight of a token
    grpo      -min(r A, clip(r, 1-e_low, 1+e_high) A)      1 / (N L_i)
    dapo      the same                                     1 / (all tokens)
    dr_grpo   the same                                     1 / (N L_max)
    gspo      the same, with one r a sequence:             1 / (N L_i)
              exp(mean_t log r_t)
    cispo     -stop_gradient(min(r, 1+e_high)) A log p     1 / (all tokens)

    loss = sum_t weight_t * (w_t l_t + beta KL_t)

N sequences, L_i tokens in sequence i, L_max the length limit; all counted over the whole batch of one optimizer step
(`Normalizer`), so the losses of micro-batches add up to the loss of the batch, wherever it is cut.

    w_t = stop_gradient(min(old / rollout probability, cap))   truncated importance sampling
                                                               (gspo: of the sequence, exp(mean_t log(old/rollout)_t))
    KL_t = q - log q - 1,  q = ref / policy probability        k3 estimator of KL(policy || reference)

Four log-probabilities, all [T] in fp32, at the sampling temperature, never one for another:

    policy_logprobs    of the parameters being trained; the only ones with a gradient
    old_logprobs       of the same parameters before this rollout's first update, under the noise mode of training
    rollout_logprobs   recorded by the engine while it sampled: noisy, other kernels
    ref_logprobs       adapters off

Sources: GRPO arXiv 2402.03300; DAPO arXiv 2503.14476; Dr. GRPO arXiv 2503.20783; GSPO arXiv 2507.18071; CISPO (of
MiniMax-M1) arXiv 2506.13585; truncated importance sampling: Ionides, J. Comput. Graph. Stat. 17(2), 2008, and for the
gap between engine and trainer Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
2025. The numbers agree with TRL's GRPOTrainer (tests/unit/rl/test_loss_trl.py). Called by rl/update.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from qerl.config import LossConfig, LossType


@dataclass(frozen=True, slots=True)
class Normalizer:
    """What a loss is divided by, counted over all sequences of one optimizer step (and all ranks).

    Overlong filtering (DAPO, section 3.4) takes truncated completions out of the loss: their tokens do not count in
    `num_tokens`, but their sequences do in `num_sequences`. So a mean over tokens is over those that teach, and a mean
    over sequences keeps its scale. TRL does the same.
    """

    num_sequences: int
    """All, with those that were filtered out and those of length 0."""
    num_tokens: int
    """Completion tokens in the loss."""
    max_completion_length: int
    """The limit, in tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], kept: Sequence[bool], max_completion_length: int) -> Normalizer:
        """From each sequence's completion length and whether it is in the loss."""
        num_tokens = sum(length for length, keep in zip(lengths, kept, strict=True) if keep)
        return cls(len(lengths), num_tokens, max_completion_length)

    def token_weight(self, loss_type: LossType, lengths: Int64[Tensor, " s"]) -> Float[Tensor, " s"]:
        """Weight of each token of a sequence, for sequences of these lengths."""
        if loss_type in ("grpo", "gspo"):
            return 1.0 / (self.num_sequences * lengths.clamp(min=1))
        token_mean = loss_type in ("dapo", "cispo")
        divisor = self.num_tokens if token_mean else self.num_sequences * self.max_completion_length
        return torch.full_like(lengths, 1.0 / max(divisor, 1), dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class LossSums:
    """The metrics of a loss under their names (metrics.py), as float64 scalars on the tokens' device.

    `a + b` is what both sets of tokens together would give: micro-batches and updates add up.
    """

    num_tokens: Tensor
    sums: dict[str, Tensor]
    """Of the metrics that are means over tokens: the sum."""
    minima: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.num_tokens + other.num_tokens,
            _merge(torch.add, self.sums, other.sums),
            _merge(torch.minimum, self.minima, other.minima),
            _merge(torch.maximum, self.maxima, other.maxima),
        )

    def averages(self) -> dict[str, float]:
        """The metrics. Waits for the device."""
        n = max(self.num_tokens.item(), 1)
        means = {name: total.item() / n for name, total in self.sums.items()}
        return means | {name: value.item() for name, value in (self.minima | self.maxima).items()}


def _merge(
    combine: Callable[[Tensor, Tensor], Tensor], a: dict[str, Tensor], b: dict[str, Tensor]
) -> dict[str, Tensor]:
    return a | {name: combine(a[name], value) if name in a else value for name, value in b.items()}


def policy_loss(
    config: LossConfig,
    normalizer: Normalizer,
    *,
    policy_logprobs: Float[Tensor, " t"],
    old_logprobs: Float[Tensor, " t"] | None,
    rollout_logprobs: Float[Tensor, " t"] | None,
    ref_logprobs: Float[Tensor, " t"] | None,
    sequence: Int64[Tensor, " t"],
    advantages: Float[Tensor, " s"],
    lengths: Int64[Tensor, " s"],
) -> tuple[Float[Tensor, ""], LossSums]:
    """This micro-batch's share of the loss of an optimizer step, and the sums for its metrics.

    sequence: each token's row in `advantages` and `lengths` (completion tokens of each sequence); a sequence is never
    cut in two. old_logprobs None: the rollout serves one update, so old and policy are the same numbers.
    rollout_logprobs None: no importance correction. ref_logprobs is needed if config.beta > 0.
    """
    if config.beta > 0 and ref_logprobs is None:
        raise ValueError("loss.beta > 0 needs ref_logprobs: score the tokens with adapters off, or set loss.beta = 0")
    old_logprobs = policy_logprobs.detach() if old_logprobs is None else old_logprobs
    advantage = advantages[sequence]

    log_ratio = policy_logprobs - old_logprobs
    if config.type == "gspo":
        log_ratio = _sequence_mean(log_ratio, sequence, lengths)
    ratio = log_ratio.exp()
    low, high = 1 - config.epsilon, 1 + config.epsilon_high
    if config.type == "cispo":
        token_loss = -ratio.detach().clamp(max=high) * advantage * policy_logprobs
    else:
        token_loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)

    log_importance = None
    if rollout_logprobs is not None:
        log_importance = (old_logprobs - rollout_logprobs).detach()
        if config.importance_sampling:
            token_loss = token_loss * _importance(config, log_importance, sequence, lengths)

    kl = None
    if ref_logprobs is not None:
        kl = _k3(ref_logprobs - policy_logprobs)
        token_loss = token_loss + config.beta * kl

    loss = (token_loss * normalizer.token_weight(config.type, lengths)[sequence]).sum()
    return loss, _sums(config, advantage, ratio.detach(), kl, log_importance, sequence, lengths)


def _importance(
    config: LossConfig, log_importance: Float[Tensor, " t"], sequence: Tensor, lengths: Tensor
) -> Float[Tensor, " t"]:
    """Truncated importance weight of each token: min(old / rollout, cap)."""
    if config.type == "gspo":
        log_importance = _sequence_mean(log_importance, sequence, lengths)
    return log_importance.exp().clamp(max=config.importance_sampling_cap)


def _sequence_mean(x: Float[Tensor, " t"], sequence: Tensor, lengths: Tensor) -> Float[Tensor, " t"]:
    """The mean of each token's sequence."""
    totals = torch.zeros(len(lengths), dtype=x.dtype, device=x.device).index_add(0, sequence, x)
    return (totals / lengths.clamp(min=1))[sequence]


def _k3(log_ratio: Tensor) -> Tensor:
    """q - log q - 1 for q = exp(log_ratio): unbiased for the KL divergence from where samples come, and never negative.

    Source: J. Schulman, "Approximating KL divergence", 2020.
    """
    return log_ratio.expm1() - log_ratio


@torch.no_grad()
def _sums(
    config: LossConfig,
    advantage: Tensor,
    ratio: Tensor,
    kl: Tensor | None,
    log_importance: Tensor | None,
    sequence: Tensor,
    lengths: Tensor,
) -> LossSums:
    """Metrics over these tokens; gspo: each token counts its sequence's ratio and weight."""
    means = {"ratio/mean": ratio}
    extremes: dict[str, Tensor] = {}
    above = ((ratio > 1 + config.epsilon_high) & (advantage > 0)).double()
    if config.type == "cispo":
        means["cispo_clip_ratio"] = above
    else:
        below = ((ratio < 1 - config.epsilon) & (advantage < 0)).double()
        means |= {
            "clip_ratio/low_mean": below,
            "clip_ratio/high_mean": above,
            "clip_ratio/region_mean": below + above,
        }
        extremes |= {
            "clip_ratio/low_min": _sequence_mean(below, sequence, lengths),
            "clip_ratio/high_max": _sequence_mean(above, sequence, lengths),
        }
    if kl is not None:
        means["kl"] = kl
    if log_importance is not None:
        means |= {
            "mismatch_kl": _k3(log_importance),
            "mismatch_kl/k1": -log_importance,
            "sampling/sampling_logp_difference/mean": log_importance.abs(),
        }
        extremes["sampling/sampling_logp_difference/max"] = log_importance.abs()
        if config.importance_sampling:
            weight = _importance(config, log_importance, sequence, lengths)
            means |= {
                "sampling/importance_sampling_ratio/mean": weight,
                "sampling/importance_sampling_ratio/capped": weight >= config.importance_sampling_cap,
            }
            extremes |= {
                "sampling/importance_sampling_ratio/min": weight,
                "sampling/importance_sampling_ratio/max": weight,
            }
    if len(ratio) == 0:
        extremes = {}
    return LossSums(
        num_tokens=torch.tensor(float(len(ratio)), dtype=torch.float64, device=ratio.device),
        sums={name: x.sum(dtype=torch.float64) for name, x in means.items()},
        minima={name: x.min().double() for name, x in extremes.items() if name.endswith("min")},
        maxima={name: x.max().double() for name, x in extremes.items() if name.endswith("max")},
    )
