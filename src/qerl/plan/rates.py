"""Seconds of a step, from measured rates alone: what was not measured is named, never guessed.

    decode   steps * layers * (a layer's four products with adapters, at so many tokens)
    update   tokens * layers * (2 or 3 products a layer) + passes * layers * (a layer's dequantisation)

A rate is of one GPU and one layer's shape; other shapes and GPUs have none. Both are lower bounds: they hold the matrix
products of the base, and not attention, norms, the head, sampling, adapters in training, rewards and the host. They are
for the worst that the config allows, every completion of full length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from qerl.config import RunConfig
from qerl.plan.memory import Memory
from qerl.plan.shapes import ModelShape

SOURCE = "benchmarks/results/nvidia-h200.jsonl: w4a16_layer, dequant"
NOT_MEASURED = "attention, norms, head, sampling, adapters in training, rewards, the host"


@dataclass(frozen=True)
class Rate:
    """Of one layer on one GPU, in microseconds."""

    gpu: str
    hidden: int
    intermediate: int
    kv_width: int
    """Numbers in a token's keys."""
    products: Mapping[int, float]
    """By tokens: the four products on the packed codes, with adapters of rank 32 (`lora_us` of measure "layer")."""
    dense: float
    """The four products of 1,024 tokens on bf16 weights (`cublas_us`): as in training, once the codes are dense."""
    dequantisation: float
    """Of all four weights."""

    def decode(self, tokens: int) -> float | None:
        """The products at so many tokens: between two measured numbers, along the line."""
        known = sorted(self.products)
        if not known[0] <= tokens <= known[-1]:
            return None
        i = bisect_left(known, tokens)
        if known[i] == tokens:
            return self.products[tokens]
        low, high = known[i - 1], known[i]
        share = (tokens - low) / (high - low)
        return self.products[low] * (1 - share) + self.products[high] * share


DENSE_TOKENS = 1024  # of `Rate.dense`

RATES = (
    Rate(
        "NVIDIA H200",
        hidden=3584,
        intermediate=18944,
        kv_width=512,
        products={
            1: 62.87, 8: 64.1, 16: 73.58, 32: 85.84, 64: 108.49, 128: 154.32, 256: 274.16, 512: 490.11, 1024: 902.37
        },
        dense=713.82,
        dequantisation=156.91,
    ),
    Rate(
        "NVIDIA H200",
        hidden=5120,
        intermediate=27648,
        kv_width=1024,
        products={
            1: 98.88, 8: 101.67, 16: 116.95, 32: 135.83, 64: 171.34, 128: 263.8, 256: 493.68, 512: 882.28,
            1024: 1647.86,
        },
        dense=1494.22,
        dequantisation=326.85,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """At least so long, on that GPU; None: nothing was measured."""

    gpu: str
    rollout: float | None
    update: float | None


def step_seconds(shape: ModelShape, config: RunConfig, memory: Memory) -> list[Seconds]:
    """One entry a GPU that has rates for the model's layers; empty where none has."""
    kv_width = shape.kv_heads * shape.head_dim
    fitting = [
        r for r in RATES if (r.hidden, r.intermediate, r.kv_width) == (shape.hidden, shape.intermediate, kv_width)
    ]
    packed = all(product.packed for product in shape.products)
    return [Seconds(r.gpu, *_seconds(shape, config, memory, r)) for r in fitting if packed]


def _seconds(shape: ModelShape, config: RunConfig, memory: Memory, rate: Rate) -> tuple[float | None, float | None]:
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    layers, together = len(shape.layers), memory.sequences_at_a_time
    rollout = None
    if together:
        waves = [together] * (completions // together) + [completions % together] * (completions % together > 0)
        each = [rate.decode(size) for size in waves]
        if all(us is not None for us in each):
            rollout = sum(us for us in each if us is not None) * layers * memory.completion_tokens / 1e6
    loss = config.loss
    tokens = completions * (memory.prompt_tokens + memory.completion_tokens) * loss.num_iterations
    # A pass over all tokens: forward, input gradient, and forward again where layers are recomputed. Scoring passes
    # have only the first.
    passes = 3 if config.optimizer.gradient_checkpointing else 2
    scorings = (loss.num_iterations * loss.updates_per_rollout > 1) + (loss.beta > 0)
    work = passes + scorings / loss.num_iterations
    micro_batches = -(-tokens // memory.micro_batch_tokens)
    us = work * layers * (tokens / DENSE_TOKENS * rate.dense + micro_batches * rate.dequantisation)
    return rollout, us / 1e6
