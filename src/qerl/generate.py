"""Sampling for a person: chat messages in, texts out. What `qerl generate` calls."""

from __future__ import annotations

from pathlib import Path

from qerl.config import ModelConfig, RolloutConfig
from qerl.engine import build_engine
from qerl.nn.load import eos_token_ids, load_model
from qerl.nn.lora import attach_saved_adapter
from qerl.philox import fold
from qerl.tasks.chat import decode, encode_prompt
from qerl.types import Example, Request, SamplingParams


class Generator:
    """A loaded model with its engine.

    The KV cache is made for one prompt of the size at hand, so that a small machine can run a large context.
    """

    def __init__(self, config: ModelConfig, adapter: Path | None = None) -> None:
        self.model, self.tokenizer = load_model(config)
        self.eos_ids = eos_token_ids(self.model)
        if adapter is not None:
            self.model = attach_saved_adapter(self.model, adapter)

    def __call__(
        self,
        messages: list[dict[str, str]],
        *,
        samples: int = 1,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """`samples` completions of a chat; temperature 0 is greedy."""
        prompt_ids = encode_prompt(self.tokenizer, Example(messages))
        config = RolloutConfig(max_completion_length=max_new_tokens, max_batch_size=samples)
        engine = build_engine(self.model, eos_ids=self.eos_ids, config=config)
        engine.sync(None)
        request = Request(prompt_ids, [fold(seed, sample) for sample in range(samples)], max_new_tokens)
        sampling = SamplingParams(temperature or 1.0, top_p, greedy=temperature == 0)
        (completions,) = engine.generate([request], sampling)
        return [decode(self.tokenizer, c.token_ids) for c in completions]
