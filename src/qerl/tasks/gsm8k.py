"""GSM8K (arXiv 2110.14168): grade-school word problems whose answer is one number. Read from a path, never shipped.

    {"question": "...", "answer": "reasoning ... #### 72"}   one JSON object a line

`task.path` is a folder with train.jsonl and, where there is one, test.jsonl (held out); or one such file. Without a
test.jsonl the last tenth of the file is held out. A training problem whose question is held out as well is dropped.
Any data of this form will do: an `answer` without `####` is the number itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.tasks import numbers
from qerl.tasks.prompts import build_prompt
from qerl.tasks.rewards import RewardSpec, format_reward, numeric_reward
from qerl.types import Example

HELD_OUT_SHARE = 10  # without a test.jsonl, one problem in ten


class GSM8KTask:
    """The task over such a file or folder, see `qerl.tasks.Task`.

    Columns: `question`, `answer` (the number after `####`) and `solution` (the reference's whole text).
    ValueError for a path or a line that cannot be used.
    """

    name = "gsm8k"
    reward_functions = (RewardSpec("format", format_reward, 0.2), RewardSpec("correctness", numeric_reward, 2.0))

    def __init__(self, path: str | None, *, system_prompt: str | None = None) -> None:
        if path is None:
            raise ValueError(
                "task.path is not set: give the folder that holds GSM8K's train.jsonl and test.jsonl "
                "(github.com/openai/grade-school-math, grade_school_math/data)"
            )
        self.system_prompt = system_prompt
        train, self._held_out = _read_split(Path(path))
        held_out_questions = {row["question"] for row in self._held_out}
        self._train = [row for row in train if row["question"] not in held_out_questions]
        if not self._train or not self._held_out:
            raise ValueError(
                f"{path} gives {len(self._train)} training and {len(self._held_out)} held-out problems: "
                "both are needed; ten lines or a test.jsonl beside train.jsonl give both"
            )

    @property
    def num_train_examples(self) -> int:
        """Number of training problems."""
        return len(self._train)

    @property
    def num_eval_examples(self) -> int:
        """Number of held-out problems."""
        return len(self._held_out)

    def train_example(self, index: int) -> Example:
        """Return training problem `index` of `num_train_examples`, in the file's order."""
        return self._example(self._train[index])

    def eval_examples(self, n: int) -> list[Example]:
        """Return the first `n` held-out problems; ValueError when there are fewer."""
        if n > len(self._held_out):
            raise ValueError(
                f"{n} held-out problems were asked for and there are {len(self._held_out)}: "
                f"set eval.num_problems = {len(self._held_out)} or lower"
            )
        return [self._example(row) for row in self._held_out[:n]]

    def grade_batch(
        self, texts: Sequence[str], columns: Sequence[Mapping[str, Any]], *, require_tags: bool = True
    ) -> list[bool | None]:
        """Whether each completion states the right number, see `numbers.grade`."""
        pairs = zip(texts, columns, strict=True)
        return [numbers.grade(text, row["answer"], require_tags=require_tags) for text, row in pairs]

    def _example(self, row: dict[str, str]) -> Example:
        return Example(build_prompt(row["question"], self.system_prompt), dict(row))


def _read_split(path: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and held-out rows."""
    if path.is_dir():
        train, test = path / "train.jsonl", path / "test.jsonl"
        if not train.is_file():
            raise ValueError(f"task.path: the folder {path} has no train.jsonl")
        if test.is_file():
            return _read_rows(train), _read_rows(test)
        path = train
    elif not path.is_file():
        raise ValueError(f"task.path: there is no file or folder {path}")
    rows = _read_rows(path)
    cut = len(rows) - len(rows) // HELD_OUT_SHARE
    return rows[:cut], rows[cut:]


def _read_rows(path: Path) -> list[dict[str, str]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not valid JSON ({error}); one object a line is expected"
            ) from None
        if not isinstance(row, dict) or not all(isinstance(row.get(field), str) for field in ("question", "answer")):
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f'{path}, line {number}: needs the text fields "question" and "answer", found {found}')
        answer = row["answer"].rpartition("####")[2].strip()
        if numbers.parse_number(answer) is None:
            raise ValueError(f"{path}, line {number}: the answer {answer[-80:]!r} is not one number")
        rows.append({"question": row["question"], "answer": answer, "solution": row["answer"]})
    return rows
