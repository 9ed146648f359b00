"""The main job: the embedded model learns its sums, from true rewards only, and the same way every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.cli import app

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "examples" / "demo.toml")


def train(output_dir: Path, *settings: str) -> list[dict]:
    result = CliRunner().invoke(app, ["train", DEMO, f"output_dir={output_dir}", *settings], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "tokens_per_second"))} for row in rows]


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    rows = train(tmp_path / "run")
    before, after = rows[0], rows[-1]
    assert before["eval/accuracy"] <= 0.45
    assert after["eval/accuracy"] >= 0.75
    assert after["eval/accuracy_greedy"] >= before["eval/accuracy_greedy"] + 0.15
    assert sum(row["noise/vectors"] > 0 for row in rows[1:]) == 36  # all but stage 0: a tenth of 40 steps
    assert {"adapter", "plot.png", "metrics.jsonl"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.slow
def test_another_seed_learns_too(tmp_path):
    rows = train(tmp_path / "run", "seed=1", "steps=14", "eval.num_problems=100", "eval.greedy=false")
    assert rows[-1]["eval/accuracy"] >= rows[0]["eval/accuracy"] + 0.15


@pytest.mark.slow
def test_permuted_rewards_teach_nothing(tmp_path):
    reward = f'rewards.functions=["{Path(__file__).parent / "permuted_reward.py"}:permuted"]'
    rows = train(tmp_path / "run", reward, "steps=14", "eval.num_problems=100", "eval.greedy=false")
    assert rows[-1]["eval/accuracy"] <= rows[0]["eval/accuracy"] + 0.05
    assert any(row["grad_norm"] > 0 for row in rows[1:])  # it did train


def test_the_same_seed_gives_the_same_run(tmp_path):
    short = ("steps=3", "eval.num_problems=8", "eval.num_samples=1", "rollout.prompts_per_step=4", "noise.num_stages=3")
    one, two, other = (train(tmp_path / name, *short, f"seed={seed}") for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert without_times(one) == without_times(two)
    assert without_times(one) != without_times(other)
