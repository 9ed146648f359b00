"""reasoning-gym's generators as tasks."""

from __future__ import annotations

import sys

import pytest

from qerl.config import RewardConfig, TaskConfig
from qerl.tasks import load_task
from qerl.tasks.rewards import RewardRunner

NAME = "reasoning_gym:leg_counting"


def load(seed=0, name=NAME, **options):
    pytest.importorskip("reasoning_gym")
    return load_task(TaskConfig(name=name, options=options), seed=seed)


def test_problems_depend_on_seed_and_index_alone():
    task = load(seed=3)
    assert (task.num_train_examples, task.num_eval_examples) == (None, None)
    forward = [task.train_example(i) for i in range(30)]
    assert [task.train_example(i) for i in reversed(range(30))] == forward[::-1]
    assert [load(seed=3).train_example(i) for i in range(30)] == forward
    assert [load(seed=4).train_example(i) for i in range(30)] != forward
    assert len({example.columns["question"] for example in forward}) > 25


def test_held_out_problems_are_fixed_and_never_trained_on():
    task = load(seed=3)
    held_out = task.eval_examples(20)
    assert load(seed=4).eval_examples(20) == held_out
    assert len({example.columns["question"] for example in held_out}) == 20
    questions = {example.columns["question"] for example in held_out}
    assert not questions & {task.train_example(i).columns["question"] for i in range(300)}


def test_the_librarys_scorer_grades_and_pays():
    task = load()
    example = task.train_example(0)
    answer = example.columns["answer"]
    texts = [f"<think>x</think><answer>{answer}</answer>", f"<answer>{answer}9</answer>", f"so {answer}"]
    assert task.grade_batch(texts, [example.columns] * 3) == [True, False, False]
    assert task.grade_batch(texts, [example.columns] * 3, require_tags=False) == [True, False, True]
    rewards = RewardRunner.from_config(RewardConfig(), task, max_steps=1)
    scores = rewards.score(
        prompts=[example.prompt] * 3, texts=texts, completion_ids=[[]] * 3, columns=[example.columns] * 3, step=0
    )
    assert scores.parts["correctness"][0] == 1.0
    assert 0 <= scores.parts["correctness"][1] < 1.0  # a little for being near
    assert scores.parts["correctness"][2] == 0.0
    correctness = rewards.specs[1].function
    columns = {name: [value] for name, value in example.columns.items()}
    assert correctness(texts[2:], **columns, require_tags=False) == [1.0]


def test_a_scorer_that_fails_gives_no_value(caplog):
    task = load()
    columns = dict(task.train_example(0).columns)
    task._train.score_answer = None
    assert task.grade_batch(["<answer>1</answer>"], [columns]) == [None]
    assert "cannot score" in caplog.text


def test_options_reach_the_generator():
    few = load(min_animals=1, max_animals=1, max_instances=2)
    assert few.train_example(0).columns["metadata"]["num_animals"] == 1
    with pytest.raises(ValueError, match=r"hardly more than \d+ held-out problems, 500 were asked for"):
        few.eval_examples(500)
    with pytest.raises(ValueError, match=r"task\.options: reasoning-gym's leg_counting refuses them: .*no_such"):
        load(no_such=1)


def test_names_and_a_library_that_is_missing(monkeypatch):
    with pytest.raises(ValueError, match=r"reasoning-gym has no 'leg_countin'; it has .*leg_counting"):
        load(name="reasoning_gym:leg_countin")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"needs `pip install qerl\[reasoning-gym\]`"):
        load_task(TaskConfig(name=NAME), seed=0)
