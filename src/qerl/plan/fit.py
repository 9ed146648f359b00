"""Whether a run fits a card, what would, and the refusal of one that cannot.

    budget = the card's bytes - CONTEXT_BYTES - SLACK_BYTES                  `qerl plan --gpu`: fits below it
    free memory, as the driver reports it once the context is there          `qerl train`: refuses above it

So a plan promises less than the card has, and training refuses only what has no chance: tensors alone that are more
than the card's free memory. Limits and settings are found by bisection over whole plans, since every part is monotone
in every setting that is looked at. (But for micro-batches, and layers that keep their activations, where the plan
chooses them: they never make a run not fit.)
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qerl.config import RunConfig
from qerl.engine.drafts import pages_alone
from qerl.engine.kv_cache import PAGE_SIZE
from qerl.plan.memory import Memory, plan_memory
from qerl.plan.shapes import ModelShape, NotPlanned, read_shape
from qerl.plan.target import Target
from qerl.plan.update import MICRO_BATCH_TOKENS

logger = logging.getLogger(__name__)

CONTEXT_BYTES = 880_000_000  # CUDA's context, loaded kernels and libraries: the most outside of torch on an H200
SLACK_BYTES = 620_000_000  # what the allocator holds and cannot use: 0.46 GB at the most there

_SAMPLING = ("rollout", "evaluation")
_MOST = 1 << 17  # of a context or a group that is looked for
_MIN_CHUNK, _CHUNK_STEP = 16, 256  # `optimizer.micro_batch_tokens`: the least, and the step of a proposal
_MIN_KV_TOKENS = 64  # `rollout.kv_cache_tokens`

Settings = dict[str, Any]
"""section.key -> value."""


@dataclass(frozen=True)
class Limits:
    """What a budget allows, all else being as in the run."""

    longest_context: int
    """Tokens of prompt and completion, one sequence at a time in sampling and in training; 0: none fits."""
    largest_group: int
    """Completions of one prompt, all of full length, that decode together; 0: none fits."""


def parse_card(text: str, option: str = "--gpu") -> int:
    """Bytes of "24GB" (or "24", or "24GiB"); 1 GB = 1e9 bytes. ValueError, naming the option, for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB?)?", text.strip(), re.IGNORECASE)
    size = 0.0 if match is None else float(match[1])
    if match is None or not 0 < size < 1000:  # an RTX 4090 has not 4,090 GB
        raise ValueError(f"{option} {text}: give the card's memory, such as 24GB")
    return int(size * (2**30 if (match[2] or "").lower() == "gib" else 10**9))


def budget_of(card_bytes: int) -> int:
    """What a plan may take of a card."""
    return card_bytes - CONTEXT_BYTES - SLACK_BYTES


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The config with some settings replaced; rules across sections are not looked at."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return config


def find_limits(shape: ModelShape, config: RunConfig, target: Target, budget: int) -> Limits:
    """The longest context and the largest group within a budget."""

    def context_fits(new: int) -> bool:
        return _plan_of_one(shape, config, target, new).peak <= budget

    def group_fits(size: int) -> bool:
        settings = {
            "rollout.prompts_per_step": 1,
            "rollout.num_generations": size,
            "rollout.max_batch_size": size,
            "rollout.kv_cache_tokens": None,
            "rollout.kv_cache_memory": None,
            "eval.num_problems": 0,
        }
        return plan_memory(shape, with_settings(config, settings), target).peak <= budget

    new = _largest(1, (shape.context or _MOST) - 1, context_fits)
    context = 0
    if new:
        memory = _plan_of_one(shape, config, target, new)
        context = memory.prompt_tokens + memory.completion_tokens
    return Limits(context, _largest(1, _MOST, group_fits))


def nearest_settings(shape: ModelShape, config: RunConfig, target: Target, budget: int) -> Settings | None:
    """Settings, as few as it takes, with which the run fits; None where none does.

    First what changes memory and speed alone: the KV cache and the slots for sampling; recomputation, the micro-batch,
    the logits' chunk and the host's memory for the update; shorter prefills for both. Only then shorter completions.
    """
    if _fits(shape, config, target, budget, {}, None):
        return {}
    found = _same_results(shape, config, target, budget)
    if found is None:
        longest = _largest(
            1,
            config.rollout.max_completion_length - 1,
            lambda new: _same_results(shape, with_settings(config, {_NEW: new}), target, budget) is not None,
        )
        if longest:
            rest = _same_results(shape, with_settings(config, {_NEW: longest}), target, budget)
            found = {_NEW: longest} | (rest or {})
    return found if found is not None and _fits(shape, config, target, budget, found, None) else None


def describe(settings: Mapping[str, Any]) -> str:
    """As they are written on the command line."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def check_fits(config: RunConfig, device: torch.device) -> Memory | None:
    """The run's plan. ValueError for one that cannot be, or whose tensors are more than the GPU's free memory. Only on
    CUDA, else None.

    What cannot be planned (other architectures, transformers' engine) is not checked, and that is logged; None.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    target = Target.of(config, total_bytes=total, free_bytes=free - SLACK_BYTES)
    try:
        shape = read_shape(config.model)
        memory = plan_memory(shape, config, target)
    except NotPlanned as error:
        logger.warning("whether the run fits the GPU is not checked: %s", error)
        return None
    if memory.peak > free:
        raise ValueError(refusal(shape, config, target, memory, free))
    return memory


NOTHING_FITS = (
    "no lengths, batches and recomputation make it fit: take a smaller model, a base in fewer bits, a smaller lora.r, "
    'or optimizer.type="adamw_8bit"'
)


def refusal(shape: ModelShape, config: RunConfig, target: Target, memory: Memory, free: int) -> str:
    """What a run lacks, its largest parts, and what fits."""
    phase = max(memory.peaks, key=lambda name: memory.peaks[name])
    parts = sorted(memory.phases[phase].items(), key=lambda part: -part[1])[:4]
    named = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts)
    settings = nearest_settings(shape, config, target, free - SLACK_BYTES)
    fix = f"it fits with {describe(settings)}" if settings else NOTHING_FITS
    return (
        f"this run needs up to {memory.peak / 1e9:.1f} GB in its {phase}, and the GPU has {free / 1e9:.1f} GB free; "
        f"the largest parts: {named}; {fix}. `qerl plan` shows all of it"
    )


# ------------------------------------------------------------------------------------------------- how it is found

_NEW, _KV, _SLOTS = "rollout.max_completion_length", "rollout.kv_cache_tokens", "rollout.max_batch_size"
_PREFILL, _MIN_PREFILL = "rollout.prefill_tokens", 256
_TOKENS, _CHUNK, _RECOMPUTE, _OFFLOAD = (
    "optimizer.micro_batch_tokens",
    "optimizer.logprob_chunk",
    "optimizer.gradient_checkpointing",
    "optimizer.offload_activations",
)


def _fits(
    shape: ModelShape,
    config: RunConfig,
    target: Target,
    budget: int,
    settings: Mapping[str, Any],
    phases: tuple[str, ...] | None,
) -> bool:
    peaks = plan_memory(shape, with_settings(config, settings), target).peaks
    return all(size <= budget for phase, size in peaks.items() if phases is None or phase in phases)


def _plan_of_one(shape: ModelShape, config: RunConfig, target: Target, new: int) -> Memory:
    """The run with one sequence at a time, in sampling and in training."""
    settings = {_NEW: new, _SLOTS: 1, _KV: _fewest_kv_tokens(shape, config, target, new), _TOKENS: _MIN_CHUNK}
    return plan_memory(shape, with_settings(config, settings | {"rollout.kv_cache_memory": None}), target)


def _fewest_kv_tokens(shape: ModelShape, config: RunConfig, target: Target, new: int) -> int:
    room = config.task.max_prompt_length if shape.context is None else shape.context - new
    longest = min(config.task.max_prompt_length, room)
    pages = max(pages_alone(prompt, new) for prompt in (longest, max(1, longest - 1)))
    return max(_MIN_KV_TOKENS, pages * PAGE_SIZE)


def _same_results(shape: ModelShape, config: RunConfig, target: Target, budget: int) -> Settings | None:
    """Settings that change memory and speed alone; shorter prefills only where nothing else is enough."""
    prefill: Settings = {}
    while True:
        shorter = with_settings(config, prefill)
        sampling = _for_sampling(shape, shorter, target, budget)
        # Scratch that prefill needs stays for the update.
        update = None if sampling is None else _for_update(shape, with_settings(shorter, sampling), target, budget)
        if sampling is not None and update is not None:
            return prefill | sampling | update
        tokens = shorter.rollout.prefill_tokens // 2
        if tokens < _MIN_PREFILL:
            return None
        prefill = {_PREFILL: tokens}


def _for_sampling(shape: ModelShape, config: RunConfig, target: Target, budget: int) -> Settings | None:
    """The KV cache and, where that lets more completions decode at a time, fewer slots."""
    if _fits(shape, config, target, budget, {}, _SAMPLING):
        return {}
    new = config.rollout.max_completion_length
    fewest = _fewest_kv_tokens(shape, config, target, new) // PAGE_SIZE
    best: tuple[int, Settings] = (0, {})
    slots = config.rollout.max_batch_size
    while slots:
        fewer: Settings = {} if slots == config.rollout.max_batch_size else {_SLOTS: slots}
        unlimited = plan_memory(shape, with_settings(config, fewer | {_KV: None}), target)
        most = config.rollout.kv_cache_tokens
        most = max(unlimited.kv_pages, fewest) if most is None else most // PAGE_SIZE

        def fits(pages: int, fewer: Settings = fewer) -> bool:
            return _fits(shape, config, target, budget, fewer | {_KV: pages * PAGE_SIZE}, _SAMPLING)

        pages = _largest(fewest, most, fits)
        if pages:
            settings = fewer | {_KV: pages * PAGE_SIZE}
            together = plan_memory(shape, with_settings(config, settings), target).sequences_at_a_time
            best = max(best, (together, settings), key=lambda choice: choice[0])
        slots //= 2
    return best[1] or None


def _for_update(shape: ModelShape, config: RunConfig, target: Target, budget: int) -> Settings | None:
    """Recomputation, then the micro-batch, the logits' chunk, the host's memory: no more of them than it takes."""
    if _fits(shape, config, target, budget, {}, ("update",)):
        return {}
    num_layers = len(shape.layers)
    all_may_recompute = config.optimizer.recomputed_layers(num_layers) in (None, num_layers)
    base: Settings = {} if all_may_recompute else {_RECOMPUTE: "auto"}
    found = _smaller_pieces(shape, config, target, budget, base)
    if found is None and not config.optimizer.offload_activations:
        found = _smaller_pieces(shape, config, target, budget, base | {_OFFLOAD: True})
    return found


def _smaller_pieces(
    shape: ModelShape, config: RunConfig, target: Target, budget: int, base: Settings
) -> Settings | None:
    """`base`, and the largest micro-batch and then chunk of logits with which the update fits."""
    chunk = config.optimizer.logprob_chunk
    while chunk:
        smaller = base if chunk == config.optimizer.logprob_chunk else base | {_CHUNK: chunk}
        if _fits(shape, config, target, budget, smaller, ("update",)):
            return smaller

        def fits(steps: int, smaller: Settings = smaller) -> bool:
            return _fits(shape, config, target, budget, smaller | {_TOKENS: steps * _CHUNK_STEP}, ("update",))

        most = config.optimizer.micro_batch_tokens or MICRO_BATCH_TOKENS
        steps = _largest(1, most // _CHUNK_STEP, fits)
        if steps:
            return smaller | {_TOKENS: steps * _CHUNK_STEP}
        chunk //= 2
    return None


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of low .. high that fits, as all below it do; 0 where not even `low` does."""
    if low > high or not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
