"""rope: what stands between the q, k, v product and attention, in one pass: head norms, rotation, k and v into pages.

    x = gain * x / rms(x)                                   each head x of q and of k, where the model has such norms
    x1, x2 = x1 cos - x2 sin, x2 cos + x1 sin               x1, x2: the halves of a head
    pages[0][row of t], pages[1][row of t] = k[t], v[t]     where keys and values are kept; 8-bit: their codes and
                                                            scales (kernels/e4m3.py)

Contract: q and k are changed in place (they are views of the product's output); v is read. All are rounded as the
trainer's forward rounds them: to their dtype after the norm, after each multiplication and after the sum. The rotation
is exact to the bit on every path, and so are codes and scales. Heads of a token are adjacent, tokens may be far apart.

    device, dtype                 path
    CUDA, bf16, d a power of two  rotate.py: Triton, each byte read and written once
    anything else                 reference.py

Called by nn/self_attention.py in training, and by the engine's attention. Leaves out rotations of a part of the head.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.rope.reference import Destination, HeadNorms, Rotation, rotate_and_store_reference_

__all__ = ["Destination", "HeadNorms", "Rotation", "rotate_and_store_"]


def rotate_and_store_(
    q: Float[Tensor, "t heads d"],
    k: Float[Tensor, "t kv_heads d"],
    v: Float[Tensor, "t kv_heads d"],
    rotation: Rotation,
    destination: Destination | None = None,
) -> None:
    """Norm and rotate q and k in place, then copy k and v to `destination`."""
    d = q.shape[-1]
    if q.is_cuda and q.dtype == torch.bfloat16 and d & (d - 1) == 0:
        from qerl.kernels.rope.rotate import rotate_and_store_bf16_  # Triton is there where CUDA is

        rotate_and_store_bf16_(q, k, v, rotation, destination)
    else:
        rotate_and_store_reference_(q, k, v, rotation, destination)
