"""A run's files: what is written can be read back, after a kill too."""

from __future__ import annotations

import json
import math

import pytest
import torch
from pyarrow import parquet

from qerl.config import RunConfig
from qerl.rl import log
from qerl.rl.log import RunLog, read_completions, read_metrics, read_run, write_completions_parquet
from qerl.types import Completion, Example, RolloutGroup


def group(question: str, texts: list[str], rewards: list[float]) -> RolloutGroup:
    return RolloutGroup(
        example=Example([{"role": "user", "content": question}]),
        prompt_ids=[1],
        prompt_index=0,
        completions=[Completion([2, 3], [-0.1, -0.1], [0.2, 0.2], "stop") for _ in texts],
        texts=texts,
        rewards=rewards,
        reward_parts={"format": rewards, "mine": [1.0 for _ in rewards]},
    )


@pytest.fixture
def run_log(tmp_path) -> RunLog:
    return RunLog(tmp_path, completions_per_step=3)


def test_metrics_come_back_and_what_json_lacks_is_null(run_log, tmp_path):
    run_log.write_metrics({"step": 1, "reward": 0.1 + 0.2, "mismatch_kl": math.nan, "loss": -math.inf})
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 0.1 + 0.2, "mismatch_kl": None, "loss": None}]
    with pytest.raises(KeyError, match="near it is 'reward'"):
        run_log.write_metrics({"rewrd": 1.0})


def test_completions_are_taken_across_groups(run_log, tmp_path):
    groups = [group("a", ["a0", "a1"], [0.0, math.nan]), group("b", ["b0", "b1"], [0.5, 1.0])]
    assert run_log.write_completions(4, groups) == list(read_completions(tmp_path))
    records = list(read_completions(tmp_path))
    assert [record["completion"] for record in records] == ["a0", "b0", "a1"]
    assert records[2]["reward"] is None and records[2]["rewards"] == {"format": None, "mine": 1.0}
    assert run_log.write_completions(5, []) == []


HOSTILE = "line\u2028separator \x85 \ud800 \r\n\x00 ü"  # what str.splitlines splits at, and a lone surrogate


def test_any_text_survives(run_log, tmp_path):
    run_log.write_completions(1, [group(HOSTILE, [HOSTILE], [1.0])])
    run_log.rewind(metrics_step=1, completions_step=1)
    (record,) = read_completions(tmp_path)
    assert record["prompt"] == record["completion"] == HOSTILE


def test_parquet_holds_every_completion(run_log, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "PARQUET_ROWS", 4)
    for step in range(1, 4):
        run_log.write_completions(step, [group(HOSTILE, ["x", "y", "z"], [1.0, math.nan, 0.5])])
    path = write_completions_parquet(tmp_path)
    table = parquet.read_table(path)
    assert table.column_names == [
        *("step", "prompt", "completion", "reward", "rewards/format", "rewards/mine", "tokens", "finish_reason")
    ]
    rows = table.to_pylist()
    assert [(row["step"], row["completion"]) for row in rows] == [(s, t) for s in (1, 2, 3) for t in "xyz"]
    assert [row["rewards/format"] for row in rows[:3]] == [1.0, None, 0.5]
    assert rows[0]["prompt"] == HOSTILE.replace("\ud800", "?")
    assert parquet.ParquetFile(path).num_row_groups == 3


def test_without_completions_there_is_no_parquet(tmp_path):
    assert write_completions_parquet(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_rewind_cuts_back_bit_for_bit_and_forgets_the_parquet(run_log, tmp_path):
    for step in range(1, 6):
        run_log.write_metrics({"step": step, "reward": step / 3, "loss": 1e-7 * step})
        run_log.write_completions(step, [group("q", ["ü"], [step / 7])])
        if step == 3:
            before = [path.read_bytes() for path in (run_log.metrics_path, run_log.completions_path)]
    write_completions_parquet(tmp_path)
    with run_log.completions_path.open("a") as file:
        file.write('{"step": 3, "prompt": "cut sh')
    run_log.rewind(metrics_step=2, completions_step=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert run_log.completions_path.read_bytes() == before[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["completions.jsonl", "metrics.jsonl"]


def test_a_line_that_a_kill_cut_short_is_left_out_and_a_broken_one_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(tmp_path) == [{"step": 0}]
    path.write_text('{"step": 0}\nnothing\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is no JSON"):
        read_metrics(tmp_path)


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
        read_metrics(tmp_path)
    assert read_run(tmp_path) == {}


def test_run_json_holds_config_versions_and_device(run_log, tmp_path):
    run_log.write_run(RunConfig(steps=7), torch.device("cpu"))
    run = read_run(tmp_path)
    assert RunConfig.model_validate(run["config"]) == RunConfig(steps=7)
    assert run["versions"]["torch"] and run["versions"]["qerl"]
    assert run["device"].startswith("cpu")
    assert json.loads((tmp_path / "run.json").read_text()) == run
