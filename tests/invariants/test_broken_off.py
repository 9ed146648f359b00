"""A run that something breaks off between two updates, and that goes on, is the run that was not broken off."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.config import load_config
from qerl.display import Display
from qerl.rl.log import RunLog
from qerl.rl.rollout import PromptStream
from qerl.rl.trainer import Interrupted, RunFailed, Trainer
from qerl.rl.update import MAX_SKIPPED_UPDATES, Learner
from qerl.tasks.arithmetic import ArithmeticTask

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
SHORT = [
    "steps=3",
    "lora.r=4",
    "rollout.prompts_per_step=2",
    "rollout.num_generations=4",
    "rollout.max_completion_length=20",
    "noise.controller=divergence",
    "eval.num_problems=1",
    "eval.every=2",
    "eval.num_samples=1",
    "eval.greedy=false",
]


def trainer(output_dir: Path, *, resume: bool = False) -> Trainer:
    config = load_config(DEMO, [*SHORT, f"output_dir={output_dir}"])
    return Trainer(config, display=Display(config.steps, stream=io.StringIO()), resume=resume)


def outcome(output_dir: Path) -> tuple[list[dict], str, dict[str, torch.Tensor]]:
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "tokens_per"))} for row in rows]
    return (
        rows,
        (output_dir / "completions.jsonl").read_text(),
        load_file(output_dir / "adapter/adapter_model.safetensors"),
    )


def assert_same(one: Path, other: Path) -> None:
    (rows, completions, adapter), (expected, texts, tensors) = outcome(one), outcome(other)
    assert rows == expected and completions == texts
    assert all(torch.equal(adapter[name], tensor) for name, tensor in tensors.items())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    trainer(folder).train()
    rows, _, tensors = outcome(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "eval/accuracy" in rows[2]
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    return folder


@pytest.mark.parametrize(
    ("place", "method", "error"),
    [
        (PromptStream, "take", ValueError("prompts are too long")),
        (ArithmeticTask, "grade_batch", TypeError("a grader's mistake")),
        (RunLog, "write_completions", OSError("no space left")),
        (Learner, "_logprobs", RuntimeError("no kernel")),
        (Trainer, "_evaluate", RuntimeError("no engine")),
        (RunLog, "write_metrics", OSError("no space left")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_raises_costs_nothing(place, method, error, unbroken, tmp_path, monkeypatch):
    run, original = trainer(tmp_path / "run"), getattr(place, method)

    def failing(*args, **kwargs):
        if run.step >= 1 and (run.step == 2 or method not in ("_evaluate", "write_metrics")):
            raise error
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(place, method, failing)
        with pytest.raises((RunFailed, TypeError)) as failed:
            run.train()
    told = str(failed.value) + "".join(getattr(failed.value, "__notes__", []))
    assert str(error) in told and "Saved" in told and "--resume" in told
    trainer(tmp_path / "run", resume=True).train()
    assert_same(tmp_path / "run", unbroken)


def test_a_stopped_trainer_goes_on(unbroken, tmp_path, monkeypatch):
    run = trainer(tmp_path / "run")
    generate = run.engine.generate

    def stopping(*args):
        run.stop_requested = run.step == 1
        return generate(*args)

    monkeypatch.setattr(run.engine, "generate", stopping)
    with pytest.raises(Interrupted, match="step-000001"):
        run.train()
    monkeypatch.setattr(run.engine, "generate", generate)
    run.train()
    assert_same(tmp_path / "run", unbroken)


def test_half_a_step_is_not_gone_on_from(tmp_path, monkeypatch):
    run = trainer(tmp_path / "run")
    monkeypatch.setattr(run.learner.optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    with pytest.raises(RunFailed, match="broken off in its updates"):
        run.train()


def test_a_mistake_in_the_settings_is_no_run_to_go_on_with(tmp_path, monkeypatch):
    def too_long(*_):
        raise ValueError("prompts are too long")

    monkeypatch.setattr(PromptStream, "take", too_long)
    with pytest.raises(ValueError, match="prompts are too long"):
        trainer(tmp_path / "run").train()
    assert not (tmp_path / "run" / "checkpoints").exists()


def poison(run: Trainer, *, steps: range) -> None:
    """Make a weight's gradient NaN in these steps."""
    parameter = next(p for name, p in run.model.named_parameters() if "lora_B" in name)
    parameter.register_hook(lambda grad: grad * (float("nan") if run.step in steps else 1.0))


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(tmp_path):
    run = trainer(tmp_path / "run")
    poison(run, steps=range(1))
    run.pending = run.train_step()
    assert run.pending["num_skipped_updates"] == 1 and run.pending["num_updates"] == 1
    assert not any(p.any() for name, p in run.model.named_parameters() if "lora_B" in name)
    run.train()
    rows, _, tensors = outcome(tmp_path / "run")
    assert [row["num_skipped_updates"] for row in rows] == [1, 0, 0] and rows[0]["grad_norm"] is None
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_gradients_that_stay_not_finite_end_the_run(tmp_path):
    run = trainer(tmp_path / "run")
    poison(run, steps=range(MAX_SKIPPED_UPDATES))
    with pytest.raises(
        RunFailed, match=r"3 updates in a row had a gradient that is not finite: try.*\n.*from the start"
    ):
        run.train()
