"""norm: the residual addition and the RMSNorm after it, in one pass over the hidden states; the norm's gradient.

    x[t] = x[t] + delta[t]                                            rounded to x's dtype, in place; delta may be None
    y[t] = gain[row t] * (x[t] / sqrt(mean(x[t]^2) + eps))            fp32 from the rounded x on, rounded once
    dx   = (s - n mean(s n)) / rms,  n = x / rms,  s = gain * dy      fp32, rounded once

Contract: gain, fp32, is the norm's weight with the rollout's noise in it (engine/norms.py): one row for all tokens, row
t for token t, or row index[t]. Rows of all arguments may be far apart. A token's bits depend on its own row alone.

    device, dtype of x      path
    CUDA, bf16              add_rms_norm.py, rms_norm_grad.py: Triton, one program a token, each byte moved once
    anything else           reference.py

Called by the engine's decoder and by nn/rmsnorm.py. The Triton kernel reads gain and index while kernels before it run:
neither may come from one of the kernels that overlap (overlap.py), and a gain from the kernel right before needs
`new_gain`. Leaves out the gain's gradient (nn/rmsnorm.py) and norms of heads (kernels/rope).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from qerl.kernels.announcement import Announcement
from qerl.kernels.norm.reference import add_rms_norm_reference_, rms_norm_grad_reference


def add_rms_norm_(
    x: Float[Tensor, "t h"],
    delta: Float[Tensor, "t h"] | None,
    gain: Float32[Tensor, "*rows h"],
    eps: float,
    index: Int64[Tensor, " t"] | None = None,
    *,
    new_gain: bool = False,
    announcement: Announcement | None = None,
    room: int = 0,
) -> Float[Tensor, "t h"]:
    """Add `delta` to x in place; the norm of the sum. gain is [h], [1, h], [t, h], or the rows that `index` names.

    new_gain: the kernel right before may have written it, so that one has to be over before anything is read;
    announcement: of the result; room: columns to leave behind its rows (room.py), for who can.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        from qerl.kernels.norm.add_rms_norm import add_rms_norm_bf16_  # Triton is there where CUDA is

        return add_rms_norm_bf16_(x, delta, gain, eps, index, new_gain=new_gain, announcement=announcement, room=room)
    return add_rms_norm_reference_(x, delta, gain, eps, index)


def rms_norm_grad(
    dy: Float[Tensor, "t h"],
    x: Float[Tensor, "t h"],
    gain: Float32[Tensor, "*rows h"],
    eps: float,
    index: Int64[Tensor, " t"] | None = None,
) -> Float[Tensor, "t h"]:
    """dx of the norm alone; `gain` and `index` as in `add_rms_norm_`."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        from qerl.kernels.norm.rms_norm_grad import rms_norm_grad_bf16

        return rms_norm_grad_bf16(dy, x, gain, eps, index)
    return rms_norm_grad_reference(dy, x, gain if index is None else gain[index], eps)
