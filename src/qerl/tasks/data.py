"""Tasks over data that are read, never shipped: a layout says what the rows of a known data set hold.

    task.path -> rows by split (table.py) -> `Layout.read`: prompt and columns, or the row is left out -> Example

Held-out problems are, in this order: those of `task.eval_path`; the split `task.eval_split`; a split called test or
validation; else the share `task.held_out_share` of the training split with the smallest hashes of the prompt, which is
the same in every run whatever the order of the rows. A training problem whose prompt is held out as well is dropped,
with a warning that counts them.
Evaluation sets hold out all they have; data with only a test split have nothing to train on either.

| layout | a row's fields | columns for rewards and graders |
|---|---|---|
| gsm8k (2110.14168) | question, answer (`... #### 72`, or the number alone) | question, answer, solution |
| math (2103.03874) | problem, solution or answer, level ("Level 3", 3, "Level ?"), subject or type | as `_read_math` |
| bigmath (2502.17387) | problem, answer, source, domain, solve_rate or llama8b_solve_rate | as `_read_bigmath` |
| math500, aime, amc | those of math; an answer may be a number, and AMC's 27.0 is 27 | as `_read_math` |
| data | what `task.prompt_column` and `task.answer_column` name | all columns but the prompt's |
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qerl.config import REWARD_ARGUMENTS, GraderName, TaskConfig
from qerl.tasks import numbers
from qerl.tasks.graders import build_grader
from qerl.tasks.prompts import build_prompt
from qerl.tasks.rewards import RewardSpec, correctness_by, format_reward
from qerl.tasks.table import Row, Splits, fingerprint, open_table
from qerl.types import Example

HELD_OUT_SPLITS = ("test", "validation", "valid", "val", "dev")

Prompt = str | list[dict[str, str]]

logger = logging.getLogger(__name__)


class _LeftOut(Exception):
    """A row that a filter leaves out."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a known data set looks like, and how it is graded and paid."""

    read: Callable[[Row, TaskConfig], tuple[Prompt, Row]]
    """A row's prompt and columns; raises _LeftOut for a row that a filter leaves out, ValueError for a bad one."""
    grader: GraderName = "math"
    format_weight: float = 0.0
    correctness_weight: float = 1.0
    evaluation_only: bool = False
    hint: str = ""
    """Where to get the data, for the message when no path is given."""


class DataTask:
    """The task over such data, see `qerl.tasks.Task`. ValueError for data or a row that cannot be used."""

    def __init__(self, config: TaskConfig) -> None:
        self.name = config.name
        self.layout = LAYOUTS[config.name]
        self.system_prompt = config.system_prompt
        self.answer_column = config.answer_column if config.name == "data" else "answer"
        grader: GraderName = config.grader or self.layout.grader
        self._grade = build_grader(grader, config.percent)
        weights = {"format": self.layout.format_weight, "correctness": self.layout.correctness_weight}
        functions = {"format": format_reward, "correctness": correctness_by(self._grade, self.answer_column)}
        if grader == "none":
            weights = {}  # the user's own functions pay
        self.reward_functions: Sequence[RewardSpec] = tuple(
            RewardSpec(name, functions[name], weight) for name, weight in weights.items() if weight
        )
        self._train, self._held_out = self._read(config)
        columns = {name: None for _, row in [*self._train, *self._held_out] for name in row}
        if grader != "none" and self.answer_column not in columns:
            known = dict.fromkeys([config.prompt_column, *columns])
            raise ValueError(
                f"task.answer_column: there is no column {self.answer_column!r}; there are {', '.join(known)}. "
                'Data without references need task.grader = "none" and your own rewards.functions'
            )
        if clash := [name for name in REWARD_ARGUMENTS if name in columns]:
            raise ValueError(f"the column {clash[0]!r} has the name of a reward function's own argument: rename it")
        self._blank: Row = columns

    @cached_property
    def fingerprint(self) -> str:
        """Of all problems, by which a resumed run knows them: how many there are, and digits that change with them."""
        rows = [[prompt, row] for prompt, row in (*self._train, *self._held_out)]
        return f"{len(self._train)} to train on, {len(self._held_out)} held out, {fingerprint(rows)}"

    @property
    def num_train_examples(self) -> int:
        """Number of training problems."""
        return len(self._train)

    @property
    def num_eval_examples(self) -> int:
        """Number of held-out problems."""
        return len(self._held_out)

    def train_example(self, index: int) -> Example:
        """Return training problem `index` of `num_train_examples`, in the data's order."""
        if not self._train:
            raise ValueError(f"task {self.name!r} has only held-out problems here: nothing can be trained on them")
        return self._example(*self._train[index])

    def eval_examples(self, n: int) -> list[Example]:
        """Return the first `n` held-out problems; ValueError when there are fewer."""
        if n > len(self._held_out):
            raise ValueError(
                f"{n} held-out problems were asked for and there are {len(self._held_out)}: "
                f"set eval.num_problems = {len(self._held_out)} or lower"
            )
        return [self._example(*row) for row in self._held_out[:n]]

    def grade_batch(
        self, texts: Sequence[str], columns: Sequence[Mapping[str, Any]], *, require_tags: bool = True
    ) -> list[bool | None]:
        """Whether each completion's final answer is the reference, by the configured grader."""
        references = ["" if row.get(self.answer_column) is None else str(row[self.answer_column]) for row in columns]
        return self._grade(texts, references, require_tags=require_tags)

    def _example(self, prompt: Prompt, columns: Row) -> Example:
        messages = build_prompt(prompt, self.system_prompt) if isinstance(prompt, str) else list(prompt)
        if not isinstance(prompt, str) and self.system_prompt:
            others = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self.system_prompt}, *others]
        return Example(messages, self._blank | columns)

    def _read(self, config: TaskConfig) -> tuple[list[tuple[Prompt, Row]], list[tuple[Prompt, Row]]]:
        """Return training and held-out problems."""
        source = config.path or config.eval_path
        if source is None:
            raise ValueError(f"task.path is not set: {self.layout.hint}")
        splits = _open(source, config.subset, "task.path" if config.path else "task.eval_path")
        place = f"{source}"
        train: list[tuple[Prompt, Row]] = []
        if self.layout.evaluation_only or config.path is None:
            held_out = self._rows(place, splits, _held_out_split(splits, config) or _only(splits, place), config)
            return train, held_out

        name = _train_split(splits, config)
        if config.eval_path is not None:
            others = _open(config.eval_path, config.subset, "task.eval_path")
            other = _held_out_split(others, config) or _only(others, config.eval_path)
            held_out = self._rows(config.eval_path, others, other, config)
        elif (other := _held_out_split(splits, config, name)) is not None and other != name:
            held_out = self._rows(place, splits, other, config)
        else:
            assert name is not None, "there is a split, and it is not the held-out one"
            return self._cut(self._rows(place, splits, name, config), config.held_out_share, place)
        if name is not None:
            train = without_held_out(self._rows(place, splits, name, config), held_out, f"{place}, {name}")
        return train, held_out

    def _rows(self, place: str, splits: Splits, name: str, config: TaskConfig) -> list[tuple[Prompt, Row]]:
        """Return the problems of one split that the filters keep."""
        rows, kept = splits[name](), list[tuple[Prompt, Row]]()
        for number, row in enumerate(rows, start=1):
            try:
                kept.append(self.layout.read(row, config))
            except _LeftOut:
                continue
            except ValueError as error:
                raise ValueError(f"{place}, {name}, row {number}: {error}") from None
        if not kept:
            raise ValueError(f"{place}, {name}: the filters of [task] keep none of its {len(rows)} problems")
        if len(kept) < len(rows):
            logger.info("%s, %s: %d of %d problems kept by the filters of [task]", place, name, len(kept), len(rows))
        return kept

    @staticmethod
    def _cut(
        rows: list[tuple[Prompt, Row]], share: float, place: str
    ) -> tuple[list[tuple[Prompt, Row]], list[tuple[Prompt, Row]]]:
        """Cut off the held-out share; none, if that is asked for."""
        if share == 0:
            return rows, []
        keys = {problem_key(prompt) for prompt, _ in rows}
        hashes = {key: hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys}
        chosen = set(sorted(hashes, key=hashes.__getitem__)[: int(len(hashes) * share)])
        train = [row for row in rows if problem_key(row[0]) not in chosen]
        held_out = [row for row in rows if problem_key(row[0]) in chosen]
        if not train or not held_out:
            raise ValueError(
                f"{place} gives {len(train)} training and {len(held_out)} held-out problems: both are needed; give "
                "task.eval_path, or more rows, or train on all by task.held_out_share = 0"
            )
        return train, held_out


def without_held_out(
    train: list[tuple[Prompt, Row]], held_out: Sequence[tuple[Prompt, Row]], place: str
) -> list[tuple[Prompt, Row]]:
    """The training problems (of `place`) whose prompt is not held out as well."""
    prompts = {problem_key(prompt) for prompt, _ in held_out}
    kept = [row for row in train if problem_key(row[0]) not in prompts]
    if len(kept) < len(train):
        logger.warning(
            "%s: %d of %d prompts are held-out ones too: they are not trained on",
            *(place, len(train) - len(kept), len(train)),
        )
    return kept


def _open(source: str, subset: str | None, key: str) -> Splits:
    """The readers of a table, whose errors name the setting; an empty split is an error."""

    def guarded(name: str, read: Callable[[], list[Row]]) -> Callable[[], list[Row]]:
        def rows() -> list[Row]:
            try:
                found = read()
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
            if not found:
                raise ValueError(f"{key}: {source}, {name} is empty: it has no row")
            return found

        return rows

    try:
        return {name: guarded(name, read) for name, read in open_table(source, subset).items()}
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _train_split(splits: Splits, config: TaskConfig) -> str | None:
    """Return the split to train on; None when all there is is held out."""
    if config.split in splits:
        return config.split
    if config.split != "train":
        raise ValueError(f"task.split: there is no split {config.split!r}; there are {', '.join(splits)}")
    if len(splits) == 1:
        name = next(iter(splits))
        return None if name in HELD_OUT_SPLITS else name
    if any(name not in HELD_OUT_SPLITS for name in splits):
        raise ValueError(f"task.split: there is no split 'train'; choose among {', '.join(splits)}")
    return None


def _held_out_split(splits: Splits, config: TaskConfig, train: str | None = None) -> str | None:
    if config.eval_split is not None:
        if config.eval_split not in splits:
            raise ValueError(f"task.eval_split: there is no split {config.eval_split!r}; there are {', '.join(splits)}")
        if config.eval_split == train:
            raise ValueError(f"task.eval_split and task.split are both {train!r}: leave one out, or take another")
        return config.eval_split
    return next((name for name in HELD_OUT_SPLITS if name in splits), None)


def _only(splits: Splits, place: str) -> str:
    if len(splits) > 1:
        raise ValueError(f"{place} has the splits {', '.join(splits)}: choose one in task.eval_split")
    return next(iter(splits))


def problem_key(prompt: Prompt) -> str:
    """Return a text that two problems share only if their prompts are the same."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


# ------------------------------------------------------------------ layouts


def _text(row: Row, *names: str) -> str:
    """Return the first of these fields that holds text; ValueError when none does."""
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return row[name]
    raise ValueError(f"needs the text field {' or '.join(map(repr, names))}, found {', '.join(row)}")


def _answer(row: Row) -> str | None:
    """Return the field `answer` as text: 27.0 is "27"."""
    value = row.get("answer")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return None if value is None or not str(value).strip() else str(value)


def _read_gsm8k(row: Row, config: TaskConfig) -> tuple[Prompt, Row]:
    question, solution = _text(row, "question"), _text(row, "answer")
    answer = solution.rpartition("####")[2].strip()
    if numbers.parse_number(answer) is None:
        raise ValueError(f"the answer {answer[-80:]!r} is not one number")
    return question, {"question": question, "answer": answer, "solution": solution}


def _read_math(row: Row, config: TaskConfig) -> tuple[Prompt, Row]:
    problem, solution = _text(row, "problem", "question"), row.get("solution") or ""
    answer = _answer(row) or numbers.last_boxed(solution)
    if not answer:
        raise ValueError(r"has no answer: neither a field 'answer' nor a \boxed{} in 'solution'")
    digits = re.search(r"\d+", str(row.get("level", "")))
    level, subject = int(digits[0]) if digits else None, row.get("subject") or row.get("type")
    if (config.levels and level not in config.levels) or (config.subjects and subject not in config.subjects):
        raise _LeftOut
    columns = {"problem": problem, "answer": answer, "solution": solution, "level": level, "subject": subject}
    return problem, columns


def _read_bigmath(row: Row, config: TaskConfig) -> tuple[Prompt, Row]:
    problem, answer = _text(row, "problem"), _answer(row)
    if answer is None:
        raise ValueError(f"has no answer, found {', '.join(row)}")
    rate = next((row[name] for name in ("solve_rate", "llama8b_solve_rate") if row.get(name) not in (None, "")), None)
    rate = None if rate is None else float(rate)
    if config.sources and row.get("source") not in config.sources:
        raise _LeftOut
    if config.solve_rate is not None and (rate is None or not config.solve_rate[0] <= rate <= config.solve_rate[1]):
        raise _LeftOut
    columns = {
        "problem": problem,
        "answer": answer,
        "source": row.get("source"),
        "domain": row.get("domain"),
        "solve_rate": rate,
    }
    return problem, columns


def _read_user_data(row: Row, config: TaskConfig) -> tuple[Prompt, Row]:
    if config.prompt_column not in row:
        raise ValueError(f"task.prompt_column: there is no {config.prompt_column!r}, found {', '.join(row)}")
    prompt = row[config.prompt_column]
    if isinstance(prompt, list):
        if not prompt or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        ):
            raise ValueError("the prompt's messages need a text 'role' and a text 'content' each")
        if prompt[-1]["role"] == "assistant":
            raise ValueError("the prompt ends with an assistant's message: what is sampled is the next one")
        prompt = [{"role": m["role"], "content": m["content"]} for m in prompt]
    elif not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"the prompt is {prompt!r}: text or a list of chat messages is expected")
    return prompt, {name: value for name, value in row.items() if name != config.prompt_column}


# Weights of the paper (arXiv 2510.11696): 0.2 + 2.0 on GSM8K, the answer alone on BigMath.
LAYOUTS: dict[str, Layout] = {
    "gsm8k": Layout(
        _read_gsm8k,
        "numeric",
        format_weight=0.2,
        correctness_weight=2.0,
        hint="give the folder that holds GSM8K's train.jsonl and test.jsonl (github.com/openai/grade-school-math, "
        'grade_school_math/data), or "openai/gsm8k" with task.subset = "main"',
    ),
    "math": Layout(_read_math, hint="give a file, a folder or a data set with MATH's fields"),
    "bigmath": Layout(_read_bigmath, hint="give a file, a folder or a data set with Big-Math's fields"),
    "math500": Layout(_read_math, evaluation_only=True, hint="give the file with MATH-500"),
    "aime": Layout(_read_math, evaluation_only=True, hint="give the file with one year's AIME problems"),
    "amc": Layout(_read_math, evaluation_only=True, hint="give the file with the AMC problems"),
    "data": Layout(_read_user_data, format_weight=0.2, hint="give your file, folder or data set"),
}
