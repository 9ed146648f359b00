"""The text of each completion in the making, its prompt first, in a line of its own on the device.

    lines of one group      p p p p p p d d d             the completion of some slot: a step writes what it draws
                            p p p p p p d d d d d d d     one that has ended: it stays until its line is needed
                            \\--starts--/            lengths

A decode step notes what it draws (kernels/slots), completions are read from here, and what may come next is looked up
here (kernels/lookup): in all lines of a group, so those that have ended are kept as long as others have none to take.
Called by runner.py. Nothing of a call of `generate` is found in the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from qerl.kernels.lookup import Texts

NOBODY = -1
"""Group of a line that nothing is looked up in, and line of a slot that nothing is looked up for."""


class TextLines:
    """`texts`, and which lines are free; integers on the host."""

    def __init__(self, num_lines: int, longest: int, device: torch.device) -> None:
        """longest: tokens of a prompt with its completion, at most."""

        def numbers() -> torch.Tensor:
            return torch.zeros(num_lines, dtype=torch.int64, device=device)

        tokens = torch.zeros(num_lines, longest, dtype=torch.int32, device=device)
        self.texts = Texts(tokens, lengths=numbers(), starts=numbers(), groups=numbers())
        self._free: deque[int] = deque()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._free = deque(range(len(self.texts.tokens)))
        self.texts.groups.fill_(NOBODY)

    def open(self, texts: Sequence[Sequence[int]], starts: Sequence[int], groups: Sequence[int]) -> list[int]:
        """Lines that hold these texts, whose first `starts` tokens are prompts: those that were closed longest ago.

        Texts that are one object, as a group's prompt is, go to the device once.
        """
        lines = [self._free.popleft() for _ in texts]
        distinct = {id(text): text for text in texts}
        place = {key: i for i, key in enumerate(distinct)}
        longest = max(map(len, texts))
        padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in distinct.values()], dtype=torch.int32)
        numbers = torch.tensor(
            [lines, [place[id(text)] for text in texts], list(map(len, texts)), list(starts), list(groups)]
        )
        index, rows, *values = numbers.to(self.texts.tokens.device)
        self.texts.tokens[index, :longest] = padded.to(index.device)[rows]
        for of_lines, new in zip(self.texts[1:], values, strict=True):
            of_lines[index] = new
        return lines

    def close(self, lines: Sequence[int]) -> None:
        """Nobody writes to these lines any more."""
        self._free.extend(lines)

    def read(self, lines: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """So many tokens of each line, from a place on."""
        index, first = torch.tensor([list(lines), list(starts)], device=self.texts.tokens.device)[..., None]
        places = (first + torch.arange(max(counts), device=first.device)).clamp_max(self.texts.tokens.shape[1] - 1)
        rows = self.texts.tokens[index, places].tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]
