"""The sequences' small state by torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor


class Progress(NamedTuple):
    """The state of b sequences that drawn tokens change."""

    tokens: Int64[Tensor, " b"]
    positions: Int64[Tensor, " b"]
    counts: Int64[Tensor, " b"]
    limits: Int64[Tensor, " b"]
    lines: Int64[Tensor, " b"]
    """Of `texts`, a line of its own for each sequence that goes on."""
    finished: Bool[Tensor, " b"]
    drawn_logprobs: Float32[Tensor, "b columns"]
    drawn_entropies: Float32[Tensor, "b columns"]
    texts: Int32[Tensor, "lines places"]
    lengths: Int64[Tensor, " lines"]


def locate_reference(
    page_table: Int64[Tensor, "b pages"], positions: Int64[Tensor, " tokens"], page_size: int
) -> tuple[Int64[Tensor, " tokens"], Int64[Tensor, " tokens"]]:
    """`locate`, on any device."""
    page = page_table.gather(1, positions.view(len(page_table), -1) // page_size).flatten()
    return page * page_size + positions % page_size, positions + 1


def advance_reference_(
    progress: Progress,
    tokens: Int64[Tensor, " tokens"],
    logprobs: Float32[Tensor, " tokens"],
    entropies: Float32[Tensor, " tokens"],
    eos: Int64[Tensor, " ids"],
    fed: Int64[Tensor, "b t"] | None = None,
) -> None:
    """`advance_`, on any device, a drawn token of each sequence at a time."""
    p, b = progress, len(progress.tokens)
    guesses = p.tokens.new_empty(b, 0) if fed is None else fed[:, 1:]
    columns = [x.view(b, -1).unbind(1) for x in (tokens, logprobs, entropies)]
    counts_next = ~p.finished  # whether a sequence's next drawn token counts
    for t, (token, logprob, entropy) in enumerate(zip(*columns, strict=True)):
        (i,) = counts_next.nonzero(as_tuple=True)
        p.drawn_logprobs[i, p.counts[i]] = logprob[i]
        p.drawn_entropies[i, p.counts[i]] = entropy[i]
        p.counts[i] += 1
        p.positions[i] += 1
        p.texts[p.lines[i], p.positions[i]] = token[i].to(torch.int32)
        p.lengths[p.lines[i]] = p.positions[i] + 1
        p.tokens[i] = token[i]
        p.finished[i] = (token[i, None] == eos).any(1) | (p.counts[i] == p.limits[i])
        if t < guesses.shape[1]:
            counts_next = counts_next & ~p.finished & (token == guesses[:, t])
