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
2025. The numbers agree with TRL's GRPOTrainer (tests/unit/rl/test_loss_trl.py). Called by rl/trainer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

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
    """Sums over tokens for the metrics, scalars on the tokens' device: they add up over micro-batches and updates."""

    num_tokens: Tensor
    ratio: Tensor
    """policy / old; gspo: each token counts its sequence's."""
    clipped_low: Tensor
    """Tokens without gradient because the ratio fell below the clip range while A < 0."""
    clipped_high: Tensor
    """Tokens whose ratio rose above the clip range while A > 0: no gradient (cispo: a clipped weight)."""
    kl: Tensor | None
    """k3 estimate of KL(policy || reference); None without a reference."""
    mismatch_kl: Tensor | None
    """rollout - old log-probability: KL(rollout policy || old policy); None without rollout_logprobs, as all below."""
    mismatch_kl_k3: Tensor | None
    """The same divergence by the k3 estimator: never negative, less spread."""
    importance: Tensor | None
    """Importance weight w."""
    importance_capped: Tensor | None
    """Tokens whose w was cut off at the cap."""
    importance_max: Tensor | None
    """Largest w; the one that is no sum."""

    def __add__(self, other: LossSums) -> LossSums:
        def combine(name: str) -> Tensor | None:
            a, b = getattr(self, name), getattr(other, name)
            if a is None or b is None:
                return None
            return torch.maximum(a, b) if name == "importance_max" else a + b

        return LossSums(**{field.name: combine(field.name) for field in fields(self)})  # type: ignore[arg-type]

    def averages(self) -> dict[str, float]:
        """Means over tokens under their metric names; what was not measured is left out. Waits for the device."""
        n = max(self.num_tokens.item(), 1)
        named = {
            "ratio/mean": self.ratio,
            "clip_ratio/low_mean": self.clipped_low,
            "clip_ratio/high_mean": self.clipped_high,
            "kl": self.kl,
            "mismatch_kl": self.mismatch_kl,
            "mismatch_kl/k3": self.mismatch_kl_k3,
            "sampling/importance_sampling_ratio/mean": self.importance,
            "sampling/importance_sampling_ratio/capped": self.importance_capped,
        }
        means = {name: value.item() / n for name, value in named.items() if value is not None}
        if self.importance_max is not None:
            means["sampling/importance_sampling_ratio/max"] = self.importance_max.item()
        return means


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
    whole_sequences = config.type == "gspo"
    advantage = advantages[sequence]

    log_ratio = policy_logprobs - old_logprobs
    if whole_sequences:
        log_ratio = _sequence_mean(log_ratio, sequence, lengths)
    ratio = log_ratio.exp()
    low, high = 1 - config.epsilon, 1 + config.epsilon_high
    if config.type == "cispo":
        token_loss = -ratio.detach().clamp(max=high) * advantage * policy_logprobs
    else:
        token_loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)

    importance = mismatch = None
    if rollout_logprobs is not None:
        mismatch = (rollout_logprobs - old_logprobs).detach()
        importance = (-_sequence_mean(mismatch, sequence, lengths) if whole_sequences else -mismatch).exp()
        if config.importance_sampling:
            token_loss = token_loss * importance.clamp(max=config.importance_sampling_cap)

    kl = None
    if ref_logprobs is not None:
        kl = _k3(ref_logprobs - policy_logprobs)
        token_loss = token_loss + config.beta * kl

    loss = (token_loss * normalizer.token_weight(config.type, lengths)[sequence]).sum()
    return loss, _sums(config, advantage, ratio.detach(), kl, mismatch, importance)


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
    mismatch: Tensor | None,
    importance: Tensor | None,
) -> LossSums:
    def total(x: Tensor) -> Tensor:
        return x.sum(dtype=torch.float64)

    below = (ratio < 1 - config.epsilon) & (advantage < 0) & (config.type != "cispo")  # cispo clips on one side only
    above = (ratio > 1 + config.epsilon_high) & (advantage > 0)
    cap = config.importance_sampling_cap
    used = None if importance is None else importance.clamp(max=cap)
    return LossSums(
        num_tokens=torch.tensor(float(len(ratio)), dtype=torch.float64, device=ratio.device),
        ratio=total(ratio),
        clipped_low=total(below),
        clipped_high=total(above),
        kl=None if kl is None else total(kl),
        mismatch_kl=None if mismatch is None else total(mismatch),
        mismatch_kl_k3=None if mismatch is None else total(_k3(-mismatch)),
        importance=None if used is None else total(used),
        importance_capped=None if importance is None else total(importance > cap),
        importance_max=None if used is None else torch.cat([used, used.new_zeros(1)]).max().double(),
    )
