"""Sample every problem, grade every completion twice, and say what came out.

    fold(seed, "eval", problem, sample) -> Request -> Engine.generate -> text -> tagged, tag-free -> Evaluation

A completion's key is made of its problem's and its own number, so sample j of a problem has the same key whatever the
batch size, the number of samples and of problems, and whatever was trained before. (Its tokens are then the same as far
as the logits are: on a GPU, other batch shapes can round them differently.) All completions go to the engine in one
call, which runs at most `max_batch_size` at a time; its memory is bounded by that, not by their number.

Both gradings look at the same completions: *tagged* is the rule of training by default (the answer must stand in the
answer tags), *tag-free* takes the final answer where it finds it, and so is fair to a model that was never taught the
tags. A run's accuracy is the one by which its rewards grade (`RewardRunner.require_tags`). A completion that the grader
could not grade counts as not right and is reported by number, never left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from transformers import PreTrainedTokenizerBase

from qerl.engine import Engine, Progress
from qerl.evaluate.statistics import Difference, Estimate, estimate, paired_difference, pass_at_k
from qerl.evaluate.votes import final_answer, majority_score
from qerl.philox import fold
from qerl.tasks import Task
from qerl.tasks.chat import decode, encode_prompt
from qerl.types import Example, FinishReason, Request, SamplingParams

EVALUATION_KEY = 0x6576616C  # "eval": separates its sampling keys from the training's of the same seed

Grading = Literal["tagged", "tag_free"]
GRADINGS: tuple[Grading, ...] = ("tagged", "tag_free")


@dataclass(slots=True)
class Attempt:
    """One completion of a problem, and its grades: True, False, or None where the grader could not tell."""

    text: str
    num_tokens: int
    """Its length, EOS included."""
    finish_reason: FinishReason
    seed: int
    """Its sampling key."""
    tagged: bool | None = None
    tag_free: bool | None = None


@dataclass(slots=True)
class ProblemResult:
    """One problem with its completions."""

    index: int
    """Its number among the task's held-out problems."""
    example: Example
    attempts: list[Attempt]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The graded completions of all problems, the same number for each, and what they say."""

    problems: list[ProblemResult]

    @property
    def attempts(self) -> list[Attempt]:
        """All completions, problem by problem."""
        return [attempt for problem in self.problems for attempt in problem.attempts]

    @property
    def num_samples(self) -> int:
        """Completions of each problem."""
        return len(self.problems[0].attempts)

    @property
    def num_truncated(self) -> int:
        """Completions cut off at the length limit."""
        return sum(attempt.finish_reason == "length" for attempt in self.attempts)

    @property
    def mean_length_tokens(self) -> float:
        """Mean length of a completion."""
        return fmean(attempt.num_tokens for attempt in self.attempts)

    def num_ungraded(self, grading: Grading) -> int:
        """Completions that the grader failed on; they count as not right."""
        return sum(getattr(attempt, grading) is None for attempt in self.attempts)

    def accuracy(self, grading: Grading) -> Estimate:
        """Pass@1: the mean over problems of the share of right completions."""
        return estimate(self.scores(grading)["pass@1"])

    def scores(self, grading: Grading) -> dict[str, list[float]]:
        """One score a problem under each measure: pass@1, pass@2, pass@4, ... pass@n and, of 3 or more, majority@n."""
        n = self.num_samples
        right = [[getattr(a, grading) is True for a in problem.attempts] for problem in self.problems]
        ks = sorted({*(2**i for i in range(n.bit_length())), n})
        measures = {f"pass@{k}": [pass_at_k(n, sum(row), k) for row in right] for k in ks}
        if n > 2:  # two that differ are a tie, and score what pass@1 does
            measures[f"majority@{n}"] = [
                majority_score([final_answer(a.text, require_tags=grading == "tagged") for a in problem.attempts], row)
                for problem, row in zip(self.problems, right, strict=True)
            ]
        return measures

    def estimates(self, grading: Grading) -> dict[str, Estimate]:
        """The mean over problems of every measure of `scores`, with its interval."""
        return {measure: estimate(scores) for measure, scores in self.scores(grading).items()}


def compare(evaluation: Evaluation, baseline: Evaluation, grading: Grading) -> dict[str, Difference]:
    """How two evaluations differ, problem by problem, under every measure that both have.

    ValueError unless both saw the same problems.
    """
    shown, base = ([(p.index, p.example.prompt[-1]) for p in e.problems] for e in (evaluation, baseline))
    if shown != base:
        raise ValueError(
            f"the two evaluations are of different problems ({len(shown)} and {len(base)}): "
            "give both the same task, --limit and data"
        )
    scores, base_scores = evaluation.scores(grading), baseline.scores(grading)
    return {m: paired_difference(scores[m], base_scores[m]) for m in scores if m in base_scores}


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
    expect_adapters: bool,
    progress: Progress | None = None,
) -> Evaluation:
    """Sample and grade; see `sample_problems`."""
    problems = sample_problems(
        engine,
        tokenizer,
        examples,
        sampling=sampling,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        seed=seed,
        expect_adapters=expect_adapters,
        progress=progress,
    )
    grade_problems(task, problems)
    return Evaluation(problems)


def sample_problems(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    sampling: SamplingParams,
    num_samples: int,
    max_new_tokens: int,
    seed: int,
    expect_adapters: bool,
    progress: Progress | None = None,
) -> list[ProblemResult]:
    """`num_samples` completions of every problem, not graded yet; the engine is synchronised without noise first.

    RuntimeError if the engine then still has noise, or has adapters other than `expect_adapters` says.
    """
    report = engine.sync(None)
    if report.num_noised_vectors or (report.num_adapters > 0) != expect_adapters:
        raise RuntimeError(
            f"an evaluation with noise on {report.num_noised_vectors} norms and {report.num_adapters} adapters, "
            f"where {'some' if expect_adapters else 'no'} adapters and no noise belong"
        )
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
    return [
        ProblemResult(
            request.prompt_index,
            example,
            [
                Attempt(decode(tokenizer, c.token_ids), len(c.token_ids), c.finish_reason, key)
                for c, key in zip(completions, request.seeds, strict=True)
            ],
        )
        for example, request, completions in zip(examples, requests, results, strict=True)
    ]


def grade_problems(task: Task, problems: Sequence[ProblemResult]) -> None:
    """Fill in both grades of every completion."""
    attempts = [attempt for problem in problems for attempt in problem.attempts]
    columns = [problem.example.columns for problem in problems for _ in problem.attempts]
    for grading in GRADINGS:
        grades = task.grade_batch([a.text for a in attempts], columns, require_tags=grading == "tagged")
        for attempt, grade in zip(attempts, grades, strict=True):
            setattr(attempt, grading, grade)
