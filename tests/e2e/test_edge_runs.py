"""Runs that have little or nothing to learn from go on, count it, and say so."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from qerl.config import load_config
from qerl.display import Display
from qerl.rl.trainer import Trainer
from qerl.tasks.arithmetic import ArithmeticTask

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
TINY = [
    "steps=5",
    "lora.r=4",
    "rollout.prompts_per_step=2",
    "rollout.num_generations=2",
    "rollout.max_completion_length=24",
    "noise.num_stages=2",
    "eval.num_problems=0",
]


@pytest.fixture
def rewards(tmp_path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(
        "def same(completions, **kwargs):\n    return [1.0] * len(completions)\n\n"
        "def half(completions, **kwargs):\n    return [None if i % 2 else float(len(c[0]['content']))\n"
        "            for i, c in enumerate(completions)]\n"
    )
    return path


def train(output_dir: Path, *settings: str) -> tuple[list[dict], str]:
    config = load_config(DEMO, [*TINY, f"output_dir={output_dir}", *settings])
    stream = io.StringIO()
    Trainer(config, display=Display(config.steps, stream=stream)).train()
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()], stream.getvalue()


def test_equal_rewards_are_said_aloud(rewards, tmp_path):
    rows, said = train(tmp_path / "run", f'rewards.functions=["{rewards}:same"]')
    assert all(row["frac_reward_zero_std"] == 1 and row["grad_norm"] == 0 for row in rows)
    assert "every group had equal rewards" in said


@pytest.mark.parametrize(("weight", "told"), [(0.5, 1), (0.0, 0)])
def test_a_reward_function_that_teaches_nothing_is_named_once(rewards, tmp_path, monkeypatch, weight, told):
    for module in ("metrics", "rl.trainer"):
        monkeypatch.setattr(f"qerl.{module}.CONSTANT_STEPS", 2)
    _, said = train(
        tmp_path / "run", f'rewards.functions=["{rewards}:same","{rewards}:half"]', f"rewards.weights=[{weight},1]"
    )
    assert said.count("reward same: in each of the last 2 steps all completions got the same value, 1 in") == told
    assert "reward half:" not in said


@pytest.mark.parametrize(("gradeless", "told"), [(1, 1), (0, 0), (4, 0)])
def test_many_completions_without_a_grade_are_told_once(tmp_path, monkeypatch, gradeless, told):
    """Of four a step. All of them: a task without a grader."""
    grade = ArithmeticTask.grade_batch

    def some(self, texts, columns, **more):
        return [None] * gradeless + grade(self, texts, columns, **more)[gradeless:]

    monkeypatch.setattr(ArithmeticTask, "grade_batch", some)
    rows, said = train(tmp_path / "run", "steps=2")
    assert [row["ungraded"] for row in rows] == [gradeless] * 2
    assert said.count("the grader could not judge 1 of 4 completions") == told == said.count("the grader could not")


def test_what_is_not_there_is_not_logged(tmp_path):
    rows, said = train(tmp_path / "run", "steps=1", "noise.enabled=false")
    assert [row["step"] for row in rows] == [1]  # no evaluation, no step 0
    assert not [name for name in rows[0] if name.startswith("noise/")]
    assert "step 0/1" not in said and "sigma" not in said


def test_accuracy_is_graded_as_the_reward_is(tmp_path, monkeypatch):
    monkeypatch.setattr(ArithmeticTask, "grade_batch", lambda *_, require_tags=True: [not require_tags] * 4)
    settings = ["steps=1", "eval.num_problems=4", "eval.num_samples=1"]
    for require_tags in (True, False):
        argument = f"rewards.arguments={{correctness={{require_tags={str(require_tags).lower()}}}}}"
        rows, said = train(tmp_path / str(require_tags), *settings, argument)
        assert rows[-1]["accuracy"] == rows[-1]["eval/accuracy"] == rows[-1]["eval/accuracy_greedy"] == 1 - require_tags
        assert ("accuracy counts a right answer wherever it stands" in said) is not require_tags


def test_dynamic_sampling_that_finds_nothing_goes_on(rewards, tmp_path):
    rows, _ = train(tmp_path / "run", f'rewards.functions=["{rewards}:same"]', "loss.dynamic_sampling=true", "steps=2")
    for row in rows:
        assert row["groups/missing"] == 2 and row["groups/rounds"] == 4 and row["groups/sampled"] == 8
        assert row["num_updates"] == 0 and row["learning_rate"] is None
        assert row["reward"] == 1 and row["completions/mean_length"] > 0  # of what was sampled, though none is kept
    assert len((tmp_path / "run" / "completions.jsonl").read_text().splitlines()) == 2


def test_a_step_that_trains_on_no_token_is_no_divergence(tmp_path):
    settings = ["rollout.max_completion_length=2", "loss.mask_truncated_completions=true"]
    rows, said = train(tmp_path / "run", *settings, "noise.on_divergence=disable_noise")
    assert all(row["completions/clipped_ratio"] == 1 and "mismatch_kl" not in row for row in rows)
    assert rows[-1]["noise/sigma"] > 0 and "divergence" not in said


def test_completions_without_a_reward_are_counted_and_left_out(rewards, tmp_path):
    rows, _ = train(tmp_path / "run", f'rewards.functions=["{rewards}:half"]', "steps=2")
    assert all(row["rewards/half/failed"] == 2 and row["reward"] > 0 for row in rows)


@pytest.mark.filterwarnings("ignore:sampling with transformers")
@pytest.mark.parametrize(
    "settings",
    [
        ["loss.type=grpo", "loss.beta=0.05", "noise.same_noise_in_training=true", "noise.per=completion"],
        ["loss.type=gspo", "loss.num_iterations=2"],
        ["loss.type=cispo", "loss.updates_per_rollout=2", "noise.controller=divergence"],
        [
            "loss.type=dr_grpo",
            "loss.scale_rewards=none",
            "loss.mask_truncated_completions=true",
            "loss.overlong_buffer=8",
        ],
        ["rollout.engine=hf", "noise.per=prompt"],
        ["model.format=bf16", "lora.use_rslora=true", "noise.controller=entropy", "noise.target=0.2"],
        ["noise.on_divergence=rollback", "noise.divergence_limit=1e-12", "save_every=1"],
    ],
    ids=lambda settings: settings[0],
)
def test_settings_that_meet_in_the_trainer(settings, tmp_path):
    rows, _ = train(tmp_path / "run", "steps=3", "noise.sigma_start=2e-2", *settings)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["num_skipped_updates"] == 0 for row in rows)
    assert any(row["noise/vectors"] == 8 for row in rows)
    if "loss.beta=0.05" in settings:
        assert rows[-1]["kl"] > 0


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "int4", "bf16"])
def test_a_run_changes_its_format_by_a_name_alone(format, tmp_path):
    rows, _ = train(tmp_path / "run", "steps=2", "loss.type=grpo", f"model.format={format}")
    assert [row["step"] for row in rows] == [1, 2] and all(row["num_skipped_updates"] == 0 for row in rows)
    # Trainer and engine compute with the same weights: without noise (stage 0) they agree on what was sampled.
    assert rows[0]["noise/sigma"] == 0 and rows[0]["mismatch_kl"] < 1e-6
    assert rows[0]["grad_norm"] > 0
