"""The table of metrics: complete, unambiguous, and true to TRL's names."""

from __future__ import annotations

import ast
import inspect
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qerl
from qerl.config import TaskConfig
from qerl.display import COLUMNS
from qerl.live import BLOCKS
from qerl.metrics import CONSTANT_STEPS, METRICS, check_names, constant_since, describe
from qerl.report.panels import PANELS
from qerl.rl.loss import LossSums
from qerl.rl.rollout import Rollout
from qerl.rl.summary import UpdateTotals, rollout_metrics
from qerl.tasks import load_task
from qerl.types import Completion, RolloutGroup


def test_names_are_unique_and_every_row_is_complete():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.unit
        assert metric.meaning.endswith(".")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_row_is_found_by_its_logged_name(metric):
    assert describe(metric.name.replace("{function}", "my reward: v2")) is metric


@pytest.mark.parametrize("name", ["rewards/format", "rewards//mean", "rewards/a/b/mean", "rewards/a/mean ", "eval", ""])
def test_other_names_have_no_row(name):
    with pytest.raises(KeyError):
        describe(name)


def test_an_unknown_name_is_told_with_the_nearest_one():
    with pytest.raises(KeyError, match=r"'mismatch_kd' is not in .*near it is 'mismatch_kl'"):
        check_names(["step", "mismatch_kd"])
    check_names(["step", "rewards/format/mean"])


def test_names_marked_as_trls_are_logged_by_trl():
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    logged = set()
    for node in ast.walk(ast.parse(inspect.getsource(grpo_trainer))):
        # self._metrics[mode]["name"], and names with a reward function's in them
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
            if isinstance(node.slice, ast.Constant):
                logged.add(node.slice.value)
            elif isinstance(node.slice, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "{function}" for p in node.slice.values]
                logged.add("".join(map(str, parts)))
    logged |= {"loss", "grad_norm", "learning_rate"}  # by the transformers Trainer under it
    assert [metric.name for metric in METRICS if metric.trl and metric.name not in logged] == []


def test_the_table_needs_no_torch():
    code = "import sys, qerl.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---------------------------------------------------------------- the code against the table


def test_every_metric_of_a_rollout_has_a_row():
    task = load_task(TaskConfig(), seed=0)
    group = RolloutGroup(
        example=task.train_example(0),
        prompt_ids=[1],
        prompt_index=0,
        completions=[Completion([2], [-0.1], [0.2], "stop"), Completion([3], [-0.1], [0.2], "length")],
        texts=["a", "b"],
        rewards=[0.0, 1.0],
        reward_parts={"format": [0.0, 1.0]},
    )
    rollout = Rollout([group], [group], num_rounds=1, reward_failures={"format": 0})
    check_names(rollout_metrics(rollout, task))
    group.texts = [f"It is {group.example.columns['answer']}.", "b"]  # right, outside the tags
    assert rollout_metrics(rollout, task)["accuracy"] == 0
    assert rollout_metrics(rollout, task, require_tags=False)["accuracy"] == 0.5


def test_a_reward_function_is_constant_after_enough_steps_without_a_difference():
    def rows(*stds: float, mean: float | None = 0.0) -> list[dict]:
        values = [{"rewards/f/std": std, "rewards/f/mean": mean} for std in stds]
        return [{"step": 0}] + [{"step": i + 1} | row for i, row in enumerate(values)]

    assert constant_since(rows(0.5, *[0.0] * CONSTANT_STEPS), "f") == 2
    assert constant_since(rows(*[0.0] * (CONSTANT_STEPS + 5)), "f") == 1
    assert constant_since(rows(*[0.0] * (CONSTANT_STEPS - 1)), "f") is None
    assert constant_since(rows(*[0.0] * CONSTANT_STEPS, 0.1), "f") is None  # it differs again
    for nothing in (None, math.nan):  # no value at all
        assert constant_since(rows(*[0.0] * CONSTANT_STEPS, mean=nothing), "f") is None


def test_every_metric_of_an_update_has_a_row():
    totals = UpdateTotals()
    # what a loss adds to `sums` is held against the table in rl/test_loss.py
    totals.add_micro_batch(torch.ones(()), torch.ones(3), LossSums(torch.tensor(3.0), {}, {}, {}))
    totals.add_update(1e-5, 0.1, taken=True)
    assert totals.metrics()["num_updates"] == 1
    check_names(totals.metrics())


def test_what_is_shown_and_plotted_has_a_row():
    check_names(column.metric for column in COLUMNS)
    check_names(name for _, figures in BLOCKS for figure in figures for name in figure.metrics)
    for curve in (curve for panel in PANELS for curve in panel.curves):
        check_names(name for name in (curve.metric, curve.low, curve.high) if name)


def test_every_row_is_logged_somewhere():
    # A name appears in the code as it is, or as an f-string with a function's name or a kind in it.
    written: list[str] = []
    for path in Path(qerl.__file__).parent.rglob("*.py"):
        if path.name != "metrics.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [re.escape(str(p.value)) if isinstance(p, ast.Constant) else "[a-z_]*" for p in node.values]
                    written += [pattern] if "/" in (pattern := "".join(parts)) else []
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    written.append(re.escape(node.value))
    names = [metric.name.replace("{function}", "format") for metric in METRICS]
    assert [name for name in names if not any(re.fullmatch(pattern, name) for pattern in written)] == []
