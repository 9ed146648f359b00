"""Memory for keys and values: a pool of pages, each with a reference count, and the tensor behind it.

    KVCache.pool  [layers, 2 (k, v), pages, page_size, kv_heads, head_dim]
    with fp8      E4M3 codes, and scales [layers, 2, pages, kv_heads, page_size] (kernels/e4m3.py)
    a sequence    page ids [p0, p1, ...]; its token t lives in page p[t // page_size], row t % page_size

A group's prompt is run once. Its full pages are shared by all completions (one reference each, and one of the group's);
its last, partly filled page is copied for every completion:

    prompt of 10 tokens, page_size 4      completion 0 reads [A B d ..]      d, e: copies of C
    pages A B C                           completion 1 reads [A B e ..]

`PagePool` is the book-keeping of one call of `generate` (plain integers), so no page outlives a policy or noise update.
`KVCache` is the tensor. Where the memory can be given back under an address that stays (mapped.py), it outlives
`sleep`, and so may what holds its address; elsewhere it lives from `wake` to `sleep`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from qerl.engine.mapped import reserve
from qerl.kernels.e4m3 import decode

PAGE_SIZE = 16
"""Tokens a page: about half of that is unused at the end of a sequence, and a page's rows are read in one run."""


def num_pages(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_SIZE)


def token_bytes(kv_heads: int, head_dim: int, activation_bytes: int, *, fp8: bool) -> int:
    """Key and value of one token in one layer: numbers of the activations' size, or codes and a float32 a head."""
    return 2 * kv_heads * (head_dim + 4 if fp8 else head_dim * activation_bytes)


class PagePool:
    """Which pages are free, and how many sequences hold each of the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._references = [0] * size

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take so many free pages, with one reference each. The caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert self._references[page] == 0, f"page {page} is free and held"
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more sequence holds these pages."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is shared but free"
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One sequence less holds these pages; those that nobody holds are free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def assert_all_free(self) -> None:
        """Nothing leaked: called when no sequence is left."""
        assert sorted(self._free) == list(range(self.size)), f"{self.size - len(self._free)} pages leaked"


class KVCache:
    """The keys and values of all pages, of all layers, in one tensor (fp8: two) that stays where it is.

    Awake when made. Every life begins with zeros: attention gives rows past a sequence's end the weight 0, and 0 * NaN
    would be NaN.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
    ) -> None:
        """dtype: of the activations, and of what is kept unless that is E4M3 codes. torch.OutOfMemoryError."""
        self._dtype = dtype
        kept = torch.uint8 if fp8 else dtype
        shape = layers, 2, pages, PAGE_SIZE, kv_heads, head_dim
        of_scales = layers, 2, pages, kv_heads, PAGE_SIZE
        pool_bytes = math.prod(shape) * kept.itemsize
        num_bytes = pool_bytes + (math.prod(of_scales) * torch.float32.itemsize if fp8 else 0)
        self._memory = reserve(num_bytes, device)
        if self._memory is None:
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._memory.map()
            self._bytes = self._memory.tensor().zero_()
        self._is_awake = True
        self.pool: Shaped[Tensor, "layers 2 pages page kv_heads head_dim"] = (
            self._bytes[:pool_bytes].view(kept).view(shape)
        )
        self.scales: Float32[Tensor, "layers 2 pages kv_heads page"] | None = None
        if fp8:
            self.scales = self._bytes[pool_bytes:num_bytes].view(torch.float32).view(of_scales)

    def sleep(self) -> bool:
        """Give the memory back, and keep its address; False where that cannot be, and the cache has to go instead."""
        if self._memory is None:
            return False
        self._is_awake = False
        self._memory.unmap()
        return True

    def wake(self) -> None:
        """Be ready for use, after `sleep` or without. torch.OutOfMemoryError: it sleeps on."""
        if self._memory is not None and not self._is_awake:
            self._memory.map()
            self._bytes.zero_()
            self._is_awake = True  # memory that is there and was not cleared, after an interrupt, is not enough

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pool.shape[2]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Pages, and scales of codes, as kernels/rope writes and kernels/attention reads them."""
        return self.pool[layer], None if self.scales is None else self.scales[layer]

    def read(self, layer: int, rows: Int64[Tensor, " t"]) -> Float[Tensor, "2 t kv_heads head_dim"]:
        """Keys and values of t tokens, each in row page * PAGE_SIZE + offset, in the activations' dtype."""
        pages, scales = self.of_layer(layer)
        numbers = pages.flatten(1, 2)[:, rows]
        if scales is None:
            return numbers
        return decode(numbers, scales.transpose(2, 3)[:, rows // PAGE_SIZE, rows % PAGE_SIZE], self._dtype)

    def copy_pages(self, source: Int64[Tensor, " n"], target: Int64[Tensor, " n"]) -> None:
        """Copy n whole pages, in every layer. No page is both source and target."""
        for tensor in (self.pool, self.scales):
            if tensor is not None:
                tensor[:, :, target] = tensor[:, :, source]
