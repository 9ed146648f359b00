"""What a prompt says and how its tags are read."""

from __future__ import annotations

import pytest

from qerl.tasks.arithmetic import train_problem, worked_solution
from qerl.tasks.prompts import SYSTEM_PROMPT, build_prompt, has_format, parse_answer


def test_the_prompt_asks_for_the_format_that_is_rewarded():
    assert [tag in SYSTEM_PROMPT for tag in ("<think>", "</think>", "<answer>", "</answer>")] == [True] * 4
    assert "step by step" in SYSTEM_PROMPT


def test_system_messages():
    user = {"role": "user", "content": "1+1=?"}
    assert build_prompt("1+1=?") == [{"role": "system", "content": SYSTEM_PROMPT}, user]
    assert build_prompt("1+1=?", "Be brief.") == [{"role": "system", "content": "Be brief."}, user]
    assert build_prompt("1+1=?", "") == [user]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer> 5\n</answer>", "5"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer></answer>", ""),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1</answer></answer>", "1"),
        ("<answer>1<think>2</answer>", None),
        ("<answer>5", None),
        ("5</answer>", None),
        ("</answer>5<answer>", None),
        ("<ANSWER>5</ANSWER>", None),
        ("< answer>5</answer>", None),
        ("", None),
    ],
)
def test_the_last_complete_answer_counts(text, answer):
    assert parse_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think>a</think><answer>5</answer>", True),
        ("\n<think>\na\n</think>\n\n<answer>\n5\n</answer>\n", True),
        ("<think>a < b > c</think><answer>5</answer>", True),
        ("<think></think><answer>5</answer>", False),
        ("<think> \n</think><answer>5</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<answer>5</answer>", False),
        ("<think>a</think>", False),
        ("<think>a</think><answer>5", False),
        ("<think>a<answer>5</answer>", False),
        ("<answer>5</answer><think>a</think>", False),
        ("so <think>a</think><answer>5</answer>", False),
        ("<think>a</think> so <answer>5</answer>", False),
        ("<think>a</think><answer>5</answer> done", False),
        ("<think>a</think><answer>5</answer><answer>6</answer>", False),
        ("<think>a</think><think>b</think><answer>5</answer>", False),
        ("<think>a<think>b</think><answer>5</answer>", False),
        ("<think>a</think><answer>5</answer></answer>", False),
        ("<think>the <answer>4</answer> was wrong</think><answer>5</answer>", False),
        ("<Think>a</Think><answer>5</answer>", False),
        ("", False),
    ],
)
def test_the_format_is_one_think_part_and_one_answer_part(text, good):
    assert has_format(text) is good


def test_worked_solutions_have_the_format():
    for i in range(50):
        assert has_format(worked_solution(train_problem(2, 0, i)))
