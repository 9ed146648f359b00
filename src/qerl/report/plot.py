"""The curves of a run as one PNG, from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from qerl.rl.log import read_metrics

# Each panel: its title, the metrics drawn in it with their labels, whether the axis is logarithmic.
PANELS = (
    ("reward", (("reward", "mean"), ("reward_std", "standard deviation")), False),
    (
        "accuracy",
        (
            ("accuracy", "rollouts"),
            ("eval/accuracy", "held out, sampled"),
            ("eval/accuracy_greedy", "held out, greedy"),
        ),
        False,
    ),
    ("entropy [nats a token]", (("rollout_entropy", "rollout policy"), ("entropy", "trained policy")), False),
    ("noise sigma", (("noise/sigma", "sigma"),), False),
    ("mismatch KL [nats a token]", (("mismatch_kl", "rollout against trained policy"),), True),
    ("completion length [tokens]", (("completions/mean_length", "mean"),), False),
)


def plot_run(output_dir: Path) -> Path:
    """Write <output_dir>/plot.png; returns its path. ValueError when the folder holds no metrics."""
    rows = read_metrics(output_dir)
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for axis, (title, metrics, logarithmic) in zip(axes.flat, PANELS, strict=True):
        for name, label in metrics:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(
                    *zip(*points, strict=True), "o-" if name.startswith("eval/") else "-", label=label, markersize=4
                )
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if logarithmic and axis.has_data():
            axis.set_yscale("log")
        if len(metrics) > 1:
            axis.legend(fontsize=8, frameon=False)
    path = output_dir / "plot.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
