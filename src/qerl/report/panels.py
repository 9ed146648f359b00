"""What is drawn of a run: one table of panels, used by the page (`html.py`) and the picture (`plot.py`).

A curve's name is a metric's (`metrics.py`); `{function}` in it stands for every reward function that a run has.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

# (on light, on dark) backgrounds, in the order of use; apart from each other for the usual colour deficiencies too
PALETTE = (
    ("#2463a6", "#6fabe8"),  # blue
    ("#c7640c", "#f2a154"),  # orange
    ("#15845a", "#56c596"),  # green
    ("#8a4fa8", "#c197e0"),  # purple
    ("#b3323f", "#ef8a90"),  # red
    ("#6f6257", "#b9a999"),  # brown
)


class Curve(NamedTuple):
    """One line of a panel."""

    metric: str
    label: str
    """In the legend; `{function}` as in the metric."""
    points: bool = False
    """Whether it is measured at a few steps only, and drawn as points on a line."""
    dashed: bool = False
    """Whether it is dashed, since it often covers the curve before it."""
    low: str | None = None
    """Metric with the lower end of an interval."""
    high: str | None = None
    """Metric with the upper end."""


class Panel(NamedTuple):
    """One plot over steps."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    percent: bool = False
    """Whether the values are shares, shown as percentages."""
    stacked: bool = False
    """Whether the curves are parts of a sum."""
    counts: bool = False
    """Whether it counts what went wrong: a curve that is zero throughout is left out."""
    smooth: bool = False
    """Whether single steps scatter so much that a running mean is drawn over them."""
    slow_start: bool = False
    """Whether the start may leave the picture: an evaluation, and a first step that compiles and captures graphs."""
    scale: float = 1.0
    """Factor between the metric and what is shown."""
    picture: bool = False
    """Whether `plot.py` draws it too."""


PANELS: tuple[Panel, ...] = (
    Panel("reward", "", (Curve("reward", "reward"),), smooth=True, picture=True),
    Panel("reward by function", "", (Curve("rewards/{function}/mean", "{function}"),), smooth=True),
    Panel(
        "accuracy",
        "",
        (
            Curve("accuracy", "rollouts"),
            Curve("eval/accuracy", "held out, sampled", True, False, "eval/accuracy_low", "eval/accuracy_high"),
            Curve("eval/accuracy_greedy", "held out, greedy", True),
            Curve("eval/accuracy_tag_free", "held out, sampled, tags or not", True),
        ),
        percent=True,
        smooth=True,
        picture=True,
    ),
    Panel(
        "entropy",
        "nats a token",
        (Curve("entropy", "trained policy"), Curve("rollout_entropy", "rollout policy", dashed=True)),
        picture=True,
    ),
    Panel(
        "noise",
        "",
        (Curve("noise/sigma", "sigma"), Curve("noise/relative", "relative to the norm weights")),
        picture=True,
    ),
    Panel(
        "mismatch KL",
        "nats a token",
        (Curve("mismatch_kl", "rollout against trained policy"),),
        logarithmic=True,
        picture=True,
    ),
    Panel(
        "importance weights of tokens",
        "",
        (
            Curve("sampling/importance_sampling_ratio/mean", "mean"),
            Curve("sampling/importance_sampling_ratio/min", "smallest"),
            Curve("sampling/importance_sampling_ratio/max", "largest"),
        ),
    ),
    Panel(
        "clipped tokens",
        "",
        (
            Curve("clip_ratio/low_mean", "ratio below"),
            Curve("clip_ratio/high_mean", "ratio above"),
            Curve("cispo_clip_ratio", "CISPO weight"),
            Curve("sampling/importance_sampling_ratio/capped", "importance weight at its cap"),
        ),
        percent=True,
    ),
    Panel(
        "groups of equal rewards",
        "",
        (Curve("frac_reward_zero_std", "of the sampled groups"),),
        percent=True,
        smooth=True,
        picture=True,
    ),
    Panel(
        "completion length",
        "tokens",
        (
            Curve("completions/mean_length", "mean"),
            Curve("completions/mean_terminated_length", "of those that ended"),
            Curve("eval/mean_length", "held out", True),
        ),
        picture=True,
    ),
    Panel(
        "cut off at the length limit",
        "",
        (Curve("completions/clipped_ratio", "rollouts"), Curve("eval/clipped_ratio", "held out", True)),
        percent=True,
        picture=True,
    ),
    Panel("KL to the reference", "nats a token", (Curve("kl", "KL"),)),
    Panel("loss", "", (Curve("loss", "loss"),)),
    Panel("gradient norm before clipping", "", (Curve("grad_norm", "norm"),), picture=True),
    Panel("learning rate", "", (Curve("learning_rate", "rate"),)),
    Panel(
        "time by phase",
        "s",
        (Curve("time/rollout", "rollout"), Curve("time/update", "update"), Curve("time/eval", "evaluation")),
        stacked=True,
        slow_start=True,
    ),
    Panel("sampling speed", "tokens/s", (Curve("tokens_per_second", "tokens/s"),)),
    Panel(
        "memory",
        "GB",
        (
            Curve("memory/reserved", "GPU, reserved, peak"),
            Curve("memory/allocated", "GPU, in tensors, peak"),
            Curve("memory/rss", "process, peak"),
        ),
        scale=1e-9,
    ),
    Panel(
        "what could not be scored or used",
        "count",
        (
            Curve("rewards/{function}/failed", "completions without a value from {function}"),
            Curve("ungraded", "completions without a grade"),
            Curve("num_skipped_updates", "updates left out"),
        ),
        counts=True,
    ),
)


def expand(curves: tuple[Curve, ...], names: Collection[str]) -> list[Curve]:
    """The curves that there are metrics for, `{function}` filled in; in the order of the table."""
    found = []
    for curve in curves:
        pattern = re.escape(curve.metric).replace(re.escape("{function}"), "([^/]+)")
        matches = [match for name in sorted(names) if (match := re.fullmatch(pattern, name))]
        for match in matches:
            label = curve.label.replace("{function}", match.group(1)) if match.groups() else curve.label
            found.append(curve._replace(metric=match.group(), label=label))
    return found


def running_mean(values: list[float | None]) -> list[float | None] | None:
    """Mean over a window of about a tenth of the run around each step; None for a run too short to need one."""
    half = len(values) // 20
    if half == 0:
        return None
    means: list[float | None] = []
    for i in range(len(values)):
        window = [value for value in values[max(0, i - half) : i + half + 1] if value is not None]
        means.append(sum(window) / len(window) if window else None)
    return means
