"""Every metric's name, unit and meaning: one table, which a run's log is held against.

    describe("rewards/format/mean") -> Metric(name="rewards/{function}/mean", unit="reward", meaning=...)

Names are TRL's where the meaning is TRL's (`trl=True`). `{function}` in a name stands for a reward function's name.
A step's metrics describe its rollout and all its updates; step 0 holds the evaluation before training, if there is one.
Those of the rollout are over all groups that were sampled, under dynamic sampling too, where some are not trained on;
rewards are what advantages are computed from, after the soft overlong punishment. Accuracy is graded as rewards are: in
the answer tags, or wherever the answer stands if one is told `require_tags = false` (`rewards.arguments`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

CONSTANT_STEPS = 20  # in a row without a difference: then a reward function is called constant


class Metric(NamedTuple):
    """One row of the table."""

    name: str
    """Name in metrics.jsonl; `{function}` stands for a reward function's name."""
    unit: str
    """Unit; "share" is a number from 0 to 1."""
    meaning: str
    """One sentence."""
    trl: bool = False
    """Whether TRL's GRPOTrainer logs the same quantity under this name."""


METRICS: tuple[Metric, ...] = (
    # progress
    Metric("step", "steps", "Steps done: rollouts with all their updates."),
    Metric("num_updates", "updates", "Optimizer updates of this step."),
    Metric("data/position", "prompts", "Training problems taken since the run began."),
    Metric("data/too_long", "prompts", "Problems passed over since the run began: longer than task.max_prompt_length."),
    # rewards; a completion that no function could score is in none of the means
    Metric("reward", "reward", "Mean weighted sum of the reward functions.", trl=True),
    Metric("reward_std", "reward", "Standard deviation of the rewards over all completions of the step.", trl=True),
    Metric("reward_group_std", "reward", "Mean over groups of the standard deviation inside the group."),
    Metric("frac_reward_zero_std", "share", "Sampled groups whose rewards are all equal.", trl=True),
    Metric("rewards/{function}/mean", "reward", "Mean value of one function, without its weight.", trl=True),
    Metric("rewards/{function}/std", "reward", "Standard deviation of one function's values.", trl=True),
    Metric("rewards/{function}/failed", "completions", "Completions that the function gave no finite value for."),
    Metric("accuracy", "share", "Completions of the rollout that the task's grader calls right."),
    Metric("ungraded", "completions", "Completions of the rollout that the grader could not grade."),
    # completions
    Metric("completions/mean_length", "tokens", "Mean length, EOS included.", trl=True),
    Metric("completions/min_length", "tokens", "Shortest.", trl=True),
    Metric("completions/max_length", "tokens", "Longest.", trl=True),
    Metric("completions/clipped_ratio", "share", "Completions cut off by the length limit.", trl=True),
    Metric("completions/mean_terminated_length", "tokens", "Mean length of those that ended with an EOS.", trl=True),
    Metric("completions/min_terminated_length", "tokens", "Shortest of those.", trl=True),
    Metric("completions/max_terminated_length", "tokens", "Longest of those.", trl=True),
    Metric("completions/new_tokens", "tokens", "Sampled in this step, groups that were replaced included."),
    # groups under dynamic sampling
    Metric("groups/sampled", "groups", "Sampled in this step, replaced ones included."),
    Metric("groups/missing", "groups", "Short of prompts_per_step after the last resampling round."),
    Metric("groups/rounds", "rounds", "Rounds of sampling: 1 without dynamic sampling."),
    # policy and loss
    Metric("loss", "1", "The policy-gradient loss, KL term included.", trl=True),
    Metric("entropy", "nats/token", "Entropy of the trained policy over completion tokens, at temperature.", trl=True),
    Metric("kl", "nats/token", "KL(policy || reference); only with loss.beta > 0.", trl=True),
    Metric("ratio/mean", "1", "Mean policy / old probability of a token; gspo: of its sequence."),
    Metric("clip_ratio/low_mean", "share", "Tokens with ratio < 1 - epsilon and negative advantage.", trl=True),
    Metric("clip_ratio/low_min", "share", "Smallest such share of a completion.", trl=True),
    Metric("clip_ratio/high_mean", "share", "Tokens with ratio > 1 + epsilon_high and positive advantage.", trl=True),
    Metric("clip_ratio/high_max", "share", "Largest such share of a completion.", trl=True),
    Metric("clip_ratio/region_mean", "share", "Tokens that either clip holds.", trl=True),
    Metric("cispo_clip_ratio", "share", "CISPO: tokens whose weight is clipped, with positive advantage.", trl=True),
    Metric("learning_rate", "1", "Of the step's last update.", trl=True),
    Metric("grad_norm", "1", "Global gradient norm before clipping, mean over the step's updates.", trl=True),
    Metric("num_skipped_updates", "updates", "Updates of this step left out: their gradient was not finite."),
    # rollout policy against trained policy: what noise and kernels change
    Metric("rollout_entropy", "nats/token", "Entropy of the rollout policy where its tokens were drawn; not of vLLM."),
    Metric("mismatch_kl", "nats/token", "KL(rollout || old): mean of r - 1 - log r, r = old / rollout probability."),
    Metric("mismatch_kl/k1", "nats/token", "The same as mean of log rollout - log old: fewer outliers."),
    Metric("sampling/sampling_logp_difference/mean", "nats", "Mean of |old - rollout log-probability|.", trl=True),
    Metric("sampling/sampling_logp_difference/max", "nats", "Largest of those.", trl=True),
    Metric("sampling/importance_sampling_ratio/min", "1", "Smallest weight min(old / rollout, cap).", trl=True),
    Metric("sampling/importance_sampling_ratio/mean", "1", "Mean weight.", trl=True),
    Metric("sampling/importance_sampling_ratio/max", "1", "Largest weight.", trl=True),
    Metric("sampling/importance_sampling_ratio/capped", "share", "Tokens whose weight is held at the cap."),
    # noise; only with noise.enabled
    Metric("noise/sigma", "1", "Standard deviation of the noise added to norm weights in this step's rollout."),
    Metric("noise/vectors", "vectors", "Norm vectors that the noise changed in the engine; 0 while sigma is 0."),
    Metric("noise/relative", "1", "Noise against the norm weights it is added to: |Z| / |w|, rms over norms."),
    # evaluation: held-out problems, adapters on, noise off
    Metric("eval/accuracy", "share", "Mean over problems of the share of right sampled completions."),
    Metric("eval/accuracy_low", "share", "Lower end of its 95 % interval, over problems."),
    Metric("eval/accuracy_high", "share", "Upper end of it."),
    Metric("eval/accuracy_tag_free", "share", "Of the same completions, with the answer taken where it is found."),
    Metric("eval/accuracy_greedy", "share", "Problems solved by greedy decoding."),
    Metric("eval/num_problems", "problems", "Problems of the evaluation."),
    Metric("eval/clipped_ratio", "share", "Sampled completions cut off by the length limit."),
    Metric("eval/ungraded", "completions", "Sampled completions that the grader could not grade; not right."),
    Metric("eval/mean_length", "tokens", "Mean length of the sampled completions."),
    # speed and memory
    Metric("tokens_per_second", "tokens/s", "Sampled tokens over the rollout's time."),
    Metric(
        "decode_steps", "steps", "Of the rollout; not of vLLM. With right guesses fewer than a completion has tokens."
    ),
    Metric("time/step", "s", "The whole step, evaluation and checkpoint left out."),
    Metric("time/rollout", "s", "Sampling and scoring."),
    Metric("time/scoring", "s", "Of it, the reward functions."),
    Metric("time/update", "s", "Scoring passes, gradients and optimizer."),
    Metric("time/eval", "s", "Evaluation after this step."),
    Metric("micro_batch_tokens", "tokens", "Most tokens of a pass: as set or planned, or fewer since memory ran out."),
    Metric(
        "recomputed_layers", "layers", "Layers that ran again in the backward pass: as set or planned, or all of them."
    ),
    Metric("memory/allocated", "bytes", "GPU memory in tensors and KV cache, its peak in this step; only on a GPU."),
    Metric("memory/reserved", "bytes", "GPU memory of allocator and KV cache, its peak in this step; only on a GPU."),
    Metric("memory/rss", "bytes", "Memory of the process, its peak since the start; only without a GPU."),
)

_EXACT = {metric.name: metric for metric in METRICS if "{" not in metric.name}
# A function's name may hold anything but a slash: "rewards/{function}/mean" -> rewards/[^/]+/mean
_PATTERNS = [
    (re.compile(re.escape(metric.name).replace(re.escape("{function}"), "[^/]+")), metric)
    for metric in METRICS
    if "{" in metric.name
]


def describe(name: str) -> Metric:
    """Return the row of a logged name; KeyError, with the nearest known name, when it has none."""
    if metric := _EXACT.get(name):
        return metric
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1)
    raise KeyError(f"metric {name!r} is not in qerl/metrics.py" + (f"; near it is {near[0]!r}" if near else ""))


def check_names(names: Iterable[str]) -> None:
    """Hold names that are about to be logged against the table; KeyError at the first without a row."""
    for name in names:
        describe(name)


def constant_since(rows: Sequence[Mapping[str, Any]], function: str) -> int | None:
    """The step since which a reward function has given all completions of each step one value.

    `rows`: the metrics of steps in a row. None unless the last CONSTANT_STEPS of them, or more, are like that.
    """

    def constant(row: Mapping[str, Any]) -> bool:
        mean = row.get(f"rewards/{function}/mean")  # NaN, or null in the log: there was no value at all
        return mean is not None and mean == mean and row[f"rewards/{function}/std"] == 0

    found = list(takewhile(constant, reversed(rows)))
    return found[-1]["step"] if len(found) >= CONSTANT_STEPS else None
