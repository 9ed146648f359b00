"""Products of always the same number of rows, so that a row has the same bits whatever rows are beside it.

    x [t, k] -> blocks of BLOCK rows, the last one filled up with zeros -> function of each -> outputs, t rows each

A library, and kernels/w4a16, choose a product's kernel by its number of rows, and kernels differ in the order of their
sums. At BLOCK rows it is always the same kernel, and within kernels/w4a16 one tile of tokens: no row is summed in
another order than its neighbour. What it costs: weights are read once a block, and one row takes as long as BLOCK.

The products of `rollout.batch_invariant` go through here (projection.py, model.py, sampler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

BLOCK = 64
"""Tokens of the largest tile that all kernels of kernels/w4a16 have."""


def in_blocks(
    function: Callable[[Float[Tensor, "block k"]], Sequence[Shaped[Tensor, "block _"]]], x: Float[Tensor, "t k"]
) -> list[Shaped[Tensor, "t _"]]:
    """What a function of BLOCK rows gives for t of them, put together; its rows must not depend on each other."""
    outputs: list[Tensor] = []
    for start in range(0, max(1, len(x)), BLOCK):
        block = x[start : start + BLOCK]
        rows = len(block)
        results = function(block if rows == BLOCK else F.pad(block, (0, 0, 0, BLOCK - rows)))
        if len(x) <= BLOCK:
            return [y[:rows] for y in results]
        outputs = outputs or [y.new_empty(len(x), y.shape[1]) for y in results]
        for whole, y in zip(outputs, results, strict=True):
            whole[start : start + rows] = y[:rows]
    return outputs
