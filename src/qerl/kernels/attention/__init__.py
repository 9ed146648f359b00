"""Decode attention: the last token of each of b sequences, or the last few, over the keys and values of its pages.

    y[j, h] = softmax(q[j, h] K^T / sqrt(d)) V        K, V [lengths[j], d]: the rows of key head h / (heads / kv_heads)

    query j is of sequence i = j / (len(q) / b), whose token t lives in page page_table[i, t / page_size],
    row t % page_size; a sequence's queries are neighbours in it, so lengths[j + 1] = lengths[j] + 1

Contract: scores, softmax and sums are float32, whatever the dtype of q and pages (the same one); the result is rounded
once. 8-bit pages hold E4M3 codes, with a scale for each head of a token (kernels/e4m3.py): K and V are code * scale.
Only rows below a query's length count, if those of a sequence's later queries are finite; table entries past it may
name any page. Sequences may share pages. Where the Triton kernels run, a query's bits depend on its own sequence alone,
not on the rest of the batch or the width of the table; and not on the sequence's other queries if each is `alone`.

    device, dtype, head_dim              path
    CUDA, bf16, 16, 32, 64 or 128        paged.py: Triton, every byte of K and V read once
    anything else                        reference.py: copies the pages (8-bit ones: in q's dtype), torch's attention

Called by the engine's decode steps, which have written the new tokens' keys and values before. The Triton kernel may
read page_table, lengths and the rows of all tokens before each sequence's queries while kernels before it run: these
were written before the last kernel that lets nobody start early, and not by it (overlap.py; in a decode step that is
the look-up of rotary angles). Leaves out prompts (hundreds of query tokens a sequence) and sliding windows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from qerl.kernels.announcement import Announcement
from qerl.kernels.attention.reference import decode_attention_reference

HEAD_DIMS = (16, 32, 64, 128)
SPLIT_TOKENS = 128
"""Tokens of one result of the kernel, which in float32 is 6 % of their keys and values (7 query heads a key head)."""


def has_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a GPU reads the pages of each sequence's length alone, by the kernel, and not all that a table names."""
    return dtype == torch.bfloat16 and head_dim in HEAD_DIMS


def decode_attention(
    q: Float[Tensor, "queries heads d"],
    pages: Float[Tensor, "2 pages page_size kv_heads d"] | UInt8[Tensor, "2 pages page_size kv_heads d"],
    page_table: Int64[Tensor, "b columns"],
    lengths: Int64[Tensor, " queries"],
    scales: Float32[Tensor, "2 pages kv_heads page_size"] | None = None,
    announcement: Announcement | None = None,
    *,
    alone: bool = False,
) -> Float[Tensor, "queries heads d"]:
    """Attention of as many queries of each sequence. `pages` has keys, then values; lengths, at least 1, count the
    query's own token.

    scales: of pages of codes; announcement: of the result; alone: a query has the bits that it has without the others
    of its sequence.
    """
    if q.is_cuda and has_kernel(q.dtype, q.shape[-1]):
        from qerl.kernels.attention.paged import paged_attention  # Triton is there where CUDA is

        return paged_attention(q, pages, page_table, lengths, scales, announcement, alone=alone)
    return decode_attention_reference(q, pages, page_table, lengths, scales)
