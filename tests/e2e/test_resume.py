"""A run that was killed and resumed equals the run that was not, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qerl.cli import app
from qerl.rl.trainer import Trainer

# Noise, two epochs over a small file, several updates per rollout, accumulation over micro-batches, trained norms.
SETTINGS = [
    "steps=6",
    "save_every=2",
    "model.path=embedded",
    "lora.r=4",
    "lora.train_norms=true",
    "task.name=gsm8k",
    "rollout.prompts_per_step=4",
    "rollout.num_generations=4",
    "rollout.max_completion_length=16",
    "loss.num_iterations=2",
    "loss.updates_per_rollout=2",
    "noise.num_stages=3",
    "noise.per=completion",
    "optimizer.learning_rate=1e-3",
    "optimizer.micro_batch_tokens=160",
    "eval.every=2",
    "eval.num_problems=4",
]
NOT_COMPARED = ("time/", "memory/", "tokens_per_second")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Twelve sums in GSM8K's file format: six steps of four prompts are two epochs."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for name, start in (("train", 10), ("test", 50)):
        rows = [{"question": f"{start + i}+{i}=?", "answer": f"It is.\n#### {start + 2 * i}"} for i in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(output_dir: Path, data: Path, *options: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "qerl.cli",
        "train",
        f"output_dir={output_dir}",
        f"task.path={data}",
        *SETTINGS,
        *options,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def metrics(output_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    assert (one / "completions.jsonl").read_text() == (other / "completions.jsonl").read_text()
    a, b = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, data) -> Path:
    output_dir = tmp_path_factory.mktemp("unbroken") / "run"
    finish(start(output_dir, data))
    rows = metrics(output_dir)
    assert [row["step"] for row in rows] == list(range(7))
    assert any(row["noise/sigma"] > 0 for row in rows[1:])
    assert rows[1]["num_updates"] == 4
    return output_dir


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 3, 4, 6])  # metrics lines at the kill: before, at and after checkpoints
def test_a_kill_changes_nothing(lines, unbroken, data, tmp_path):
    process = start(tmp_path / "run", data)
    path = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= lines, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(start(tmp_path / "run", data, "--resume"))
    assert_same_run(unbroken, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_leaves(number, unbroken, data, tmp_path):
    process = start(tmp_path / "run", data)
    path = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= 2, process)
    process.send_signal(number)
    output = finish(process, code=130)
    assert "--resume" in output
    finish(start(tmp_path / "run", data, "--resume"))
    assert_same_run(unbroken, tmp_path / "run")


def test_who_is_stopped_at_once_is_told_what_is_lost(unbroken, data, tmp_path, monkeypatch):
    def stopped(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train", stopped)
    done = shutil.copytree(unbroken, tmp_path / "done")  # whose lock this process keeps
    for folder, more, words in (
        (tmp_path / "run", [], "stopped at once: nothing is saved"),
        (done, ["--resume"], rf"what was done since {done}/checkpoints/step-\d+ is lost\nGo on with: qerl"),
    ):
        result = CliRunner().invoke(app, ["train", f"output_dir={folder}", f"task.path={data}", *SETTINGS, *more])
        assert result.exit_code == 130 and re.search(words, result.output)


def test_other_settings_are_refused_on_resume(unbroken, data, tmp_path):
    output = finish(start(unbroken, data, "--resume", "optimizer.learning_rate=2e-3"), code=2)
    assert "optimizer.learning_rate: 0.001 in the checkpoint, 0.002 now" in output
    (begin_from,) = re.findall(r"lora\.start_from=(\S+) begins it", output)
    assert (Path(begin_from) / "adapter_config.json").is_file()


def test_a_run_can_start_from_an_adapter(unbroken, data, tmp_path):
    """With a learning rate of next to nothing it ends where it began; other settings are refused."""
    adapter = unbroken / "adapter"
    options = ("steps=1", f"lora.start_from={adapter}", "optimizer.learning_rate=1e-12", "eval.num_problems=0")
    finish(start(tmp_path / "run", data, *options))
    begun, ended = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "run" / "adapter")
    )
    assert any(tensor.abs().max() > 1e-4 for name, tensor in begun.items() if "lora_B" in name)
    assert begun.keys() == ended.keys() and all(abs(begun[n] - ended[n]).max() < 1e-6 for n in begun)
    output = finish(start(tmp_path / "other", data, *options, "lora.r=8", "lora.train_norms=false"), code=2)
    assert f"lora.start_from: {adapter} was made with other settings: set lora.r=4 lora.train_norms=true" in output
    of_another_model = shutil.copytree(adapter, tmp_path / "adapter")
    name = min(begun)
    save_file(begun | {name: begun[name][..., :-8].contiguous()}, of_another_model / "adapter_model.safetensors")
    output = finish(start(tmp_path / "third", data, *options, f"lora.start_from={of_another_model}"), code=2)
    assert f"does not fit: {name}" in output and "loading the model" not in output


def test_other_problems_are_refused_on_resume(unbroken, data):
    """The same path, another file: what was measured before and after would not be the same."""
    file = data / "train.jsonl"
    rows = file.read_text()
    file.write_text("".join(rows.splitlines(keepends=True)[:-1]))
    try:
        output = finish(start(unbroken, data, "--resume"), code=2)
    finally:
        file.write_text(rows)
    assert (
        "the problems that task.path has now are not those that the run began with (11 to train on, 12 held" in output
    )


def test_a_run_that_paid_nothing_does_not_end_well(data, tmp_path):
    (tmp_path / "mine.py").write_text("def nothing(completions):\n    return [None] * len(completions)\n")
    options = ("steps=1", f'rewards.functions=["{tmp_path / "mine.py"}:nothing"]', "eval.num_problems=0")
    output = finish(start(tmp_path / "run", data, *options), code=1)
    assert "no completion had a reward from any of nothing: nothing was learned" in output


def test_a_finished_run_is_not_overwritten(unbroken, data):
    assert "holds a run already" in finish(start(unbroken, data), code=2)


def test_a_run_killed_before_its_first_checkpoint_is_no_other_run(data, tmp_path):
    process = start(tmp_path / "run", data)
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    output = finish(start(tmp_path / "run", data, "--resume", "seed=9"), code=2)
    assert "seed: 0 in the checkpoint, 9 now" in output
    assert (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_judge_that_is_down_costs_nothing(unbroken, data, tmp_path):
    rewards = tmp_path / "judge.py"
    up = "from qerl.tasks.rewards import numeric_reward as judge\n"
    rewards.write_text(up + "def judge(completions, **kwargs):\n    raise ConnectionError('the judge is down')\n")
    options = (f'rewards.functions=["{rewards}:judge"]', "rewards.weights=[1.0]")
    output = finish(start(tmp_path / "run", data, *options), code=1)
    assert "the judge is down" in output and "--resume" in output
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    rewards.write_text(up)
    finish(start(tmp_path / "run", data, *options, "--resume"))
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(7))


def test_a_folder_that_cannot_be_made(data, tmp_path):
    (tmp_path / "file").write_text("")
    assert "output_dir" in finish(start(tmp_path / "file", data), code=2)
