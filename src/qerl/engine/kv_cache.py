"""Memory for keys and values: a pool of pages, each with a reference count, and the tensor behind it.

    KVCache.pool  [layers, 2 (k, v), pages, page_size, kv_heads, head_dim]
    a sequence    page ids [p0, p1, ...]; its token t lives in page p[t // page_size], row t % page_size

A group's prompt is run once. Its full pages are shared by all completions (one reference each); its last, partly filled
page is copied for every completion but the last to start, which takes the original:

    prompt of 10 tokens, page_size 4      completion 0 reads [A B d ..]      d, e: copies of C
    pages A B C                           completion 1 reads [A B e ..]
                                          completion 2 reads [A B C ..]

`PagePool` is the book-keeping (plain integers), `KVCache` the tensor. The scheduler takes for each completion, when it
starts, all pages that it can ever need, so nothing runs out midway. Leaves out: taking pages back from a running
completion, and pages that outlive a call of `generate` (a policy or noise update would make them stale).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

PAGE_SIZE = 16
"""Tokens a page: about half of that is unused at the end of a sequence, and a page's rows are read in one run."""


def num_pages(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_SIZE)


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
    """The keys and values of all pages, of all layers, in one tensor whose address never changes."""

    def __init__(
        self, *, layers: int, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros: attention gives rows past a sequence's end the weight 0, and 0 * NaN would be NaN.
        self.pool: Float[Tensor, "layers 2 pages page kv_heads head_dim"] = torch.zeros(
            layers, 2, pages, PAGE_SIZE, kv_heads, head_dim, dtype=dtype, device=device
        )
        # The same memory, addressed by token: row page * PAGE_SIZE + offset.
        self._rows = self.pool.flatten(2, 3)
        self._copies = self.pool[0, :, :0]

    def write(
        self, layer: int, rows: Int64[Tensor, " t"], k: Float[Tensor, "t kv_heads d"], v: Float[Tensor, "t kv_heads d"]
    ) -> None:
        """Store the keys and values of t tokens at their rows (page * PAGE_SIZE + offset)."""
        self._rows[layer, 0].index_copy_(0, rows, k)
        self._rows[layer, 1].index_copy_(0, rows, v)

    def read(
        self, layer: int, page_table: Int64[Tensor, "b pages"]
    ) -> tuple[Float[Tensor, "b t kv_heads d"], Float[Tensor, "b t kv_heads d"]]:
        """The pages of b sequences side by side, t = pages * PAGE_SIZE, until the next call overwrites them.

        Rows past a sequence's end are finite junk.
        """
        pages = page_table.flatten()
        self.reserve_copies(len(pages))
        copies = self._copies[:, : len(pages)]
        for source, copy in zip(self.pool[layer], copies, strict=True):
            torch.index_select(source, 0, pages, out=copy)
        k, v = copies.unflatten(1, page_table.shape).flatten(2, 3)
        return k, v

    def reserve_copies(self, pages: int) -> None:
        """Make room for what `read` returns. One buffer for all layers and steps: fresh memory would cost as much as
        the copy in page faults, and a CUDA graph needs its address to stay."""
        if self._copies.shape[1] < pages:
            self._copies = self.pool.new_empty(2, pages, *self.pool.shape[3:])

    def copy_pages(self, source: Int64[Tensor, " n"], target: Int64[Tensor, " n"]) -> None:
        """Copy n whole pages, in every layer. No page is both source and target."""
        self.pool[:, :, target] = self.pool[:, :, source]
