"""Noise on the norms of vLLM's model: w + Z while a rollout runs, w again afterwards, bit for bit.

    written = round(float(w) + sigma * Z)       over a folded norm + sigma * Z / s; Z is noise.py's, of the same
                                                (seed, step, site, stream) as the trainer's

vLLM's norm has a weight in the model's dtype, and its kernels want it so. In bf16 the sum is rounded, once: near w = 1
the next number is 0.4 to 0.8 % away, and noise well below half of that is lost (`Applied.lost` counts it). Importance
correction sees the rounded policy through its log-probabilities, like any other difference.

vLLM has no streams a token, so all of a rollout shares one Z. Which modules: those named `layers.<i>.` + SITE_NAMES, as
transformers names them; fused linears (qkv_proj, gate_up_proj) change nothing about that. Left out, and refused: norms
of other kinds, and a model that is cut over several pipeline stages.

Called by worker.py. Needs no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qerl.formats.folding import Fold
from qerl.noise import ROLLOUT_STREAM, SITE_NAMES, NoiseDraw, folded_rows

_NAME = re.compile(rf"(?:.*\.)?layers\.(\d+)\.({'|'.join(SITE_NAMES)})")


@dataclass(frozen=True)
class Applied:
    """What a draw did to the norms."""

    num_vectors: int
    """Norms that were written."""
    lost: float
    """Share of their numbers that rounding left as they were."""


def lost_warning(sigma: float, lost: float) -> str | None:
    """What to tell where more than half of the noise is lost."""
    if lost <= 0.5:
        return None
    return (
        f"noise of sigma {sigma:g} is below what vLLM's norms hold: rounding leaves {lost:.0%} of their numbers clean"
    )


class NoisyNorms:
    """The noisy norms of a model of vLLM's, in the order of noise.py's sites."""

    def __init__(self, model: nn.Module, folds: Mapping[str, Fold]) -> None:
        """folds: of the model's folder. ValueError: a layer without such a norm, or with one of another kind."""
        norms = find_norms(model)
        self._norms = list(norms.values())
        outputs = [folds.get(name, Fold()).outputs for name in norms]
        self._folds = [s if s is None else s.to(self._weights()[0].device) for s in outputs]
        self._clean: list[Tensor] | None = None

    def _weights(self) -> list[Tensor]:
        """As they are now: loading may put other tensors in their places."""
        return [norm.get_parameter("weight").data for norm in self._norms]

    def apply(self, draw: NoiseDraw, stream: int = ROLLOUT_STREAM) -> Applied:
        """Write w + Z in place of what stands there, which is first w again."""
        self.restore()
        if draw.sigma == 0:
            return Applied(0, 0.0)
        weights = self._weights()
        (size,) = {weight.numel() for weight in weights}
        rows = folded_rows(draw, self._folds, torch.tensor([stream], device=weights[0].device), size)[:, 0]
        self._clean = [weight.clone() for weight in weights]
        for weight, row in zip(weights, rows, strict=True):
            weight.copy_(weight.float() + row)
        kept = [weight.eq(clean).float().mean() for weight, clean in zip(weights, self._clean, strict=True)]
        return Applied(len(weights), torch.stack(kept).mean().item())

    def restore(self) -> None:
        """The clean weights as they were when noise was last applied."""
        if self._clean is not None:
            for weight, clean in zip(self._weights(), self._clean, strict=True):
                weight.copy_(clean)
        self._clean = None


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the two of SITE_NAMES of every layer, layer by layer. ValueError, saying what is amiss, otherwise."""
    found: dict[tuple[int, str], tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        if type(module).__name__ != "RMSNorm":
            raise ValueError(f"noise: {name} is a {type(module).__name__}, which is not w * x / rms(x)")
        if hasattr(layer, "pre_feedforward_layernorm"):
            raise ValueError(f"noise: the layer of {name} has a pre_feedforward_layernorm, and takes no noise")
        if found.setdefault((int(match[1]), match[2]), (name, module))[0] != name:
            raise ValueError(f"noise: {name} and {found[int(match[1]), match[2]][0]} are both of layer {match[1]}")
    depth = 1 + max((number for number, _ in found), default=-1)
    wanted = [(number, site) for number in range(depth) for site in SITE_NAMES]
    if not found or set(found) != set(wanted):
        missing = next((place for place in wanted if place not in found), (0, SITE_NAMES[0]))
        raise ValueError(
            f"noise: {type(model).__name__} has no layers.{missing[0]}.{missing[1]}, and noise goes on "
            f"layers.*.{' and layers.*.'.join(SITE_NAMES)}: this model takes none; turn the noise off"
        )
    return dict(found[place] for place in wanted)
