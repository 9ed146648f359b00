"""A step in numbers: its metrics, from the groups of the rollout and from the sums of the updates.

Names and units are in metrics.py. What describes the rollout is over all that was sampled: under dynamic sampling the
groups to train on are chosen by their rewards, so their accuracy says little of the policy. A completion that no reward
function could score is in no mean of rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import torch
from torch import Tensor

from qerl.rl.loss import LossSums
from qerl.rl.rollout import Rollout
from qerl.tasks import Task


def rollout_metrics(rollout: Rollout, task: Task, *, require_tags: bool = True) -> dict[str, float]:
    """What was sampled and how it was paid. Grades all completions, as `Task.grade_batch` does with `require_tags`."""
    groups = rollout.sampled
    rewards = [r for group in groups for r in group.rewards if not math.isnan(r)]
    completions = [c for group in groups for c in group.completions]
    lengths = [len(c.token_ids) for c in completions]
    ended = [len(c.token_ids) for c in completions if not c.truncated]
    entropies = [h for c in completions for h in c.entropies or []]  # none at all: NaN, which is logged as null
    grades = task.grade_batch(
        [text for group in groups for text in group.texts],
        [group.example.columns for group in groups for _ in group.texts],
        require_tags=require_tags,
    )
    scored = [[r for r in group.rewards if not math.isnan(r)] for group in groups]
    metrics = {
        "reward": _mean(rewards),
        "reward_std": _std(rewards),
        "reward_group_std": _mean([_std(group) for group in scored if len(group) > 1]),
        "frac_reward_zero_std": rollout.num_zero_variance_groups / len(groups),
        "accuracy": _mean([float(grade is True) for grade in grades]) if set(grades) != {None} else math.nan,
        "ungraded": sum(grade is None for grade in grades),
        "rollout_entropy": _mean(entropies),
        "completions/new_tokens": rollout.num_new_tokens,
        "completions/clipped_ratio": _mean([float(c.truncated) for c in completions]),
        "groups/sampled": len(groups),
        "groups/missing": rollout.num_missing_groups,
        "groups/rounds": rollout.num_rounds,
    }
    for kind, values in (("", lengths), ("terminated_", ended)):
        metrics |= {
            f"completions/mean_{kind}length": _mean(values),
            f"completions/min_{kind}length": min(values, default=math.nan),
            f"completions/max_{kind}length": max(values, default=math.nan),
        }
    for name, failed in rollout.reward_failures.items():
        values = [v for group in groups for v in group.reward_parts[name] if not math.isnan(v)]
        metrics |= {
            f"rewards/{name}/mean": _mean(values),
            f"rewards/{name}/std": _std(values),
            f"rewards/{name}/failed": failed,
        }
    return metrics


@dataclass
class UpdateTotals:
    """Sums over the micro-batches and updates of a step; the device is waited for once, in `metrics`."""

    losses: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    """Sum over tokens of each micro-batch's entropy."""
    sums: LossSums | None = None
    rate: float = math.nan
    grad_norms: list[float] = field(default_factory=list)
    num_skipped: int = 0

    def add_micro_batch(self, loss: Tensor, entropy: Tensor, sums: LossSums) -> None:
        """One forward and backward pass."""
        self.losses.append(loss)
        self.entropy.append(entropy.sum(dtype=torch.float64))
        self.sums = sums if self.sums is None else self.sums + sums

    def add_update(self, rate: float, grad_norm: float, taken: bool) -> None:
        """One optimizer step."""
        self.rate = rate
        self.grad_norms.append(grad_norm)
        self.num_skipped += not taken

    def metrics(self) -> dict[str, float]:
        """Means over the step's tokens and updates."""
        metrics = {
            "learning_rate": self.rate,
            "grad_norm": _mean(self.grad_norms),
            "num_updates": len(self.grad_norms),
            "num_skipped_updates": self.num_skipped,
        }
        if self.sums is not None:
            metrics["loss"] = torch.stack(self.losses).sum().item() / len(self.grad_norms)
            metrics["entropy"] = torch.stack(self.entropy).sum().item() / max(self.sums.num_tokens.item(), 1)
            metrics |= self.sums.averages()
        return metrics


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
