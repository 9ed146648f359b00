"""Which completions run now: a queue of groups, a dense range of slots, and the pages that each completion needs.

    waiting  groups (a prompt and its completions), first come, first served
    running  completions; the one in slot i is running[i], and slots 0 .. len(running) - 1 are always all in use

`admit` starts waiting completions while slots and pages last; a group's prompt is to be prefilled when its first
completion starts, and stays in its pages until its last one has started. `finish` ends completions and moves the last
ones into the holes, so that a decode step reads the slots' state as one slice (and, under a CUDA graph, at one
address). A completion gets its worst case (prompt + max_new_tokens) of pages at once: nothing is ever preempted.

Host only: plain integers, no torch. The runner repeats the moves on the tensors. Called by engine.py once a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qerl.engine.kv_cache import PAGE_SIZE, PagePool, num_pages
from qerl.types import Request

MAX_PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill (a longer prompt runs alone): bounds its activations; a GPU is busy well below it."""


@dataclass(eq=False)
class Group:
    """A request in the queue, with the pages of its prompt."""

    index: int
    """The request's place in the call of `generate`."""
    request: Request
    pages: list[int] = field(default_factory=list)
    """Pages of the prompt, from its prefill on. The group's last completion to start becomes their owner."""
    num_started: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def sequence_pages(self) -> int:
        """Pages of the prompt and one completion of full length."""
        return num_pages(self.prompt_length + self.request.max_new_tokens)

    @property
    def full_prompt_pages(self) -> int:
        """Pages that all completions share."""
        return self.prompt_length // PAGE_SIZE

    @property
    def one_left(self) -> bool:
        """Whether the next completion to start is the last: it takes the prompt's pages over and copies none."""
        return self.num_started == len(self.request.seeds) - 1

    @property
    def new_pages(self) -> int:
        """Pages that the next completion needs, next to the prompt's."""
        return self.sequence_pages - (num_pages(self.prompt_length) if self.one_left else self.full_prompt_pages)

    @property
    def pages_alone(self) -> int:
        """Pages that the group cannot do without, even with nothing else running."""
        return num_pages(self.prompt_length) + self.new_pages


@dataclass(eq=False)
class Running:
    """A completion in a slot."""

    group: Group
    sample: int
    """Its place among the group's completions."""
    pages: list[int]
    """All its pages, in the order of its tokens."""
    copied_page: tuple[int, int] | None
    """(source, target): the prompt's last, partly filled page and this completion's copy of it."""

    @property
    def is_last(self) -> bool:
        """Whether no completion of the group starts after it."""
        return self.sample == len(self.group.request.seeds) - 1

    @property
    def seed(self) -> int:
        """The completion's key."""
        return self.group.request.seeds[self.sample]


@dataclass(frozen=True)
class Admission:
    """What `admit` decided: first run these prompts, then start these completions."""

    prompts: list[Group]
    started: list[Running]
    """In slots len(running) - len(started) .. len(running) - 1."""


class Scheduler:
    """The queue and the slots of one call of `generate`."""

    def __init__(self, groups: Iterable[Group], pool: PagePool, num_slots: int) -> None:
        self.waiting = deque(groups)
        self.running: list[Running] = []
        self._pool = pool
        self._num_slots = num_slots

    @property
    def is_done(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def admit(self) -> Admission:
        """Start waiting completions in free slots, in order, while pages last."""
        prompts: list[Group] = []
        started: list[Running] = []
        num_tokens = 0
        while self.waiting and len(self.running) < self._num_slots:
            group = self.waiting[0]
            if group.num_started == 0:
                num_tokens += group.prompt_length
                if self._pool.num_free < group.pages_alone or (prompts and num_tokens > MAX_PREFILL_TOKENS):
                    break
                group.pages = self._pool.allocate(num_pages(group.prompt_length))
                prompts.append(group)
            elif self._pool.num_free < group.new_pages:
                break
            started.append(self._start(group))
            if group.num_started == len(group.request.seeds):
                self.waiting.popleft()
        assert self.running or not self.waiting, "a group waits that does not fit an empty cache"
        return Admission(prompts, started)

    def _start(self, group: Group) -> Running:
        copied_page = None
        new = self._pool.allocate(group.new_pages)
        if group.one_left:
            pages = group.pages + new
        else:
            shared = group.pages[: group.full_prompt_pages]
            self._pool.share(shared)
            pages = shared + new
            if len(shared) < len(group.pages):
                copied_page = (group.pages[-1], new[0])
        running = Running(group, group.num_started, pages, copied_page)
        group.num_started += 1
        self.running.append(running)
        return running

    def finish(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """End the completions in these slots, give their pages back, and close the holes.

        Returns moves (source slot, target slot). Targets are below the new number of slots in use and sources are not,
        so that all moves can be made at once.
        """
        origin = list(range(len(self.running)))
        for slot in sorted(slots, reverse=True):
            self._pool.release(self.running[slot].pages)
            last, last_origin = self.running.pop(), origin.pop()
            if slot < len(self.running):
                self.running[slot], origin[slot] = last, last_origin
        return [(source, target) for target, source in enumerate(origin) if source != target]
