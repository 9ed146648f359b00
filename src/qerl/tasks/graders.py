"""Graders by name: is a completion's final answer the reference?

| name | compares |
|---|---|
| numeric | the one number that the answer states, exact (`numbers.py`) |
| math | the answer as mathematics (`math_grader.py`) |
| exact | the answer's text, but for the amount of space |
| none | nothing: every verdict is None |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from qerl.config import GraderName, Percent
from qerl.tasks import numbers
from qerl.tasks.math_grader import final_answer, grade_math


@runtime_checkable  # for the run-time type checks of the tests
class Grader(Protocol):
    """Grades completions by their references, one each."""

    def __call__(
        self, texts: Sequence[str], references: Sequence[str], *, require_tags: bool = True
    ) -> list[bool | None]:
        """Return a verdict a completion; None: it could not tell."""
        ...


def build_grader(name: GraderName, percent: Percent = "ignore") -> Grader:
    """Return the grader of that name with a policy for percent signs."""
    if name == "numeric":
        return partial(_grade_numbers, percent=percent)
    if name == "math":
        return partial(grade_math, percent=percent)
    return _grade_exactly if name == "exact" else _grade_nothing


def _grade_numbers(
    texts: Sequence[str], references: Sequence[str], *, require_tags: bool = True, percent: Percent
) -> list[bool | None]:
    return [
        numbers.grade(text, reference, require_tags=require_tags, percent=percent)
        for text, reference in zip(texts, references, strict=True)
    ]


def _grade_exactly(texts: Sequence[str], references: Sequence[str], *, require_tags: bool = True) -> list[bool | None]:
    answers = [final_answer(text, require_tags=require_tags) for text in texts]
    return [
        answer is not None and answer.split() == reference.split()
        for answer, reference in zip(answers, references, strict=True)
    ]


def _grade_nothing(texts: Sequence[str], references: Sequence[str], *, require_tags: bool = True) -> list[bool | None]:
    return [None] * len(texts)
