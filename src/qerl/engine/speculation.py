"""How many tokens a decode step feeds for each sequence: the last one that was drawn, and guesses of what follows it.

    a step of one sequence      fed     the last token   guess   guess   guess
                                drawn        a             b       c       d
                                kept         a, and b if a == the first guess, and c if b == the second, ..

A token is a function of its logits, its completion's seed and its count (sampler.py). So a guess is right or wrong, and
what is kept is what would have been drawn without it: nothing is accepted by chance, as in speculation that samples.
Guesses are what followed the last few tokens elsewhere in the texts of the group (kernels/lookup): n-gram speculation,
or prompt lookup decoding. What wrong guesses leave in keys and values is written over by the tokens that come instead.

A step reads all weights, for one token as for many, so guesses cost little where there are few sequences: at the end of
a rollout, when the longest completions go on alone, and in a chat. There a step feeds TOKENS of each sequence, as long
as that pays. If each guess is right with probability p where all before it are,

    a step of T tokens a sequence gives    1 + p + .. + p^(T - 1)    tokens of each and costs    COST[T * sequences]

and p is estimated as steps go by. Plain numbers, no torch. One `Speculation` is of one call of `generate`, so that
equal calls take equal steps. Called by engine.py at each look.
"""

from __future__ import annotations

from collections.abc import Sequence

from qerl.engine.blocks import BLOCK
from qerl.engine.graphs import power_of_two

TOKENS = {1: 8, 2: 4, 4: 4, 8: 4, 16: 2}
"""Of each sequence in a step with guesses, by the number of sequences: what gives most for p = 0.45. One number for
each, since every size of a step is a CUDA graph of its own."""
MOST = max(TOKENS.values())
COST = {1: 0.95, 2: 0.95, 4: 0.95, 8: 1.0, 16: 1.15, 32: 1.35}
"""Time of a step by its tokens, over that of 8: 7B and 32B in NVFP4 on an H200 (docs/engine.md). Of fewer than 8, it is
between those of a step that is rounded up to 8 slots (graphs.py) and of one that is not."""
LOOK_TOKENS = 32
"""Tokens that a sequence can gain between two looks of the host, at most: pages are reserved for all of them."""

PRIOR = 0.4
"""p of a text about which nothing is known: of GSM8K, at temperature 1, it is 0.43 to 0.5."""
MEMORY = 32
"""Steps of a sequence that weigh as much as all before them."""
FORGETTING = 0.004
"""Share of the way back to PRIOR at each step without guesses, so that they are tried again."""


def tokens_with_guesses(num_sequences: int, *, batch_invariant: bool) -> int:
    """Of each of so many sequences in a step, where guesses are taken: a power of two.

    batch_invariant: products of a step have BLOCK rows anyway, so it is filled, whatever guesses are worth.
    """
    slots = power_of_two(num_sequences)
    return max(1, min(MOST, BLOCK // slots)) if batch_invariant else TOKENS.get(slots, 1)


class Speculation:
    """How the sequences of a call go on; see the module's text."""

    def __init__(self, *, is_on: bool, steps_per_look: int, batch_invariant: bool = False) -> None:
        """steps_per_look: most decode steps between two looks of the host."""
        self._is_on, self._steps_per_look, self._batch_invariant = is_on, steps_per_look, batch_invariant
        self._p = PRIOR

    def tokens(self, num_sequences: int) -> int:
        """Of each sequence in a step: a power of two, 1 without guesses."""
        if not self._is_on:
            return 1
        tokens = tokens_with_guesses(num_sequences, batch_invariant=self._batch_invariant)
        if tokens == 1 or self._batch_invariant:
            return tokens
        slots = power_of_two(num_sequences)
        return tokens if gain(self._p, tokens) >= COST[slots * tokens] / COST[slots] else 1

    def steps(self, tokens: int) -> int:
        """Of so many tokens a sequence between two looks."""
        return max(1, min(self._steps_per_look, LOOK_TOKENS // tokens))

    def reach(self, num_sequences: int) -> int:
        """Tokens that each sequence can gain up to the next look, even if more sequences start before."""
        tokens = self.tokens(num_sequences)
        return max(tokens * self.steps(tokens), MOST if self._is_on else 1)

    @property
    def longest_reach(self) -> int:
        """Of any number of sequences."""
        return max(tokens * self.steps(tokens) for tokens in ((1, MOST) if self._is_on else (1,)))

    def observe(self, tokens: int, steps: int, gains: Sequence[int]) -> None:
        """After steps of so many tokens: what each sequence that has not ended has gained."""
        if tokens == 1:
            self._p += (1 - (1 - FORGETTING) ** steps) * (PRIOR - self._p)
        elif gains:
            weight = len(gains) * steps
            self._p += weight / (weight + MEMORY) * (probability(sum(gains) / weight, tokens) - self._p)


def gain(p: float, tokens: int) -> float:
    """Tokens that a step of so many gives a sequence on average."""
    return sum(p**i for i in range(tokens))


def probability(mean_gain: float, tokens: int) -> float:
    """The p of a mean gain, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle, tokens) < mean_gain else (low, middle)
    return (low + high) / 2
