"""What the trainer does about a rollout that is too far from the policy."""

from types import SimpleNamespace
from typing import Any

from qerl.config import NoiseConfig
from qerl.noise import NoiseMonitor
from qerl.rl.trainer import SMALLEST_RATE_SCALE, Trainer


def test_the_learning_rate_is_cut_to_a_floor_and_the_warning_says_when_it_is_there(tmp_path):
    said: list[str] = []
    run: Any = SimpleNamespace(
        monitor=NoiseMonitor(NoiseConfig(on_divergence="cut_lr", divergence_limit=0.5)),
        output_dir=tmp_path,
        step=3,
        learner=SimpleNamespace(rate_scale=1.0),
        display=SimpleNamespace(warning=said.append),
    )
    scales = []
    for kl in (0.4, *[0.6] * 7):
        Trainer._react_to_divergence(run, kl)
        scales.append(run.learner.rate_scale)
    assert scales == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32, 1 / 32] and SMALLEST_RATE_SCALE == 1 / 32
    assert [text.endswith("is halved") for text in said] == [True] * 5 + [False] * 2
    assert said[-1].endswith("has been halved as often as it may")
