"""slots: what a decode step does with its sequences' small state, in one kernel at either end.

    locate      position p of each sequence -> its row among all pages' rows, and its length p + 1
    advance_    a drawn token of each sequence -> noted, fed next, counted; which sequences have ended

    drawn_tokens[i, counts[i]] = tokens[i] = drawn[i]                      (so for logprobs and entropies)
    counts[i] += 1, positions[i] += 1                                      where i had not ended before
    finished[i] |= drawn[i] in eos or counts[i] == limits[i]

Contract: integers are int64, as torch's indices are. A sequence that had ended stands still: what is drawn for it lands
in the column after its last, which has to be there.

    device            path
    CUDA              fused.py: Triton
    anything else     reference.py: a dozen operations of torch, a microsecond or two each on a GPU

Called by the engine's decode steps (engine/runner.py, engine/attention.py).
"""

from __future__ import annotations

from jaxtyping import Float32, Int64
from torch import Tensor

from qerl.kernels.slots.reference import Progress, advance_reference_, locate_reference

__all__ = ["Progress", "advance_", "locate"]


def locate(
    page_table: Int64[Tensor, "b pages"], positions: Int64[Tensor, " b"], page_size: int
) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"]]:
    """(row, length) of each sequence."""
    if positions.is_cuda:
        from qerl.kernels.slots.fused import locate_fused  # Triton is there where CUDA is

        return locate_fused(page_table, positions, page_size)
    return locate_reference(page_table, positions, page_size)


def advance_(
    progress: Progress,
    tokens: Int64[Tensor, " b"],
    logprobs: Float32[Tensor, " b"],
    entropies: Float32[Tensor, " b"],
    eos: Int64[Tensor, " ids"],
) -> None:
    """Note one drawn token a sequence, in place."""
    if tokens.is_cuda:
        from qerl.kernels.slots.fused import advance_fused_  # Triton is there where CUDA is

        advance_fused_(progress, tokens, logprobs, entropies, eos)
    else:
        advance_reference_(progress, tokens, logprobs, entropies, eos)
