"""The arithmetic generator: right answers, a held-out part that stays out, and one problem per (seed, index)."""

from __future__ import annotations

import random
import re

import pytest

from qerl.tasks import arithmetic
from qerl.tasks.arithmetic import LEVELS, held_out_problems, is_held_out, solve, train_problem, worked_solution

DIFFICULTIES = sorted(LEVELS)


def problems(difficulty: int, n: int = 500) -> list[str]:
    return [train_problem(difficulty, seed=0, index=i) for i in range(n)]


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_the_answer_is_what_python_computes(difficulty):
    for problem in problems(difficulty):
        steps, answer = solve(problem)
        assert answer == eval(problem.removesuffix("=?"))
        for step in steps:
            expression, value = step.split("=")
            assert eval(expression) == int(value)
        assert len(steps) == len(re.findall(r"[+*-]", problem))


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_no_running_total_is_negative(difficulty):
    for problem in problems(difficulty):
        assert re.fullmatch(r"\d+([+*-]\d+)+=\?", problem)
        assert not re.search(r"(^|[ =>])-", worked_solution(problem))


@pytest.mark.parametrize(
    ("problem", "solution"),
    [
        ("12+7-4=?", "<think>12+7=19 19-4=15</think><answer>15</answer>"),
        ("8+69=?", "<think>8+69=77</think><answer>77</answer>"),
        ("9-9=?", "<think>9-9=0</think><answer>0</answer>"),
        ("12+3*4-5=?", "<think>3*4=12 12+12=24 24-5=19</think><answer>19</answer>"),
        ("2*3+99-4*5=?", "<think>2*3=6 4*5=20 6+99=105 105-20=85</think><answer>85</answer>"),
    ],
)
def test_worked_solution_is_written_as_documented(problem, solution):
    assert worked_solution(problem) == solution


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_training_problems_are_never_held_out(difficulty):
    held_out = held_out_problems(difficulty, 1000)
    assert len(set(held_out)) == 1000
    assert all(is_held_out(problem) for problem in held_out)
    for seed in (0, 1, 2**63 - 1):
        assert not any(is_held_out(train_problem(difficulty, seed, i)) for i in range(500))


def test_the_held_out_list_grows_at_its_end():
    assert held_out_problems(2, 300)[:100] == held_out_problems(2, 100)
    assert held_out_problems(2, 0) == []


def test_a_problem_depends_on_seed_and_index_alone():
    forward = [train_problem(2, 7, i) for i in range(50)]
    assert [train_problem(2, 7, i) for i in reversed(range(50))] == forward[::-1]
    assert [train_problem(2, 8, i) for i in range(50)] != forward


def test_problems_are_pinned_across_versions():
    # A resumed run and the embedded model's training both count on these.
    assert [train_problem(2, 0, i) for i in range(3)] == ["6+66+9+8=?", "9+40+58=?", "3+97+48-24=?"]
    assert train_problem(5, 0, 0) == "188+21*9-27-43*8+37*2=?"


def test_problems_hardly_repeat():
    assert len(set(problems(2, 2000))) > 1980


def test_the_dial_makes_solutions_longer():
    lengths = [sum(len(worked_solution(p)) for p in problems(d)) for d in DIFFICULTIES]
    assert lengths == sorted(lengths)


def test_demo_solutions_are_short():
    # The demo trains on a CPU: at difficulty 2, with a token for each tag and each other character, 16 to 38 tokens.
    tokens = [len(re.sub(r"</?(think|answer)>", "#", worked_solution(p))) for p in problems(2)]
    assert min(tokens) >= 16
    assert max(tokens) <= 40
    assert 20 <= sum(tokens) / len(tokens) <= 30


def test_levels_keep_to_their_terms_and_digits():
    for difficulty, level in LEVELS.items():
        for problem in problems(difficulty):
            terms = re.split(r"[+-]", problem.removesuffix("=?"))
            assert level.min_terms <= len(terms) <= level.max_terms
            numbers = [number for term in terms for number in term.split("*")]
            assert all(len(number) <= level.max_digits and number[0] != "0" for number in numbers)
            assert level.products or "*" not in problem


def test_more_held_out_problems_than_there_are_is_an_error():
    with pytest.raises(ValueError, match=r"difficulty 1 .* 1500 were asked for: lower eval\.num_problems"):
        held_out_problems(1, 1500)


def test_a_share_of_problems_is_held_out():
    drawn = [arithmetic._draw_problem(LEVELS[2], random.Random(i)) for i in range(4000)]
    share = sum(map(is_held_out, drawn)) / len(drawn)
    assert share == pytest.approx(0.1, abs=0.02)
