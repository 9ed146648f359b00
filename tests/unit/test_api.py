"""`qerl.Trainer`: TRL's arguments become the run that `qerl train` would do; what does not fit together is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import qerl
from qerl.nn import load
from qerl.rl.log import read_completions, read_run
from qerl.tasks.rewards import RewardRunner
from qerl.tasks.rows import RowsTask
from qerl.tasks.table import fingerprint

ROOT = Path(__file__).parents[2]
TINY = {
    "steps": 2,
    "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 6},
    "lora": {"r": 2},
    "log_completions": 4,
}
CHATS = [{"prompt": [{"role": "user", "content": f"{n}+{n}=?"}], "answer": str(2 * n)} for n in range(10, 18)]
TEXTS = [{"prompt": f"{n}+{n}=?", "total": 2 * n} for n in range(10, 18)]


def config(folder: Path, **settings) -> qerl.Config:
    return qerl.Config(output_dir=str(folder), **TINY | settings)


def length(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys, qerl; assert 'Trainer' in dir(qerl); heavy = {'torch', 'transformers', 'pydantic'}; "
        "assert not heavy & set(sys.modules), heavy; qerl.Config(steps=3); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        qerl.Trainr  # noqa: B018


def test_a_dataset_a_function_and_a_model_are_a_run(tmp_path):
    seen = {}

    def exact(prompts, completions, completion_ids, answer, trainer_state, **kwargs):
        seen.update(prompt=prompts[0], completion=completions[0], answers=answer, state=trainer_state)
        return [float(a in completion[0]["content"]) for completion, a in zip(completions, answer, strict=True)]

    args = config(tmp_path / "run", rewards={"weights": [1.0, 0.25]})
    trainer = qerl.Trainer("embedded", [exact, length], args, Dataset.from_list(CHATS))
    lines = trainer.train()
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["reward"] == pytest.approx(lines[1]["rewards/exact/mean"] + 0.25 * lines[1]["rewards/length/mean"])
    assert lines[1]["accuracy"] is None  # nobody grades
    assert seen["prompt"] in [row["prompt"] for row in CHATS]  # no system message was added
    assert seen["completion"][0]["role"] == "assistant"
    assert len(seen["answers"]) == 4 and set(seen["answers"]) <= {row["answer"] for row in CHATS}
    assert (seen["state"].global_step, seen["state"].max_steps) == (1, 2)
    assert (trainer.output_dir / "adapter" / "adapter_model.safetensors").is_file()
    written = read_run(trainer.output_dir)["config"]
    assert written["rewards"]["functions"] == [f"{__name__}:exact", f"{__name__}:length"]
    assert written["task"]["path"] == f"train_dataset:{fingerprint(CHATS)}"
    assert args.task.path is None  # the caller's settings are as they were


def test_reward_functions_get_text_where_prompts_are_text(tmp_path):
    def checked(prompts, completions, total, **kwargs):
        assert prompts[0] in [row["prompt"] for row in TEXTS]
        assert all(isinstance(completion, str) for completion in completions)
        return [float(str(number) in text) for number, text in zip(total, completions, strict=True)]

    async def also_checked(completions, **kwargs):
        return [float(completion.count("=")) for completion in completions]

    trainer = qerl.Trainer("embedded", [checked, also_checked], config(tmp_path / "run"), TEXTS)
    last = trainer.train()[-1]
    assert last["rewards/checked/failed"] == last["rewards/also_checked/failed"] == 0
    assert len(list(read_completions(trainer.output_dir))) == 8


def test_held_out_rows_are_graded_and_never_trained_on(tmp_path, caplog):
    args = config(tmp_path / "run", task={"grader": "numeric"}, eval={"greedy": False})
    trainer = qerl.Trainer("embedded", length, args, CHATS, CHATS[:2])
    assert trainer.task.num_train_examples == 6 and trainer.task.num_eval_examples == 2
    assert "train_dataset: 2 of 8 prompts are held-out ones too: they are not trained on" in caplog.text
    assert "eval/accuracy" in trainer.train()[-1]


def test_the_grader_pays_where_there_are_no_functions(tmp_path):
    trainer = qerl.Trainer("embedded", None, config(tmp_path / "run", task={"grader": "numeric"}), CHATS)
    assert [spec.name for spec in trainer.rewards.specs] == ["format", "correctness"]


def test_a_task_of_the_config_is_trained_on_with_own_functions(tmp_path):
    args = config(tmp_path / "run", eval={"num_problems": 0})
    trainer = qerl.Trainer("embedded", [length, "qerl.tasks.rewards:format_reward"], args)
    assert trainer.task.name == "arithmetic"
    assert [spec.name for spec in trainer.rewards.specs] == ["length", "format_reward"]


def test_a_run_is_resumed_by_the_same_rows_alone(tmp_path):
    args = config(tmp_path / "run", save_every=1, keep_checkpoints=9)
    unbroken = qerl.Trainer("embedded", length, args, CHATS).train()
    again = config(tmp_path / "run", save_every=1, keep_checkpoints=9)
    with pytest.raises(ValueError, match=r"task\.path: 'train_dataset:.*' in the checkpoint"):
        qerl.Trainer("embedded", length, again, CHATS[1:], resume=True)
    for file in (tmp_path / "run" / "checkpoints").glob("step-000002/**/*"):
        if file.is_file():
            file.unlink()
    for folder in sorted((tmp_path / "run" / "checkpoints").glob("step-000002/**"), reverse=True):
        folder.rmdir()
    resumed = qerl.Trainer("embedded", length, again, CHATS, resume=True)
    assert resumed.step == 1
    lines = resumed.train()
    assert [line["reward"] for line in lines] == [line["reward"] for line in unbroken]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": None}, "nothing pays for completions"),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": "data.jsonl"}, "train_dataset is a str: a datasets.Dataset or a list of dicts"),
        ({"train_dataset": [{"question": "1+1"}]}, r"train_dataset, row 1: task\.prompt_column: there is no 'prompt'"),
        ({"train_dataset": [{"prompt": "1", "completions": 2}]}, "column 'completions' has the name of"),
        ({"eval_dataset": CHATS}, r"needs a grader: set args\.task\.grader"),
        ({"eval_dataset": CHATS, "train_dataset": None}, "eval_dataset goes with train_dataset"),
        ({"eval_dataset": CHATS, "settings": {"task": {"grader": "math"}}}, "every prompt of train_dataset is in eval"),
        ({"settings": {"task": {"name": "gsm8k"}}}, r"args\.task\.name and train_dataset are two sources"),
        ({"settings": {"task": {"path": "x.jsonl"}}}, r"args\.task\.path and train_dataset are two sources"),
        ({"settings": {"rewards": {"functions": ["a:b"]}}}, "both name functions"),
        ({"settings": {"rewards": {"weights": [1.0, 2.0]}}}, "2 numbers"),
        ({"settings": {"model": {"path": "elsewhere"}}}, "two models"),
        ({"reward_funcs": lambda completions, label: completions}, "needs the argument 'label'"),
        ({"reward_funcs": [length, length]}, "two reward functions are called 'length'"),
        ({"reward_funcs": [3]}, "reward_funcs has 3, which is no function"),
        ({"model": torch.nn.Linear(2, 2)}, "model is a Linear: give its folder"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(load, "Checkpoint", None)
    settings = arguments.pop("settings", {})
    given = {"model": "embedded", "reward_funcs": length, "train_dataset": CHATS} | arguments
    with pytest.raises(ValueError, match=message):
        qerl.Trainer(args=config(tmp_path / "run", **settings), **given)


def test_settings_that_are_no_config_are_refused():
    with pytest.raises(ValueError, match=r"args is a dict: give a qerl\.Config"):
        qerl.Trainer("embedded", length, {"steps": 2}, CHATS)  # pyright: ignore[reportArgumentType]


def test_a_generator_takes_folders(tmp_path):
    trainer = qerl.Trainer("embedded", length, config(tmp_path / "run", steps=1), CHATS)
    trainer.train()
    sampled = [
        qerl.Generator(model, adapter)(prompt, max_new_tokens=4, temperature=0)
        for model, adapter, prompt in (
            (trainer.config.model, trainer.output_dir / "adapter", CHATS[0]["prompt"]),
            ("embedded", str(trainer.output_dir / "adapter"), "10+10=?"),
        )
    ]
    assert sampled[0] == sampled[1] and sampled[0][0]


def test_a_fingerprint_changes_with_the_rows():
    assert fingerprint(CHATS) == fingerprint(json.loads(json.dumps(CHATS)))
    assert len({fingerprint(rows) for rows in (CHATS, CHATS[1:], CHATS[::-1], TEXTS)}) == 4


def test_text_is_for_the_functions_of_text_prompts_alone():
    task = RowsTask(qerl.Config(task={"name": "data", "grader": "none"}).task, CHATS)
    assert not task.plain_text
    runner = RewardRunner.from_config(
        qerl.Config(rewards={"functions": [f"{__file__}:length"]}).rewards, task, max_steps=1
    )
    scores = runner.score(prompts=[[]], texts=["four"], completion_ids=[[1]], columns=[{"answer": ""}], step=0)
    assert scores.totals == [4.0]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    """At tiny size; its figures are in its README."""
    monkeypatch.chdir(tmp_path)
    small = {"steps": 1, "eval": {"num_problems": 2, "greedy": False}, "lora": {"r": 2}}
    made = qerl.Config
    monkeypatch.setattr(
        qerl, "Config", lambda **settings: made(**settings | small | {"rollout": TINY["rollout"]}), raising=False
    )
    source = (ROOT / "examples" / "python" / "train.py").read_text(encoding="utf-8")
    exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
    assert "sampled accuracy" in capsys.readouterr().out
    assert (tmp_path / "runs" / "python" / "adapter").is_dir()
