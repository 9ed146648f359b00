"""Slots and pages: sharing, growth, interruption, chunks. Under any load all requests end once, and as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.engine.drafts import Chunk, Draft, Group, pages_alone
from qerl.engine.engine import step
from qerl.engine.kv_cache import PAGE_SIZE, KVCache, PagePool, num_pages
from qerl.engine.runner import Runner
from qerl.engine.scheduler import LOOKAHEAD, Scheduler
from qerl.engine.speculation import Speculation
from qerl.types import Completion, Request


def group(prompt: int, samples: int, max_new: int, index: int = 0) -> Group:
    return Group(index, Request([1000 * index + i for i in range(prompt)], list(range(samples)), max_new))


def scheduler_of(groups: list[Group], pool: PagePool, num_slots: int = 8, prefill_tokens: int = 8192) -> Scheduler:
    return Scheduler(groups, pool, num_slots=num_slots, prefill_tokens=prefill_tokens, longest_reach=1)


def after(scheduler: Scheduler, tokens: int) -> list[int]:
    """Everyone's tokens when each has gained so many."""
    return [draft.count + tokens for draft in scheduler.running]


def next_token(seed: int, context: Sequence[int]) -> int:
    """A model that looks at every token of its context. Token 0 ends a completion."""
    return hash((seed, *context)) % 100


def expected(group: Group, seed: int) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < group.request.max_new_tokens and 0 not in drawn:
        drawn.append(next_token(seed, group.tokens + drawn))
    return drawn


@dataclass
class Slot:
    draft: Draft
    drawn: list[int]
    table: dict[int, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.drawn[-1] == 0 or len(self.drawn) == self.draft.limit


class TokenRunner(Runner):
    """The runner's calls, with tokens themselves for keys and values: what is read is checked against what should be
    there, so a page that is stale, shared by mistake or written by two is seen at once."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], int] = {}
        self.ready: set[int] = set()
        self.slots: list[Slot] = []
        self.chunks: list[Chunk] = []

    def write(self, pages: Sequence[int] | dict[int, int], position: int, token: int) -> None:
        self.memory[pages[position // PAGE_SIZE], position % PAGE_SIZE] = token

    def read(self, pages: Sequence[int] | dict[int, int], length: int) -> list[int]:
        return [self.memory[pages[i // PAGE_SIZE], i % PAGE_SIZE] for i in range(length)]

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)
        for chunk in chunks:
            for i, token in enumerate(chunk.tokens):
                self.write(chunk.pages, chunk.start + i, token)
        for chunk in chunks:
            sequence = chunk.group.tokens
            if chunk.sample is not None:
                sequence = sequence + expected(chunk.group, chunk.group.request.seeds[chunk.sample])
            assert self.read(chunk.pages, chunk.stop) == sequence[: chunk.stop]
            if chunk.needs_logits:
                assert chunk.stop == chunk.group.prompt_length
                self.ready.add(chunk.group.index)

    def start(self, started: Sequence[Draft], first_slot: int) -> None:
        assert first_slot == len(self.slots)
        for draft in started:
            if draft.drawn is not None:
                self.slots.append(Slot(draft, list(draft.drawn.token_ids)))
                continue
            assert draft.group.index in self.ready
            for offset in range(draft.group.prompt_length % PAGE_SIZE):
                key = draft.pages[draft.group.full_pages], offset
                self.memory[key] = self.memory[draft.group.pages[-1], offset]
            prompt = self.read(draft.pages, draft.group.prompt_length)
            self.slots.append(Slot(draft, [next_token(draft.seed, prompt)]))

    def map_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        for slot, place, page in pages:
            self.slots[slot].table[place] = page

    def decode(self, num_slots: int, steps: int, tokens: int, pages: int) -> tuple[list[int], list[int]]:
        """In each step slots gain up to `tokens` tokens, as with guesses of which some are right."""
        assert num_slots == len(self.slots)
        for slot in [slot for slot in self.slots for _ in range(steps)]:
            for _ in range(1 + hash((slot.draft.age, len(slot.drawn))) % tokens):
                position = slot.draft.group.prompt_length + len(slot.drawn) - 1
                assert position // PAGE_SIZE < pages
                self.write(slot.table, position, slot.drawn[-1])  # slots that have ended write too
                context = self.read(slot.table, position + 1)
                assert context == slot.draft.group.tokens + slot.drawn
                if not slot.finished:
                    slot.drawn.append(next_token(slot.draft.seed, context))
        ended = [i for i, slot in enumerate(self.slots) if slot.finished]
        return ended, [len(slot.drawn) for slot in self.slots]

    def take(self, slots: Sequence[int], drafts: Sequence[Draft]) -> list[Completion]:
        assert [self.slots[slot].draft for slot in slots] == list(drafts)
        return [Completion(list(self.slots[slot].drawn), [], [], "length") for slot in slots]

    def move(self, moves: Sequence[tuple[int, int]], in_use: int) -> None:
        before = list(self.slots)
        for source, target in moves:
            assert target < in_use <= source
            self.slots[target] = before[source]
        del self.slots[in_use:]


def check_books(scheduler: Scheduler, pool: PagePool, groups: list[Group]) -> None:
    """Reference counts are what is held, no page is written by two, the queue is in order."""
    drafts = [*scheduler.running, *scheduler.waiting]
    held = Counter(page for owner in (*groups, *drafts) for page in owner.pages)
    assert [held[page] for page in range(pool.size)] == pool._references
    assert pool.num_free == pool.size - len(held)
    own = Counter(page for draft in drafts for page in draft.pages[draft.group.full_pages :])
    own.update(page for g in groups for page in g.pages[g.full_pages :])
    shared = {page for g in groups for page in g.pages[: g.full_pages]}
    assert all(count == 1 for count in own.values()) and not shared & set(own)
    assert [draft.age for draft in scheduler.waiting] == sorted(draft.age for draft in scheduler.waiting)
    if scheduler.running and scheduler.waiting:
        assert max(draft.age for draft in scheduler.running) < scheduler.waiting[0].age
    holders = {g.index for g in groups if g.pages and not g.num_running}
    assert holders <= {draft.group.index for draft in list(scheduler.waiting)[:1]}
    assert not any(draft.pages for draft in list(scheduler.waiting)[1:])


SHAPES = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 5), st.integers(1, 90)), min_size=1, max_size=6
)  # prompt tokens, completions, new tokens


@settings(deadline=None, max_examples=150)
@given(SHAPES, st.integers(0, 12), st.integers(1, 20), st.integers(16, 90), st.integers(1, 8))
def test_any_load_gives_every_completion_once_and_its_own_tokens(
    shapes: list[tuple[int, int, int]], spare: int, num_slots: int, prefill_tokens: int, steps_per_look: int
) -> None:
    groups = [group(*shape, index=i) for i, shape in enumerate(shapes)]
    pool = PagePool(max(pages_alone(prompt, new) for prompt, _, new in shapes) + spare)
    speculation = Speculation(is_on=steps_per_look % 2 == 0, steps_per_look=steps_per_look)
    ahead = speculation.longest_reach
    scheduler = Scheduler(groups, pool, num_slots=num_slots, prefill_tokens=prefill_tokens, longest_reach=ahead)
    runner, results = TokenRunner(), {}
    while not scheduler.is_done:
        with patch("qerl.engine.scheduler.LOOKAHEAD", ahead + 1):  # so careless that drafts give way all the time
            ended, _ = step(scheduler, runner, speculation)
        for draft, completion in ended:
            assert draft.age not in results
            results[draft.age] = completion.token_ids
        check_books(scheduler, pool, groups)
        assert sum(len(chunk.tokens) for chunk in runner.chunks) <= prefill_tokens
        assert len(scheduler.running) <= num_slots
    pool.assert_all_free()
    assert results == {(g.index, s): expected(g, seed) for g in groups for s, seed in enumerate(g.request.seeds)}


def test_pages_of_a_group_are_shared_up_to_the_partial_one() -> None:
    pool = PagePool(40)
    one = group(2 * PAGE_SIZE + 3, 3, 20)
    scheduler = scheduler_of([one], pool)
    admission = scheduler.admit()
    first, second, third = admission.started
    assert [(c.sample, len(c.tokens), c.needs_logits) for c in admission.chunks] == [(None, 2 * PAGE_SIZE + 3, True)]
    assert first.pages[:2] == second.pages[:2] == third.pages[:2] == one.pages[:2]
    own = [page for draft in admission.started for page in draft.pages[2:]] + one.pages[2:]
    assert len(set(own)) == len(own) == 4  # only what the next step needs
    assert pool.num_free == 40 - 3 - 3
    scheduler.finish([2], after(scheduler, 1))
    scheduler.finish([0, 1], after(scheduler, 1))
    assert scheduler.is_done
    pool.assert_all_free()


def test_pages_come_as_tokens_do() -> None:
    pool = PagePool(20)
    scheduler = scheduler_of([group(PAGE_SIZE, 1, 40)], pool)
    (draft,) = scheduler.admit().started
    assert scheduler.unmapped_pages() == [(0, 0, draft.pages[0]), (0, 1, draft.pages[1])]
    sizes = []
    for _ in range(39):
        scheduler.finish([], after(scheduler, 1))
        assert scheduler.reserve(1) == []
        sizes.append(len(draft.pages))
    assert sizes == sorted(sizes) and sizes[-1] == num_pages(PAGE_SIZE + 40) and sizes[13] == 2
    assert [place for _, place, _ in scheduler.unmapped_pages()] == [2, 3]


def test_a_group_larger_than_the_slots_is_prefilled_once() -> None:
    pool = PagePool(100)
    scheduler = scheduler_of([group(5, 5, 4), group(5, 1, 4, index=1)], pool, num_slots=2)
    admission = scheduler.admit()
    assert len(admission.chunks) == 1 and len(admission.started) == 2
    scheduler.finish([0], after(scheduler, 0))
    again = scheduler.admit()
    assert again.chunks == [] and [draft.sample for draft in again.started] == [2]
    scheduler.finish([0, 1], after(scheduler, 0))  # for a moment nothing of the group runs
    last = scheduler.admit()
    assert last.chunks == [] and [draft.sample for draft in last.started] == [3, 4]
    scheduler.finish([1], after(scheduler, 0))
    assert [chunk.group.index for chunk in scheduler.admit().chunks] == [1]
    scheduler.finish([0, 1], after(scheduler, 0))
    pool.assert_all_free()


def test_the_youngest_gives_way_and_the_oldest_never() -> None:
    groups = [group(10, 2, 150), group(10, 1, 150, index=1)]
    for g in groups:  # none ends early
        g.request.seeds = [s for s in range(200) if len(expected(g, s)) == 150][: len(g.request.seeds)]
    pool = PagePool(17)  # enough to start all three, and too little for two of full length
    scheduler, runner = scheduler_of(groups, pool), TokenRunner()
    plain = Speculation(is_on=False, steps_per_look=1)
    interrupted, ended = [], []
    while not scheduler.is_done:
        before = {draft.age for draft in scheduler.running}
        done = [draft.age for draft, _ in step(scheduler, runner, plain)[0]]
        interrupted += sorted(before - {draft.age for draft in scheduler.running} - set(done))
        ended += done
    assert interrupted == [(1, 0), (0, 1)] and ended == [(0, 0), (0, 1), (1, 0)]


def test_a_draft_that_comes_back_shares_the_prompt_and_prefills_the_rest() -> None:
    pool = PagePool(100)
    one = group(2 * PAGE_SIZE + 5, 2, 50)
    scheduler = scheduler_of([one], pool)
    scheduler.admit()
    others = pool.allocate(pool.num_free)
    slots = []
    while not slots:
        scheduler.finish([], after(scheduler, 1))
        slots = scheduler.reserve(1)
    (youngest,) = (scheduler.running[slot] for slot in slots)
    count = youngest.count
    assert youngest.sample == 1 and count > PAGE_SIZE - 6
    scheduler.suspend(slots, [Completion(list(range(count)), [], [], "length")])
    assert scheduler.admit().started == []
    pool.release(others)
    admission = scheduler.admit()
    (chunk,) = admission.chunks
    assert (chunk.sample, chunk.start, chunk.stop) == (1, 2 * PAGE_SIZE, one.prompt_length + count - 1)
    assert chunk.tokens == one.tokens[2 * PAGE_SIZE :] + list(range(count - 1))
    assert admission.started == [youngest] and youngest.pages[:2] == one.pages[:2]


def test_nothing_starts_that_would_soon_give_way() -> None:
    prompt, new = PAGE_SIZE, 2 * LOOKAHEAD
    need = num_pages(prompt + LOOKAHEAD)
    for pages, started in ((2 * need + 1, 2), (2 * need, 1)):  # the second one draws its first token at once
        scheduler = scheduler_of([group(prompt, 1, new, index=i) for i in range(2)], PagePool(pages))
        assert len(scheduler.admit().started) == started


def test_a_long_prompt_runs_in_pieces_and_others_fill_the_budget() -> None:
    scheduler = scheduler_of([group(n, 1, 1, i) for i, n in enumerate((70, 10, 5, 40))], PagePool(100), 8, 32)
    pieces = []
    while scheduler.waiting:
        pieces.append([(c.group.index, c.start, c.stop, c.needs_logits) for c in scheduler.admit().chunks])
    assert pieces == [
        [(0, 0, 32, False)],
        [(0, 32, 64, False)],
        [(0, 64, 70, True), (1, 0, 10, True), (2, 0, 5, True), (3, 0, 11, False)],
        [(3, 11, 40, True)],
    ]


def test_moves_fill_the_holes_from_the_end() -> None:
    scheduler = scheduler_of([group(1, 6, 1)], PagePool(10))
    scheduler.admit()
    moves = scheduler.finish([1, 4, 3], after(scheduler, 0))
    assert sorted(moves) == [(5, 1)]
    assert [draft.sample for draft in scheduler.running] == [0, 5, 2]
    scheduler = scheduler_of([group(1, 6, 1)], PagePool(10))
    scheduler.admit()
    state = list(range(6))
    for source, target in scheduler.finish([0, 2], after(scheduler, 0)):
        state[target] = state[source]
    assert state[:4] == [draft.sample for draft in scheduler.running]


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


def test_copied_pages_are_copied_in_every_layer() -> None:
    cache = KVCache(layers=2, pages=6, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    before = cache.pool.normal_().clone()
    cache.copy_pages(torch.tensor([1, 4]), torch.tensor([5, 0]))
    expected = before[:, :, [4, 1, 2, 3, 4, 1]]
    assert torch.equal(cache.pool, expected)
