"""From rewards to advantages: how much better a completion is than the others of its prompt.

    A_i = (r_i - mean(r)) / (std + 1e-4)            over one group; std is unbiased

    scale_rewards   std
    group           of the group                    GRPO, arXiv 2402.03300, section 4.1.2
    batch           of all rewards of the step      Lite PPO, arXiv 2508.08221
    none            no division                     Dr. GRPO, arXiv 2503.20783: dividing favours easy and hard prompts

A reward of NaN says that no reward function could score the completion: it is left out of mean and std, and its
advantage is 0. A group whose scored rewards are all equal (within a tolerance), or that has fewer than two of them,
teaches nothing: its advantages are exactly 0. rl/rollout.py counts both.

Plain numbers in and out: a step has some hundred rewards. Called by rl/rollout.py and rl/trainer.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

STD_EPSILON = 1e-4  # keeps A finite for nearly equal rewards; TRL's value, so that advantages agree


def compute_advantages(
    rewards: Sequence[Sequence[float]],
    *,
    scale: Literal["group", "batch", "none"] = "group",
    tolerance: float = 1e-6,
) -> list[list[float]]:
    """One advantage a completion; see the module docstring. `tolerance` is what `reward_varies` takes."""
    all_scored = [r for group in rewards for r in _scored(group)]
    batch_std = stdev(all_scored) if len(all_scored) > 1 else 0.0
    values: list[list[float]] = []
    for group in rewards:
        if not reward_varies(group, tolerance):
            values.append([0.0] * len(group))
            continue
        scored = _scored(group)
        mean = fmean(scored)
        divisor = {"group": stdev(scored) + STD_EPSILON, "batch": batch_std + STD_EPSILON, "none": 1.0}[scale]
        values.append([0.0 if math.isnan(r) else (r - mean) / divisor for r in group])
    return values


def reward_varies(rewards: Sequence[float], tolerance: float) -> bool:
    """Whether a group teaches anything: at least two scored rewards, further than `tolerance` apart."""
    scored = _scored(rewards)
    return len(scored) > 1 and max(scored) - min(scored) > tolerance


def overlong_punishment(length: int, max_length: int, buffer: int, penalty: float = 1.0) -> float:
    """What to subtract from the reward of a completion of `length` tokens: soft overlong punishment.

        0 up to max_length - buffer, rising in a straight line to `penalty` at max_length, and `penalty` beyond

    buffer 0 is off. Source: DAPO, arXiv 2503.14476, eq. 13 (there with penalty 1 and the opposite sign).
    """
    if buffer == 0:
        return 0.0
    return penalty * min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)


def _scored(rewards: Sequence[float]) -> list[float]:
    assert not any(math.isinf(r) for r in rewards), "an infinite reward is counted as unscored (NaN) where it arises"
    return [r for r in rewards if not math.isnan(r)]
