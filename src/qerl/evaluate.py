"""Accuracy on a task's held-out problems: adapters on, noise off.

Each problem is sampled `num_samples` times; accuracy is the mean over problems of the share of right answers (Pass@1).
A completion that the grader could not grade counts as not right and is reported by number, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qerl.engine import Engine
from qerl.philox import fold
from qerl.tasks import Task
from qerl.tasks.chat import decode, encode_prompt
from qerl.types import Example, Request, SamplingParams

EVALUATION_KEY = 0x6576616C  # "eval": separates its sampling keys from the training's of the same seed


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation measured."""

    accuracy: float
    """Mean over problems of the share of right completions."""
    num_problems: int
    num_completions: int
    num_truncated: int
    """Completions cut off at the length limit."""
    num_ungraded: int
    """Completions that the grader failed on."""
    mean_length_tokens: float


def evaluate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    examples: Sequence[Example],
    *,
    sampling: SamplingParams,
    num_samples: int,
    max_new_tokens: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Sample and grade; the engine is synchronised without noise first.

    The same seed and problems give the same keys whatever was trained in between, so that two evaluations differ by the
    policy alone.
    """
    engine.sync(None)
    requests = [
        Request(
            prompt_ids=encode_prompt(tokenizer, example),
            seeds=[fold(seed, EVALUATION_KEY, index, sample) for sample in range(num_samples)],
            max_new_tokens=max_new_tokens,
            prompt_index=index,
        )
        for index, example in enumerate(examples)
    ]
    results = engine.generate(requests, sampling, progress)
    completions = [completion for group in results for completion in group]
    grades = task.grade_batch(
        [decode(tokenizer, completion.token_ids) for completion in completions],
        [example.columns for example, group in zip(examples, results, strict=True) for _ in group],
    )
    return Evaluation(
        accuracy=sum(grade is True for grade in grades) / len(grades),
        num_problems=len(examples),
        num_completions=len(completions),
        num_truncated=sum(completion.truncated for completion in completions),
        num_ungraded=sum(grade is None for grade in grades),
        mean_length_tokens=sum(len(completion.token_ids) for completion in completions) / len(completions),
    )
