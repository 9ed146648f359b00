"""Arithmetic chains: an endless task that a tiny model can learn on a CPU, with a difficulty dial from 1 to 5.

A problem is one line of digits and signs, `12+7-4=?`, which a model that reads single characters can read as well as a
large one. Its worked solution names every step and then the answer:

    12+7-4=?   ->   <think>12+7=19 19-4=15</think><answer>15</answer>

Products come first, from left to right, then sums and differences from left to right (`12+3*4=?` -> `3*4=12 12+12=24`).
Every number written is positive and no running total is below zero.

A problem is a pure function of (seed, index), so that a position in the data is all that a resumed run needs. The
held-out part is a tenth of all problems, chosen by a hash of the text: the same for every seed, and never trained on.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.tasks import numbers
from qerl.tasks.prompts import build_prompt
from qerl.tasks.rewards import RewardSpec, format_reward, numeric_reward
from qerl.types import Example

HELD_OUT_SHARE = 10  # one problem in ten is held out


@dataclass(frozen=True, slots=True)
class Level:
    """What one step of the difficulty dial draws from."""

    min_terms: int
    """Fewest terms of a chain."""
    max_terms: int
    """Most terms of a chain."""
    max_digits: int
    """Digits of a number: drawn evenly from 1 to this, then the number evenly among those of that many digits."""
    products: bool = False
    """Whether a term in three, on average, is a product of a number of up to two digits and a digit."""


LEVELS: dict[int, Level] = {
    1: Level(min_terms=2, max_terms=2, max_digits=2),
    2: Level(min_terms=3, max_terms=4, max_digits=2),
    3: Level(min_terms=4, max_terms=6, max_digits=2),
    4: Level(min_terms=4, max_terms=6, max_digits=3),
    5: Level(min_terms=4, max_terms=6, max_digits=3, products=True),
}


class ArithmeticTask:
    """The task over these problems, see `qerl.tasks.Task`. Columns: `problem`, `answer` and the worked `solution`."""

    name = "arithmetic"
    num_train_examples = None
    num_eval_examples = None
    reward_functions = (RewardSpec("format", format_reward, 0.2), RewardSpec("correctness", numeric_reward, 1.0))

    def __init__(self, *, difficulty: int, seed: int, system_prompt: str | None = None) -> None:
        self.difficulty = difficulty
        self.seed = seed
        self.system_prompt = system_prompt

    def train_example(self, index: int) -> Example:
        """Return training problem `index`; a function of (seed, index) alone."""
        return self._example(train_problem(self.difficulty, self.seed, index))

    def eval_examples(self, n: int) -> list[Example]:
        """Return the first `n` held-out problems, the same for every seed."""
        return [self._example(problem) for problem in held_out_problems(self.difficulty, n)]

    def grade_batch(
        self, texts: Sequence[str], columns: Sequence[Mapping[str, Any]], *, require_tags: bool = True
    ) -> list[bool | None]:
        """Whether each completion states the right number, see `numbers.grade`."""
        pairs = zip(texts, columns, strict=True)
        return [numbers.grade(text, row["answer"], require_tags=require_tags) for text, row in pairs]

    def _example(self, problem: str) -> Example:
        columns = {"problem": problem, "answer": str(solve(problem)[1]), "solution": worked_solution(problem)}
        return Example(build_prompt(problem, self.system_prompt), columns)


def train_problem(difficulty: int, seed: int, index: int) -> str:
    """Return training problem `index` (0, 1, ...) of an endless sequence, such as `12+7-4=?`; never a held-out one."""
    rng = random.Random(f"train/{difficulty}/{seed}/{index}")
    while is_held_out(problem := _draw_problem(LEVELS[difficulty], rng)):
        pass
    return problem


def held_out_problems(difficulty: int, n: int) -> list[str]:
    """Return the first `n` of a fixed list of distinct held-out problems; ValueError when the level has too few."""
    rng = random.Random(f"held-out/{difficulty}")
    problems: dict[str, None] = {}
    misses = 0
    while len(problems) < n:
        problem = _draw_problem(LEVELS[difficulty], rng)
        if is_held_out(problem) and problem not in problems:
            problems[problem] = None
            misses = 0
        elif (misses := misses + 1) == 10_000:
            raise ValueError(
                f"arithmetic of difficulty {difficulty} has hardly more than {len(problems)} held-out problems, "
                f"{n} were asked for: lower eval.num_problems or raise task.difficulty"
            )
    return list(problems)


def is_held_out(problem: str) -> bool:
    """Whether a problem belongs to the held-out tenth."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def solve(problem: str) -> tuple[list[str], int]:
    """Return the steps (`["12+7=19", "19-4=15"]`) and the answer (15) of a problem."""
    # numbers and operators alternate: "12+7-4=?" -> ["12", "+", "7", "-", "4"]
    first, *rest = re.findall(r"\d+|[+*-]", problem)
    numbers, operators = [int(first), *map(int, rest[1::2])], rest[0::2]
    steps = []
    for group in ("*", "+-"):
        i = 0
        while i < len(operators):
            if operators[i] not in group:
                i += 1
                continue
            a, b = numbers[i : i + 2]
            value = a * b if operators[i] == "*" else a + b if operators[i] == "+" else a - b
            steps.append(f"{a}{operators[i]}{b}={value}")
            numbers[i : i + 2] = [value]
            del operators[i]
    return steps, numbers[0]


def worked_solution(problem: str) -> str:
    """Return the completion that solves a problem step by step: `<think>12+7=19 19-4=15</think><answer>15</answer>`."""
    steps, answer = solve(problem)
    return f"<think>{' '.join(steps)}</think><answer>{answer}</answer>"


def _draw_problem(level: Level, rng: random.Random) -> str:
    text, total = _draw_term(level, rng)
    for _ in range(_draw_integer(rng, level.min_terms, level.max_terms) - 1):
        term, value = _draw_term(level, rng)
        sign = "-" if rng.random() < 0.5 and value <= total else "+"
        text += sign + term
        total += -value if sign == "-" else value
    return f"{text}=?"


def _draw_term(level: Level, rng: random.Random) -> tuple[str, int]:
    """Draw one term: its text and its value."""
    if level.products and rng.random() < 1 / 3:
        a, b = _draw_integer(rng, 2, 99), _draw_integer(rng, 2, 9)
        return f"{a}*{b}", a * b
    digits = _draw_integer(rng, 1, level.max_digits)
    value = _draw_integer(rng, 10 ** (digits - 1), 10**digits - 1)
    return str(value), value


def _draw_integer(rng: random.Random, low: int, high: int) -> int:
    """Draw evenly from low..high, both included."""
    # random() alone is promised to give the same sequence in every Python version; randint is not.
    return low + int(rng.random() * (high - low + 1))
