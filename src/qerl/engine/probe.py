"""The proof, after every sync, that adapters and noise reach the engine's logits.

An adapter that loads and changes nothing, or noise on modules that do not run, raises no error by itself and trains for
days. So a few fixed tokens go through the engine: logits must differ from those without adapters (once some B is not
zero) and from those without noise (once sigma is positive). A young adapter or a small sigma may vanish in 16-bit
rounding although its path is sound; then the same path is tried with the effect made large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float32
from torch import Tensor

from qerl.engine.api import SyncReport
from qerl.noise import NoiseDraw

LARGE_SIGMA = 1.0  # as large as the norm weights themselves

Logits = Callable[[float, NoiseDraw | None], Float32[Tensor, "t v"]]
"""(factor on the adapters, noise) -> logits of `probe_tokens`."""


def probe_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """Eight tokens from all over the vocabulary."""
    return torch.arange(1, 9, device=device) * vocab_size // 9


def probe(
    logits: Logits, draw: NoiseDraw | None, largest_b: Float32[Tensor, " adapters"], num_noised: int, num_sites: int
) -> SyncReport:
    """Measure what adapters and noise change; RuntimeError naming what is dead.

    largest_b: of every adapter, the largest |B|; num_noised of num_sites norm vectors are noisy.
    """
    now = logits(1.0, draw)
    if not torch.isfinite(now).all():
        raise RuntimeError("the engine's logits are not finite after sync: an adapter or a norm has NaN or Inf")
    largest = float(largest_b.max()) if len(largest_b) else 0.0
    num_live = int((largest_b > 0).sum())
    adapter_change = noise_change = 0.0
    if largest > 0:
        bare = logits(0.0, draw)
        adapter_change = _difference(now, bare)
        if adapter_change == 0 and _difference(logits(1 / largest, draw), bare) == 0:
            raise RuntimeError(
                f"dead adapters: {num_live} of {len(largest_b)} have B != 0, and none changes the engine's logits"
            )
    if draw is not None and draw.sigma > 0:
        if num_noised != num_sites:
            raise RuntimeError(
                f"dead noise: sigma is {draw.sigma}, and {num_sites - num_noised} of {num_sites} norms are clean"
            )
        clean = logits(1.0, None)
        noise_change = _difference(now, clean)
        if noise_change == 0 and _difference(logits(1.0, replace(draw, sigma=LARGE_SIGMA)), clean) == 0:
            raise RuntimeError(
                f"dead noise: sigma is {draw.sigma} on {num_sites} norms, and the engine's logits are the same"
            )
    return SyncReport(len(largest_b), num_live, num_noised, adapter_change, noise_change)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
