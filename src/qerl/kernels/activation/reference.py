"""SwiGLU by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def swiglu_reference(gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"]) -> Float[Tensor, "t n"]:
    """`swiglu`."""
    return F.silu(gate) * up


def swiglu_grad_reference(
    dy: Float[Tensor, "t n"], gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"]
) -> tuple[Float[Tensor, "t n"], Float[Tensor, "t n"]]:
    """`swiglu_grad`."""
    dgate = torch.ops.aten.silu_backward(dy.float() * up.float(), gate.float())
    return dgate.to(gate.dtype), dy * F.silu(gate)
