"""lookup: guesses of a completion's next tokens, looked up in its own text and its group's (prompt lookup decoding).

    e            a place where the last tokens of line L, n of them, stand elsewhere: in line j of L's group
    m(e)         how many: the most m <= LONGEST with tokens[j, e - d] = tokens[L, n - 1 - d] for all d < m; at least 1
    0             <= e < n - 1               in the own line, j = L: prompt and completion
    starts[j] - 1 <= e < lengths[j] - 1      in another, with e >= 0: its completion, which may follow the prompt's end
    best         the largest m, then the own line, then the largest e, then the smallest j
    guess t      tokens[j, e + 1 + t % (lengths[j] - 1 - e)]    of the best; the last token if there is none

    row          the last token, tokens[L, n - 1], and the guesses 0 .. num_tokens - 2

Past a line's end what is known repeats: right for a text that goes on with that period. A match does not reach before
the beginning of a line, but in another line's prompt it does not end: all of a group share that.

Contract: tokens are int32 and not negative, those of a line neighbours in memory; all else is int64, as torch's indices
are. A line of a negative group has no candidates. lines[i] < 0 is a slot without a completion: its row is zeros.
Otherwise the line has a token. num_tokens: a power of two from 2 to 16.

    device            path
    CUDA              fused.py: Triton
    anything else     reference.py: torch's operations, a row after the other

No transfer between host and device, and shapes alone decide what runs: fit for CUDA graphs. The same guesses each time.

For decode steps that check several tokens of a sequence at once.
"""

from __future__ import annotations

from jaxtyping import Int64
from torch import Tensor

from qerl.kernels.lookup.reference import LONGEST, Texts, look_up_reference

__all__ = ["LONGEST", "Texts", "look_up"]


def look_up(texts: Texts, lines: Int64[Tensor, " b"], num_tokens: int) -> Int64[Tensor, "b num_tokens"]:
    """Each line's last token, and num_tokens - 1 guesses of what follows it."""
    assert num_tokens in (2, 4, 8, 16)
    if lines.is_cuda:
        from qerl.kernels.lookup.fused import look_up_fused  # Triton is there where CUDA is

        return look_up_fused(texts, lines, num_tokens)
    return look_up_reference(texts, lines, num_tokens)
