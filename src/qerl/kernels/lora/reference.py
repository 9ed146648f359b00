"""The adapters' second half by torch, part after part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32
from torch import Tensor

TILE = 64
"""Rows of B that a row of `tiles` stands for, at most."""


class Expansion(NamedTuple):
    """The factors B of a fused product's parts; made by `empty`, filled by its owner."""

    b: Float[Tensor, "n rank"]
    scaling: Float32[Tensor, " parts"]
    tiles: Int32[Tensor, "tiles 4"]
    """Of each run of TILE rows: the first, the one after the last, the column of u of its part, the part."""
    sizes: tuple[int, ...]
    """Rows of the parts."""
    ranks: tuple[int, ...]
    """Of the parts; 0: no adapter."""

    @classmethod
    def empty(cls, sizes: Sequence[int], ranks: Sequence[int], dtype: torch.dtype, device: torch.device) -> Expansion:
        """Zeros for parts of so many rows and such ranks."""
        tiles, start, offset = [], 0, 0
        for part, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
            for first in range(start, start + size if rank else start, TILE):
                tiles.append((first, min(first + TILE, start + size), offset, part))
            start, offset = start + size, offset + rank
        return cls(
            torch.zeros(start, max(ranks), dtype=dtype, device=device),
            torch.zeros(len(sizes), device=device),
            torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 4),
            tuple(sizes),
            tuple(ranks),
        )


def add_expanded_reference_(
    y: Float[Tensor, "t n"], u: Float[Tensor, "t ranks"], expansion: Expansion, gain: float
) -> None:
    """`add_expanded_`, on any device."""
    sizes, ranks = expansion.sizes, expansion.ranks
    parts = zip(y.split(sizes, 1), u.split(ranks, 1), expansion.b.split(sizes), ranks, expansion.scaling, strict=True)
    for rows, inner, b, rank, scaling in parts:
        if rank:
            rows.copy_(rows.float() + F.linear(inner, b[:, :rank]).float() * (scaling * gain))
