"""How far the engine's log-probabilities are from an fp32 forward pass, beside what transformers' own 16-bit pass is.

    python benchmarks/logprob_gap.py MODEL_FOLDER [--results benchmarks/results/GPU.jsonl]

The engine samples completions in bf16 under noise (sigma 5e-2) and an adapter with a large B. The same tokens are then
scored by transformers' forward over the same packed weights: in fp32 (the oracle), in bf16, in fp32 without the noise,
and in fp32 without the adapter. A missing noise or adapter would show as a gap of the size of the last two.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from qerl.config import LoraConfig, ModelConfig, RolloutConfig
from qerl.engine import build_engine
from qerl.nn.load import load_model
from qerl.nn.lora import LoraLinear, adapters_disabled, attach_lora
from qerl.noise import NoiseDraw, applied
from qerl.tasks.chat import encode_prompt
from qerl.types import Completion, Example, Request, SamplingParams

QUESTIONS = (
    "What is 17 * 23?",
    "Write a Python function that reverses a string.",
    "A train leaves at 9:40 and arrives at 12:05. How long does it take?",
    "Name three uses of a hash table.",
)
DRAW = NoiseDraw(seed=1, step=1, sigma=5e-2)


def policy(folder: str, dtype: str, device: str) -> tuple[torch.nn.Module, object]:
    base, tokenizer = load_model(ModelConfig(path=folder, dtype=dtype, device=device))
    model = attach_lora(base, LoraConfig(r=32, alpha=32), seed=0)
    for i, module in enumerate(m for m in model.modules() if isinstance(m, LoraLinear)):
        b = module.lora_B["default"].weight
        generator = torch.Generator().manual_seed(i)
        with torch.no_grad():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.02)
    return model, tokenizer


@torch.no_grad()
def score(
    model: torch.nn.Module, requests: list[Request], results: list[list[Completion]], draw: NoiseDraw | None
) -> Tensor:
    device = next(model.parameters()).device
    scores = []
    with applied(model, draw):
        for request, group in zip(requests, results, strict=True):
            for c in group:
                ids = torch.tensor([request.prompt_ids + c.token_ids], device=device)
                logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
                scores.append(logits.log_softmax(-1).gather(-1, ids[0, len(request.prompt_ids) :, None])[:, 0].cpu())
    return torch.cat(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model, tokenizer = policy(args.folder, "bfloat16", device)
    requests = [
        Request(
            encode_prompt(tokenizer, Example([{"role": "user", "content": q}])),
            [i * 100 + j for j in range(16)],
            128,
            i,
        )
        for i, q in enumerate(QUESTIONS)
    ]
    engine = build_engine(model, eos_ids=(), config=RolloutConfig())
    engine.sync(DRAW)
    results = engine.generate(requests, SamplingParams())
    ours = torch.tensor([x for group in results for c in group for x in c.logprobs])
    theirs = score(model, requests, results, DRAW)
    del model, engine
    exact, _ = policy(args.folder, "float32", device)
    oracle = score(exact, requests, results, DRAW)
    no_noise = score(exact, requests, results, None)
    with adapters_disabled(exact):
        no_adapter = score(exact, requests, results, DRAW)

    def gap(x: Tensor) -> float:
        return float((x - oracle).abs().mean())

    record = {
        "bench": "logprob_gap",
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": Path(args.folder).name,
        "tokens": len(ours),
        "engine_bf16": gap(ours),
        "transformers_bf16": gap(theirs),
        "without_noise": gap(no_noise),
        "without_adapter": gap(no_adapter),
    }
    for key, value in record.items():
        print(f"{key:<18} {value}")
    print(f"engine / transformers {record['engine_bf16'] / record['transformers_bf16']:.2f}  (bar: 1.5)")
    smallest = min(record["without_noise"], record["without_adapter"])
    print(f"engine / smallest effect {record['engine_bf16'] / smallest:.3f}  (bar: 0.25)")
    if args.results:
        with args.results.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
