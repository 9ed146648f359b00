"""A rollout as training data: flat packed tokens, cut into the mini-batches of updates and the micro-batches of passes.

    RolloutGroup (types.py) -> TrainBatch -> mini_batches: which sequences each optimizer step takes
                                          -> micro_batches: what one forward and backward pass takes

A sequence is a prompt followed by one completion; sequences are numbered 0 .. S-1 as the groups and their completions
come. Nothing is padded, and masks are lengths:

    input_ids     p p p c c | p p c c c c | ...     [T]
    cu_seqlens    0           5             11 ...  [sequences + 1]
    predictors        2 3       6 7 8 9             [C]  hidden state i predicts token i + 1
    targets           c c       c c c c             [C]
    sequence          0 0       1 1 1 1             [C]  row in the micro-batch's `advantages` and `lengths`
    slots             0 1       2 3 4 5             [C]  place among the completion tokens of the whole TrainBatch

`slots` is how a number per token that one pass computes (old_logprobs, ref_logprobs) is found again by a pass that cuts
the batch otherwise: `table[micro.slots]`, with `table` of `num_completion_tokens` entries.

Completions that give no gradient (empty, or truncated under overlong filtering) are in no micro-batch; the loss's
Normalizer counts them. Prompts are repeated for each completion of a group. Made by rl/trainer.py,
cut by rl/update.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from qerl import philox
from qerl.noise import ROLLOUT_STREAM, NoiseDraw
from qerl.rl.loss import Normalizer
from qerl.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A prompt and one completion."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """With its EOS; may be empty."""
    advantage: float
    kept: bool
    """Whether the loss takes it; False for a truncated completion under overlong filtering."""
    prompt_index: int
    """The prompt's number within the step."""
    sample_index: int
    """The completion's number within its group."""
    first_slot: int
    """Place of its first completion token among those of the whole batch."""

    @property
    def num_tokens(self) -> int:
        """Prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass needs; all tensors on the training device. See the module docstring."""

    input_ids: Int64[Tensor, " t"]
    cu_seqlens: Int32[Tensor, " s_plus_1"]
    predictors: Int64[Tensor, " c"]
    targets: Int64[Tensor, " c"]
    sequence: Int64[Tensor, " c"]
    slots: Int64[Tensor, " c"]
    rollout_logprobs: Float32[Tensor, " c"]
    advantages: Float32[Tensor, " s"]
    lengths: Int64[Tensor, " s"]
    """Completion tokens of each sequence."""
    members: tuple[TrainSequence, ...]
    """The sequences, in order."""

    def noise_streams(self, draw: NoiseDraw) -> tuple[list[int], Int64[Tensor, " t"] | None]:
        """`streams` and `index` for `noise.applied`: every token under the Z that it had while it was sampled.

        A prompt's tokens, its last one included, take the prompt's stream; completion tokens take their completion's.
        """
        if draw.per == "rollout":
            return [ROLLOUT_STREAM], None
        rows: dict[int, int] = {}
        row_of_part: list[int] = []
        part_lengths: list[int] = []
        for member in self.members:
            for sample, ids in ((None, member.prompt_ids), (member.sample_index, member.completion_ids)):
                stream = draw.stream(member.prompt_index, sample)
                row_of_part.append(rows.setdefault(stream, len(rows)))
                part_lengths.append(len(ids))
        index = torch.repeat_interleave(torch.tensor(row_of_part), torch.tensor(part_lengths))
        return list(rows), index.to(self.input_ids.device)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All sequences of one rollout."""

    sequences: list[TrainSequence]
    rollout_logprobs: Float32[Tensor, " c"]
    """Of every completion token, in order, on the host."""

    @classmethod
    def from_groups(
        cls, groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]], *, mask_truncated: bool = False
    ) -> TrainBatch:
        """From scored groups and one advantage a completion; `mask_truncated` is overlong filtering."""
        sequences: list[TrainSequence] = []
        logprobs: list[float] = []
        for group, group_advantages in zip(groups, advantages, strict=True):
            for sample, (completion, advantage) in enumerate(zip(group.completions, group_advantages, strict=True)):
                assert len(completion.logprobs) == len(completion.token_ids)
                sequences.append(
                    TrainSequence(
                        group.prompt_ids,
                        completion.token_ids,
                        advantage,
                        kept=not (mask_truncated and completion.truncated),
                        prompt_index=group.prompt_index,
                        sample_index=sample,
                        first_slot=len(logprobs),
                    )
                )
                logprobs += completion.logprobs
        return cls(sequences, torch.tensor(logprobs, dtype=torch.float32))

    @property
    def num_completion_tokens(self) -> int:
        """Entries of a table that `slots` index."""
        return len(self.rollout_logprobs)

    def mini_batches(self, num_updates: int, key: int) -> list[list[int]]:
        """Sequence numbers of each optimizer step: a random order of whole completions, cut into equal parts.

        The order depends on `key` and the number of sequences alone. Sizes differ by at most one; with fewer sequences
        than updates there are fewer parts, never an empty one.
        """
        total = len(self.sequences)
        draws = philox.uniform(key, torch.zeros(1, dtype=torch.int64), total)[0]
        order = draws.argsort(stable=True).tolist()
        bounds = [total * i // num_updates for i in range(num_updates + 1)]
        parts = [sorted(order[a:b]) for a, b in pairwise(bounds)]
        return [part for part in parts if part]

    def normalizer(self, sequences: Sequence[int], max_completion_length: int) -> Normalizer:
        """What the loss of an optimizer step over these sequences is divided by."""
        members = [self.sequences[i] for i in sequences]
        return Normalizer.of([len(m.completion_ids) for m in members], [m.kept for m in members], max_completion_length)

    def micro_batches(
        self, sequences: Sequence[int], max_tokens: int, device: torch.device | str = "cpu"
    ) -> list[MicroBatch]:
        """The sequences that give a gradient, packed into passes of at most `max_tokens` tokens, prompts included.

        First fit on falling lengths: at most 11/9 of the fewest possible passes, plus one. A sequence longer than the
        limit gets a pass of its own. The list is empty if no completion has a token in the loss.
        """
        live = [i for i in sequences if self.sequences[i].kept and self.sequences[i].completion_ids]
        bins: list[list[int]] = []
        room: list[int] = []
        for i in sorted(live, key=lambda i: (-self.sequences[i].num_tokens, i)):
            size = self.sequences[i].num_tokens
            place = next((b for b, free in enumerate(room) if free >= size), None)
            if place is None:
                bins.append([i])
                room.append(max_tokens - size)
            else:
                bins[place].append(i)
                room[place] -= size
        return [self._pack([self.sequences[i] for i in sorted(numbers)], torch.device(device)) for numbers in bins]

    def _pack(self, members: list[TrainSequence], device: torch.device) -> MicroBatch:
        ends = list(accumulate((m.num_tokens for m in members), initial=0))
        predictors: list[int] = []
        slots: list[int] = []
        for start, member in zip(ends[:-1], members, strict=True):
            length = len(member.completion_ids)
            first = start + len(member.prompt_ids) - 1  # the prompt's last token predicts the first completion token
            predictors += range(first, first + length)
            slots += range(member.first_slot, member.first_slot + length)
        lengths = torch.tensor([len(m.completion_ids) for m in members])
        return MicroBatch(
            input_ids=torch.tensor([t for m in members for t in (*m.prompt_ids, *m.completion_ids)], device=device),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
            predictors=torch.tensor(predictors, device=device),
            targets=torch.tensor([t for m in members for t in m.completion_ids], device=device),
            sequence=torch.repeat_interleave(lengths).to(device),
            slots=torch.tensor(slots, device=device),
            rollout_logprobs=self.rollout_logprobs[torch.tensor(slots)].to(device),
            advantages=torch.tensor([m.advantage for m in members], device=device),
            lengths=lengths.to(device),
            members=tuple(members),
        )
