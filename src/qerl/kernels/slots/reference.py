"""The sequences' small state by torch."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Float32, Int64
from torch import Tensor


class Progress(NamedTuple):
    """The state of b sequences that a drawn token changes."""

    tokens: Int64[Tensor, " b"]
    positions: Int64[Tensor, " b"]
    counts: Int64[Tensor, " b"]
    limits: Int64[Tensor, " b"]
    finished: Bool[Tensor, " b"]
    drawn_tokens: Int64[Tensor, "b columns"]
    drawn_logprobs: Float32[Tensor, "b columns"]
    drawn_entropies: Float32[Tensor, "b columns"]


def locate_reference(
    page_table: Int64[Tensor, "b pages"], positions: Int64[Tensor, " b"], page_size: int
) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"]]:
    """`locate`, on any device."""
    page = page_table.gather(1, positions[:, None] // page_size)[:, 0]
    return page * page_size + positions % page_size, positions + 1


def advance_reference_(
    progress: Progress,
    tokens: Int64[Tensor, " b"],
    logprobs: Float32[Tensor, " b"],
    entropies: Float32[Tensor, " b"],
    eos: Int64[Tensor, " ids"],
) -> None:
    """`advance_`, on any device."""
    p, column = progress, progress.counts[:, None]
    p.drawn_tokens.scatter_(1, column, tokens[:, None])
    p.drawn_logprobs.scatter_(1, column, logprobs[:, None])
    p.drawn_entropies.scatter_(1, column, entropies[:, None])
    p.tokens.copy_(tokens)
    going = ~p.finished
    p.counts.add_(going)
    p.positions.add_(going)
    p.finished.logical_or_((tokens[:, None] == eos).any(1) | (p.counts == p.limits))
