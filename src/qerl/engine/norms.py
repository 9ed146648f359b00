"""The engine's norm vectors: fp32 copies of the trainer's, with the rollout's noise already added.

    y = gain * x / rms(x)          gain = w + Z at the noisy sites (Z / s over a folded w), w elsewhere (kernels/norm)

The trainer's weights are read and never written: `sync` copies them, and Z is added to the copy, so noise cannot pile
up. Which Z a token runs under is decided by its stream (qerl/noise.py):

    noise off, per rollout      `shared` [sites, 1, H]: one vector a site for every token
    per prompt, per completion  `gains(streams)` [sites, streams, H]: made when a prompt or a completion starts

Called by model.py, the runner (which keeps one row a slot) and the probe. Buffers keep their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from qerl.noise import ROLLOUT_STREAM, NoiseDraw, running_norm, site_rows


class Gains(NamedTuple):
    """The noisy norms' vectors of one forward pass."""

    rows: Float32[Tensor, "sites rows h"]
    index: Int64[Tensor, " t"] | None = None
    """Row of each token; None: row t for token t, or the only row for all."""

    def of_site(self, site: int) -> Float32[Tensor, "rows h"]:
        """What `index` refers to."""
        return self.rows[site]


class NormBuffers:
    """Vectors of the noisy sites, in noise.py's order, and of the other norms (final, q_norm, k_norm)."""

    def __init__(self, sites: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
        self._sites, self._others = list(sites), list(others)
        self.draw: NoiseDraw | None = None  # of the last `sync`
        self.clean: Float32[Tensor, "sites h"] = torch.stack([_vector(module) for module in sites])
        self.shared: Float32[Tensor, "sites 1 h"] = self.clean[:, None].clone()
        self.others: list[Float32[Tensor, " size"]] = [_vector(module).clone() for module in others]

    @property
    def per_slot(self) -> bool:
        """Whether tokens of different prompts or completions run under different vectors."""
        return self.draw is not None and self.draw.per != "rollout" and self.draw.sigma > 0

    def sync(self, draw: NoiseDraw | None) -> int:
        """Copy the trainer's vectors and add the draw's Z; how many sites are noisy now.

        With one Z a prompt or a completion, `shared` holds that of prompt 0, as a specimen for the probe.
        """
        self.draw = draw
        torch.stack([_vector(module) for module in self._sites], out=self.clean)
        vectors = [_vector(module) for module in self._others]
        torch._foreach_copy_(self.others, vectors)  # pyright: ignore[reportPrivateImportUsage]
        self.shared.copy_(self.gains([self.stream(0)], draw))
        return int((self.shared[:, 0] != self.clean).any(-1).sum())

    def stream(self, prompt: int, sample: int | None = None) -> int:
        """Stream of a prompt's tokens or, with `sample`, of that completion's tokens."""
        return ROLLOUT_STREAM if self.draw is None else self.draw.stream(prompt, sample)

    def gains(self, streams: Sequence[int], draw: NoiseDraw | None) -> Float32[Tensor, "sites streams h"]:
        """w + Z of every site under each stream of a draw."""
        sites, size = self.clean.shape
        clean = self.clean[:, None].expand(sites, len(streams), size)
        if draw is None or draw.sigma == 0:
            return clean
        on_device = torch.tensor(streams, dtype=torch.int64, device=clean.device)
        return clean + site_rows(draw, [running_norm(module) for module in self._sites], on_device)


def _vector(module: Any) -> Float32[Tensor, " h"]:
    """A norm's weight; of one that PEFT trains, the copy that runs."""
    return running_norm(module).weight.detach().float()
