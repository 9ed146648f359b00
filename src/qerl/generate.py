"""A policy to sample from: base model, adapter, tokenizer. And sampling for a person: chat messages in, texts out.

`load_policy` is what `qerl generate` and `qerl eval` load; `Generator` is what `qerl generate` calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from qerl.config import ModelConfig, RolloutConfig
from qerl.engine import Engine, Progress, build_engine
from qerl.nn.load import eos_token_ids, load_model, open_base
from qerl.nn.lora import attach_saved_adapter, check_saved_adapter
from qerl.philox import fold
from qerl.tasks.chat import decode, encode_prompt
from qerl.types import Example, Request, SamplingParams


@dataclass(frozen=True)
class Policy:
    """A loaded model, with its adapter where it has one."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]

    def build_engine(self, config: RolloutConfig) -> Engine:
        """An engine over it, synchronised without noise."""
        return build_engine(self.model, eos_ids=self.eos_ids, config=config)


def load_policy(config: ModelConfig, adapter: Path | None = None, progress: Progress | None = None) -> Policy:
    """Load a model and put a saved adapter on it; ValueError, before that, names what is missing or does not fit."""
    if adapter is not None:
        check_saved_adapter(open_base(config).model, adapter)
    model, tokenizer = load_model(config, progress=progress)
    eos_ids = eos_token_ids(model)
    return Policy(model if adapter is None else attach_saved_adapter(model, adapter), tokenizer, eos_ids)


class Generator:
    """A policy with an engine for each prompt.

    The KV cache is made for one prompt of the size at hand, so that a small machine can run a large context.
    """

    def __init__(
        self, config: ModelConfig | str | Path, adapter: str | Path | None = None, progress: Progress | None = None
    ) -> None:
        """A model's settings, or its folder alone; a saved adapter's folder. `progress` is told how far loading is."""
        settings = config if isinstance(config, ModelConfig) else ModelConfig(path=str(config))
        self.policy = load_policy(settings, None if adapter is None else Path(adapter), progress)

    def __call__(
        self,
        messages: str | list[dict[str, str]],
        *,
        samples: int = 1,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> list[str]:
        """`samples` completions of a chat, or of one user's message; temperature 0 is greedy."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        tokenizer = self.policy.tokenizer
        engine = self.policy.build_engine(RolloutConfig(max_completion_length=max_new_tokens, max_batch_size=samples))
        request = Request(
            encode_prompt(tokenizer, Example(messages)),
            [fold(seed, sample) for sample in range(samples)],
            max_new_tokens,
        )
        sampling = SamplingParams(temperature or 1.0, top_p, greedy=temperature == 0)
        (completions,) = engine.generate([request], sampling, progress)
        return [decode(tokenizer, c.token_ids) for c in completions]
