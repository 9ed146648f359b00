"""Head norms, rotation and copy by torch, operation by operation in q's dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from qerl.kernels.e4m3 import encode
from qerl.kernels.norm.reference import rms_norm_reference


class HeadNorms(NamedTuple):
    """RMSNorms over each head of q and of k (Qwen3)."""

    q_gain: Float32[Tensor, " d"]
    k_gain: Float32[Tensor, " d"]
    eps: float


class Rotation(NamedTuple):
    """What becomes of the heads of t tokens."""

    cos: Float[Tensor, "t half"]
    """Of the angles at each token's position, in the heads' dtype."""
    sin: Float[Tensor, "t half"]
    norms: HeadNorms | None = None
    """Before the rotation."""


class Destination(NamedTuple):
    """Where keys and values of t tokens are kept."""

    pages: Float[Tensor, "2 pages page_size kv_heads d"] | UInt8[Tensor, "2 pages page_size kv_heads d"]
    """Keys, then values, or their codes; contiguous."""
    rows: Int64[Tensor, " t"]
    """page * page_size + offset of each token. Tokens that share a row leave one of theirs there."""
    scales: Float32[Tensor, "2 pages kv_heads page_size"] | None = None
    """Of codes; contiguous."""


def rotate_and_store_reference_(
    q: Float[Tensor, "t heads d"],
    k: Float[Tensor, "t kv_heads d"],
    v: Float[Tensor, "t kv_heads d"],
    rotation: Rotation,
    destination: Destination | None = None,
) -> None:
    """`rotate_and_store_`."""
    cos, sin, norms = rotation
    if norms is not None:
        q.copy_(rms_norm_reference(q, norms.q_gain, norms.eps))
        k.copy_(rms_norm_reference(k, norms.k_gain, norms.eps))
    for x in (q, k):
        x.copy_(_rotated(x, cos[:, None], sin[:, None]))
    if destination is not None:
        pages, rows, scales = destination
        for i, x in enumerate((k, v)):
            if scales is not None:
                x, of_heads = encode(x)
                scales[i].transpose(1, 2)[rows // pages.shape[2], rows % pages.shape[2]] = of_heads
            pages[i].flatten(0, 1).index_copy_(0, rows, x)


def _rotated(x: Float[Tensor, "t heads d"], cos: Float[Tensor, "t 1 half"], sin: Float[Tensor, "t 1 half"]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
