"""Decode steps as CUDA graphs: one launch for the several hundred of a step.

    run(step, num_slots, pages) -> a step of the next bucket up: first eager, the second time captured, then replayed

A step reads and writes tensors at fixed addresses only (runner.py), so one graph serves every step of its bucket. The
slots that a bucket has too many run on a spare page and leave no trace; for pages past a sequence's end, attention
starts programs that return at once.

    tokens  of each slot: one, or with guesses (speculation.py) some
    slots   powers of two, and all; from MIN_SLOTS on where each has one token
    pages   all that a sequence can have, a quarter, a sixteenth, ... down to the first whose programs are few (IDLE),
            and not below MIN_PAGES

A capture takes as long as some ten steps, so there are few buckets: with few slots, one alone. Graphs belong to a
runner, whose buffers and sampling parameters are in them with the cache's address, and go when it goes: none can
outlive what it reads. Without CUDA, steps run as they are, on exactly the slots in use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from qerl.engine.kv_cache import PAGE_SIZE
from qerl.kernels.attention import SPLIT_TOKENS

MIN_SLOTS = 8
MIN_PAGES = 8
IDLE = 2048
"""Programs of which it does not matter how many have nothing to do: a GPU starts as many in a microsecond or two."""

Step = Callable[[int, int, int], None]
"""(slots, pages of context, tokens a slot) -> nothing: advances the slots' state in place."""


def num_splits(pages: int) -> int:
    """Programs that decode attention starts for a sequence and key head, at most, with a table so wide."""
    return -(-pages * PAGE_SIZE // SPLIT_TOKENS)


def power_of_two(number: int) -> int:
    """The smallest that is not less than a number from 1 on."""
    return 1 << (number - 1).bit_length()


def bucket_slots(num_slots: int, max_slots: int, tokens: int = 1) -> int:
    """Slots that a GPU's step runs for so many in use, with so many tokens of each."""
    return min(max(MIN_SLOTS if tokens == 1 else 1, power_of_two(num_slots)), max_slots)


class StepRunner:
    """Runs a runner's step, always the same one, by graph where that is possible."""

    def __init__(
        self, *, max_slots: int, max_pages: int, kv_heads: int | None, device: torch.device, graphs: bool
    ) -> None:
        """kv_heads: None where decode attention reads all that the table names, so that wide ones are slow."""
        self._max_slots, self._max_pages, self._kv_heads = max_slots, max_pages, kv_heads
        self._bucketed = device.type == "cuda"
        self._use_graphs = graphs and self._bucketed
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None

    def bucket(self, num_slots: int, pages: int, tokens: int) -> tuple[int, int, int]:
        """The sizes that a step really runs at; the same with and without graphs, so that both give the same bits."""
        if not self._bucketed:
            return num_slots, pages, tokens
        slots, width = bucket_slots(num_slots, self._max_slots, tokens), self._max_pages
        while (narrower := -(-width // 4)) >= max(MIN_PAGES, pages) and self._minds(slots, width):
            width = narrower
        return slots, width, tokens

    def _minds(self, slots: int, pages: int) -> bool:
        """Whether it takes time when most of a table so wide is empty."""
        return self._kv_heads is None or slots * self._kv_heads * num_splits(pages) > IDLE

    def run(self, step: Step, num_slots: int, pages: int, tokens: int) -> None:
        """One decode step over at least these slots and pages, of exactly so many tokens a slot.

        The step is no attribute: it belongs to the runner, and a cycle would keep graphs and cache until collected.
        """
        bucket = self.bucket(num_slots, pages, tokens)
        if not self._use_graphs or bucket not in self._graphs:
            step(*bucket)
            self._graphs[bucket] = None  # it has also sized the buffers and compiled the kernels
            return
        graph = self._graphs[bucket]
        if graph is not None:
            graph.replay()
            return
        graph = torch.cuda.CUDAGraph()
        with _told_as_lack_of_memory():
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
                step(*bucket)
            graph.replay()
        self._graphs[bucket] = graph


@contextmanager
def _told_as_lack_of_memory() -> Generator[None]:
    """The driver needs memory for a graph's nodes; where that is missing, the engine makes room as for a tensor."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(f"no memory for a CUDA graph: {error}") from error


@contextmanager
def _no_collection() -> Generator[None]:
    """What garbage collection ends may wait for the device (mapped.py), which would break a capture off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
