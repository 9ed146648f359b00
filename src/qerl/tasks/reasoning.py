"""Problems of the reasoning-gym library (arXiv 2505.24760), generated and scored by it: `reasoning_gym:leg_counting`.

Endless, and a function of (seed, index). As in `arithmetic.py` a tenth of all problems is held out by a hash of the
text. The library's own scorer gives a value in [0, 1], often a little for a well-formed wrong answer; that is the
reward, and a completion is right when it is 1. Needs `pip install qerl[reasoning-gym]`.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from qerl.config import TaskConfig
from qerl.tasks.math_grader import final_answer
from qerl.tasks.prompts import build_prompt
from qerl.tasks.rewards import RewardSpec, completion_text, format_reward
from qerl.types import Example

PREFIX = "reasoning_gym:"
HELD_OUT_SHARE = 10  # one problem in ten is held out
STRIDE = 1 << 24  # the library seeds problem i by seed + i; attempts at another problem are this far apart
EVAL_SEED = 1 << 31

logger = logging.getLogger(__name__)


class ReasoningGymTask:
    """One of the library's generators, see `qerl.tasks.Task`. Columns: question, answer, metadata."""

    num_train_examples = None
    num_eval_examples = None

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        try:
            import reasoning_gym  # pyright: ignore[reportMissingImports]
            from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"task.name = {config.name!r} needs `pip install qerl[reasoning-gym]` ({error})"
            ) from error
        self.name = config.name
        self.system_prompt = config.system_prompt
        generator = config.name.removeprefix(PREFIX)
        if generator not in DATASETS:
            raise ValueError(f"task.name: reasoning-gym has no {generator!r}; it has {', '.join(sorted(DATASETS))}")
        self._train, self._held_out = (
            self._build(reasoning_gym, generator, config.options, start) for start in (seed % EVAL_SEED, EVAL_SEED)
        )
        self.reward_functions: Sequence[RewardSpec] = (
            RewardSpec("format", format_reward, 0.2),
            RewardSpec("correctness", self._reward, 1.0),
        )

    @staticmethod
    def _build(library: Any, generator: str, options: Mapping[str, Any], seed: int) -> Any:
        try:
            return library.create_dataset(generator, **{"size": 2**31 - 1, "seed": seed} | dict(options))
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"task.options: reasoning-gym's {generator} refuses them: {error}") from error

    def train_example(self, index: int) -> Example:
        """Return training problem `index`; a function of (seed, index) alone; never a held-out one."""
        while _is_held_out(item := self._train[index]):
            index += STRIDE
        return self._example(item)

    def eval_examples(self, n: int) -> list[Example]:
        """Return the first `n` distinct held-out problems, the same for every seed; ValueError when there are fewer."""
        found: dict[str, Any] = {}
        index = misses = 0
        while len(found) < n:
            item = self._held_out[index]
            index += 1
            if _is_held_out(item) and item["question"] not in found:
                found[item["question"]] = item
                misses = 0
            elif (misses := misses + 1) == 2000:
                raise ValueError(
                    f"{self.name} has hardly more than {len(found)} held-out problems, {n} were asked for: lower "
                    "eval.num_problems, or make it harder in task.options"
                )
        return [self._example(item) for item in found.values()]

    def grade_batch(
        self, texts: Sequence[str], columns: Sequence[Mapping[str, Any]], *, require_tags: bool = True
    ) -> list[bool | None]:
        """Whether the library's scorer gives each completion's answer full marks; None where the scorer failed."""
        answers = [final_answer(text, require_tags=require_tags) for text in texts]
        scores = [self._score(answer, row) for answer, row in zip(answers, columns, strict=True)]
        return [None if score is None else score >= 1.0 for score in scores]

    def _reward(
        self,
        completions: list[Any],
        question: list[str],
        answer: list[Any],
        metadata: list[Any],
        *,
        require_tags: bool = True,
        **kwargs: Any,
    ) -> list[float]:
        rows = [{"question": q, "answer": a, "metadata": m} for q, a, m in zip(question, answer, metadata, strict=True)]
        answers = [final_answer(completion_text(c), require_tags=require_tags) for c in completions]
        scores = [self._score(said, row) for said, row in zip(answers, rows, strict=True)]
        return [math.nan if score is None else score for score in scores]

    def _score(self, answer: str | None, row: Mapping[str, Any]) -> float | None:
        if answer is None:
            return 0.0
        try:
            return float(self._train.score_answer(answer, dict(row)))
        except Exception as error:  # the library's scorers run on any text a model writes
            logger.warning("%s cannot score %.200r: %s: %s", self.name, answer, type(error).__name__, error)
            return None

    def _example(self, item: Mapping[str, Any]) -> Example:
        columns = {name: item[name] for name in ("question", "answer", "metadata")}
        return Example(build_prompt(item["question"], self.system_prompt), columns)


def _is_held_out(item: Mapping[str, Any]) -> bool:
    digest = hashlib.blake2b(item["question"].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
