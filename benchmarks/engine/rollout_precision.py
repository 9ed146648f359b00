"""What `rollout.kv_cache_dtype` and `rollout.head_format` change in log-probabilities.

    python benchmarks/engine/rollout_precision.py MODEL [--device cpu] [--dtype float32]

Completions are sampled from the policy as it is (NVFP4 base, keys, values and head unrounded), one a prompt. Then their
tokens are scored by the engine's decoder in each setting. A line a setting: mean, 99th percentile and largest |change
of a token's log-probability|, mean KL(policy as it is || policy in the setting) in nats a token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qerl.config import ModelConfig, RolloutConfig
from qerl.engine import build_engine
from qerl.engine.attention import ChunkAttention
from qerl.engine.kv_cache import KVCache, num_pages
from qerl.engine.model import Decoder
from qerl.engine.norms import Gains
from qerl.nn.load import eos_token_ids, load_model
from qerl.types import Request, SamplingParams

QUESTIONS = (
    "Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell altogether?",
    "A robe takes 2 bolts of blue fibre and half that much white fibre. How many bolts does it take?",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey in minutes?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 boxes of 12 pencils and gives away a quarter of them. How many pencils are left?",
    "Why is the sky blue? Answer in three sentences.",
)
SETTINGS = {"kv_cache_dtype=fp8": (True, False), "head_format=nvfp4": (False, True), "both": (True, True)}


@torch.inference_mode()
def scores(decoder: Decoder, prompt: Sequence[int], completion: Sequence[int], fp8: bool) -> Tensor:
    """Log-probabilities [completion, vocabulary]."""
    tokens = torch.tensor([*prompt, *completion], device=decoder.device)
    pages = num_pages(len(tokens))
    sizes = dict(layers=decoder.num_layers, kv_heads=decoder.kv_heads, head_dim=decoder.head_dim)
    cache = KVCache(pages=pages, dtype=decoder.dtype, device=decoder.device, fp8=fp8, **sizes)
    attend = ChunkAttention(cache, [0], [len(tokens)], [range(pages)])
    positions = torch.arange(len(tokens), device=decoder.device)
    hidden = decoder.forward(tokens, positions, Gains(decoder.norms.shared), attend)
    return decoder.logits(hidden[len(prompt) - 1 : -1]).float().log_softmax(-1)


def decoder_of(model: nn.Module, *, packs_head: bool) -> Decoder:
    """The engine's decoder, with the model's norms."""
    with torch.inference_mode():
        decoder = Decoder(model, packs_head=packs_head)
        decoder.sync(None)
    return decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=48, help="of a completion, at the most")
    arguments = parser.parse_args()
    config = ModelConfig.model_validate(
        {"path": arguments.model, "device": arguments.device, "dtype": arguments.dtype, "format": "nvfp4"}
    )
    model, tokenizer = load_model(config)
    template: Any = tokenizer.apply_chat_template
    prompts: list[list[int]] = [
        template([{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)
        for question in QUESTIONS
    ]
    requests = [Request(prompt, [i], arguments.tokens) for i, prompt in enumerate(prompts)]
    engine = build_engine(model, eos_ids=eos_token_ids(model), config=RolloutConfig(engine="qerl"))
    completions = [group[0].token_ids for group in engine.generate(requests, SamplingParams())]
    engine.sleep()
    decoders = {packs: decoder_of(model, packs_head=packs) for packs in (False, True)}
    changes: dict[str, list[Tensor]] = {name: [] for name in SETTINGS}
    divergences: dict[str, list[Tensor]] = {name: [] for name in SETTINGS}
    for prompt, completion in zip(prompts, completions, strict=True):
        drawn = torch.tensor(completion, device=arguments.device)[:, None]
        exact = scores(decoders[False], prompt, completion, fp8=False)
        for name, (fp8, packs) in SETTINGS.items():
            logprobs = scores(decoders[packs], prompt, completion, fp8=fp8)
            changes[name].append((logprobs - exact).gather(1, drawn)[:, 0].cpu())
            divergences[name].append((exact.exp() * (exact - logprobs)).sum(1).cpu())
    print(f"{arguments.model}, {sum(map(len, completions))} tokens")
    for name, parts in changes.items():
        change = torch.cat(parts).abs()
        kl = float(torch.cat(divergences[name]).mean())
        print(
            f"{name}: mean {change.mean():.4f}, 99 % below {change.quantile(0.99):.3f}, largest {change.max():.3f}, "
            f"KL {kl:.5f}"
        )


if __name__ == "__main__":
    main()
