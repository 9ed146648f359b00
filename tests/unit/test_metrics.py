"""The table of metrics: complete, unambiguous, and true to TRL's names."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

from qerl.metrics import METRICS, check_names, describe


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
