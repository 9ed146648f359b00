"""The device's side of sampling: the slots' state, and the passes that advance it.

    prefill   chunks of prompts and of drafts that come back, packed -> their keys and values in pages; logits after
              each prompt's last token
    start     drafts enter the next free slots: a new one copies the prompt's partly filled page and draws its first
              token from the prompt's logits, one that comes back takes up its last token
    decode    every slot in use: feed its last token (with few slots, guesses of the next ones, speculation.py), embed,
              attend over pages, sample, record                                            (graphs.py, without the host)

A slot's state is one row of each tensor in `_Slots`; rows 0 .. n-1 are in use (scheduler.py closes holes, `move`
repeats it here), so a step works on slices at fixed addresses and holds no decision of the host: a CUDA graph replays
it. The other rows have finished, at position 0 of the spare page, so that a step may run over them. A draft that has
ended (EOS or length) stays as it is, whatever steps follow, until the host looks: after every step on a CPU, after
several on a GPU, and then learns in one transfer who has ended and how far the others are. A table has one column more
than the longest sequence has pages, and where no page is mapped it names the spare one: keys and values of guesses past
a sequence's end go there.

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
from qerl.engine.speculation import MOST
from qerl.engine.texts import NOBODY, TextLines
from qerl.kernels.attention import has_kernel
from qerl.kernels.lookup import look_up
from qerl.kernels.slots import Progress, advance_
from qerl.types import Completion, SamplingParams

STEPS_PER_LOOK = {"cpu": 1}
"""Decode steps between two looks of the host at who has ended, at most; a look makes a GPU wait, a late look wastes
slots."""
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
    lines: Int64[Tensor, " slots"]
    """Of the completions' text (texts.py)."""
    finished: Bool[Tensor, " slots"]
    page_table: Int64[Tensor, "slots pages"]
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
        speculates: bool = True,
    ) -> None:
        """The cache's last page is the spare one, which no sequence has; graphs: replay decode steps as CUDA graphs.

        speculates: steps may feed several tokens a sequence.
        """
        self._decoder, self._cache, self._sampling = decoder, cache, sampling
        self._batch_invariant = batch_invariant
        self._eos_ids = frozenset(eos_ids)
        self._eos = torch.tensor(sorted(self._eos_ids), dtype=torch.int64, device=decoder.device)
        self._prompt_logits: dict[int, Float[Tensor, " v"]] = {}
        self.steps_per_look = STEPS_PER_LOOK.get(decoder.device.type, DEFAULT_STEPS_PER_LOOK)
        self._spare_page = cache.num_pages - 1
        self._ahead = torch.arange(MOST, device=decoder.device)
        self._lines = TextLines((2 if speculates else 1) * num_slots, pages_per_slot * PAGE_SIZE, decoder.device)
        self._steps = StepRunner(
            max_slots=num_slots,
            max_pages=pages_per_slot + 1,
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
            lines=rows(),
            finished=rows(dtype=torch.bool),
            page_table=rows(pages_per_slot + 1),
            drawn_logprobs=rows(max_new_tokens, dtype=torch.float32),
            drawn_entropies=rows(max_new_tokens, dtype=torch.float32),
            gains=rows(sites if decoder.norms.per_slot else 0, size, dtype=torch.float32),
        )
        self.reset()

    def reset(self) -> None:
        """Forget everything, whatever a call that was broken off has left."""
        self._prompt_logits.clear()
        self._lines.clear()
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
        groups = [draft.group for draft in started]
        lines = self._lines.open(
            [draft.tokens for draft in started],
            [group.prompt_length for group in groups],
            [group.index for group in groups],
        )
        for draft, line in zip(started, lines, strict=True):
            draft.line = line
        numbers = [
            (
                draft.drawn.token_ids[-1] if draft.drawn else 0,
                draft.group.prompt_length - 1 + (draft.count if draft.drawn else 0),
                draft.count if draft.drawn else 0,
                draft.limit,
                signed_key(draft.seed),
                draft.line,
            )
            for draft in started
        ]
        columns = torch.tensor(numbers, dtype=torch.int64).to(self._decoder.device).unbind(1)
        state = (slots.tokens, slots.positions, slots.counts, slots.limits, slots.seeds, slots.lines)
        for rows, column in zip(state, columns, strict=True):
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

    def decode(self, num_slots: int, steps: int, tokens: int, pages: int) -> tuple[list[int], list[int]]:
        """Some steps of all slots in use, then a look: the slots whose completion has ended, and how many tokens each
        slot's completion has.

        tokens: of each slot in a step; pages: as many as the longest sequence has, with room for all that it can gain.
        """
        for _ in range(steps):
            self._steps.run(self._step, num_slots, pages + 1, tokens)
        finished, counts = torch.stack((self._slots.finished.long(), self._slots.counts))[:, :num_slots].tolist()
        return [slot for slot, ended in enumerate(finished) if ended], counts

    def _step(self, num_slots: int, pages: int, each: int) -> None:
        decoder, slots = self._decoder, self._slots.range(0, num_slots)
        gains = Gains(slots.gains.transpose(0, 1) if decoder.norms.per_slot else decoder.norms.shared)
        tokens, positions, fed = slots.tokens, slots.positions, None
        if each > 1:
            fed = look_up(self._lines.texts, slots.lines, each)
            tokens, positions = fed.flatten(), self._following(slots.positions, each)
            if decoder.norms.per_slot:
                gains = gains._replace(index=torch.arange(num_slots, device=decoder.device).repeat_interleave(each))
        attend = DecodeAttention(self._cache, slots.page_table[:, :pages], positions, alone=self._batch_invariant)
        self._sample(slots, decoder.logits(decoder.forward(tokens, positions, gains, attend)), fed)

    def _sample(
        self, slots: _Slots, logits: Float[Tensor, "tokens v"], fed: Int64[Tensor, "slots each"] | None = None
    ) -> None:
        """Draw, and note what counts; slots that had ended before stay as they are. fed: as `advance_` has it."""
        seeds, counts = slots.seeds, slots.counts
        if fed is not None:
            each = fed.shape[1]
            seeds, counts = seeds.repeat_interleave(each), self._following(counts, each)
        sampled = sample(logits, seeds, counts, self._sampling, batch_invariant=self._batch_invariant)
        texts, drawn = self._lines.texts, (slots.drawn_logprobs, slots.drawn_entropies)
        state = (slots.tokens, slots.positions, slots.counts, slots.limits, slots.lines, slots.finished, *drawn)
        advance_(Progress(*state, texts.tokens, texts.lengths), *sampled, self._eos, fed)

    def _following(self, first: Int64[Tensor, " slots"], each: int) -> Int64[Tensor, " tokens"]:
        """first, first + 1, .. for each slot."""
        return (first[:, None] + self._ahead[:each]).flatten()

    def take(self, slots: Sequence[int], drafts: Sequence[Draft]) -> list[Completion]:
        """What the drafts in these slots have drawn, before they last gave their pages back and since."""
        if not slots:
            return []
        index = torch.tensor(slots, device=self._decoder.device)
        counts = self._slots.counts[index].tolist()
        columns = (
            rows[index, : max(counts)].tolist() for rows in (self._slots.drawn_logprobs, self._slots.drawn_entropies)
        )
        lines = [draft.line for draft in drafts]
        texts = self._lines.read(lines, [draft.group.prompt_length for draft in drafts], counts)
        self._lines.close(lines)
        completions = []
        for draft, count, ids, *since in zip(drafts, counts, texts, *columns, strict=True):
            draft.line = NOBODY
            before = draft.drawn or empty_completion()
            num_before = len(before.token_ids)
            logprobs, entropies = (
                old + new[num_before:count] for old, new in zip((before.logprobs, before.entropies), since, strict=True)
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
        empty.lines.fill_(NOBODY)  # spares a look-up
        empty.finished.fill_(True)
