r"""majority@k (self-consistency, arXiv 2203.11171): the final answer that most completions of a problem give.

    texts -> final answers -> the most frequent one -> its grade

Answers count as the same if they are the same number (`18`, `18.00`, `$18`), or else the same text without space: two
spellings of one expression (`\sqrt{8}`, `2\sqrt{2}`) are two answers. A completion without an answer does not vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from qerl.tasks.numbers import last_boxed, last_number, parse_number
from qerl.tasks.prompts import parse_answer


def final_answer(text: str, *, require_tags: bool) -> str | None:
    r"""What a completion votes for; None when it gives no answer.

    It stands in the answer tags; with `require_tags=False`, and no tags, in the last `\boxed{}`, else behind the last
    `####`, else it is the last number.
    """
    stated = parse_answer(text)
    if stated is None and not require_tags:
        stated = last_boxed(text)
        if stated is None and "####" in text:
            stated = text.rpartition("####")[2].strip().partition("\n")[0]
        if stated is None:
            return _spell(last_number(text))
    if stated is None:
        return None
    boxed = last_boxed(stated)
    return _spell(parse_number(stated)) or "".join((stated if boxed is None else boxed).split()).strip("$") or None


def majority_score(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the most frequent answer is right, by the grade of the first completion that gives it.

    A tie scores the share of the tied answers that are right: what a fair draw among them would score on average.
    Without any answer the score is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == most]
    return sum(right[answers.index(answer)] for answer in leaders) / len(leaders)


def _spell(number: Fraction | None) -> str | None:
    return None if number is None else str(number)
