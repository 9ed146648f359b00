"""What a checkpoint's record says of the run, after its way through JSON."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch

from qerl.config import RunConfig, validate
from qerl.rl.checkpoint import check_same_run
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
