"""Decode steps as CUDA graphs: one launch for the several hundred of a step.

    run(step, num_slots, pages) -> a step of the next bucket up: first eager, the second time captured, then replayed

A step reads and writes tensors at fixed addresses only (runner.py), so one graph serves every step of its bucket:
slots rounded up to a power of two, pages of context to one or to 1.5 of one. The slots that a bucket has too many
run on a spare page and leave no trace; for pages past a sequence's end, attention starts programs that return at once.
A capture takes as long as some twenty steps, and graphs are captured anew after every update: so there are few buckets.
Graphs belong to a runner, whose buffers, cache and sampling parameters are in them, and go when it goes: none can
outlive what it reads. Without CUDA, steps run as they are, on exactly the slots in use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MIN_SLOTS = 8
MIN_PAGES = 8

Step = Callable[[int, int], None]
"""(slots, pages of context) -> nothing: advances the slots' state in place."""


class StepRunner:
    """Runs a runner's step, always the same one, by graph where that is possible."""

    def __init__(self, *, max_slots: int, max_pages: int, device: torch.device, graphs: bool) -> None:
        self._max_slots, self._max_pages = max_slots, max_pages
        self._bucketed = device.type == "cuda"
        self._use_graphs = graphs and self._bucketed
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None

    def bucket(self, num_slots: int, pages: int) -> tuple[int, int]:
        """The sizes that a step really runs at; the same with and without graphs, so that both give the same bits."""
        if not self._bucketed:
            return num_slots, pages
        slots = max(MIN_SLOTS, 1 << (num_slots - 1).bit_length())
        whole = max(MIN_PAGES, 1 << (pages - 1).bit_length())
        rung = whole * 3 // 4 if whole > MIN_PAGES and pages <= whole * 3 // 4 else whole
        return min(slots, self._max_slots), min(rung, self._max_pages)

    def run(self, step: Step, num_slots: int, pages: int) -> None:
        """One decode step over at least these slots and pages.

        The step is no attribute: it belongs to the runner, and a cycle would keep graphs and cache until collected.
        """
        bucket = self.bucket(num_slots, pages)
        if not self._use_graphs or bucket not in self._graphs:
            self._graphs[bucket] = None  # the first step of a bucket also sizes the buffers and compiles the kernels
            step(*bucket)
            return
        graph = self._graphs[bucket]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                step(*bucket)
            self._graphs[bucket] = graph
        graph.replay()
