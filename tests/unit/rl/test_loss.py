"""Policy losses: numbers worked out by hand, the sign of the gradient, and that no cut of a batch changes them."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.config import LossConfig
from qerl.metrics import check_names
from qerl.rl.loss import Normalizer, policy_loss

LOSS_TYPES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo"]

# Two completions: one of 2 tokens with A = 1, one of 3 tokens with A = -2. Ratios policy/old:
RATIOS = torch.tensor([1.5, 1.1, 0.5, 1.0, 1.3])
SEQUENCE = torch.tensor([0, 0, 1, 1, 1])
LENGTHS = torch.tensor([2, 3])
ADVANTAGES = torch.tensor([1.0, -2.0])
NORMALIZER = Normalizer(num_sequences=2, num_tokens=5, max_completion_length=10)
OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])


def config(**values):
    return LossConfig(**{"type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28} | values)


def loss_of(loss_config, normalizer=NORMALIZER, *, ratios=RATIOS, rollout=None, ref=None, advantages=ADVANTAGES):
    policy = (OLD + ratios.log()).requires_grad_()
    loss, sums = policy_loss(
        loss_config,
        normalizer,
        policy_logprobs=policy,
        old_logprobs=OLD,
        rollout_logprobs=rollout,
        ref_logprobs=ref,
        sequence=SEQUENCE,
        advantages=advantages,
        lengths=LENGTHS,
    )
    loss.backward()
    return loss.item(), policy.grad, sums.averages()


# Token losses -min(r A, clip(r, 0.8, 1.28) A):  1.5 -> -1.28   1.1 -> -1.1   0.5 -> 1.6   1.0 -> 2.0   1.3 -> 2.6
TOKEN_LOSSES = [-1.28, -1.1, 1.6, 2.0, 2.6]


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", (sum(TOKEN_LOSSES[:2]) / 2 + sum(TOKEN_LOSSES[2:]) / 3) / 2),
        ("dapo", sum(TOKEN_LOSSES) / 5),
        ("dr_grpo", sum(TOKEN_LOSSES) / 20),
    ],
)
def test_token_level_losses_by_hand(loss_type, expected):
    loss, grad, metrics = loss_of(config(type=loss_type))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert (grad == 0).tolist() == [True, False, True, False, False]  # clipped tokens have no gradient
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 5)  # 1.5 with A > 0
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 5)  # 0.5 with A < 0
    assert metrics["clip_ratio/region_mean"] == pytest.approx(2 / 5)
    assert metrics["clip_ratio/low_min"] == 0  # the first completion has none
    assert metrics["clip_ratio/high_max"] == pytest.approx(1 / 2)
    assert metrics["ratio/mean"] == pytest.approx(5.4 / 5)


def test_the_gradient_of_dapo_by_hand():
    _, grad, _ = loss_of(config())
    # d(-r A)/d log p = -r A where nothing is clipped
    assert grad.tolist() == pytest.approx([0, -1.1 / 5, 0, 2.0 / 5, 2.6 / 5], rel=1e-6)


def test_gspo_by_hand():
    s = [math.sqrt(1.5 * 1.1), (0.5 * 1.0 * 1.3) ** (1 / 3)]  # 1.2845, 0.8662
    loss, grad, metrics = loss_of(config(type="gspo"))
    assert loss == pytest.approx((-1.28 + 2 * s[1]) / 2, rel=1e-6)
    # d s / d log p_t = s / L: every token of a sequence gets the same
    assert grad.tolist() == pytest.approx([0, 0] + [2 * s[1] / 3 / 2] * 3, rel=1e-6)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(2 / 5)
    assert metrics["clip_ratio/low_mean"] == 0


def test_cispo_by_hand():
    loss, grad, metrics = loss_of(config(type="cispo"))
    policy = (OLD + RATIOS.log()).tolist()
    weights = [1.28, 1.1, 0.5, 1.0, 1.28]  # clipped above only, on either sign of A
    advantages = [1, 1, -2, -2, -2]
    expected = -sum(w * a * p for w, a, p in zip(weights, advantages, policy, strict=True)) / 5
    assert loss == pytest.approx(expected, rel=1e-6)
    expected_grad = [-w * a / 5 for w, a in zip(weights, advantages, strict=True)]
    assert grad.tolist() == pytest.approx(expected_grad, rel=1e-6)  # no token loses its gradient
    assert metrics["cispo_clip_ratio"] == pytest.approx(1 / 5)  # the fifth token has A < 0
    assert not [name for name in metrics if name.startswith("clip_ratio")]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_raises_good_and_lowers_bad_completions(loss_type):
    _, grad, _ = loss_of(config(type=loss_type), ratios=torch.ones(5))
    assert (grad[:2] < 0).all()  # gradient descent adds -grad
    assert (grad[2:] > 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_zero_advantage_gives_no_gradient(loss_type):
    _, grad, _ = loss_of(config(type=loss_type), advantages=torch.zeros(2))
    assert (grad == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_old_logprobs_the_ratio_is_one_and_has_a_gradient(loss_type):
    def run(old):
        policy = OLD.clone().requires_grad_()
        loss, sums = policy_loss(
            config(type=loss_type),
            NORMALIZER,
            policy_logprobs=policy,
            old_logprobs=old,
            rollout_logprobs=None,
            ref_logprobs=None,
            sequence=SEQUENCE,
            advantages=ADVANTAGES,
            lengths=LENGTHS,
        )
        loss.backward()
        return loss.item(), policy.grad.tolist(), sums.averages()

    assert run(None) == run(OLD)
    assert run(None)[2]["ratio/mean"] == 1.0


# ---------------------------------------------------------------------------------------------- importance correction

# old/rollout probability: 0.5, 1, 4 (capped at 2), 1, 1.25
MISMATCH_RATIOS = torch.tensor([0.5, 1.0, 4.0, 1.0, 1.25])
ROLLOUT = OLD - MISMATCH_RATIOS.log()


def test_token_importance_weights_by_hand():
    loss, grad, metrics = loss_of(config(), rollout=ROLLOUT)
    weights = [0.5, 1.0, 2.0, 1.0, 1.25]
    assert loss == pytest.approx(sum(w * x for w, x in zip(weights, TOKEN_LOSSES, strict=True)) / 5, rel=1e-6)
    assert grad.tolist() == pytest.approx([0, -1.1 / 5, 0, 2.0 / 5, 1.25 * 2.6 / 5], rel=1e-5)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(5.75 / 5)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/importance_sampling_ratio/max"] == 2.0
    assert metrics["sampling/importance_sampling_ratio/capped"] == pytest.approx(1 / 5)


def test_mismatch_kl_by_hand():
    _, _, metrics = loss_of(config(), rollout=ROLLOUT)
    logs = [math.log(q) for q in MISMATCH_RATIOS.tolist()]
    assert metrics["mismatch_kl/k1"] == pytest.approx(-sum(logs) / 5, rel=1e-6)
    k3 = sum(q - 1 - x for q, x in zip(MISMATCH_RATIOS.tolist(), logs, strict=True)) / 5
    assert metrics["mismatch_kl"] == pytest.approx(k3, rel=1e-6)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(sum(map(abs, logs)) / 5, rel=1e-6)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(4), rel=1e-6)


def test_gspo_corrects_whole_sequences():
    loss, _, metrics = loss_of(config(type="gspo"), rollout=ROLLOUT)
    s = (0.5 * 1.0 * 1.3) ** (1 / 3)
    weights = [math.sqrt(0.5), 5.0 ** (1 / 3)]
    assert loss == pytest.approx((weights[0] * -1.28 + weights[1] * 2 * s) / 2, rel=1e-6)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(weights[1], rel=1e-6)


def test_correction_can_be_off_while_the_mismatch_is_measured():
    loss, _, metrics = loss_of(config(importance_sampling=False), rollout=ROLLOUT)
    assert loss == pytest.approx(sum(TOKEN_LOSSES) / 5, rel=1e-6)
    assert metrics["mismatch_kl"] > 0
    assert not [name for name in metrics if "importance" in name]  # a weight that was not applied is none


def test_without_rollout_logprobs_nothing_is_said_about_the_mismatch():
    _, _, metrics = loss_of(config())
    assert not [name for name in metrics if "mismatch" in name or "sampling" in name]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_metric_has_its_row_in_the_table(loss_type):
    _, _, metrics = loss_of(config(type=loss_type, beta=0.1), rollout=ROLLOUT, ref=OLD)
    check_names(metrics)


# ------------------------------------------------------------------------------------------------------------- KL


def test_kl_by_hand():
    q = torch.tensor([2.0, 1.0, 0.5, 1.0, 1.0])  # ref / policy
    ref = OLD + RATIOS.log() + q.log()
    loss, grad, metrics = loss_of(config(beta=0.1), ref=ref, advantages=torch.zeros(2))
    k3 = [1 - math.log(2), 0, -0.5 + math.log(2), 0, 0]
    assert loss == pytest.approx(0.1 * sum(k3) / 5, rel=1e-5)
    assert metrics["kl"] == pytest.approx(sum(k3) / 5, rel=1e-5)
    assert grad.tolist() == pytest.approx([0.1 * (1 - 2) / 5, 0, 0.1 * (1 - 0.5) / 5, 0, 0], abs=1e-7)


def test_the_importance_weight_is_not_applied_to_the_kl():
    ref = OLD + 0.3
    bare, _, _ = loss_of(config(beta=0.1), ref=ref, advantages=torch.zeros(2))
    corrected, _, _ = loss_of(config(beta=0.1), ref=ref, advantages=torch.zeros(2), rollout=ROLLOUT)
    assert corrected == bare


def test_kl_without_reference_is_refused():
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss_of(config(beta=0.1))


# ------------------------------------------------------------------------------------------------------ normalizer


def test_normalizer_counts_filtered_sequences_but_not_their_tokens():
    assert Normalizer.of([2, 3, 0, 7], [True, True, True, False], 10) == Normalizer(4, 5, 10)


def test_filtered_sequences_scale_means_over_sequences_only():
    with_filtered = Normalizer.of([2, 3, 7, 7], [True, True, False, False], 10)
    for loss_type, factor in [("grpo", 0.5), ("gspo", 0.5), ("dr_grpo", 0.5), ("dapo", 1.0), ("cispo", 1.0)]:
        alone, _, _ = loss_of(config(type=loss_type))
        among, _, _ = loss_of(config(type=loss_type), with_filtered)
        assert among == pytest.approx(factor * alone, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_tokens_at_all(loss_type):
    empty = torch.zeros(0)
    policy = torch.zeros(0, requires_grad=True)
    loss, sums = policy_loss(
        config(type=loss_type),
        Normalizer.of([0, 0], [True, True], 10),
        policy_logprobs=policy,
        old_logprobs=empty,
        rollout_logprobs=empty,
        ref_logprobs=empty,
        sequence=empty.long(),
        advantages=ADVANTAGES,
        lengths=torch.tensor([0, 0]),
    )
    loss.backward()
    assert loss.item() == 0
    assert all(math.isfinite(v) for v in sums.averages().values())


# ------------------------------------------------------------------------------------------------ micro-batch cuts


@st.composite
def cut_batches(draw):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths)), max_size=3)) - {len(lengths)})
    return lengths, cuts, draw(st.integers(0, 2**31))


@settings(max_examples=40, deadline=None)
@given(cut_batches(), st.sampled_from(LOSS_TYPES))
def test_no_cut_changes_loss_gradient_or_metrics(batch, loss_type):
    lengths, cuts, seed = batch
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    names = ("policy_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    logprobs = {name: -1 + 0.3 * torch.randn(total, generator=generator).double() for name in names}
    advantages = torch.randn(len(lengths), generator=generator).double()
    normalizer = Normalizer.of(lengths, [True] * len(lengths), 6)
    loss_config = config(type=loss_type, beta=0.1)

    def run(bounds):
        policy = logprobs["policy_logprobs"].clone().requires_grad_()
        losses, sums = [], []
        for first, last in pairwise(bounds):
            span = slice(sum(lengths[:first]), sum(lengths[:last]))
            part = torch.tensor(lengths[first:last])
            loss, part_sums = policy_loss(
                loss_config,
                normalizer,
                **{name: (policy if name == "policy_logprobs" else logprobs[name])[span] for name in names},
                sequence=torch.repeat_interleave(part),
                advantages=advantages[first:last],
                lengths=part,
            )
            loss.backward()
            losses.append(loss.item())
            sums.append(part_sums)
        return sum(losses), policy.grad, reduce(add, sums).averages()

    whole, cut = run([0, len(lengths)]), run([0, *cuts, len(lengths)])
    assert cut[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-9)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-6, atol=1e-9)
    assert cut[2] == pytest.approx(whole[2], rel=1e-6, abs=1e-9)
