"""AWQ: scale up the columns that see large activations before rounding, and take it back in what feeds them.

    L(s) = sum over the matrices W of one input  || X (Q(W diag(s)) diag(1/s) - W)^T ||^2         X: sampled inputs
    s = a^alpha, of geometric mean 1 at its ends        a: mean |input| of each channel, alpha of 0, 0.1 .. 1

(arXiv 2306.00978, equations 4 and 5.) The loss is taken over some of the rows; alpha = 0 is no scaling, so it is never
worse than without. Where columns read from a norm, its weight is divided by s (formats/folding.py); where they read
from another linear, its rows are. Attention mixes tokens and not channels, so o_proj's columns read from v_proj's rows;
with fewer key heads than query heads, columns that read the same row share a factor (`tie`).

Contract: pure functions of tensors on any device; formats are any of codes.py that take `importance`. The model that
the activations come from is qerl/calibrate.py's business. Left out: AWQ's clipping, which block scales do better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from qerl.formats.codes import Swept, dequantize

ALPHAS = tuple(i / 10 for i in range(11))

_ROWS = 512  # of each matrix, evenly spread, that the loss is taken over
_TINY = 1e-4  # a channel that is hardly ever active counts as this share of the mean


class Inputs(NamedTuple):
    """What the linears of one input saw on the calibration text."""

    sample: Float[Tensor, "t k"]
    """Some of the tokens."""
    magnitude: Float32[Tensor, " k"]
    """Mean |x| of each channel over all tokens."""
    square: Float32[Tensor, " k"]
    """Mean x^2."""


class Choice(NamedTuple):
    """The factors of one input's channels, and what they do to the loss."""

    factors: Float32[Tensor, " k_own"]
    """Of the producer's channels; `untied` makes them the columns'."""
    alpha: float
    loss: float
    """Relative to the outputs: sum of squared errors over sum of squares."""
    loss_before: float
    """Of alpha = 0."""


def choose_factors(
    weights: Sequence[Float[Tensor, "_ k"]],
    inputs: Inputs,
    format: Swept,
    *,
    weighted: bool,
    tie: int = 1,
    heads: int = 1,
    names: Sequence[str],
) -> Choice:
    """The factors of the least loss among ALPHAS, the smaller alpha of equals.

    `weights` are the matrices that read the input; `weighted`: their scales will be chosen by importance. `tie` heads
    of the input in a row, of `heads`, share factors. ValueError names a matrix with NaN or infinity.
    """
    magnitude = inputs.magnitude.view(heads // tie, tie, -1).mean(1).flatten()
    magnitude = magnitude.clamp(min=_TINY * magnitude.mean().item())
    sample = inputs.sample.float()
    rows = [weight[:: -(-len(weight) // _ROWS)].float() for weight in weights]
    outputs = [sample @ weight.T for weight in rows]
    power = sum(output.square().sum().item() for output in outputs) or 1.0
    best: Choice | None = None
    before = 0.0
    for alpha in ALPHAS:
        factors = magnitude**alpha
        factors = factors / (factors.max() * factors.min()).sqrt()
        columns = untied(factors, tie, heads)
        importance = inputs.square / columns.square() if weighted else None
        scaled = [weight * columns for weight in rows]
        shared = format.share(scaled, names)
        loss = 0.0
        for weight, output, name in zip(scaled, outputs, names, strict=True):
            codes = format.quantize(weight, shared=shared, importance=importance, name=name)
            loss += (sample @ (dequantize(codes) / columns).T - output).square().sum().item()
        before = loss / power if alpha == 0 else before
        if best is None or loss / power < best.loss:
            best = Choice(factors, alpha, loss / power, before)
    assert best is not None
    return best


def untied(factors: Float32[Tensor, " k_own"], tie: int, heads: int) -> Float32[Tensor, " k"]:
    """Factors of the producer's channels as factors of the columns: each of `heads // tie` heads, `tie` times."""
    return factors.view(heads // tie, 1, -1).expand(-1, tie, -1).flatten()


def exact_in_norm(weight: Float[Tensor, " k"], factors: Float32[Tensor, " k"]) -> Float32[Tensor, " k"]:
    """Factors that divide a norm's weight without a rounding error in its dtype, next to the ones given.

    w' = round(w / s); then w / w' is what the columns must be multiplied by, and w' is exact. A weight of 0 keeps s.
    """
    folded = (weight.float() / factors).to(weight.dtype).float()
    return torch.where(folded != 0, weight.float() / folded, factors)
