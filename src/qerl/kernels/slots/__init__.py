"""slots: what a decode step does with its sequences' small state, in one kernel at either end.

    locate      positions of T tokens of each sequence -> their rows among all pages' rows, and lengths up to them
    advance_    tokens drawn for each sequence -> noted, counted, the last one fed next; which sequences have ended

A step feeds T tokens a sequence, the last one drawn and guesses of what follows it, and draws T: tokens[i, t] follows
fed[i, t]. Drawn tokens count up to the first one that was guessed wrong, itself included, or that ends the sequence:

    n[i] = 1 + the number of t in a row, from 0, where tokens[i, t] == fed[i, t + 1] does not end i     (0: had ended)
    for t < n[i]: texts[lines[i], positions[i] + 1 + t] = tokens[i, t],  drawn_*[i, counts[i] + t] = ..
    counts[i] += n[i], positions[i] += n[i], lengths[lines[i]] = positions[i] + 1, tokens[i] = the last of n[i]
    finished[i] |= tokens[i, t] in eos or counts[i] + t + 1 == limits[i], for the last of them

Contract: integers are int64, as torch's indices are, but texts int32. A sequence that had ended stands still.

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
    page_table: Int64[Tensor, "b pages"], positions: Int64[Tensor, " tokens"], page_size: int
) -> tuple[Int64[Tensor, " tokens"], Int64[Tensor, " tokens"]]:
    """(row, length) of each token; the tokens are as many of each sequence, one sequence after the other."""
    if positions.is_cuda:
        from qerl.kernels.slots.fused import locate_fused  # Triton is there where CUDA is

        return locate_fused(page_table, positions, page_size)
    return locate_reference(page_table, positions, page_size)


def advance_(
    progress: Progress,
    tokens: Int64[Tensor, " tokens"],
    logprobs: Float32[Tensor, " tokens"],
    entropies: Float32[Tensor, " tokens"],
    eos: Int64[Tensor, " ids"],
    fed: Int64[Tensor, "b t"] | None = None,
) -> None:
    """Note the drawn tokens that count, in place: t of each sequence, one sequence after the other.

    fed: what they follow (None: one token a sequence, which always counts).
    """
    if tokens.is_cuda:
        from qerl.kernels.slots.fused import advance_fused_  # Triton is there where CUDA is

        advance_fused_(progress, tokens, logprobs, entropies, eos, fed)
    else:
        advance_reference_(progress, tokens, logprobs, entropies, eos, fed)
