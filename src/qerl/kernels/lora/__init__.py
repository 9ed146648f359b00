"""lora: the second half of the adapters of a fused product, added to it in one pass.

    y[t, n] = y[t, n] + scaling[p] gain sum_r u[t, offset[p] + r] B[n, r]        n in part p's rows

Contract: u = x A^T of all parts side by side, rounded to y's dtype. The sum is float32, rounded to y's dtype, then
scaled and added in float32, and rounded once: the trainer's order (nn/lora.py). y is changed in place. B has as many
columns as the largest rank; a part with a smaller one has zeros there.

    device, dtype     path
    CUDA, bf16        expand.py: Triton, y read and written once, whatever the number of parts
    anything else     reference.py

Called by the engine for adapters that no 4-bit product takes in (engine/projection.py). Leaves out gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from qerl.kernels.lora.reference import add_expanded_reference_

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


def add_expanded_(
    y: Float[Tensor, "t n"], u: Float[Tensor, "t ranks"], expansion: Expansion, gain: float = 1.0
) -> Float[Tensor, "t n"]:
    """Add the adapters' part to y, in place; y again."""
    if y.is_cuda and y.dtype == torch.bfloat16:
        from qerl.kernels.lora.expand import add_expanded_bf16_  # Triton is there where CUDA is

        add_expanded_bf16_(y, u, expansion, gain)
    else:
        add_expanded_reference_(y, u, expansion, gain)
    return y
