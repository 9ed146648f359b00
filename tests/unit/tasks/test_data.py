"""Tasks over data: what is held out, the known layouts, a user's own columns."""

from __future__ import annotations

import json
import random

import datasets
import pytest

from qerl.config import RewardConfig, TaskConfig
from qerl.tasks import Task, load_task
from qerl.tasks.rewards import RewardRunner


def write(path, rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(name, path=None, **settings) -> Task:
    return load_task(TaskConfig(name=name, path=None if path is None else str(path), **settings), seed=0)


def gsm8k(i: int) -> dict[str, str]:
    return {"question": f"Ann has {i} pens and buys 1,000. How many?", "answer": f"{i}+1000\n#### {i + 1000:,}"}


def math(i: int, level="Level 3", kind="Algebra") -> dict:
    return {
        "problem": f"What is {i}/2?",
        "solution": rf"It is \boxed{{\frac{{{i}}}{{2}}}}.",
        "level": level,
        "type": kind,
    }


def trained(task: Task, column: str = "answer") -> list:
    return [task.train_example(i).columns[column] for i in range(task.num_train_examples or 0)]


def held_out(task: Task, column: str = "answer") -> list:
    return [example.columns[column] for example in task.eval_examples(task.num_eval_examples or 0)]


# ---------------------------------------------------------------- what is held out


def test_a_test_split_is_held_out(tmp_path, caplog):
    write(tmp_path / "train.jsonl", [gsm8k(100), *(gsm8k(i) for i in range(5)), gsm8k(104)])
    write(tmp_path / "test.jsonl", [gsm8k(i) for i in range(100, 105)])
    task = load("gsm8k", tmp_path)
    assert held_out(task) == [f"1,10{i}" for i in range(5)]
    assert trained(task) == [f"1,00{i}" for i in range(5)]  # 100 and 104 are held out as well
    assert "train: 2 of 7 prompts are held-out ones too: they are not trained on" in caplog.text


@pytest.mark.parametrize("name", ["train.jsonl", "mine.jsonl"])
def test_else_a_share_is_held_out_by_hash_whatever_the_order(tmp_path, name):
    rows = [gsm8k(i) for i in range(60)]
    write(tmp_path / "a" / name, rows)
    random.Random(0).shuffle(rows)
    write(tmp_path / "b" / name, rows)
    first, second = (load("gsm8k", tmp_path / folder) for folder in "ab")
    assert (first.num_train_examples, first.num_eval_examples) == (54, 6)
    assert set(held_out(first)) == set(held_out(second))
    assert not set(held_out(first)) & set(trained(first))
    assert len(held_out(load("gsm8k", tmp_path / "a", held_out_share=0.5))) == 30
    assert held_out(load("gsm8k", tmp_path / "a" / name)) == held_out(first)


def test_equal_prompts_are_on_one_side(tmp_path):
    task = load("gsm8k", write(tmp_path / "d.jsonl", [gsm8k(i % 10) for i in range(40)]))
    assert (task.num_train_examples, task.num_eval_examples) == (36, 4)


def test_held_out_problems_from_elsewhere(tmp_path):
    train = write(tmp_path / "mine.jsonl", [gsm8k(i) for i in range(10)])
    other = write(tmp_path / "other" / "whatever.jsonl", [gsm8k(i) for i in range(8, 12)])
    task = load("gsm8k", train, eval_path=other)
    assert held_out(task) == ["1,008", "1,009", "1,010", "1,011"]
    assert trained(task) == [f"1,00{i}" for i in range(8)]


def test_splits_by_name(tmp_path):
    for i, name in enumerate(("train", "extra", "validation", "test", "hard")):
        write(tmp_path / f"{name}.jsonl", [gsm8k(i)])
    for settings, expected in [
        ({}, ("1,000", "1,003")),
        ({"split": "extra"}, ("1,001", "1,003")),
        ({"eval_split": "hard"}, ("1,000", "1,004")),
    ]:
        task = load("gsm8k", tmp_path, **settings)
        assert (trained(task), held_out(task)) == ([expected[0]], [expected[1]])
    with pytest.raises(ValueError, match=r"task\.split: there is no split 'trian'; there are .*train"):
        load("gsm8k", tmp_path, split="trian")
    with pytest.raises(ValueError, match=r"task\.eval_split: there is no split 'x'"):
        load("gsm8k", tmp_path, eval_split="x")
    with pytest.raises(ValueError, match=r"task\.eval_split and task\.split are both 'extra'"):
        load("gsm8k", tmp_path, split="extra", eval_split="extra")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ValueError, match=r"task\.split: there is no split 'train'; choose among"):
        load("gsm8k", tmp_path)


def test_data_with_a_test_split_alone_can_only_be_measured_on(tmp_path):
    write(tmp_path / "test.jsonl", [gsm8k(i) for i in range(3)])
    for path, settings in [(tmp_path, {}), (tmp_path / "test.jsonl", {}), (None, {"eval_path": str(tmp_path)})]:
        task = load("gsm8k", path, **settings)
        assert (task.num_train_examples, task.num_eval_examples) == (0, 3)
        with pytest.raises(ValueError, match="only held-out problems"):
            RewardRunner.from_config(RewardConfig(), task, max_steps=1)


def test_too_little_data(tmp_path):
    with pytest.raises(ValueError, match=r"task\.path is not set: give the folder that holds GSM8K"):
        load("gsm8k")
    with pytest.raises(ValueError, match=r"task\.path: there is no file or folder .*nowhere"):
        load("gsm8k", tmp_path / "nowhere")
    path = write(tmp_path / "d.jsonl", [gsm8k(i) for i in range(9)])
    with pytest.raises(ValueError, match=r"9 training and 0 held-out problems"):
        load("gsm8k", path)
    with pytest.raises(ValueError, match=r"4 held-out problems .* there are 3: set eval\.num_problems = 3"):
        load("gsm8k", path, held_out_share=0.34).eval_examples(4)
    task = load("gsm8k", path, held_out_share=0.0)
    assert (task.num_train_examples, task.num_eval_examples, task.eval_examples(0)) == (9, 0, [])


# ---------------------------------------------------------------- known layouts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "a", "answer": "1"}, r"row 2: needs the text field 'question', found problem, answer"),
        ({"question": "a", "answer": 1}, r"row 2: needs the text field 'answer'"),
        ({"question": "a", "answer": "so #### many"}, r"row 2: the answer 'many' is not one number"),
    ],
)
def test_a_row_that_is_no_gsm8k_is_named(tmp_path, row, message):
    path = write(tmp_path / "d.jsonl", [gsm8k(0), row])
    with pytest.raises(ValueError, match=r"d\.jsonl, d, " + message):
        load("gsm8k", path)


def test_gsm8k_takes_plain_numbers_too(tmp_path):
    path = write(tmp_path / "test.jsonl", [{"question": "half \u00bd", "answer": "3.5", "id": 3}])
    assert load("gsm8k", path).eval_examples(1)[0].columns == {
        "question": "half \u00bd",
        "answer": "3.5",
        "solution": "3.5",
    }


def test_math_rows_and_filters(tmp_path):
    rows = [
        math(1),
        math(2, "Level ?"),
        math(3, "Level 5", "Geometry"),
        {"problem": "p", "answer": "4", "subject": "Geometry", "level": 5},
        {"problem": "q", "answer": "5"},
    ]
    path = write(tmp_path / "d.jsonl", rows)

    def kept(**settings):
        return sorted(held_out(load("math", eval_path=path, **settings)))

    assert kept() == ["4", "5", r"\frac{1}{2}", r"\frac{2}{2}", r"\frac{3}{2}"]
    assert kept(levels=[5]) == ["4", r"\frac{3}{2}"]
    assert kept(levels=[1, 3]) == [r"\frac{1}{2}"]
    assert kept(subjects=["Geometry"]) == ["4", r"\frac{3}{2}"]
    columns = load("math", eval_path=path).eval_examples(5)[1].columns
    assert columns == {
        "problem": "What is 2/2?",
        "answer": r"\frac{2}{2}",
        "solution": r"It is \boxed{\frac{2}{2}}.",
        "level": None,
        "subject": "Algebra",
    }
    with pytest.raises(ValueError, match=r"the filters of \[task\] keep none of its 5 problems"):
        kept(levels=[4])
    with pytest.raises(ValueError, match=r"row 1: has no answer"):
        load("math", eval_path=write(tmp_path / "e.jsonl", [{"problem": "p", "solution": "none"}]))


def test_bigmath_rows_and_filters(tmp_path):
    rates = [0.1, 0.5, None, 0.9]
    rows = [
        {
            "problem": f"p{i}",
            "answer": str(i),
            "source": "math" if i % 2 else "orca_math",
            "domain": ["Algebra"],
            "llama8b_solve_rate": rate,
        }
        for i, rate in enumerate(rates)
    ]
    path = write(tmp_path / "d.jsonl", [*rows, {"problem": "p4", "answer": "4", "source": "math", "solve_rate": 0.3}])

    def kept(**settings):
        return held_out(load("bigmath", eval_path=path, **settings))

    assert kept() == ["0", "1", "2", "3", "4"]
    assert kept(solve_rate=(0.1, 0.5)) == ["0", "1", "4"]  # a row without a rate is dropped
    assert kept(sources=["math"]) == ["1", "3", "4"]
    assert kept(sources=["math"], solve_rate=(0.4, 1.0)) == ["1", "3"]
    assert load("bigmath", eval_path=path).eval_examples(1)[0].columns == {
        "problem": "p0",
        "answer": "0",
        "source": "orca_math",
        "domain": ["Algebra"],
        "solve_rate": 0.1,
    }


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("aime", {"id": 60, "problem": "p", "answer": "025", "url": "u"}, "025"),
        ("amc", {"id": 0, "problem": "p", "answer": 27.0}, "27"),
        ("math500", {"problem": "p", "answer": r"\frac12", "subject": "Precalculus", "level": 2}, r"\frac12"),
    ],
)
def test_evaluation_sets_hold_out_all_they_have(tmp_path, name, row, answer):
    task = load(name, write(tmp_path / "any.jsonl", [row, row | {"problem": "q"}]))
    assert (task.num_train_examples, task.num_eval_examples) == (0, 2)
    assert held_out(task) == [answer] * 2
    columns = [task.eval_examples(1)[0].columns] * 2
    assert task.grade_batch([f"<answer>{answer}</answer>", "<answer>26</answer>"], columns) == [True, False]


def test_rewards_are_those_of_the_paper(tmp_path):
    # arXiv 2510.11696: format 0.2 + correctness 2.0 on GSM8K, correctness 1.0 on BigMath
    def weights(name, row):
        rows = [row, row | {"problem": "q", "question": "q"}]
        task = load(name, write(tmp_path / f"{name}.jsonl", rows), held_out_share=0.5)
        return {spec.name: spec.weight for spec in task.reward_functions}

    assert weights("gsm8k", gsm8k(1)) == {"format": 0.2, "correctness": 2.0}
    assert weights("math", math(1)) == {"correctness": 1.0}
    assert weights("bigmath", {"problem": "p", "answer": "1"}) == {"correctness": 1.0}


# ---------------------------------------------------------------- a user's own data


def own(i: int) -> dict:
    return {"ask": f"Half of {i}?", "gold": f"{i}/2", "hint": [i], "level": "easy"}


def test_own_columns(tmp_path):
    path = write(tmp_path / "d.jsonl", [own(i) for i in range(20)])
    task = load("data", path, prompt_column="ask", answer_column="gold", system_prompt="Be brief.")
    example = task.train_example(0)
    i = example.columns["hint"][0]
    assert example.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Half of {i}?"},
    ]
    assert example.columns == {"gold": f"{i}/2", "hint": [i], "level": "easy"}
    texts = [rf"<answer>\frac{{{i}}}{{2}}</answer>", f"<answer>{i}</answer>"]
    assert task.grade_batch(texts, [example.columns] * 2) == [True, i == 0]
    rewards = RewardRunner.from_config(RewardConfig(), task, max_steps=1)
    scores = rewards.score(
        prompts=[example.prompt], texts=texts[:1], completion_ids=[[1]], columns=[example.columns], step=0
    )
    assert scores.parts == {"format": [0.0], "correctness": [1.0]}


@pytest.mark.parametrize("form", ["csv", "parquet", "saved"])
def test_own_data_in_other_forms(tmp_path, form):
    data = datasets.Dataset.from_list([{"prompt": f"{i}?", "answer": i} for i in range(10)])
    path = tmp_path / f"d.{form}"
    {"csv": data.to_csv, "parquet": data.to_parquet, "saved": data.save_to_disk}[form](str(path))
    task = load("data", path, grader="numeric")
    example = task.eval_examples(1)[0]
    assert task.num_train_examples == 9
    assert task.grade_batch([f"<answer>{example.prompt[-1]['content'][:-1]}.0</answer>"], [example.columns]) == [True]


def test_chat_prompts(tmp_path):
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ]
    path = write(tmp_path / "d.jsonl", [{"prompt": chat, "answer": "1"}])
    assert load("data", eval_path=path).eval_examples(1)[0].prompt == chat
    changed = load("data", eval_path=path, system_prompt="t").eval_examples(1)[0].prompt
    assert changed == [{"role": "system", "content": "t"}, *chat[1:]]
    parquet = tmp_path / "d.parquet"
    datasets.Dataset.from_list([{"prompt": chat, "answer": "1"}]).to_parquet(parquet)
    assert load("data", eval_path=str(parquet)).eval_examples(1)[0].prompt == chat


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "the prompt is None: text or a list of chat messages is expected"),
        (" ", "the prompt is ' '"),
        ([], "messages need a text 'role' and a text 'content' each"),
        ([{"role": "user", "content": ["x"]}], "messages need"),
        ([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], "ends with an assistant's message"),
    ],
)
def test_prompts_that_are_none(tmp_path, prompt, message):
    path = write(tmp_path / "d.jsonl", [{"prompt": prompt, "answer": "1"}])
    with pytest.raises(ValueError, match=rf"d, row 1: .*{message}"):
        load("data", eval_path=path)


def test_every_example_has_all_columns(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": "2", "more": 3}])
    assert held_out(load("data", eval_path=path), "more") == [None, 3]


def test_columns_that_are_missing_or_in_the_way(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": "p", "gold": "1"}])
    with pytest.raises(ValueError, match=r"task\.answer_column: there is no column 'answer'; there are prompt, gold\."):
        load("data", eval_path=path)
    alone = write(tmp_path / "alone.jsonl", [{"prompt": "p"}])
    with pytest.raises(ValueError, match=r"there is no column 'answer'; there are prompt\. Data without references"):
        load("data", eval_path=alone)
    with pytest.raises(ValueError, match=r"task\.prompt_column: there is no 'ask', found prompt, gold"):
        load("data", eval_path=path, prompt_column="ask")
    path = write(tmp_path / "e.jsonl", [{"prompt": "p", "answer": "1", "completions": 1}])
    with pytest.raises(ValueError, match="column 'completions' has the name of a reward function's own argument"):
        load("data", eval_path=path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.parquet", b"PAR1 but no more", r"^task\.path: .*d\.parquet is no readable Parquet file: "),
        ("d.jsonl", b"", r"^task\.path: .*d\.jsonl, d is empty: it has no row"),
        ("d.csv", b"prompt,answer\n", r"^task\.path: .*d\.csv, d is empty: it has no row"),
    ],
)
def test_damaged_and_empty_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("data", tmp_path / name)


def test_data_without_references(tmp_path):
    task = load("data", write(tmp_path / "d.jsonl", [{"prompt": f"p{i}"} for i in range(10)]), grader="none")
    assert task.grade_batch(["a", "b"], [{}, {}]) == [None, None]
    with pytest.raises(ValueError, match=r"no reward function: name one in rewards\.functions"):
        RewardRunner.from_config(RewardConfig(), task, max_steps=1)


@pytest.mark.parametrize(
    ("grader", "percent", "verdicts"),
    [
        ("numeric", "ignore", [True, True, False]),
        ("numeric", "fraction", [False, False, True]),
        ("math", "ignore", [True, True, False]),
        ("math", "fraction", [False, False, True]),
        ("exact", "ignore", [False, True, False]),
    ],
)
def test_grader_and_policy_are_chosen(tmp_path, grader, percent, verdicts):
    path = write(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "50"}])
    task = load("data", eval_path=path, grader=grader, percent=percent)
    texts = ["<answer>50 %</answer>", "<answer>50</answer>", "<answer>5000%</answer>"]
    columns = task.eval_examples(1)[0].columns
    expected = verdicts if percent == "ignore" else [False, True, True]
    assert task.grade_batch(texts, [columns] * 3) == expected
