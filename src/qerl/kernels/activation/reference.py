"""SwiGLU by torch."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def swiglu_reference(gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"]) -> Float[Tensor, "t n"]:
    """`swiglu`."""
    return F.silu(gate) * up
