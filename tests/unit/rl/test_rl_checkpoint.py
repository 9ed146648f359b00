"""What a checkpoint's record says of the run, after its way through JSON."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from qerl.config import LoraConfig, RunConfig, validate
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora
from qerl.rl import checkpoint
from qerl.rl.checkpoint import check_same_run, lock, save_checkpoint
from qerl.rl.log import RunLog, read_run

SETTINGS = {
    "task": {
        "name": "bigmath",
        "path": "data",
        "solve_rate": [0.1, 0.7],
        "options": {"day": datetime.date(2025, 1, 2)},
    },
    "lora": {"alpha": 16, "rank_pattern": {"q_proj": 8}},
    "rewards": {"arguments": {"overlong_reward": {"max_length": 512, "buffer": 64}}},
}


def written(folder: Path, config: RunConfig) -> dict:
    RunLog(folder, completions_per_step=0).write_run(config, torch.device("cpu"))
    return read_run(folder)


def test_the_same_settings_are_the_same_run(tmp_path):
    config = validate(SETTINGS)
    check_same_run(written(tmp_path, config), config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("section", "change", "told"),
    [
        ("task", {"solve_rate": [0.1, 0.8]}, "task.solve_rate: [0.1, 0.7] in the checkpoint, [0.1, 0.8] now"),
        ("lora", {"rank_pattern": {}}, "lora.rank_pattern.q_proj: 8 in the checkpoint, None now"),
        ("rollout", {"top_p": 1.0, "temperature": 0.5}, "rollout.temperature: 1.0 in the checkpoint, 0.5 now"),
    ],
)
def test_other_settings_are_told(section, change, told, tmp_path):
    record = written(tmp_path, validate(SETTINGS))
    other = json.loads(json.dumps(SETTINGS, default=str))
    other["task"]["options"] = SETTINGS["task"]["options"]
    other[section] = other.get(section, {}) | change
    with pytest.raises(ValueError) as refused:
        check_same_run(record, validate(other), tmp_path)
    assert told in str(refused.value)


def test_what_changes_memory_alone_may_differ(tmp_path):
    record = written(tmp_path, validate(SETTINGS))
    check_same_run(record, validate(SETTINGS | {"optimizer": {"micro_batch_tokens": 64}, "save_every": 3}), tmp_path)


HOLDS_A_LOCK = """
import sys, time
from pathlib import Path
from qerl.rl.checkpoint import lock
lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_two_processes_do_not_write_one_run(tmp_path):
    """The lock goes with the process, however it ends; within one process a run may be taken up again."""
    command = [sys.executable, "-c", HOLDS_A_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=rf"another process \(pid {other.pid}\) writes a run there"):
            lock(tmp_path)
        other.kill()
    lock(tmp_path)
    lock(tmp_path)


def test_a_full_disk_names_the_checkpoint_that_is_whole(tmp_path, monkeypatch):
    config = validate({})
    model = attach_lora(load_model(config.model)[0], LoraConfig(r=2), seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    save = partial(save_checkpoint, tmp_path, model=model, optimizer=optimizer, state={}, config=config)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    first = save(step=1)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        OSError, match=r"step-000002 cannot be written \(.*No space left.*step-000001 is whole: --resume"
    ):
        save(step=2)
    assert list((tmp_path / "checkpoints").iterdir()) == [first]
