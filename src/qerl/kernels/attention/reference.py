"""Decode attention by torch: pages copied side by side, what lies past each sequence's end masked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from qerl.kernels.e4m3 import decode

_COPY_BYTES = 1 << 21
"""Pages copied at a time: what a CPU's cache holds, and memory that its allocator gives again without page faults."""


def decode_attention_reference(
    q: Float[Tensor, "queries heads d"],
    pages: Float[Tensor, "2 pages page_size kv_heads d"] | UInt8[Tensor, "2 pages page_size kv_heads d"],
    page_table: Int64[Tensor, "b columns"],
    lengths: Int64[Tensor, " queries"],
    scales: Float32[Tensor, "2 pages kv_heads page_size"] | None = None,
) -> Float[Tensor, "queries heads d"]:
    """`decode_attention`, some queries at a time, each alone. Rows past a sequence's end must be finite."""
    kv_heads = pages.shape[3]
    page_table = page_table.repeat_interleave(len(q) // len(page_table), 0)
    num_rows = page_table.shape[1] * pages.shape[2]
    past = torch.arange(num_rows, device=q.device) >= lengths[:, None]
    mask = torch.zeros(past.shape, dtype=q.dtype, device=q.device).masked_fill_(past, -torch.inf)[:, None, None]
    # The query heads that share a key head are the rows of one product, so keys and values are not repeated.
    rows = q.unflatten(1, (kv_heads, -1))
    at_once = max(1, _COPY_BYTES // (page_table.shape[1] * pages[:, 0].nbytes))
    outputs = []
    for r, table, m in zip(rows.split(at_once), page_table.split(at_once), mask.split(at_once), strict=True):
        copies = pages.index_select(1, table.flatten())
        if scales is not None:
            copies = decode(copies, scales.index_select(1, table.flatten()).transpose(2, 3), q.dtype)
        keys, values = copies.view(2, len(table), num_rows, kv_heads, -1).transpose(2, 3)
        outputs.append(F.scaled_dot_product_attention(r, keys, values, attn_mask=m).flatten(1, 2))
    return torch.cat(outputs)
