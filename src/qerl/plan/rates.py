"""Seconds of a step, from measured steps alone: what was not measured is named, never guessed.

    rollout   prompt tokens / prefill's rate + steps * (a decode step of so many sequences, at its measured context)
                                             + keys and values of the tokens beyond that context / bandwidth
    update    tokens * (microseconds a token, with recomputation or without) + passes that only score * (forward alone)

A rate is of one GPU and one model's shape, with adapters of rank 32 (72B: 16) on all seven projections over NVFP4;
other shapes and GPUs have none. Seconds are for the worst that the config allows, every completion of full length;
sequences that have no room decode one wave after another. tests/unit/plan holds them against measured steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from qerl.config import RunConfig
from qerl.engine.kv_cache import token_bytes
from qerl.formats.codes import NVFP4
from qerl.kernels.adapter import MAX_RANK
from qerl.plan.memory import Memory
from qerl.plan.shapes import ModelShape
from qerl.plan.update import MICRO_BATCH_TOKENS, pass_time

SOURCE = "benchmarks/results/nvidia-h200.jsonl: decode, step"
NOT_MEASURED = "rewards, checkpoints, and some 0.1 to 0.3 s between rollout and update"
CONTEXT = 768
"""Tokens of a sequence in the measured decode steps."""


@dataclass(frozen=True)
class Rate:
    """Of one model's shape on one GPU."""

    gpu: str
    bandwidth: float
    """Bytes a second that reading keys and values reaches."""
    hidden: int
    intermediate: int
    layers: int
    kv_width: int
    """Numbers in a token's keys."""
    decode: Mapping[int, float]
    """Milliseconds of a decode step, by sequences; empty: not measured."""
    prefill: float
    """Prompt tokens a second; 0: not measured."""
    forward: float
    """Microseconds a token of a pass that only scores."""
    update: float
    """Microseconds a token of forward and backward; 0: not measured."""
    recomputing: float
    """The same where layers are recomputed."""

    def decode_ms(self, sequences: int) -> float | None:
        """Of a step: between two measured numbers, along the line."""
        known = sorted(self.decode)
        if not known or not known[0] <= sequences <= known[-1]:
            return None
        i = bisect_left(known, sequences)
        if known[i] == sequences:
            return self.decode[sequences]
        low, high = known[i - 1], known[i]
        share = (sequences - low) / (high - low)
        return self.decode[low] * (1 - share) + self.decode[high] * share


RATES = (
    Rate(
        "NVIDIA H200", 4.2e12, hidden=3584, intermediate=18944, layers=28, kv_width=512,
        decode={1: 2.2007, 8: 2.3997, 32: 3.4828, 64: 4.4097, 128: 6.0911, 256: 11.2758},
        prefill=40658, forward=27.7, update=67.9, recomputing=98.2,
    ),
    Rate(
        "NVIDIA H200", 4.2e12, hidden=5120, intermediate=13824, layers=48, kv_width=1024,
        decode={1: 4.0987, 8: 4.823, 32: 6.5415, 64: 8.6142, 128: 13.3635, 256: 24.1052},
        prefill=21432, forward=54.9, update=123.9, recomputing=190.7,
    ),
    Rate(
        "NVIDIA H200", 4.2e12, hidden=5120, intermediate=27648, layers=64, kv_width=1024,
        decode={1: 7.2962, 8: 8.2479, 32: 11.3832, 64: 15.0058, 128: 23.5597, 256: 43.9443},
        prefill=9482, forward=117.9, update=284.5, recomputing=373.1,
    ),
    Rate(
        "NVIDIA H200", 4.2e12, hidden=8192, intermediate=29568, layers=80, kv_width=1024,
        decode={}, prefill=0, forward=255.2, update=0, recomputing=818.6,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """About so long, on that GPU; None: not measured."""

    gpu: str
    rollout: float | None
    update: float | None


def step_seconds(shape: ModelShape, config: RunConfig, memory: Memory) -> list[Seconds]:
    """One entry a GPU that has rates for the model's shape; empty where none has, or not with such settings."""
    key = shape.hidden, shape.intermediate, len(shape.layers), shape.kv_heads * shape.head_dim
    fitting = [r for r in RATES if (r.hidden, r.intermediate, r.layers, r.kv_width) == key]
    if not _as_measured(shape, config):
        return []
    return [Seconds(r.gpu, _rollout(shape, config, memory, r), _update(shape, config, memory, r)) for r in fitting]


def _as_measured(shape: ModelShape, config: RunConfig) -> bool:
    model, rollout = config.model, config.rollout
    return (
        all(isinstance(product.format, NVFP4) for product in shape.products)
        and model.dtype != "float32"
        and model.device != "cpu"
        and config.lora.r <= MAX_RANK  # above that adapters are beside the products
        and rollout.cuda_graphs
        and not rollout.batch_invariant
        and not config.optimizer.offload_activations
    )


def _rollout(shape: ModelShape, config: RunConfig, memory: Memory, rate: Rate) -> float | None:
    """Waves of as many sequences as there is room for, each at its mean context."""
    rollout, together = config.rollout, memory.sequences_at_a_time
    completions = rollout.prompts_per_step * rollout.num_generations
    if not together or not rate.decode:
        return None
    waves = [together] * (completions // together) + [completions % together] * (completions % together > 0)
    token, measured = (
        token_bytes(shape.kv_heads, shape.head_dim, 2, fp8=fp8) for fp8 in (rollout.kv_cache_dtype == "fp8", False)
    )
    context = memory.prompt_tokens + memory.completion_tokens / 2
    beyond = len(shape.layers) * (context * token - CONTEXT * measured)  # bytes of a sequence that a step reads more
    step_s = 0.0
    for size in waves:
        ms = rate.decode_ms(size)
        if ms is None:
            return None
        step_s += ms / 1e3 + size * beyond / rate.bandwidth
    return rollout.prompts_per_step * memory.prompt_tokens / rate.prefill + step_s * memory.completion_tokens


def _update(shape: ModelShape, config: RunConfig, memory: Memory, rate: Rate) -> float | None:
    loss, completions = config.loss, config.rollout.prompts_per_step * config.rollout.num_generations
    tokens = completions * (memory.prompt_tokens + memory.completion_tokens)
    share = memory.recomputed_layers / len(shape.layers)
    us = rate.update + share * (rate.recomputing - rate.update) if rate.update else rate.recomputing * (2 + share) / 3
    # Measured with long micro-batches.
    us *= pass_time(shape, memory.micro_batch_tokens) / pass_time(shape, MICRO_BATCH_TOKENS)
    scorings = (loss.num_iterations * loss.updates_per_rollout > 1) + (loss.beta > 0)
    return tokens * (loss.num_iterations * us + scorings * rate.forward) / 1e6
