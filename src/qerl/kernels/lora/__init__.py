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

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.lora.reference import TILE, Expansion, add_expanded_reference_

__all__ = ["TILE", "Expansion", "add_expanded_"]


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
