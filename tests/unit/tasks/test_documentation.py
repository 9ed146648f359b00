"""The examples in docs/tasks.md and docs/rewards.md are what the code takes."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from pathlib import Path

import pytest

from qerl.config import validate
from qerl.tasks import TASKS, load_task, rewards
from qerl.tasks.rewards import RewardRunner

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in ("tasks.md", "rewards.md")}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


@pytest.mark.parametrize("toml", [toml for page in PAGES for toml in blocks(page, "toml")])
def test_configurations_are_valid(toml):
    validate(tomllib.loads(toml))


def test_the_example_of_own_data_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.loads(line) for line in blocks("tasks.md", "json")[0].splitlines()]
    Path("my.jsonl").write_text("".join(json.dumps(lines[i % 2] | {"i": i}) + "\n" for i in range(2)))
    config = validate(tomllib.loads(blocks("tasks.md", "toml")[-1]) | {"eval": {"num_problems": 1}})
    config.task.held_out_share = 0.5
    task = load_task(config.task, seed=0)
    columns = [task.train_example(0).columns]
    assert task.grade_batch([f"<answer>{columns[0]['gold']}</answer>"], columns) == [True]


def test_the_example_functions_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, asynchronous = blocks("rewards.md", "python")
    Path("my_rewards.py").write_text(plain)
    config = validate(tomllib.loads(blocks("rewards.md", "toml")[0]))
    runner = RewardRunner.from_config(config.rewards, load_task(config.task, seed=0), max_steps=1)
    scores = runner.score(
        prompts=[[]],
        texts=["7 x"],
        completion_ids=[[]],
        columns=[{"problem": "", "answer": "7", "solution": ""}],
        step=0,
    )
    assert scores.totals == [pytest.approx(1 - 0.0003)]

    async def ask(prompt, text):
        return float(len(text))

    scope = {"asyncio": asyncio, "ask": ask}
    exec(asynchronous, scope)
    assert asyncio.run(scope["judge"]([None], [[{"content": "abc"}]])) == [3.0]


def test_the_tables_name_all_there_is():
    for task in TASKS:
        assert f"`{task}`" in PAGES["tasks.md"]
    for name in rewards.__all__:
        if name.endswith("_reward") and name != "load_reward":
            assert f"`{name}`" in PAGES["rewards.md"]
