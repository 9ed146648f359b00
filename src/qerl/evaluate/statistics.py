"""From scores per problem to numbers with an interval. Plain Python; the unit of chance is the problem.

    Pass@1      mean over problems of the share of right completions
    pass@k      mean over problems of 1 - C(n - c, k) / C(n, k): c of n completions are right (arXiv 2107.03374, eq. 1)
    interval    value +- 1.96 * s / sqrt(N), s the standard deviation of the N problems' scores; or Wilson's
    difference  the same on score_i - baseline_i, problem by problem, with a sign test on how many went up or down

Completions of one problem are not independent, so that an interval over all N * n of them would be too narrow: the
standard error is clustered by problem (arXiv 2411.00640, sections 2.2 and 4.2). What it covers is the choice of
problems and the draw of completions; not the prompt's wording, nor what another seed of the training would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal

Z = NormalDist().inv_cdf(0.975)
"""1.96: half the width of a 95 % interval, in standard errors."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its 95 % interval."""

    value: float
    low: float
    high: float
    method: Literal["wilson", "normal"]
    """How the interval was made, see `estimate`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How two policies differ on the same problems."""

    value: float
    """Mean of score - baseline."""
    low: float
    high: float
    num_better: int
    """Problems whose score is above the baseline's."""
    num_worse: int
    num_equal: int
    p_value: float
    """Of the two-sided sign test; for scores of 0 and 1 this is McNemar's exact test."""


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k completions, drawn without replacement from these, is right. k <= num_samples."""
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_samples, num_right, k)
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate(scores: Sequence[float]) -> Estimate:
    """Mean of scores in [0, 1], one a problem, with its interval.

    All scores 0 or 1 (one completion a problem, pass@k with k = n): Wilson's, which holds near 0 and 1 too. Else the
    normal one, cut to [0, 1].
    """
    n, mean = len(scores), fmean(scores)
    if all(score in (0, 1) for score in scores):
        center = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
        return Estimate(mean, max(0.0, center - half), min(1.0, center + half), "wilson")
    half = _half_width(scores)
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), "normal")


def paired_difference(scores: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Mean difference of two policies' scores on the same problems in the same order, its interval, and the test."""
    differences = [score - base for score, base in zip(scores, baseline, strict=True)]
    mean, half = fmean(differences), _half_width(differences)
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Difference(
        value=mean,
        low=max(-1.0, mean - half),
        high=min(1.0, mean + half),
        num_better=better,
        num_worse=worse,
        num_equal=len(differences) - better - worse,
        p_value=sign_test(better, worse),
    )


def sign_test(num_better: int, num_worse: int) -> float:
    """Chance of a split at least this uneven if better and worse were equally likely; 1 when nothing differs."""
    n, fewer = num_better + num_worse, min(num_better, num_worse)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n)


def _half_width(values: Sequence[float]) -> float:
    """1.96 standard errors of a mean; one value alone says nothing about its spread."""
    return Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
