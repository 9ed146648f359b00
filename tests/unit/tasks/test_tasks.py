"""Tasks as a run sees them: `load_task`, examples, held-out problems."""

from __future__ import annotations

import json

import pytest

from qerl.config import TaskConfig
from qerl.tasks import Task, load_task
from qerl.tasks.prompts import SYSTEM_PROMPT


def row(i: int) -> dict[str, str]:
    return {"question": f"Ann has {i} pens and buys 1,000. How many?", "answer": f"{i}+1000\n#### {i + 1000:,}"}


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


@pytest.fixture
def gsm8k_folder(tmp_path):
    write(tmp_path / "train.jsonl", [row(i) for i in range(30)])
    write(tmp_path / "test.jsonl", [row(i) for i in range(100, 105)])
    return tmp_path


NAMES = ("arithmetic", "gsm8k")


def config_of(name, folder, **settings) -> TaskConfig:
    return TaskConfig(name=name, path=str(folder) if name == "gsm8k" else None, **settings)


@pytest.fixture(params=NAMES)
def task(request, gsm8k_folder) -> Task:
    return load_task(config_of(request.param, gsm8k_folder), seed=3)


# ---------------------------------------------------------------- what every task promises


def test_examples_have_the_same_columns_and_a_prompt(task):
    examples = [task.train_example(i) for i in range(10)] + task.eval_examples(5)
    assert len({tuple(example.columns) for example in examples}) == 1
    for example in examples:
        assert [message["role"] for message in example.prompt] == ["system", "user"]
        assert example.prompt[0]["content"] == SYSTEM_PROMPT


def test_training_problems_depend_on_their_index_alone(task):
    forward = [task.train_example(i) for i in range(10)]
    assert [task.train_example(i) for i in reversed(range(10))] == forward[::-1]


def test_held_out_problems_are_fixed_and_never_trained_on(task):
    held_out = task.eval_examples(5)
    assert task.eval_examples(3) == held_out[:3]
    assert task.eval_examples(0) == []
    trained_on = [task.train_example(i).prompt for i in range(task.num_train_examples or 500)]
    assert not any(example.prompt in trained_on for example in held_out)


def test_an_example_cannot_be_changed_through_its_copy(task):
    task.train_example(0).columns["answer"] = "changed"
    assert task.train_example(0).columns["answer"] != "changed"


def test_the_reference_is_graded_right_and_another_number_wrong(task):
    for example in [task.train_example(0), *task.eval_examples(2)]:
        answer = example.columns["answer"]
        texts = [f"<answer>{answer}</answer>", f"<answer>{answer}9</answer>", f"It is {answer}"]
        assert task.grade_batch(texts, [example.columns] * 3) == [True, False, False]
        assert task.grade_batch(texts, [example.columns] * 3, require_tags=False) == [True, False, True]
        assert task.grade_batch(texts[:1], [{**example.columns, "answer": "?"}]) == [None]


def test_system_prompts_are_replaced(gsm8k_folder):
    for name in NAMES:
        for system, roles in (("Be brief.", ["system", "user"]), ("", ["user"])):
            config = config_of(name, gsm8k_folder, system_prompt=system)
            prompt = load_task(config, seed=0).train_example(0).prompt
            assert [message["role"] for message in prompt] == roles
            assert system in prompt[0]["content"]


@pytest.mark.parametrize(("name", "correctness"), [("arithmetic", 1.0), ("gsm8k", 2.0)])
def test_reward_weights(gsm8k_folder, name, correctness):
    # GSM8K's are those of arXiv 2510.11696
    task = load_task(config_of(name, gsm8k_folder), seed=0)
    assert {s.name: s.weight for s in task.reward_functions} == {"format": 0.2, "correctness": correctness}


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no task 'gsm9k'; known are arithmetic, gsm8k, .*reasoning_gym:NAME"):
        load_task(TaskConfig(name="gsm9k"), seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": [3]}, "task.levels is read by math, math500, aime, amc, not by 'arithmetic': take it out"),
        ({"name": "gsm8k", "solve_rate": (0, 1)}, "task.solve_rate is read by bigmath, not by 'gsm8k'"),
        ({"grader": "math"}, "task.grader is read by gsm8k, .*, not by 'arithmetic'"),
        ({"path": "data.jsonl"}, "task.path is read by gsm8k, .*, data, not by 'arithmetic'"),
        ({"subset": "main"}, "task.subset is read by gsm8k, .*, not by 'arithmetic'"),
        ({"split": "extra"}, "task.split is read by gsm8k, math, bigmath, data, not by 'arithmetic'"),
        ({"eval_path": "data.jsonl"}, "task.eval_path is read by gsm8k, .*, not by 'arithmetic'"),
        ({"eval_split": "test"}, "task.eval_split is read by gsm8k, .*, not by 'arithmetic'"),
        ({"held_out_share": 0.2}, "task.held_out_share is read by gsm8k, .*, not by 'arithmetic'"),
        ({"name": "math500", "split": "extra"}, "task.split is read by gsm8k, math, bigmath, data, not by 'math500'"),
        ({"name": "gsm8k", "difficulty": 3}, "task.difficulty is read by arithmetic, not by 'gsm8k'"),
        ({"name": "reasoning_gym:chain_sum", "path": "x"}, "task.path is .*, not by 'reasoning_gym:chain_sum'"),
        ({"name": "math5000", "levels": [3]}, "there is no task 'math5000'"),
        ({"name": "math", "options": {"a": 1}}, "task.options is read by reasoning_gym:, not by 'math'"),
    ],
)
def test_a_setting_that_the_task_does_not_read_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_task(TaskConfig(**settings), seed=0)


# ---------------------------------------------------------------- arithmetic


def test_arithmetic_is_endless_and_ordered_by_the_seed():
    def problems(seed):
        task = load_task(TaskConfig(difficulty=3), seed)
        assert task.num_train_examples is None
        assert task.num_eval_examples is None
        return [task.train_example(i).columns["problem"] for i in range(20)]

    assert problems(0) == problems(0) != problems(1)


def test_arithmetic_holds_out_the_same_problems_for_every_seed():
    assert load_task(TaskConfig(), seed=0).eval_examples(20) == load_task(TaskConfig(), seed=1).eval_examples(20)


def test_the_worked_solution_is_graded_right():
    task = load_task(TaskConfig(difficulty=5), seed=0)
    columns = [task.train_example(i).columns for i in range(50)]
    assert task.grade_batch([row["solution"] for row in columns], columns) == [True] * 50
