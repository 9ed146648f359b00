"""activation: SwiGLU, from the gate and up halves of one product to the input of the next.

    y = round(silu(gate)) * up        silu(x) = x / (1 + e^-x), in fp32; rounded as the trainer's forward rounds

Contract: rows of gate and up may be far apart (views of one product's output); y is contiguous.

    device, dtype         path
    CUDA, bf16            swiglu.py: Triton, each byte read and written once
    anything else         reference.py

Called by the engine's decoder. Leaves out gradients.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.activation.reference import swiglu_reference


def swiglu(gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"]) -> Float[Tensor, "t n"]:
    """silu(gate) * up."""
    if gate.is_cuda and gate.dtype == torch.bfloat16:
        from qerl.kernels.activation.swiglu import swiglu_bf16  # Triton is there where CUDA is

        return swiglu_bf16(gate, up)
    return swiglu_reference(gate, up)
