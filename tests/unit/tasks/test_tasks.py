"""Tasks as a run sees them: `load_task`, examples, held-out problems, and GSM8K's files."""

from __future__ import annotations

import json

import pytest

from qerl.config import TaskConfig
from qerl.tasks import TASKS, Task, load_task
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


def gsm8k(path, **settings) -> Task:
    return load_task(TaskConfig(name="gsm8k", path=str(path), **settings), seed=0)


@pytest.fixture(params=TASKS)
def task(request, gsm8k_folder) -> Task:
    return load_task(TaskConfig(name=request.param, path=str(gsm8k_folder)), seed=3)


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
    for name in TASKS:
        for system, roles in (("Be brief.", ["system", "user"]), ("", ["user"])):
            config = TaskConfig(name=name, path=str(gsm8k_folder), system_prompt=system)
            prompt = load_task(config, seed=0).train_example(0).prompt
            assert [message["role"] for message in prompt] == roles
            assert system in prompt[0]["content"]


@pytest.mark.parametrize(("name", "correctness"), [("arithmetic", 1.0), ("gsm8k", 2.0)])
def test_reward_weights(gsm8k_folder, name, correctness):
    # GSM8K's are those of arXiv 2510.11696
    task = load_task(TaskConfig(name=name, path=str(gsm8k_folder)), seed=0)
    assert {s.name: s.weight for s in task.reward_functions} == {"format": 0.2, "correctness": correctness}


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(ValueError, match=r"there is no task 'gsm9k'; known are arithmetic, gsm8k"):
        load_task(TaskConfig(name="gsm9k"), seed=0)


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


# ---------------------------------------------------------------- GSM8K's files


def test_gsm8k_reads_a_folder_with_both_files(gsm8k_folder):
    task = gsm8k(gsm8k_folder)
    assert task.num_train_examples == 30
    assert task.train_example(2).prompt[-1]["content"] == row(2)["question"]
    assert task.train_example(2).columns == {
        "question": row(2)["question"],
        "answer": "1,002",
        "solution": row(2)["answer"],
    }
    assert [example.columns["answer"] for example in task.eval_examples(5)] == [f"1,10{i}" for i in range(5)]


@pytest.mark.parametrize("as_folder", [True, False])
def test_the_last_tenth_is_held_out_without_a_test_file(tmp_path, as_folder):
    write(tmp_path / "train.jsonl", [row(i) for i in range(30)])
    task = gsm8k(tmp_path if as_folder else tmp_path / "train.jsonl")
    assert task.num_train_examples == 27
    assert task.num_eval_examples == len(task.eval_examples(task.num_eval_examples)) == 3
    assert [example.columns["question"] for example in task.eval_examples(3)] == [
        row(i)["question"] for i in (27, 28, 29)
    ]


def test_a_file_by_name_ignores_its_neighbours(gsm8k_folder):
    assert gsm8k(gsm8k_folder / "train.jsonl").num_train_examples == 27


def test_training_problems_that_are_held_out_too_are_dropped(gsm8k_folder):
    write(gsm8k_folder / "train.jsonl", [row(100), *(row(i) for i in range(5)), row(104)])
    task = gsm8k(gsm8k_folder)
    assert [task.train_example(i).columns["answer"] for i in range(task.num_train_examples)] == [
        f"1,00{i}" for i in range(5)
    ]


def test_plain_answers_blank_lines_and_unicode_are_read(tmp_path):
    rows = [{"question": f"{i}\u2028half ½", "answer": f"{i}.5", "id": i} for i in range(10)]
    text = "\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    task = gsm8k(tmp_path / "data.jsonl")
    assert task.train_example(3).columns == {"question": "3\u2028half ½", "answer": "3.5", "solution": "3.5"}


def test_asking_for_more_held_out_problems_than_there_are(gsm8k_folder):
    with pytest.raises(ValueError, match=r"6 held-out problems .* there are 5: set eval\.num_problems = 5"):
        gsm8k(gsm8k_folder).eval_examples(6)


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"task\.path is not set: give the folder"):
        load_task(TaskConfig(name="gsm8k"), seed=0)
    with pytest.raises(ValueError, match=r"there is no file or folder .*nowhere"):
        gsm8k(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no train\.jsonl"):
        gsm8k(tmp_path)
    write(tmp_path / "train.jsonl", [row(i) for i in range(9)])
    with pytest.raises(ValueError, match=r"9 training and 0 held-out problems"):
        gsm8k(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"0 training and 0 held-out problems"):
        gsm8k(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"line 2: not valid JSON"),
        ("[1, 2]", r'line 2: needs the text fields "question" and "answer", found list'),
        ('{"problem": "a", "answer": "1"}', r"line 2: needs .*, found problem, answer"),
        ('{"question": "a", "answer": 1}', r"line 2: needs .*, found question, answer"),
        ('{"question": "a", "answer": "so #### many"}', r"line 2: the answer 'many' is not one number"),
        ('{"question": "a", "answer": ""}', r"line 2: the answer '' is not one number"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row(0)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"data\.jsonl, " + message):
        gsm8k(path)
