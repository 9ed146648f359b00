"""Causal attention over paged keys and values: of prompts, whole or in chunks, and of a few new tokens a sequence.

    y = softmax(q K^T * scale) V       K, V: of the token's own sequence, up to itself

All are made once a forward pass and called once a layer, as attend(layer, q, k, v, rotation), with what the q, k, v
product gave: they rotate (kernels/rope), store keys and values, attend.

    PromptAttention   whole prompts, whose keys and values nobody keeps: the probe's
    ChunkAttention    a chunk that starts a sequence is its own whole context, one that continues it reads its pages
    DecodeAttention   of the last token of each sequence, or the last few: goes over pages (kernels/attention)

`alone`: a token's bits depend on its own sequence alone, and there on what precedes it. Every sequence is attended to
in a call of its own, except by decode attention's kernel on a GPU, which takes new tokens of a sequence apart instead.

Leaves out sliding windows (engine/model.py refuses contexts that would need one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from qerl.engine.kv_cache import PAGE_SIZE, KVCache, num_pages
from qerl.kernels.announcement import Announcement
from qerl.kernels.attention import decode_attention
from qerl.kernels.rope import Destination, Rotation, rotate_and_store_
from qerl.kernels.slots import locate
from qerl.nn.attention import Packing, attend_packed


@runtime_checkable
class Attention(Protocol):
    """What the decoder calls in every layer."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "t heads d"],
        k: Float[Tensor, "t kv_heads d"],
        v: Float[Tensor, "t kv_heads d"],
        rotation: Rotation,
        announcement: Announcement | None = None,
    ) -> Float[Tensor, "t heads_d"]:
        """Attention of t tokens; heads are concatenated in the result. q and k may be rotated in place.

        announcement: of the result, for who can.
        """
        ...


class PromptAttention:
    """Several prompts in one row of tokens, as `Packing` says; each sees itself only."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._packing = Packing(ends.to(device), tuple(lengths))

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, announcement: Announcement | None = None
    ) -> Tensor:
        """See `Attention`."""
        rotate_and_store_(q, k, v, rotation)
        return self.of_rotated(q, k, v)

    def of_rotated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same of rotated queries and keys."""
        return attend_packed(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self._packing).flatten(1)


class ChunkAttention:
    """Several chunks in one row of tokens, each at the end of what its sequence's pages hold.

    A chunk may read pages that another one of the row fills, since all are stored before any attends.
    """

    def __init__(
        self,
        cache: KVCache,
        starts: Sequence[int],
        lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        alone: bool = False,
    ) -> None:
        """Of each chunk: tokens before it, its own, and its sequence's pages. Those that nothing precedes come last."""
        device = cache.pool.device
        self._cache = cache
        rows = [
            (torch.tensor(of_chunk)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[: start + length]
            for of_chunk, start, length in zip(pages, starts, lengths, strict=True)
        ]
        self._rows = torch.cat([r[start:] for r, start in zip(rows, starts, strict=True)]).to(device)
        num_continued = sum(start > 0 for start in starts)
        assert all(starts[:num_continued]), "chunks that continue a sequence come first"
        self._contexts = [r.to(device) for r in rows[:num_continued]]
        self._lengths = list(lengths[:num_continued])
        whole = list(lengths[num_continued:])
        rows_of_calls = [[length] for length in whole] if alone else [whole] if whole else []
        self._whole = [(sum(of_call), PromptAttention(of_call, device)) for of_call in rows_of_calls]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, announcement: Announcement | None = None
    ) -> Tensor:
        """See `Attention`. With fp8, a chunk sees its own keys and values as those see them that read its pages."""
        pages, scales = self._cache.of_layer(layer)
        rotate_and_store_(q, k, v, rotation, Destination(pages, self._rows, scales))
        outputs = []
        num_continued = sum(self._lengths)
        for queries, context in zip(q[:num_continued].split(self._lengths), self._contexts, strict=True):
            keys, values = (x.transpose(0, 1)[None] for x in self._cache.read(layer, context))
            mask = causal_lower_right(len(queries), len(context))
            y = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
            )
            outputs.append(y[0].transpose(0, 1).flatten(1))
        if self._whole and scales is not None:
            k, v = self._cache.read(layer, self._rows)
        first = num_continued
        for length, attend in self._whole:
            rows = slice(first, first := first + length)
            outputs.append(attend.of_rotated(q[rows], k[rows], v[rows]))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class DecodeAttention:
    """The last tokens of b sequences, as many of each, over its pages."""

    def __init__(
        self,
        cache: KVCache,
        page_table: Int64[Tensor, "b pages"],
        positions: Int64[Tensor, " tokens"],
        *,
        alone: bool = False,
    ) -> None:
        """positions: of the new tokens in their sequences, one sequence after the other; page_table has enough pages
        for the longest."""
        self._cache, self._page_table, self._alone = cache, page_table, alone
        self._rows, self._lengths = locate(page_table, positions, PAGE_SIZE)
        apart = alone and not positions.is_cuda
        self._pages = [num_pages(length) for length in self._lengths.tolist()] if apart else None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, announcement: Announcement | None = None
    ) -> Tensor:
        """See `Attention`."""
        pages, scales = self._cache.of_layer(layer)
        rotate_and_store_(q, k, v, rotation, Destination(pages, self._rows, scales))
        if self._pages is None:
            return decode_attention(
                q, pages, self._page_table, self._lengths, scales, announcement, alone=self._alone
            ).flatten(1)
        table = self._page_table.repeat_interleave(len(q) // len(self._page_table), 0)
        rows = [slice(i, i + 1) for i in range(len(q))]
        outputs = [
            decode_attention(q[i], pages, table[i, :n], self._lengths[i], scales)
            for i, n in zip(rows, self._pages, strict=True)
        ]
        return torch.cat(outputs).flatten(1)
