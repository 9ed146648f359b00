"""docs/migrating.md: its scripts run, TRL's own among them, on the embedded model at tiny size; its tables are true."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import datasets
import pytest
from peft import LoraConfig

from qerl.config import EMBEDDED, RunConfig, Section, validate
from qerl.rl.log import read_metrics
from qerl.tasks import load_task

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n# (\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
# What makes a script of the page tiny; each must be in it.
TINY = {
    "TRL": {
        "max_steps=100": "max_steps=2, use_cpu=True, bf16=False, save_strategy='no'",
        "per_device_train_batch_size=16": "per_device_train_batch_size=4",
        "gradient_accumulation_steps=8": "gradient_accumulation_steps=2",
        "num_generations=8": "num_generations=4",
        "max_completion_length=512": "max_completion_length=8",
    },
    "qerl": {
        r"steps=\d+": "steps=2",
        r'"prompts_per_step": \d+': '"prompts_per_step": 2',
        r'"max_completion_length": 512': '"max_completion_length": 8',
        r"max_new_tokens=512": "max_new_tokens=8",
    },
}


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A folder with the model and the data that the page names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Qwen2.5-0.5B-Instruct").symlink_to(EMBEDDED)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for split, start in (("train", 10), ("test", 30)):
        numbers = range(start, start + 10)
        rows = [{"question": f"{n}+{n}=?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in numbers]
        (tmp_path / "data" / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(kind: str, names: dict) -> None:
    """Run the page's blocks of one kind, in order, after those that are common."""
    source = "\n".join(code for label, code in BLOCKS if label == "common")
    scripts = "\n".join(code for label, code in BLOCKS if label == kind)
    for found, replacement in TINY[kind].items():
        scripts, count = re.subn(found, replacement, scripts)
        assert count, found
    exec(compile(f"{source}\n{scripts}", f"migrating.md, {kind}", "exec"), names)


def test_the_page_has_its_scripts():
    assert [label for label, _ in BLOCKS] == ["common", "TRL", "qerl", *3 * ["Unsloth", "qerl"]]


def test_the_scripts_here_run(clone):
    names: dict = {"__name__": "migrating"}
    run("qerl", names)
    for folder in ("from-trl", "from-unsloth"):
        last = read_metrics(clone / "runs" / folder)[-1]
        assert last["step"] == 2 and last["rewards/correct/failed"] == last["rewards/tagged/failed"] == 0
        assert (clone / "runs" / folder / "adapter" / "adapter_model.safetensors").is_file()
    assert list((clone / "runs" / "from-trl" / "tensorboard").iterdir())
    assert len(names["answers"]) == 2


def test_trls_script_runs(clone):
    pytest.importorskip("trl")
    names: dict = {"__name__": "migrating"}
    run("TRL", names)
    logged = {name for row in names["trainer"].state.log_history for name in row}
    assert {"reward", "rewards/correct/mean", "rewards/tagged/std", "completions/mean_length"} <= logged
    assert (clone / "runs" / "trl" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_file_is_a_run(clone):
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    config = validate(tomllib.loads(text))
    assert load_task(config.task, config.seed).num_train_examples
    assert (Path(config.model.path) / "config.json").is_file()


def test_every_setting_of_the_table_exists_on_both_sides():
    trl = pytest.importorskip("trl")
    theirs = {field.name for cls in (trl.GRPOConfig, LoraConfig) for field in dataclasses.fields(cls)}
    theirs.add("gradient_checkpointing")  # an older name of a field, and still a property
    section = PAGE.partition("## Settings")[2].partition("## What differs")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    for left, right, *_ in rows:
        assert set(re.findall(r"`(\w+)`", left)) <= theirs, left
        for key in re.findall(r"`([\w.]+)`", right):
            model: type[Section] = RunConfig
            *sections, last = key.split(".")
            for name in sections:
                model = type(model.model_fields[name].default)
            assert last in model.model_fields, key


def test_the_defaults_that_differ_are_named_truly():
    trl = pytest.importorskip("trl")
    ours, theirs = RunConfig(), trl.GRPOConfig("unused", use_cpu=True, bf16=False)
    optimizer = ours.optimizer
    assert (optimizer.learning_rate, optimizer.lr_scheduler, optimizer.warmup_ratio) == (1e-5, "cosine", 0.1)
    assert (optimizer.beta2, optimizer.weight_decay, optimizer.max_grad_norm) == (0.99, 0.1, 0.2)
    assert (theirs.learning_rate, theirs.lr_scheduler_type, theirs.warmup_steps) == (1e-6, "linear", 0)
    assert (theirs.adam_beta2, theirs.weight_decay, theirs.max_grad_norm) == (0.999, 0, 1.0)
    assert (ours.loss.epsilon_high, theirs.epsilon_high, theirs.epsilon) == (0.28, None, 0.2)
    assert ours.loss.type == theirs.loss_type == "dapo"
