"""Built-in reward functions, all in TRL's signature; name them in `rewards.functions` as `qerl.tasks.rewards:NAME`.

| name | pays |
|---|---|
| `format_reward` | 1 for one think part and one answer part with nothing around them |
| `tag_count_reward` | a quarter for each of the four tags that occurs exactly once |
| `numeric_reward` | 1 for the number in the column `answer` (`numbers.py`) |
| `math_reward` | 1 for the column `answer` as mathematics (`math_grader.py`) |
| `exact_reward` | 1 for the text of the column `answer`, but for the amount of space |
| `regex_reward` | 1 where `pattern` is found in the completion |
| `length_reward` | minus its share of `max_length` tokens, at most 1 |
| `overlong_reward` | DAPO's soft punishment of the last `buffer` tokens before `max_length` (2503.14476, eq. 13) |

Arguments such as `pattern` are set in `rewards.arguments`. The three that grade look inside the answer tags; with
`require_tags = false` they take the answer where they find it, and a run's accuracy follows. Where the grader could not
tell (a reference that it cannot read, an answer that it ran out of time on), the value is NaN: what the completion is
worth is unknown. What a task pays for by itself, with its own grader and policies, comes from `correctness_by`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from qerl.tasks.graders import Grader, build_grader
from qerl.tasks.prompts import TAGS, has_format


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, be it chat messages or plain."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def correctness_by(grader: Grader, column: str = "answer") -> Callable[..., list[float]]:
    """Return the reward function that pays 1 for what the grader calls right by the references in `column`."""

    def correctness(completions: list[Any], *, require_tags: bool = True, **columns: Any) -> list[float]:
        references = ["" if reference is None else str(reference) for reference in columns[column]]
        texts = [completion_text(completion) for completion in completions]
        grades = grader(texts, references, require_tags=require_tags)
        return [math.nan if grade is None else float(grade) for grade in grades]

    return correctness


def format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 for a completion that is one think part and one answer part, else 0 (`prompts.has_format`)."""
    return [float(has_format(completion_text(completion))) for completion in completions]


def tag_count_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return a quarter for each of the tags that occurs exactly once: a step towards `format_reward`."""
    texts = map(completion_text, completions)
    return [sum(text.count(tag) == 1 for tag in TAGS) / len(TAGS) for text in texts]


def numeric_reward(
    completions: list[Any], answer: list[Any], *, require_tags: bool = True, **kwargs: Any
) -> list[float]:
    """Return 1 for an answer that is the number in the column `answer`, else 0."""
    return correctness_by(build_grader("numeric"))(completions, answer=answer, require_tags=require_tags)


def math_reward(completions: list[Any], answer: list[Any], *, require_tags: bool = True, **kwargs: Any) -> list[float]:
    """Return 1 for an answer that equals the column `answer` as mathematics, else 0."""
    return correctness_by(build_grader("math"))(completions, answer=answer, require_tags=require_tags)


def exact_reward(completions: list[Any], answer: list[Any], *, require_tags: bool = True, **kwargs: Any) -> list[float]:
    """Return 1 for an answer that is the text of the column `answer`, else 0."""
    return correctness_by(build_grader("exact"))(completions, answer=answer, require_tags=require_tags)


def regex_reward(completions: list[Any], *, pattern: str, **kwargs: Any) -> list[float]:
    """Return 1 where `pattern` is found anywhere in the completion (`.` matches newlines too), else 0."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(completion_text(completion)) is not None) for completion in completions]


def length_reward(completion_ids: list[list[int]], *, max_length: int, **kwargs: Any) -> list[float]:
    """Return -tokens / max_length, at least -1: among equal answers the shorter one is better."""
    return [-min(len(ids) / max_length, 1.0) for ids in completion_ids]


def overlong_reward(completion_ids: list[list[int]], *, max_length: int, buffer: int, **kwargs: Any) -> list[float]:
    """Return 0 up to max_length - buffer tokens, then a line down to -1 at max_length.

    The same as `loss.overlong_buffer`, as a function that can be weighed and is logged by itself; use one of the two.
    """
    return [-min(max((len(ids) - (max_length - buffer)) / buffer, 0.0), 1.0) for ids in completion_ids]
