"""Slots and pages: shared prompts, copies of the last page, worst-case reservation, nothing leaked or overtaken."""

from __future__ import annotations

import random

import pytest
import torch

from qerl.engine.kv_cache import PAGE_SIZE, KVCache, PagePool, num_pages
from qerl.engine.scheduler import MAX_PREFILL_TOKENS, Group, Scheduler
from qerl.types import Request


def group(prompt: int, samples: int, max_new: int, index: int = 0) -> Group:
    return Group(index, Request(list(range(prompt)), list(range(samples)), max_new))


def test_pages_of_a_group_are_shared_up_to_the_partial_one() -> None:
    pool = PagePool(40)
    scheduler = Scheduler([group(2 * PAGE_SIZE + 3, 3, 20)], pool, 8)
    admission = scheduler.admit()
    first, second, third = admission.started
    assert [g.index for g in admission.prompts] == [0]
    assert all(len(r.pages) == num_pages(2 * PAGE_SIZE + 23) for r in admission.started)
    assert first.pages[:2] == second.pages[:2] == third.pages[:2]
    own = [page for r in admission.started for page in r.pages[2:]]
    assert len(set(own)) == len(own)
    assert first.copied_page == (third.pages[2], first.pages[2])
    assert second.copied_page == (third.pages[2], second.pages[2])
    assert third.copied_page is None
    assert pool.num_free == 40 - 2 - 3 * 2
    scheduler.finish([2])
    assert pool.num_free == 40 - 2 - 2 * 2
    scheduler.finish([0, 1])
    assert scheduler.is_done
    pool.assert_all_free()


def test_a_prompt_of_whole_pages_copies_nothing() -> None:
    scheduler = Scheduler([group(2 * PAGE_SIZE, 2, 1)], PagePool(10), 8)
    assert [r.copied_page for r in scheduler.admit().started] == [None, None]


def test_a_group_larger_than_the_slots_is_prefilled_once() -> None:
    pool = PagePool(100)
    scheduler = Scheduler([group(5, 5, 4), group(5, 1, 4, index=1)], pool, 2)
    admission = scheduler.admit()
    assert len(admission.prompts) == 1 and len(admission.started) == 2
    scheduler.finish([0])
    again = scheduler.admit()
    assert again.prompts == [] and [r.sample for r in again.started] == [2]
    scheduler.finish([0, 1])
    assert [r.sample for r in scheduler.admit().started] == [3, 4]
    scheduler.finish([1])
    assert [g.index for g in scheduler.admit().prompts] == [1]
    scheduler.finish([0, 1])
    pool.assert_all_free()


def test_moves_fill_the_holes_from_the_end() -> None:
    scheduler = Scheduler([group(1, 6, 1)], PagePool(10), 6)
    scheduler.admit()
    moves = scheduler.finish([1, 4, 3])
    assert sorted(moves) == [(5, 1)]
    assert [r.sample for r in scheduler.running] == [0, 5, 2]
    scheduler = Scheduler([group(1, 6, 1)], PagePool(10), 6)
    scheduler.admit()
    state = list(range(6))
    for source, target in scheduler.finish([0, 2]):
        state[target] = state[source]
    assert state[:4] == [r.sample for r in scheduler.running]


def test_a_prefill_is_bounded_but_a_long_prompt_runs() -> None:
    pool = PagePool(10_000)
    scheduler = Scheduler([group(n, 1, 1) for n in (MAX_PREFILL_TOKENS + 5, 10, MAX_PREFILL_TOKENS - 10, 1)], pool, 8)
    sizes = []
    while scheduler.waiting:
        sizes.append([g.prompt_length for g in scheduler.admit().prompts])
    assert sizes == [[MAX_PREFILL_TOKENS + 5], [10, MAX_PREFILL_TOKENS - 10], [1]]


def test_random_loads_end_with_every_page_free() -> None:
    rng = random.Random(0)
    for _ in range(50):
        groups = [group(rng.randint(1, 70), rng.randint(1, 6), rng.randint(1, 60), i) for i in range(12)]
        pool = PagePool(max(g.pages_alone for g in groups) + rng.randint(0, 20))
        scheduler = Scheduler(groups, pool, rng.randint(1, 9))
        order, prefilled = [], []
        while not scheduler.is_done:
            admission = scheduler.admit()
            order += [(r.group.index, r.sample) for r in admission.started]
            prefilled += [g.index for g in admission.prompts]
            held = {p for r in scheduler.running for p in r.pages} | {p for g in scheduler.waiting for p in g.pages}
            assert len(held) == pool.size - pool.num_free
            writable = [p for r in scheduler.running for p in r.pages[r.group.full_prompt_pages :]]
            assert len(set(writable)) == len(writable), "two completions write to one page"
            scheduler.finish(rng.sample(range(len(scheduler.running)), rng.randint(1, len(scheduler.running))))
        assert order == [(g.index, s) for g in groups for s in range(len(g.request.seeds))]
        assert prefilled == list(range(12))
        pool.assert_all_free()


def test_pool_refuses_misuse() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="leaked"):
        pool.assert_all_free()
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages[:1])
    with pytest.raises(AssertionError, match="shared but free"):
        pool.share(pages[:1])


def test_cache_reads_back_what_was_written_through_any_page_order() -> None:
    cache = KVCache(layers=2, pages=6, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    k, v = torch.randn(2, PAGE_SIZE + 3, 2, 4)
    pages = torch.tensor([4, 1])
    position = torch.arange(PAGE_SIZE + 3)
    cache.write(1, pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE, k, v)
    cache.copy_pages(torch.tensor([1]), torch.tensor([5]))
    for table in ([4, 1], [4, 5]):
        got_k, got_v = cache.read(1, torch.tensor([table]))
        assert torch.equal(got_k[0, : PAGE_SIZE + 3], k) and torch.equal(got_v[0, : PAGE_SIZE + 3], v)
    assert cache.pool[0].abs().sum() == 0
