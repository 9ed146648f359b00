"""Which completions run now: one queue in order of age, a dense range of slots, and pages as tokens come.

    waiting  drafts, oldest first; one that gave its pages back waits at the head again
    running  drafts; the one in slot i is running[i], and slots 0 .. len(running) - 1 are always all in use

    reserve  pages for the next decode steps; where none is free, the youngest draft gives all of its own back
    admit    the head of the queue, while slots, pages and the step's budget of prompt tokens last
    finish   completions end, the last ones move into the holes: a decode step reads the slots' state as one slice

Every draft that waits is younger than every one that runs, so the oldest is never interrupted and each one ends. A
prompt runs once for its group, and its pages stay while a completion of the group runs, or is the next to. A draft that
comes back keeps its tokens: it shares the prompt's full pages again, what follows them is prefilled as one more piece
of prompt, and the next token is drawn as it would have been, under the same seed and count.

Host only: plain integers, no torch. The runner repeats the moves on the tensors. Called by engine.py once a step.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qerl.engine.drafts import Chunk, Draft, Group
from qerl.engine.kv_cache import PAGE_SIZE, PagePool, num_pages
from qerl.types import Completion

LOOKAHEAD = 64
"""A draft starts only where all that run could go on for so many tokens: else a prefill would soon be thrown away."""

Moves = list[tuple[int, int]]
"""(source slot, target slot): targets are below the new number of slots in use and sources are not, so that all moves
can be made at once."""


@dataclass(frozen=True)
class Admission:
    """What `admit` decided: first run these chunks, then start these drafts."""

    chunks: list[Chunk]
    started: list[Draft]
    """In slots len(running) - len(started) .. len(running) - 1; those that come back precede those that are new."""


class Scheduler:
    """The queue and the slots of one call of `generate`."""

    def __init__(
        self,
        groups: Iterable[Group],
        pool: PagePool,
        *,
        num_slots: int,
        prefill_tokens: int,
        longest_reach: int,
        batch_invariant: bool = False,
    ) -> None:
        """prefill_tokens: budget of a step; longest_reach: tokens that a draft gains between two `reserve`, at most.

        batch_invariant: where a prompt is cut depends on itself alone, and no draft is interrupted, since those that
        run can always go on to their end.
        """
        assert longest_reach < LOOKAHEAD
        self._batch_invariant = batch_invariant
        self.waiting = deque(Draft(group, sample) for group in groups for sample in range(group.num_fresh))
        self.running: list[Draft] = []
        self._pool, self._num_slots = pool, num_slots
        self._prefill_tokens, self._longest_reach = prefill_tokens, longest_reach

    @property
    def is_done(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    @property
    def most_left(self) -> int:
        """Tokens that some draft can still draw, and no other more."""
        return max(draft.limit - draft.count for draft in self.running)

    @property
    def num_context_pages(self) -> int:
        """Pages of the running draft that has most."""
        return max(len(draft.pages) for draft in self.running)

    def reserve(self, reach: int) -> list[int]:
        """Give every running draft the pages of so many next tokens; the slots whose drafts had to give theirs back.

        Those are still in `running`, so that their tokens can be fetched, until `suspend`.
        """
        by_age = sorted(self.running, key=lambda draft: draft.age)
        num_ready = 0
        while num_ready < len(by_age):
            missing = by_age[num_ready].missing_pages(reach)
            if missing <= self._pool.num_free:
                by_age[num_ready].pages += self._pool.allocate(missing)
                num_ready += 1
            elif not self._take_from_head():
                assert not self._batch_invariant, "a draft started without the pages to end"
                youngest = by_age.pop()
                youngest.group.num_running -= 1
                self._give_back(youngest)
        return [slot for slot, draft in enumerate(self.running) if not draft.pages]

    def suspend(self, slots: Sequence[int], drawn: Sequence[Completion]) -> Moves:
        """Put the drafts that `reserve` interrupted back into the queue, with their tokens."""
        drafts = [self.running[slot] for slot in slots]
        for draft, tokens in zip(drafts, drawn, strict=True):
            assert len(tokens.token_ids) == draft.count, "host and device disagree on how many tokens a draft has"
            draft.drawn = tokens
        self.waiting.extendleft(sorted(drafts, key=lambda draft: draft.age, reverse=True))
        return self._close(slots)

    def admit(self) -> Admission:
        """Start waiting drafts in free slots, in order, while pages and the budget of prompt tokens last.

        A sequence that the budget does not cover keeps its pages and goes on in the next step.
        """
        chunks: list[Chunk] = []
        started: list[Draft] = []
        lookahead = sys.maxsize if self._batch_invariant else LOOKAHEAD
        ahead = sum(draft.missing_pages(lookahead) for draft in self.running)
        while self.waiting and len(self.running) < self._num_slots:
            draft, group = self.waiting[0], self.waiting[0].group
            prompt_pages = 0 if group.pages else num_pages(group.prompt_length)
            if prompt_pages + draft.missing_pages(lookahead) + ahead > self._pool.num_free:
                break
            group.pages += self._pool.allocate(prompt_pages)
            if not self._prefill(chunks, group, None, group.prompt_length):
                break
            if not draft.pages:
                self._open(draft)
            # The last token that was drawn is not prefilled: the next decode step feeds it.
            if draft.drawn is not None and not self._prefill(chunks, group, draft, len(draft.tokens) - 1):
                break
            self._start(draft)
            started.append(draft)
            ahead += draft.missing_pages(lookahead)
        assert self.running or chunks or not self.waiting, "a draft waits that does not fit an empty cache"
        return Admission(chunks, started)

    def unmapped_pages(self) -> list[tuple[int, int, int]]:
        """(slot, place among its draft's pages, page) of those that the runner does not know; from now on it does."""
        unmapped = []
        for slot, draft in enumerate(self.running):
            unmapped += [(slot, place, draft.pages[place]) for place in range(draft.num_mapped, len(draft.pages))]
            draft.num_mapped = len(draft.pages)
        return unmapped

    def finish(self, slots: Sequence[int], counts: Sequence[int]) -> Moves:
        """After decode steps: end the completions in these slots, and close the holes. counts: every slot's tokens."""
        for draft, count in zip(self.running, counts, strict=True):
            draft.count = count
        for slot in slots:
            draft = self.running[slot]
            draft.group.num_running -= 1
            draft.group.num_left -= 1
            self._give_back(draft, keep_prompt=draft.group.num_left > 0)
        return self._close(slots)

    def _prefill(self, chunks: list[Chunk], group: Group, draft: Draft | None, stop: int) -> bool:
        """Add tokens of a prompt, or of a draft, to the step's, up to `stop`; whether they are all written then."""
        sequence = group if draft is None else draft
        budget = self._prefill_tokens - sum(len(chunk.tokens) for chunk in chunks)
        if self._batch_invariant and budget < min(stop - sequence.num_written, self._prefill_tokens):
            return False  # what others have left of the budget must not decide where a prompt is cut
        tokens = sequence.tokens[sequence.num_written : min(stop, sequence.num_written + budget)]
        start, sequence.num_written = sequence.num_written, sequence.num_written + len(tokens)
        is_whole = sequence.num_written == stop
        if tokens:
            needs_logits = draft is None and is_whole and group.num_fresh > 0
            sample = None if draft is None else draft.sample
            chunks.append(Chunk(group, sample, start, tokens, sequence.pages, needs_logits))
        return is_whole

    def _open(self, draft: Draft) -> None:
        """Share the prompt's full pages with a draft, and give it those of its next steps."""
        shared = draft.group.pages[: draft.group.full_pages]
        new = self._pool.allocate(draft.missing_pages(1 + self._longest_reach))  # a new one's start draws a token
        self._pool.share(shared)
        draft.pages, draft.num_written = shared + new, len(shared) * PAGE_SIZE

    def _start(self, draft: Draft) -> None:
        if draft.drawn is None:
            draft.count = 1
            draft.group.num_fresh -= 1
        draft.group.num_running += 1
        self.running.append(self.waiting.popleft())

    def _take_from_head(self) -> bool:
        """Free what the head of the queue holds, since it is younger than all that run; whether there was anything."""
        if not self.waiting:
            return False
        head = self.waiting[0]
        if not head.pages and (head.group.num_running or not head.group.pages):
            return False
        self._give_back(head)
        return True

    def _give_back(self, draft: Draft, *, keep_prompt: bool = False) -> None:
        """Free the pages of a draft that does not run, and its prompt's where nothing of the group runs."""
        group = draft.group
        self._pool.release(draft.pages)
        draft.pages, draft.num_written, draft.num_mapped = [], 0, 0
        if not group.num_running and not keep_prompt:
            self._pool.release(group.pages)
            group.pages, group.num_written = [], 0

    def _close(self, slots: Sequence[int]) -> Moves:
        """Move the last drafts into these slots."""
        origin = list(range(len(self.running)))
        for slot in sorted(slots, reverse=True):
            last, last_origin = self.running.pop(), origin.pop()
            if slot < len(self.running):
                self.running[slot], origin[slot] = last, last_origin
        return [(source, target) for target, source in enumerate(origin) if source != target]
