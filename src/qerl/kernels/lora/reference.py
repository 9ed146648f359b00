"""The adapters' second half by torch, part after part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from qerl.kernels.lora import Expansion


def add_expanded_reference_(
    y: Float[Tensor, "t n"], u: Float[Tensor, "t ranks"], expansion: Expansion, gain: float
) -> None:
    """`add_expanded_`, on any device."""
    sizes, ranks = expansion.sizes, expansion.ranks
    parts = zip(y.split(sizes, 1), u.split(ranks, 1), expansion.b.split(sizes), ranks, expansion.scaling, strict=True)
    for rows, inner, b, rank, scaling in parts:
        if rank:
            rows.copy_(rows.float() + F.linear(inner, b[:, :rank]).float() * (scaling * gain))
