"""activation: SwiGLU, from the gate and up halves of one product to the input of the next; its gradient.

    y     = round(silu(gate)) * up                       silu(x) = x s, s = 1 / (1 + e^-x), in fp32
    dgate = dy * up * s (1 + gate (1 - s))               dup = dy * round(silu(gate))

silu is rounded to the numbers' dtype, as transformers' two operations round it; each result is rounded once.

Contract: rows of gate and up may be far apart (views of one product's output); gradients are contiguous.

    device, dtype         path
    CUDA, bf16            swiglu.py, swiglu_grad.py: Triton, each byte read and written once
    anything else         reference.py

Called by the engine's decoder and by nn/mlp.py.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.activation.reference import swiglu_grad_reference, swiglu_reference
from qerl.kernels.announcement import Announcement


def swiglu(
    gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"], announcement: Announcement | None = None, *, room: int = 0
) -> Float[Tensor, "t n"]:
    """silu(gate) * up. announcement: of the result; room: columns to leave behind its rows (room.py), for who can."""
    if gate.is_cuda and gate.dtype == torch.bfloat16:
        from qerl.kernels.activation.swiglu import swiglu_bf16  # Triton is there where CUDA is

        return swiglu_bf16(gate, up, announcement, room)
    return swiglu_reference(gate, up)


def swiglu_grad(
    dy: Float[Tensor, "t n"], gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"]
) -> tuple[Float[Tensor, "t n"], Float[Tensor, "t n"]]:
    """dgate, dup."""
    if gate.is_cuda and gate.dtype == torch.bfloat16:
        from qerl.kernels.activation.swiglu_grad import swiglu_grad_bf16

        return swiglu_grad_bf16(dy, gate, up)
    return swiglu_grad_reference(dy, gate, up)
