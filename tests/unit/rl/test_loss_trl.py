"""The losses agree with TRL: its own GRPOTrainer._compute_loss runs here, on log-probabilities that it is handed.

Only what that method reads is stood in for: the log-probabilities of a forward pass, the configuration, and an
accelerator of one process.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from qerl.config import LossConfig
from qerl.rl.loss import Normalizer, policy_loss

GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

LENGTHS = torch.tensor([7, 1, 4, 5, 3, 6])
MAX_COMPLETION_LENGTH = 9
CAP = 2.0
# Our type: TRL's loss_type and importance_sampling_level. TRL's epsilon_high of cispo is our 1 + epsilon_high.
TRL_NAMES = {
    "grpo": ("grpo", "token"),
    "dapo": ("dapo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "gspo": ("grpo", "sequence"),
    "cispo": ("cispo", "token"),
}


def fake_trainer(config: LossConfig, policy: torch.Tensor, *, correct: bool) -> SimpleNamespace:
    loss_type, level = TRL_NAMES[config.type]
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon_high + (1 if config.type == "cispo" else 0),
        beta=config.beta,
        use_vllm=correct,
        vllm_importance_sampling_correction=correct,
        max_completion_length=MAX_COMPLETION_LENGTH,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


@pytest.mark.parametrize("masked", [False, True], ids=["all", "overlong-filter"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("correct", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("loss_type", TRL_NAMES)
def test_loss_and_gradient_agree_with_trl(loss_type, correct, beta, masked):
    config = LossConfig(
        type=loss_type, epsilon=0.2, epsilon_high=0.28, beta=beta, importance_sampling=correct,
        importance_sampling_cap=CAP,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), int(LENGTHS.max()))
    policy, old, rollout, ref = (-1.5 + 0.4 * torch.randn(shape, generator=generator) for _ in range(4))
    advantages = torch.randn(len(LENGTHS), generator=generator)
    kept = torch.tensor([True, True, not masked, True, not masked, True])
    real = torch.arange(shape[1]) < LENGTHS[:, None]
    mask = real & kept[:, None]

    trl_policy = policy.clone().requires_grad_()
    trainer = fake_trainer(config, trl_policy, correct=correct)
    # As GRPOTrainer makes it when it scores completions ("token_truncate"); gspo: the mean over the sequence, as we do.
    gap = torch.where(mask, old - rollout, 0.0)
    if loss_type == "gspo":
        gap = gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 2, dtype=torch.long),
        "completion_ids": torch.zeros(shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": gap.exp().clamp(max=CAP),
    }
    expected = GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()

    our_policy = policy.clone().requires_grad_()
    lengths = LENGTHS[kept]
    loss, sums = policy_loss(
        config,
        Normalizer.of(LENGTHS.tolist(), kept.tolist(), MAX_COMPLETION_LENGTH),
        policy_logprobs=our_policy[mask],
        old_logprobs=old[mask],
        rollout_logprobs=rollout[mask],
        ref_logprobs=ref[mask] if beta else None,
        sequence=torch.repeat_interleave(lengths),
        advantages=advantages[kept],
        lengths=lengths,
    )
    loss.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_policy.grad, trl_policy.grad, rtol=1e-4, atol=1e-7)
    theirs, ours = trainer._metrics["train"], sums.averages()
    if beta:
        assert ours["kl"] == pytest.approx(theirs["kl"][0], rel=1e-5)
    if loss_type == "cispo":
        assert ours["cispo_clip_ratio"] == pytest.approx(theirs["cispo_clip_ratio"][0], rel=1e-6)
    elif loss_type != "gspo":  # there TRL counts sequences, we count tokens
        for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
            assert ours[f"clip_ratio/{name}"] == pytest.approx(theirs[f"clip_ratio/{name}"][0], rel=1e-6), name
        assert ours["clip_ratio/high_mean"] > 0
