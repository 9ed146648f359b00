"""Decode attention: a new token of each of b sequences, over the keys and values of its pages and its own.

    q, k, v -> q and k normed and rotated, k and v into their page                            as kernels/rope has it
    y[i, h] = softmax(q[i, h] K^T / sqrt(d)) V        K, V [lengths[i], d]: the rows of key head h / (heads / kv_heads)

    token t of sequence i lives in page page_table[i, t / page_size], row t % page_size

Contract: scores, softmax and sums are float32, whatever the dtype of q and pages (the same one); the result is rounded
once. 8-bit pages hold E4M3 codes, with a scale for each head of a token (kernels/e4m3.py): K and V are code * scale,
those of the new token, too. Only rows below a sequence's length count; table entries past it may name any page.
Sequences may share pages; of new tokens that go to the same row, one is there afterwards, which others may have seen
(slots that no sequence is in do so). q and k are as the product gives them, and may be rotated in place. A sequence's
bits depend on its own tokens alone, not on the rest of the batch or the width of the table, where the Triton kernel
runs.

    device, dtype, head_dim              path
    CUDA, bf16, 16, 32, 64 or 128        kernels/rope, then paged.py: Triton, every byte of K and V read once
    anything else                        kernels/rope, then reference.py: copies the pages (8-bit ones: in q's dtype),
                                         torch's attention

Called by the engine's decode steps. Leaves out prompts (many query tokens a sequence) and sliding windows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from qerl.kernels.attention.reference import decode_attention_reference
from qerl.kernels.rope import Destination, Rotation, rotate_and_store_

HEAD_DIMS = (16, 32, 64, 128)


def decode_attention(
    q: Float[Tensor, "b heads d"],
    k: Float[Tensor, "b kv_heads d"],
    v: Float[Tensor, "b kv_heads d"],
    rotation: Rotation,
    destination: Destination,
    page_table: Int64[Tensor, "b columns"],
    lengths: Int64[Tensor, " b"],
) -> Float[Tensor, "b heads d"]:
    """Attention of b new tokens, whose keys and values are in `destination` afterwards.

    destination: all pages, and the row of each new token; lengths, at least 1, count it.
    """
    if q.is_cuda and q.dtype == torch.bfloat16 and q.shape[-1] in HEAD_DIMS:
        from qerl.kernels.attention.paged import paged_attention  # Triton is there where CUDA is

        return paged_attention(q, k, v, rotation, destination, page_table, lengths)
    rotate_and_store_(q, k, v, rotation, destination)
    return decode_attention_reference(q, destination.pages, page_table, lengths, destination.scales)
