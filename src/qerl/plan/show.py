"""A plan as tables and as JSON: what `qerl plan` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from qerl.config import RunConfig
from qerl.engine.budget import check_pages
from qerl.engine.drafts import pages_alone
from qerl.plan.fit import (
    CONTEXT_BYTES,
    NOTHING_FITS,
    SLACK_BYTES,
    Limits,
    budget_of,
    describe,
    find_limits,
    nearest_settings,
)
from qerl.plan.memory import Memory, plan_memory
from qerl.plan.rates import NOT_MEASURED, SOURCE, Seconds, step_seconds
from qerl.plan.shapes import ModelShape, read_shape
from qerl.plan.target import Target


@dataclass(frozen=True)
class Card:
    """What a card of this size makes of the run."""

    bytes: int
    fits: bool
    limits: Limits
    settings: dict[str, Any] | None
    """With which it fits; None where no setting helps."""


@dataclass(frozen=True)
class Plan:
    """All that `qerl plan` knows."""

    shape: ModelShape
    memory: Memory
    seconds: list[Seconds]
    card: Card | None


def make_plan(config: RunConfig, card_bytes: int | None) -> Plan:
    """Plan a run on a GPU; `card_bytes`: the card's memory, where one is asked about.

    ValueError: `rollout.kv_cache_tokens` do not hold one completion of full length: a run would not start.
    """
    free = None if card_bytes is None else budget_of(card_bytes)
    shape, target = read_shape(config.model), Target.of(config, total_bytes=card_bytes, free_bytes=free)
    memory = plan_memory(shape, config, target)
    if memory.sequences_at_a_time == 0 and config.rollout.kv_cache_tokens is not None:
        prompt, new = memory.prompt_tokens, memory.completion_tokens
        alone = config.rollout.model_copy(update={"kv_cache_memory": None})
        what = f"a prompt of up to {prompt} tokens and up to {new} new ones"
        check_pages(alone, 0, 0, pages_alone(prompt, new), what)
    card = None
    if card_bytes is not None:
        budget = budget_of(card_bytes)
        card = Card(
            card_bytes,
            memory.peak <= budget,
            find_limits(shape, config, target, budget),
            nearest_settings(shape, config, target, budget),
        )
    return Plan(shape, memory, step_seconds(shape, config, memory), card)


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes, tokens and seconds under stable names."""
    memory = plan.memory
    return {
        "model": plan.shape.name,
        "weights": plan.shape.num_weights,
        "phases": {phase: dict(parts) for phase, parts in memory.phases.items()},
        "peaks": memory.peaks,
        "prompt_tokens": memory.prompt_tokens,
        "completion_tokens": memory.completion_tokens,
        "micro_batch_tokens": memory.micro_batch_tokens,
        "recomputed_layers": memory.recomputed_layers,
        "sequences_at_a_time": memory.sequences_at_a_time,
        "seconds": [asdict(seconds) for seconds in plan.seconds],
        "card": None if plan.card is None else asdict(plan.card),
    }


def show(plan: Plan, console: Console) -> None:
    """The tables."""
    memory = plan.memory
    table = Table(title=f"{plan.shape.name}: GB by part and phase", title_justify="left")
    table.add_column("part")
    for phase in memory.phases:
        table.add_column(phase, justify="right")
    for part in memory.parts:
        table.add_row(part, *(_gb(parts.get(part)) for parts in memory.phases.values()))
    table.add_section()
    table.add_row("peak", *(_gb(peak) for peak in memory.peaks.values()), style="bold")
    console.print(table)
    for line in _lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def _lines(plan: Plan) -> list[str]:
    memory, card = plan.memory, plan.card
    lines = [
        f"prompts of {memory.prompt_tokens:,} and completions of {memory.completion_tokens:,} tokens at the most; "
        f"{memory.sequences_at_a_time:,} of full length decode at a time; "
        f"micro-batches of up to {memory.micro_batch_tokens:,} tokens; "
        f"{memory.recomputed_layers} of {len(plan.shape.layers)} layers recompute their activations"
    ]
    if card is not None:
        reserve = (CONTEXT_BYTES + SLACK_BYTES) / 1e9
        verdict = "fits" if card.fits else "does not fit"
        lines.append(
            f"{verdict} a card of {card.bytes / 1e9:g} GB, of which {reserve:g} GB are left for CUDA and the allocator"
        )
        if not card.fits:
            lines.append(f"would fit: {describe(card.settings)}" if card.settings else NOTHING_FITS)
        lines.append(
            f"on that card, all else as it is: contexts of up to {card.limits.longest_context:,} tokens one at a time; "
            f"groups of up to {card.limits.largest_group:,} completions of full length at a time"
        )
    lines += [
        f"a step on {s.gpu} takes about {_seconds(s.rollout)} for its rollout and {_seconds(s.update)} for its update, "
        f"if every completion is of full length; not in it: {NOT_MEASURED} ({SOURCE})"
        for s in plan.seconds
    ]
    if not plan.seconds:
        lines.append("seconds of a step: none were measured for a model of this shape with such settings")
    return lines


def _gb(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.3f}"


def _seconds(seconds: float | None) -> str:
    return "(not measured)" if seconds is None else f"{seconds:.{1 if seconds < 10 else 0}f} s"
