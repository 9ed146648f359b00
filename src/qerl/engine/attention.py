"""Causal attention over paged keys and values: of whole prompts, and of one new token a sequence.

    y = softmax(q K^T * scale) V       K, V: of the token's own sequence, up to itself

Both classes are made once a forward pass and called once a layer, as attend(layer, q, k, v), with rotated q and k,
after k and v were stored where `destination(layer)` says. `PromptAttention` needs no page table, since a prompt is its
own whole context; `DecodeAttention` goes over pages (kernels/attention). Leaves out sliding windows (engine/model.py
refuses contexts that would need one) and prompts that are continued from pages.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from qerl.engine.kv_cache import PAGE_SIZE, KVCache
from qerl.kernels.attention import decode_attention
from qerl.kernels.rope import Destination
from qerl.nn.attention import Packing, attend_packed


@runtime_checkable
class Attention(Protocol):
    """What the decoder calls in every layer."""

    def destination(self, layer: int) -> Destination | None:
        """Where the layer's k and v must be before the call; None: they are not kept."""
        ...

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "t heads d"],
        k: Float[Tensor, "t kv_heads d"],
        v: Float[Tensor, "t kv_heads d"],
    ) -> Float[Tensor, "t heads_d"]:
        """Attention of t tokens; heads are concatenated in the result."""
        ...


class PromptAttention:
    """Several prompts in one row of tokens, as `Packing` says; each sees itself only."""

    def __init__(
        self, lengths: list[int], device: torch.device, write_to: tuple[KVCache, Int64[Tensor, " t"]] | None = None
    ) -> None:
        """write_to: a cache, and the row in it of each token; None: keys and values are not kept."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._packing = Packing(ends.to(device), tuple(lengths))
        self._write_to = write_to

    def destination(self, layer: int) -> Destination | None:
        """See `Attention`."""
        if self._write_to is None:
            return None
        cache, rows = self._write_to
        return Destination(cache.pool[layer], rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention`."""
        return attend_packed(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self._packing).flatten(1)


class DecodeAttention:
    """One token of each of b sequences, at the end of its pages."""

    def __init__(self, cache: KVCache, page_table: Int64[Tensor, "b pages"], positions: Int64[Tensor, " b"]) -> None:
        """positions: of the new token in its sequence; page_table has enough pages for the longest."""
        self._cache, self._page_table, self._lengths = cache, page_table, positions + 1
        page = page_table.gather(1, positions[:, None] // PAGE_SIZE)[:, 0]
        self._rows = page * PAGE_SIZE + positions % PAGE_SIZE

    def destination(self, layer: int) -> Destination:
        """See `Attention`."""
        return Destination(self._cache.pool[layer], self._rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention`."""
        return decode_attention(q, self._cache.pool[layer], self._page_table, self._lengths).flatten(1)
