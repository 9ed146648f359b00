"""Evaluation: the statistics against numbers worked out by hand or by brute force, grading, keys, files."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import NormalDist

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.config import ModelConfig, RolloutConfig, TaskConfig
from qerl.engine import SyncReport
from qerl.evaluate import Attempt, Evaluation, ProblemResult, evaluate
from qerl.evaluate.files import read_results, write_results
from qerl.evaluate.sampling import compare, grade_problems, sample_problems
from qerl.evaluate.show import _Lines, print_evaluations
from qerl.evaluate.statistics import estimate, paired_difference, pass_at_k, sign_test
from qerl.evaluate.votes import final_answer, majority_score
from qerl.generate import load_policy
from qerl.tasks import load_task
from qerl.types import SamplingParams

# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 1, 1), (4, 1, 2), (4, 2, 3), (6, 2, 4), (5, 5, 5), (5, 4, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, c, k):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_wilson_interval_of_a_share():
    # 10 of 40 with z = 1.96: center 0.27186, half width 0.13011 (Wilson 1927, by hand)
    result = estimate([1.0] * 10 + [0.0] * 30)
    assert (result.value, result.method) == (0.25, "wilson")
    assert (result.low, result.high) == pytest.approx((0.14187, 0.40193), abs=2e-4)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_problems_that_all_score_alike_do_not_give_certainty(score):
    result = estimate([score] * 30)
    far = result.high if score == 0 else 1 - result.low
    assert far == pytest.approx(1.96**2 / (30 + 1.96**2), abs=1e-4)
    assert result.low <= score <= result.high


def test_interval_is_clustered_by_problem():
    # Two problems of ten solved in all four completions are two observations, not eight.
    scores = [1.0, 1.0, 0.5, *[0.0] * 7]
    result = estimate(scores)
    variance = sum((s - 0.25) ** 2 for s in scores) / 9
    assert result.method == "normal"
    assert result.high - result.value == pytest.approx(1.959964 * math.sqrt(variance / 10), rel=1e-6)
    assert result.low == 0.0  # cut: 0.25 - 0.262


def test_one_problem_says_nothing_about_the_others():
    assert (estimate([0.5]).low, estimate([0.5]).high) == (0.0, 1.0)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40))
def test_an_interval_holds_its_estimate(scores):
    result = estimate(scores)
    assert 0 <= result.low <= result.value + 1e-12
    assert result.value - 1e-12 <= result.high <= 1


def test_wilson_interval_solves_its_equation():
    # Its ends are the shares p whose test statistic is exactly z: (value - p)^2 = z^2 p (1 - p) / n.
    z = NormalDist().inv_cdf(0.975)
    result = estimate([1.0] * 3 + [0.0] * 14)
    for p in (result.low, result.high):
        assert (3 / 17 - p) ** 2 == pytest.approx(z**2 * p * (1 - p) / 17, rel=1e-9)


def test_paired_difference():
    difference = paired_difference([1.0, 1.0, 0.5, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0, 0.0])
    assert difference.value == pytest.approx(0.3)
    assert (difference.num_better, difference.num_worse, difference.num_equal) == (2, 1, 2)
    variance = (0.7**2 + 0.3**2 + 0.8**2 + 0.3**2 + 0.7**2) / 4
    assert difference.high - difference.value == pytest.approx(1.959964 * math.sqrt(variance / 5), rel=1e-6)
    assert difference.p_value == 1.0


def test_pairing_sees_what_two_intervals_do_not():
    # Five more of forty problems solved, none lost: the two shares' own intervals overlap.
    base = [1.0] * 10 + [0.0] * 30
    better = [1.0] * 15 + [0.0] * 25
    assert estimate(better).low < estimate(base).high
    assert paired_difference(better, base).low > 0


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (1, 8, 2 * 10 / 512), (3, 3, 1.0)]
)
def test_sign_test(better, worse, p):
    assert sign_test(better, worse) == pytest.approx(p)
    assert sign_test(worse, better) == pytest.approx(p)


# ---------------------------------------------------------------- majority


@pytest.mark.parametrize(
    ("text", "tagged", "tag_free"),
    [
        ("<answer>18</answer>", "18", "18"),
        ("<answer> $18.00 </answer>", "18", "18"),
        ("<answer>0.5</answer> or <answer>1/2</answer>", "1/2", "1/2"),
        ("<answer>18 dollars</answer> 20", "18", "18"),
        ("So \\boxed{18}, and not 20", None, "18"),
        ("7 left\n#### 18\n20", None, "18"),
        ("It is 18.", None, "18"),
        ("<answer>$x^2 + y$</answer>", "x^2+y", "x^2+y"),
        ("<answer>\\boxed{ x + y }</answer>", "x+y", "x+y"),
        ("\\boxed{(3, \\pi)}", None, "(3,\\pi)"),
        ("<answer></answer>", None, None),
        ("\\boxed{18", None, None),
        ("no idea", None, None),
        ("", None, None),
    ],
)
def test_final_answers(text, tagged, tag_free):
    assert final_answer(text, require_tags=True) == tagged
    assert final_answer(text, require_tags=False) == tag_free


@pytest.mark.parametrize(
    ("answers", "right", "score"),
    [
        (["7", "8", "7", "9"], [True, False, True, False], 1.0),
        (["8", "7", "8", "9"], [False, True, False, False], 0.0),
        (["7", "8", "8", "7"], [True, False, False, True], 0.5),  # a tie: a fair draw would be right half the time
        (["8", "7", "9", None], [False, True, False, False], 1 / 3),
        ([None, None, "7"], [False, False, True], 1.0),  # no answer is no vote
        ([None, None], [False, False], 0.0),
    ],
)
def test_majority(answers, right, score):
    assert majority_score(answers, right) == pytest.approx(score)


# ---------------------------------------------------------------- evaluations


def attempt(text: str, finish_reason="stop", num_tokens=3) -> Attempt:
    return Attempt(text, num_tokens, finish_reason, seed=1)


@pytest.fixture(scope="module")
def task():
    return load_task(TaskConfig(name="arithmetic"), seed=0)


@pytest.fixture
def evaluation(task) -> Evaluation:
    """Three problems of two completions: right in both gradings, right without tags, ungraded and cut off."""
    examples = task.eval_examples(3)
    answers = [example.columns["answer"] for example in examples]
    examples[2].columns["answer"] = "no number"
    texts = [
        [f"<answer>{answers[0]}</answer>", f"<answer>{answers[0]}</answer>"],
        [f"It is {answers[1]}", "<answer>0</answer> or so"],
        ["<answer>1</answer>", "1, 1, 1"],
    ]
    problems = [
        ProblemResult(i, example, [attempt(t) for t in row])
        for i, (example, row) in enumerate(zip(examples, texts, strict=True))
    ]
    problems[2].attempts[1] = attempt("1, 1, 1", "length", num_tokens=9)
    grade_problems(task, problems)
    return Evaluation(problems)


def test_both_gradings_of_the_same_completions(evaluation):
    assert evaluation.scores("tagged")["pass@1"] == [1.0, 0.0, 0.0]
    assert evaluation.scores("tag_free")["pass@1"] == [1.0, 0.5, 0.0]
    assert list(evaluation.scores("tagged")) == ["pass@1", "pass@2"]
    assert evaluation.accuracy("tag_free").value == pytest.approx(0.5)


def test_three_completions_of_a_problem_vote(evaluation):
    for problem in evaluation.problems:
        problem.attempts.append(problem.attempts[0])
    assert evaluation.scores("tagged")["majority@3"] == [1.0, 0.0, 0.0]
    assert evaluation.scores("tag_free")["majority@3"] == [1.0, 1.0, 0.0]  # two of three are right


def test_what_could_not_be_graded_or_was_cut_off_is_counted(evaluation):
    assert evaluation.num_ungraded("tagged") == evaluation.num_ungraded("tag_free") == 2
    assert evaluation.num_truncated == 1
    assert evaluation.mean_length_tokens == pytest.approx(4.0)


def test_different_problems_are_not_compared(evaluation):
    with pytest.raises(ValueError, match=r"different problems \(3 and 2\)"):
        compare(evaluation, Evaluation(evaluation.problems[:2]), "tagged")


def test_results_survive_a_file(tmp_path, evaluation):
    evaluation.problems[0].attempts[0].seed = -(2**63)
    path = tmp_path / "results.parquet"
    write_results(path, {"sampled": evaluation}, {"task": {"name": "arithmetic"}})
    assert read_results(path) == ({"sampled": evaluation}, {"task": {"name": "arithmetic"}})
    assert [file.name for file in tmp_path.iterdir()] == ["results.parquet"]


def test_another_file_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    for name, message in (
        ("other", "holds no results"),
        ("text", "cannot be read as Parquet"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            read_results(tmp_path / f"{name}.parquet")


# ---------------------------------------------------------------- with a model


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(path="embedded", device="cpu"))


def sampled(policy, task, *, num_samples, num_problems=4, batch_size=64, seed=0) -> list[ProblemResult]:
    return sample_problems(
        policy.build_engine(RolloutConfig(max_batch_size=batch_size, max_completion_length=32)),
        policy.tokenizer,
        task.eval_examples(num_problems),
        sampling=SamplingParams(temperature=1.0, top_p=0.95),
        num_samples=num_samples,
        max_new_tokens=32,
        seed=seed,
        expect_adapters=False,
    )


def test_a_sample_is_the_same_for_any_k_limit_and_batch_size(policy, task):
    whole = sampled(policy, task, num_samples=3)
    for part in (
        sampled(policy, task, num_samples=1),
        sampled(policy, task, num_samples=2, num_problems=2),
        sampled(policy, task, num_samples=3, batch_size=2),
    ):
        for problem, other in zip(part, whole, strict=False):
            assert problem.attempts == other.attempts[: len(problem.attempts)]
    keys = [a.seed for problem in whole for a in problem.attempts]
    assert len(set(keys)) == len(keys)
    assert sampled(policy, task, num_samples=3, seed=1) != whole


class EngineThatStaysNoisy:
    def __init__(self, report: SyncReport) -> None:
        self.report = report

    def sync(self, draw):
        assert draw is None
        return self.report


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (SyncReport(0, 0, 8, 0.0, 1.0), False),
        (SyncReport(4, 4, 0, 1.0, 0.0), False),
        (SyncReport(0, 0, 0, 0.0, 0.0), True),
    ],
)
def test_noise_and_missing_adapters_stop_an_evaluation(policy, task, report, expected):
    with pytest.raises(RuntimeError, match=r"where (some|no) adapters and no noise belong"):
        evaluate(
            EngineThatStaysNoisy(report),
            policy.tokenizer,
            task,
            task.eval_examples(1),
            sampling=SamplingParams(),
            num_samples=1,
            max_new_tokens=4,
            seed=0,
            expect_adapters=expected,
        )


# ---------------------------------------------------------------- what is shown


def test_plain_table(evaluation, capsys):
    print_evaluations("arithmetic: base", {"greedy": evaluation}, "tag_free")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "arithmetic: base"
    assert lines[2].split() == ["tag-free", "tagged"]
    assert lines[3].startswith("greedy")
    assert "50.0 [0.0, 100.0]" in lines[3]
    assert "6 completions, 1 truncated, 2 / 2 ungraded, 4.0 tokens on average" in lines[-1]
    assert "\x1b" not in "".join(lines)


def test_progress_without_a_terminal_says_how_long(capsys, monkeypatch):
    import sys

    now = iter([0.0, 10.0, 30.0, 31.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    report = _Lines("sampled", sys.stdout)
    for done in (10, 30, 31):
        report(done, 120)
    assert capsys.readouterr().out == "sampled: 30/120, 1:30 left\n"
