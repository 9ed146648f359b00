"""The nouns of the project: what is asked of the engine, what it returns, and what a group of completions is.

Token ids go in and token ids come out: a completion is never decoded and encoded again. Its length is the length of
`token_ids`; no mask is ever derived from a token id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class SamplingParams:
    """How the next token is drawn.

    `logprobs` of completions are taken at `temperature`, before any truncation by top-k, top-p or min-p.
    """

    temperature: float = 1.0
    """Divides the logits."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 is off."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability; 0 is off."""
    greedy: bool = False
    """Take the most likely token; the other fields but temperature (which scales logprobs) are ignored."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}; for greedy decoding set greedy=True"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn, so that the sampled distribution is not the softmax."""
        return self.greedy or self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(slots=True)
class Request:
    """One prompt and the completions wanted of it; the prompt is run once for all of them."""

    prompt_ids: list[int]
    """Token ids of the prompt, at least one."""
    seeds: list[int]
    """One 64-bit seed a completion: same seed, same tokens, whatever else is in the batch."""
    max_new_tokens: int
    """Longest completion in tokens, its EOS included; 0 gives empty completions."""
    prompt_index: int = 0
    """The prompt's number within the step, resampling rounds counted on: names its noise stream."""


@dataclass(slots=True)
class Completion:
    """What the engine sampled after a prompt. A list has one entry a token."""

    token_ids: list[int]
    """Sampled ids, with the EOS where one ended it."""
    logprobs: list[float]
    """`rollout_logprobs`: log-probability of each sampled token at the sampling temperature, before truncation; NaN
    where the engine has none of that distribution (vLLM's under truncation, which no training run may sample with)."""
    entropies: list[float] | None
    """Entropy in nats of the distribution that each token was drawn from, at temperature, before truncation; None from
    an engine that does not say (vLLM)."""
    finish_reason: FinishReason
    """'stop' after an EOS, 'length' at `max_new_tokens`."""

    @property
    def truncated(self) -> bool:
        """Whether the length limit cut it off."""
        return self.finish_reason == "length"


@dataclass(slots=True)
class Example:
    """One problem of a task."""

    prompt: list[dict[str, str]]
    """Chat messages, each with a role and a content."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """The data set's other columns (`answer`, ...), handed to reward functions by name."""


@dataclass(slots=True)
class RolloutGroup:
    """The completions of one prompt, with their rewards: what an advantage is computed over."""

    example: Example
    prompt_ids: list[int]
    prompt_index: int
    completions: list[Completion]
    texts: list[str]
    """Decoded completions, as the reward functions saw them."""
    rewards: list[float]
    """Weighted sum of the reward functions, less the soft overlong punishment, one a completion; NaN where no function
    gave a value, or where one could not tell."""
    reward_parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Each reward function's own values; NaN where it gave none."""
