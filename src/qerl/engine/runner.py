"""The device's side of sampling: the slots' state, and the passes that advance it.

    prefill   chunks of prompts and of drafts that come back, packed -> their keys and values in pages; logits after
              each prompt's last token
    start     drafts enter the next free slots: a new one copies the prompt's partly filled page and draws its first
              token from the prompt's logits, one that comes back takes up its last token
    decode    one token for every slot in use: embed, attend over pages, sample, record    (graphs.py, without the host)

A slot's state is one row of each tensor in `_Slots`; rows 0 .. n-1 are in use (scheduler.py closes holes, `move`
repeats it here), so a step works on slices at fixed addresses and holds no decision of the host: a CUDA graph replays
it. The other rows have finished, at position 0 of the spare page, so that a step may run over them. A draft that has
ended (EOS or length) stays as it is, whatever steps follow, until the host looks: its counters stand still and what is
drawn for it lands in a spare column. The host looks after every step on a CPU, after several on a GPU, and then learns
in one transfer who has ended; how far the others are it knows without asking.

Called by engine.py, which does what the scheduler decided. One runner serves many calls of `generate`, with one cache
and one set of sampling parameters; nothing of a call is left to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from qerl.engine.api import empty_completion
from qerl.engine.attention import ChunkAttention, DecodeAttention
from qerl.engine.drafts import Chunk, Draft
from qerl.engine.graphs import StepRunner
from qerl.engine.kv_cache import PAGE_SIZE, KVCache
from qerl.engine.model import Decoder
from qerl.engine.norms import Gains
from qerl.engine.sampler import sample, signed_key
from qerl.kernels.attention import has_kernel
from qerl.kernels.slots import Progress, advance_
from qerl.types import Completion, SamplingParams

STEPS_PER_LOOK = {"cpu": 1}
"""Decode steps between two looks of the host at who has ended; a look makes a GPU wait, a late look wastes slots."""
DEFAULT_STEPS_PER_LOOK = 8


@dataclass
class _Slots:
    """One row a slot."""

    tokens: Int64[Tensor, " slots"]
    """The last token drawn: fed next."""
    positions: Int64[Tensor, " slots"]
    """That token's place in prompt + completion."""
    counts: Int64[Tensor, " slots"]
    """Tokens drawn so far."""
    limits: Int64[Tensor, " slots"]
    """max_new_tokens."""
    seeds: Int64[Tensor, " slots"]
    finished: Bool[Tensor, " slots"]
    page_table: Int64[Tensor, "slots pages"]
    drawn_tokens: Int64[Tensor, "slots columns"]
    """The completion; one column more than the longest has, for what is drawn after its end."""
    drawn_logprobs: Float32[Tensor, "slots columns"]
    drawn_entropies: Float32[Tensor, "slots columns"]
    gains: Float32[Tensor, "slots sites h"]
    """Noisy norm vectors of the completion's stream; without rows where all slots share them."""

    def range(self, start: int, stop: int) -> _Slots:
        """Some slots, as views."""
        return _Slots(*(getattr(self, field.name)[start:stop] for field in fields(self)))


class Runner:
    """The slots; see the module's text."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampling: SamplingParams,
        eos_ids: Sequence[int],
        *,
        num_slots: int,
        pages_per_slot: int,
        max_new_tokens: int,
        graphs: bool,
        batch_invariant: bool = False,
    ) -> None:
        """The cache's last page is the spare one, which no sequence has; graphs: replay decode steps as CUDA graphs."""
        self._decoder, self._cache, self._sampling = decoder, cache, sampling
        self._batch_invariant = batch_invariant
        self._eos_ids = frozenset(eos_ids)
        self._eos = torch.tensor(sorted(self._eos_ids), dtype=torch.int64, device=decoder.device)
        self._prompt_logits: dict[int, Float[Tensor, " v"]] = {}
        self.steps_per_look = STEPS_PER_LOOK.get(decoder.device.type, DEFAULT_STEPS_PER_LOOK)
        self._spare_page = cache.num_pages - 1
        self._steps = StepRunner(
            max_slots=num_slots,
            max_pages=pages_per_slot,
            kv_heads=decoder.kv_heads if has_kernel(decoder.dtype, decoder.head_dim) else None,
            device=decoder.device,
            graphs=graphs,
        )
        sites, size = decoder.norms.clean.shape

        def rows(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=decoder.device)

        self._slots = _Slots(
            tokens=rows(),
            positions=rows(),
            counts=rows(),
            limits=rows(),
            seeds=rows(),
            finished=rows(dtype=torch.bool),
            page_table=rows(pages_per_slot),
            drawn_tokens=rows(max_new_tokens + 1),
            drawn_logprobs=rows(max_new_tokens + 1, dtype=torch.float32),
            drawn_entropies=rows(max_new_tokens + 1, dtype=torch.float32),
            gains=rows(sites if decoder.norms.per_slot else 0, size, dtype=torch.float32),
        )
        self.reset()

    def reset(self) -> None:
        """Forget everything, whatever a call that was broken off has left."""
        self._prompt_logits.clear()
        self._vacate(0)

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Run chunks into their pages; keep logits from which first tokens are drawn until the last one is."""
        if not chunks:
            return
        decoder, device = self._decoder, self._decoder.device
        chunks = sorted(chunks, key=lambda chunk: chunk.start == 0)  # as ChunkAttention wants them
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=device)
        positions = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).to(device)
        attend = ChunkAttention(
            self._cache,
            [chunk.start for chunk in chunks],
            [len(chunk.tokens) for chunk in chunks],
            [chunk.pages for chunk in chunks],
            alone=self._batch_invariant,
        )
        hidden = decoder.forward(tokens, positions, self._chunk_gains(chunks), attend)
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0) - 1
        wanted = torch.tensor([chunk.needs_logits for chunk in chunks])
        if wanted.any():
            groups = [chunk.group for chunk in chunks if chunk.needs_logits]
            for group, logits in zip(groups, decoder.logits(hidden[ends[wanted].to(device)]), strict=True):
                self._prompt_logits[group.index] = logits

    def _chunk_gains(self, chunks: Sequence[Chunk]) -> Gains:
        """Norm vectors of chunks' tokens: the prompt's up to its end, then the completion's."""
        norms = self._decoder.norms
        if not norms.per_slot:
            return Gains(norms.shared)
        rows: dict[int, int] = {}
        index: list[int] = []
        for chunk in chunks:
            prompt = chunk.group.request.prompt_index
            in_prompt = min(len(chunk.tokens), max(0, chunk.group.prompt_length - chunk.start))
            for whose, length in ((None, in_prompt), (chunk.sample, len(chunk.tokens) - in_prompt)):
                if length:
                    index += [rows.setdefault(norms.stream(prompt, whose), len(rows))] * length
        return Gains(norms.gains(list(rows), norms.draw), torch.tensor(index, device=self._decoder.device))

    def start(self, started: Sequence[Draft], first_slot: int) -> None:
        """Bring drafts into slots `first_slot` and following, those that come back before those that are new."""
        if not started:
            return
        norms, slots = self._decoder.norms, self._slots.range(first_slot, first_slot + len(started))
        returning = [draft for draft in started if draft.drawn is not None]
        new = started[len(returning) :]
        assert all(draft.drawn is None for draft in new)
        numbers = [
            (
                draft.drawn.token_ids[-1] if draft.drawn else 0,
                draft.group.prompt_length - 1 + (draft.count if draft.drawn else 0),
                draft.count if draft.drawn else 0,
                draft.limit,
                signed_key(draft.seed),
            )
            for draft in started
        ]
        columns = torch.tensor(numbers, dtype=torch.int64).to(self._decoder.device).unbind(1)
        fed = (slots.tokens, slots.positions, slots.counts, slots.limits, slots.seeds)
        for rows, column in zip(fed, columns, strict=True):
            rows.copy_(column)
        slots.finished.zero_()
        if norms.per_slot:
            streams = [norms.stream(draft.group.request.prompt_index, draft.sample) for draft in started]
            slots.gains.copy_(norms.gains(streams, norms.draw).transpose(0, 1))
        if new:
            self._draw_first(new, slots.range(len(returning), len(started)))

    def _draw_first(self, new: Sequence[Draft], slots: _Slots) -> None:
        groups = [draft.group for draft in new]
        copies = [
            (group.pages[-1], draft.pages[group.full_pages])
            for draft, group in zip(new, groups, strict=True)
            if group.prompt_length % PAGE_SIZE
        ]
        if copies:
            source, target = torch.tensor(copies, device=self._decoder.device).T
            self._cache.copy_pages(source, target)
        logits = torch.stack([self._prompt_logits[group.index] for group in groups])
        for group in groups:
            if group.num_fresh == 0:
                self._prompt_logits.pop(group.index, None)
        self._sample(slots, logits)

    def map_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Enter pages into the table: (slot, place among its sequence's pages, page)."""
        if pages:
            slot, place, page = torch.tensor(pages, device=self._decoder.device).T
            self._slots.page_table[slot, place] = page

    def decode(self, num_slots: int, steps: int, pages: int) -> list[int]:
        """Some steps of all slots in use, then a look: the slots whose completion has ended.

        pages: as many as the longest sequence has after the last of these steps.
        """
        for _ in range(steps):
            self._steps.run(self._step, num_slots, pages)
        return self._slots.finished[:num_slots].nonzero()[:, 0].tolist()

    def _step(self, num_slots: int, pages: int) -> None:
        decoder, slots = self._decoder, self._slots.range(0, num_slots)
        gains = Gains(slots.gains.transpose(0, 1) if decoder.norms.per_slot else decoder.norms.shared)
        alone = self._batch_invariant and decoder.device.type != "cuda"
        attend = DecodeAttention(self._cache, slots.page_table[:, :pages], slots.positions, alone=alone)
        hidden = decoder.forward(slots.tokens, slots.positions, gains, attend)
        self._sample(slots, decoder.logits(hidden))

    def _sample(self, slots: _Slots, logits: Float[Tensor, "slots v"]) -> None:
        """Draw and note one token a slot; slots that had ended before stay as they are."""
        sampled = sample(logits, slots.seeds, slots.counts, self._sampling, batch_invariant=self._batch_invariant)
        advance_(Progress(*(getattr(slots, name) for name in Progress._fields)), *sampled, self._eos)

    def take(self, slots: Sequence[int], drafts: Sequence[Draft]) -> list[Completion]:
        """What the drafts in these slots have drawn, before they last gave their pages back and since."""
        if not slots:
            return []
        index = torch.tensor(slots, device=self._decoder.device)
        counts = self._slots.counts[index].tolist()
        drawn = (self._slots.drawn_tokens, self._slots.drawn_logprobs, self._slots.drawn_entropies)
        columns = (rows[index, : max(counts)].tolist() for rows in drawn)
        completions = []
        for draft, count, *since in zip(drafts, counts, *columns, strict=True):
            before = draft.drawn or empty_completion()
            num_before = len(before.token_ids)
            ids, logprobs, entropies = (
                old + new[num_before:count]
                for old, new in zip((before.token_ids, before.logprobs, before.entropies), since, strict=True)
            )
            reason = "stop" if ids[-1] in self._eos_ids else "length"
            completions.append(Completion(ids, logprobs, entropies, reason))
        return completions

    def move(self, moves: Sequence[tuple[int, int]], in_use: int) -> None:
        """Copy slots' state from sources to targets, as the scheduler did; slots from `in_use` on are empty now."""
        if moves:
            source, target = torch.tensor(moves, device=self._decoder.device).T
            for field in fields(self._slots):
                rows = getattr(self._slots, field.name)
                rows[target] = rows[source]
        self._vacate(in_use)

    def _vacate(self, first: int) -> None:
        empty = self._slots.range(first, len(self._slots.finished))
        empty.page_table.fill_(self._spare_page)
        empty.positions.zero_()
        empty.counts.zero_()
        empty.finished.fill_(True)
