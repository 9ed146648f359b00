"""Lookup by torch, a row after the other: the path of a CPU, and what the kernels are checked against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

LONGEST = 4
"""Tokens that are compared at most; of GSM8K's completions, comparing ten gives half a percent more right guesses."""


class Texts(NamedTuple):
    """Tokens of prompts and completions, one line a completion."""

    tokens: Int32[Tensor, "lines columns"]
    lengths: Int64[Tensor, " lines"]
    """Tokens of each line that are there."""
    starts: Int64[Tensor, " lines"]
    """Of which the first so many are its prompt."""
    groups: Int64[Tensor, " lines"]
    """Lines of one number share a prompt; negative: nobody's line."""


def look_up_reference(texts: Texts, lines: Int64[Tensor, " b"], num_tokens: int) -> Int64[Tensor, "b num_tokens"]:
    """`look_up`, on any device."""
    found = torch.zeros(len(lines), num_tokens, dtype=torch.int64, device=lines.device)
    for row, own in zip(found, lines.tolist(), strict=True):
        if own >= 0:
            row[0] = texts.tokens[own, texts.lengths[own] - 1]
            row[1:] = _guesses(texts, own, num_tokens - 1)
    return found


def _guesses(texts: Texts, own: int, count: int) -> Int64[Tensor, " count"]:
    """What may follow line `own`."""
    text = texts.tokens[own, : texts.lengths[own]]
    related = ((texts.groups == texts.groups[own]) & (texts.groups >= 0)).nonzero()
    tokens, lengths, starts, _ = (x[related[:, 0]] for x in texts)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    equal = (place < lengths[:, None] - 1) & ((related == own) | (place >= starts[:, None] - 1))
    matched = torch.zeros(equal.shape, dtype=torch.int64, device=tokens.device)
    for d in range(min(LONGEST, len(text))):
        equal[:, :d] = False
        equal[:, d:] &= tokens[:, : len(place) - d] == text[-1 - d]
        matched += equal
    if not matched.any():
        return text[-1].long().expand(count)
    rank = torch.arange(len(related), 0, -1, device=tokens.device)[:, None]
    order = ((2 * matched + (related == own)) * len(place) + place) * (len(related) + 1) + rank  # no two are equal
    j, e = divmod(int(order.argmax()), len(place))
    known = tokens[j, e + 1 : lengths[j]].long()
    return known[torch.arange(count, device=tokens.device) % len(known)]
