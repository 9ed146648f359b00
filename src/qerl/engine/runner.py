"""The device's side of a call of `generate`: the slots' state, and the two passes that advance it.

    prefill   tokens of whole prompts, packed -> their keys and values in pages, logits after their last token
    start     completions enter the next free slots: pages copied, first token drawn from the prompt's logits
    decode    one token for every slot in use: embed, attend over pages, sample, record    (graphs.py, without the host)

A slot's state is one row of each tensor in `_Slots`; rows 0 .. n-1 are in use (scheduler.py closes holes, `move`
repeats it here), so a step works on slices at fixed addresses and holds no decision of the host: a CUDA graph replays
it. The other rows have finished, at position 0 of the spare page, so that a step may run over them. A completion that
has ended (EOS or length) stays as it is, whatever steps follow, until the host looks: its counters stand still and what
is drawn for it lands in a spare column. The host looks after every step on a CPU, after several on a GPU, and then
learns in one transfer who has ended.

Called by engine.py, which does what the scheduler decided. Leaves out chunks of long prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from qerl.engine.attention import DecodeAttention, PromptAttention
from qerl.engine.graphs import StepRunner
from qerl.engine.kv_cache import PAGE_SIZE, KVCache, num_pages
from qerl.engine.model import Decoder
from qerl.engine.norms import Gains
from qerl.engine.sampler import sample, signed_key
from qerl.engine.scheduler import Group, Running
from qerl.kernels.sample import Sampled
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
    """The slots of one call of `generate`; see the module's text."""

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
        spare_page: int,
        graphs: bool,
    ) -> None:
        """spare_page: a page of the cache that no sequence has; graphs: replay decode steps as CUDA graphs."""
        self._decoder, self._cache, self._sampling = decoder, cache, sampling
        self._eos_ids = frozenset(eos_ids)
        self._eos = torch.tensor(sorted(self._eos_ids), dtype=torch.int64, device=decoder.device)
        self._prompt_logits: dict[int, Float[Tensor, " v"]] = {}
        self._steps_per_look = STEPS_PER_LOOK.get(decoder.device.type, DEFAULT_STEPS_PER_LOOK)
        self._spare_page = spare_page
        self._steps = StepRunner(
            self._step, max_slots=num_slots, max_pages=pages_per_slot, device=decoder.device, graphs=graphs
        )
        cache.reserve_copies(num_slots * pages_per_slot)
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
        self._vacate(0)

    def prefill(self, groups: Sequence[Group]) -> None:
        """Run prompts, once each, into their pages; keep the logits after each prompt until its group has started."""
        if not groups:
            return
        decoder, device = self._decoder, self._decoder.device
        lengths = [group.prompt_length for group in groups]
        tokens = torch.tensor([token for group in groups for token in group.request.prompt_ids], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths])
        pages = torch.cat([torch.tensor(g.pages).repeat_interleave(PAGE_SIZE)[: g.prompt_length] for g in groups])
        rows = (pages * PAGE_SIZE + positions % PAGE_SIZE).to(device)
        gains = Gains(decoder.norms.shared)
        if decoder.norms.per_slot:
            streams = [decoder.norms.stream(group.request.prompt_index) for group in groups]
            index = torch.arange(len(groups)).repeat_interleave(torch.tensor(lengths))
            gains = Gains(decoder.norms.gains(streams, decoder.norms.draw), index.to(device))
        attend = PromptAttention(lengths, device, (self._cache, rows))
        hidden = decoder.forward(tokens, positions.to(device), gains, attend)
        last = torch.tensor(lengths).cumsum(0) - 1
        for group, logits in zip(groups, decoder.logits(hidden[last.to(device)]), strict=True):
            self._prompt_logits[group.index] = logits

    def start(self, started: Sequence[Running], first_slot: int) -> None:
        """Bring completions into slots `first_slot` and following, and draw the first token of each."""
        if not started:
            return
        device, norms = self._decoder.device, self._decoder.norms
        copies = [running.copied_page for running in started if running.copied_page is not None]
        if copies:
            source, target = torch.tensor(copies, device=device).T
            self._cache.copy_pages(source, target)
        slots = self._slots.range(first_slot, first_slot + len(started))
        width = slots.page_table.shape[1]
        numbers = [
            (
                r.group.prompt_length - 1,
                r.group.request.max_new_tokens,
                signed_key(r.seed),
                *r.pages,
                *[0] * (width - len(r.pages)),
            )
            for r in started
        ]
        state = torch.tensor(numbers, dtype=torch.int64).to(device)
        slots.positions.copy_(state[:, 0])
        slots.limits.copy_(state[:, 1])
        slots.seeds.copy_(state[:, 2])
        slots.page_table.copy_(state[:, 3:])
        slots.counts.zero_()
        slots.finished.zero_()
        if norms.per_slot:
            streams = [norms.stream(r.group.request.prompt_index, r.sample) for r in started]
            slots.gains.copy_(norms.gains(streams, norms.draw).transpose(0, 1))
        logits = torch.stack([self._prompt_logits[r.group.index] for r in started])
        for running in started:
            if running.is_last:
                del self._prompt_logits[running.group.index]
        self._record(slots, sample(logits, slots.seeds, slots.counts, self._sampling))

    def decode(self, num_slots: int) -> list[int]:
        """Some steps of all slots in use, then a look: the slots whose completion has ended."""
        slots = self._slots.range(0, num_slots)
        longest, remaining = torch.stack([slots.positions.max(), (slots.limits - slots.counts).max()]).tolist()
        steps = min(self._steps_per_look, remaining)
        pages = min(num_pages(longest + steps), slots.page_table.shape[1])
        for _ in range(steps):
            self._steps.run(num_slots, pages)
        return slots.finished.nonzero()[:, 0].tolist()

    def _step(self, num_slots: int, pages: int) -> None:
        decoder, slots = self._decoder, self._slots.range(0, num_slots)
        gains = Gains(slots.gains.transpose(0, 1) if decoder.norms.per_slot else decoder.norms.shared)
        attend = DecodeAttention(self._cache, slots.page_table[:, :pages], slots.positions)
        hidden = decoder.forward(slots.tokens, slots.positions, gains, attend)
        self._record(slots, sample(decoder.logits(hidden), slots.seeds, slots.counts, self._sampling))

    def _record(self, slots: _Slots, sampled: Sampled) -> None:
        """Note one drawn token a slot; slots that had ended before stay as they are."""
        column = slots.counts[:, None]
        slots.drawn_tokens.scatter_(1, column, sampled.tokens[:, None])
        slots.drawn_logprobs.scatter_(1, column, sampled.logprobs[:, None])
        slots.drawn_entropies.scatter_(1, column, sampled.entropies[:, None])
        slots.tokens.copy_(sampled.tokens)
        going = ~slots.finished
        slots.counts += going
        slots.positions += going
        slots.finished |= (slots.tokens[:, None] == self._eos).any(1) | (slots.counts == slots.limits)

    def take(self, slots: Sequence[int]) -> list[Completion]:
        """The completions of slots that `decode` reported."""
        if not slots:
            return []
        index = torch.tensor(slots, device=self._decoder.device)
        counts = self._slots.counts[index].tolist()
        drawn = (self._slots.drawn_tokens, self._slots.drawn_logprobs, self._slots.drawn_entropies)
        columns = (rows[index, : max(counts)].tolist() for rows in drawn)
        return [
            Completion(ids[:n], logprobs[:n], entropies[:n], "stop" if ids[n - 1] in self._eos_ids else "length")
            for n, ids, logprobs, entropies in zip(counts, *columns, strict=True)
        ]

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
