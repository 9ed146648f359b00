"""Triton kernels: one program takes a token's whole row for the statistics, a piece of a row for the gradient.

Statistics go through the row once, with sums relative to the largest score so far: when that grows by d, what has been
summed shrinks by e^-d, and a mean of (z - largest) moves by -d.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from qerl.kernels.numerics import rounded

WIDTH: Any = 4096
"""Scores that a program holds at a time."""


def token_statistics_fused(
    scores: Float[Tensor, "t v"], targets: Int64[Tensor, " t"], temperature: float
) -> tuple[Float32[Tensor, " t"], Float32[Tensor, " t"], Float32[Tensor, " t"]]:
    """`token_statistics` on one CUDA device."""
    tokens, v = scores.shape
    assert scores.stride(1) == 1 and targets.is_contiguous()
    logprobs, entropy, normalizer = (torch.empty(tokens, device=scores.device) for _ in range(3))
    with torch.cuda.device_of(scores):
        options: Any = {"WIDTH": WIDTH, "num_warps": 8}
        _statistics_kernel[(tokens,)](
            scores, targets, logprobs, entropy, normalizer, scores.stride(0), v, 1 / temperature, **options
        )
    return logprobs, entropy, normalizer


def logprob_grad_fused_(
    scores: Float[Tensor, "t v"],
    targets: Int64[Tensor, " t"],
    normalizer: Float32[Tensor, " t"],
    grad: Float32[Tensor, " t"],
    temperature: float,
) -> Float[Tensor, "t v"]:
    """`logprob_grad_` on one CUDA device."""
    tokens, v = scores.shape
    assert scores.stride(1) == 1 and all(x.is_contiguous() for x in (targets, normalizer, grad))
    with torch.cuda.device_of(scores):
        options: Any = {"WIDTH": WIDTH, "num_warps": 8}
        _grad_kernel[(tokens, triton.cdiv(v, WIDTH))](
            scores, targets, normalizer, grad, scores.stride(0), v, 1 / temperature, **options
        )
    return scores


@triton.jit
def _statistics_kernel(
    scores_ptr,
    targets_ptr,
    logprobs_ptr,
    entropy_ptr,
    normalizer_ptr,
    stride,
    v,
    inverse_temperature,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = scores_ptr + token * stride
    column = tl.arange(0, WIDTH)
    largest, total, weighted = -3.0e38, 0.0, 0.0  # finite: 0 * (largest - new) is 0
    for start in range(0, v, WIDTH):
        inside = start + column < v
        z = tl.load(row + start + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        new = tl.maximum(largest, tl.max(tl.where(inside, z, -3.0e38), 0))
        e = tl.where(inside, tl.exp(z - new), 0.0)
        shrink = tl.exp(largest - new)
        weighted = shrink * (weighted + total * (largest - new)) + tl.sum(e * (z - new), 0)
        total = shrink * total + tl.sum(e, 0)
        largest = new
    log_total = tl.log(total)
    of_target = tl.load(row + tl.load(targets_ptr + token)).to(tl.float32) * inverse_temperature
    tl.store(logprobs_ptr + token, of_target - largest - log_total)
    tl.store(entropy_ptr + token, log_total - weighted / total)
    tl.store(normalizer_ptr + token, largest + log_total)


@triton.jit
def _grad_kernel(
    scores_ptr, targets_ptr, normalizer_ptr, grad_ptr, stride, v, inverse_temperature, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < v
    at = scores_ptr + token * stride + column
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    p = tl.exp(z - tl.load(normalizer_ptr + token))
    is_target = (column == tl.load(targets_ptr + token)).to(tl.float32)
    grad = tl.load(grad_ptr + token) * inverse_temperature
    tl.store(at, rounded((is_target - p) * grad, scores_ptr.dtype.element_ty), mask=inside)
