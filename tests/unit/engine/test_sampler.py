"""The sampler draws from the distribution that it reports, and truncates it as documented."""

from __future__ import annotations

import math

import pytest
import torch

from qerl.engine.sampler import kept_tokens, sample
from qerl.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
NUM_DRAWS = 20_000
CHI2_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
"""99.9 % points of the chi-square distribution, by degrees of freedom."""


def draw(params: SamplingParams, logits: torch.Tensor = LOGITS, seed: int = 7) -> torch.Tensor:
    """NUM_DRAWS tokens from one distribution, each with its own seed and position."""
    seeds = torch.arange(NUM_DRAWS) * 2654435761 + seed
    return sample(logits.expand(NUM_DRAWS, -1), seeds, torch.arange(NUM_DRAWS) % 17, params).tokens


def assert_drawn_from(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0].double() * len(tokens)
    chi2 = ((counts[probs > 0] - expected) ** 2 / expected).sum().item()
    assert chi2 < CHI2_999[len(expected) - 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    assert_drawn_from(draw(SamplingParams(temperature=temperature)), (LOGITS / temperature).softmax(0))


def test_wrong_temperature_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_drawn_from(draw(SamplingParams(temperature=1.1)), LOGITS.softmax(0))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=3), [0, 1, 2]),
        (SamplingParams(top_p=0.7), [0, 1]),
        (SamplingParams(min_p=0.2), [0, 1, 2]),
        (SamplingParams(top_k=4, top_p=0.9, min_p=0.15), [0, 1, 2]),
    ],
)
def test_draws_follow_the_truncated_softmax(params: SamplingParams, kept: list[int]) -> None:
    probs = torch.zeros(6)
    probs[kept] = LOGITS[kept].softmax(0)
    assert_drawn_from(draw(params), probs)


def test_positions_of_one_completion_are_independent_draws() -> None:
    counts = torch.arange(NUM_DRAWS)
    tokens = sample(LOGITS.expand(NUM_DRAWS, -1), torch.full_like(counts, -5), counts, SamplingParams()).tokens
    assert_drawn_from(tokens, LOGITS.softmax(0))
    pairs = tokens[:-1:2] * 6 + tokens[1::2]  # independence of neighbours, over the nine most likely pairs and the rest
    expected = torch.outer(LOGITS.softmax(0), LOGITS.softmax(0)).flatten() * len(pairs)
    observed = torch.bincount(pairs, minlength=36)
    frequent = expected > 50
    assert ((observed - expected) ** 2 / expected)[frequent].sum() < 2 * frequent.sum()


def test_logprob_and_entropy_are_those_before_truncation() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.7, top_k=2, top_p=0.5)
    got = sample(logits, torch.arange(5), torch.zeros(5, dtype=torch.int64), params)
    full = torch.distributions.Categorical(logits=logits.double() / 0.7)
    torch.testing.assert_close(got.logprobs.double(), full.log_prob(got.tokens), rtol=0, atol=1e-6)
    torch.testing.assert_close(got.entropies.double(), full.entropy(), rtol=0, atol=1e-6)


def test_impossible_tokens_leave_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    got = sample(logits, torch.tensor([1]), torch.tensor([0]), SamplingParams())
    assert got.entropies.item() == pytest.approx(math.log(2))
    assert got.tokens.item() < 2


def test_greedy_takes_the_largest_and_the_lower_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [4.0, 0.0, 0.0, 4.0]])
    got = sample(logits, torch.tensor([1, 2]), torch.tensor([0, 0]), SamplingParams(greedy=True))
    assert got.tokens.tolist() == [1, 0]
    torch.testing.assert_close(got.logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=100), [0, 1, 2, 3]),  # more than the vocabulary
        (SamplingParams(top_k=2), [0, 1]),  # three tie for rank 2: exactly k stay, the lower id first
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(top_p=0.35), [0]),  # the first alone reaches it
        (SamplingParams(top_p=0.55), [0, 1]),
        (SamplingParams(top_k=2, top_p=0.6), [0]),  # renormalised after top-k: 2/3, 1/3
        (SamplingParams(min_p=1.0), [0]),
        (SamplingParams(min_p=0.6), [0]),
        (SamplingParams(min_p=0.4), [0, 1, 2, 3]),
    ],
)
def test_kept_tokens_at_the_edges(params: SamplingParams, kept: list[int]) -> None:
    logprobs = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert kept_tokens(logprobs, params)[0].nonzero()[:, 0].tolist() == kept


def test_kept_tokens_are_found_wherever_they_stand() -> None:
    logprobs = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4]]).log()
    assert kept_tokens(logprobs, SamplingParams(top_k=2)).tolist() == [[False, True, True], [True, False, True]]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, seeds = (
        torch.randn(40, 301, generator=generator),
        torch.randint(-(2**62), 2**62, (40,), generator=generator),
    )
    counts = torch.randint(0, 100, (40,), generator=generator)
    params = SamplingParams(top_p=0.9)
    together = sample(logits, seeds, counts, params)
    for row in (0, 17, 39):
        alone = sample(logits[row : row + 1], seeds[row : row + 1], counts[row : row + 1], params)
        assert alone.tokens.item() == together.tokens[row].item()
    assert not torch.equal(sample(logits, seeds + 1, counts, params).tokens, together.tokens)
    assert not torch.equal(sample(logits, seeds, counts + 1, params).tokens, together.tokens)
