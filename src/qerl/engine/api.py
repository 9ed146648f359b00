"""What an engine is: four calls, the same for every implementation.

    sync(draw)                     the policy as the trainer holds it now, with this noise
    generate(requests, sampling)   completions of prompts, all as token ids
    sleep(), wake()                memory of keys and values: given back for training, taken again

`PagedEngine` (engine.py), `TransformersEngine` (hf.py) and `VLLMEngine` (vllm/) implement it; rl/ and evaluate/ call
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams

Progress = Callable[[int, int], None]
"""Called with (completions that have ended, completions in all)."""


@dataclass(frozen=True)
class SyncReport:
    """What reached the engine, and what it changes: the largest |difference| of a logit on the probe's few tokens.

    Of vLLM, which shows no logits, it is that of a log-probability.
    """

    num_adapters: int
    """Linears with an adapter."""
    num_live_adapters: int
    """Those whose B is not all zero."""
    num_noised_vectors: int
    """Norm vectors that are noisy."""
    adapter_change: float
    """Against the same policy without adapters; 0 while every B is zero."""
    noise_change: float
    """Against the same policy without noise; 0 without noise."""


@runtime_checkable
class Engine(Protocol):
    """Samples completions from the trainer's model."""

    decode_steps: int
    """Passes since the engine was made that gave sequences their next tokens; stays 0 in one that does not say."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """One list a request, one completion a seed, in their order.

        ValueError, before any work, for a prompt without tokens or with ids that the vocabulary lacks, and for a
        request that can never fit into the memory that it is allowed. torch.OutOfMemoryError where the device has less
        than one sequence at a time needs.
        """
        ...

    def sync(self, draw: NoiseDraw | None) -> SyncReport:
        """Take over the trainer's adapters and norms; noise is drawn anew, or off. Nothing cached outlives it.

        RuntimeError if adapters with a non-zero B, or noise with a positive sigma, leave the logits as they are.
        """
        ...

    def sleep(self) -> None:
        """Give back the memory that only sampling needs, until `wake` or the next `generate`."""
        ...

    def wake(self) -> None:
        """Take that memory again, where it is known how much. `generate` does it too, with less if it must."""
        ...


def check_requests(requests: Sequence[Request], vocab_size: int, max_positions: int | None) -> None:
    """ValueError for a request that no engine can run. max_positions: tokens of the model's context, if it ends."""
    for i, request in enumerate(requests):
        if not request.prompt_ids:
            raise ValueError(
                f"request {i} has no prompt tokens: a completion needs at least one, such as the BOS token"
            )
        if request.max_new_tokens < 0:
            raise ValueError(f"request {i}: max_new_tokens must be 0 or more, got {request.max_new_tokens}")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            raise ValueError(
                f"request {i} has token ids outside the model's vocabulary of {vocab_size}: "
                "was it encoded with another model's tokenizer?"
            )
        if max_positions is not None and len(request.prompt_ids) + request.max_new_tokens > max_positions:
            raise ValueError(
                f"request {i}: a prompt of {len(request.prompt_ids)} tokens and up to {request.max_new_tokens} new "
                f"ones exceed the model's context of {max_positions}: ask for fewer new tokens"
            )


def empty_completion() -> Completion:
    """What max_new_tokens = 0 gives."""
    return Completion(token_ids=[], logprobs=[], entropies=[], finish_reason="length")
