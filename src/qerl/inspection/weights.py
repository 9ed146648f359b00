"""SQNR of every linear layer of a model against a reference's: sum w^2 / sum (a - w)^2, in decibels.

    open_pair(config, against) -> (model, reference) as `Base`s -> compare_weights -> WeightComparison

The model is a packed folder, or a bf16 folder as a run would quantise it while it loads. The reference is a bf16 (fp16,
fp32) folder; by default, for a bf16 model, the same. SQNR is the error of each weight as a number: factors that AWQ has
folded into the model are taken out first, where the folder names them (formats/folding.py). The other tensors are
compared too, factors taken out, and those that differ are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.config import ModelConfig, model_folder
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import Distortion, dequantize, distortion
from qerl.formats.folding import Fold, read_folds
from qerl.nn.load import Base, open_base

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Layer:
    """One linear layer."""

    name: str
    rows: int
    columns: int
    bits: float
    """Stored bits a weight, scales included."""
    distortion: Distortion

    @property
    def kind(self) -> str:
        """Its last name, such as q_proj."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class WeightComparison:
    """A model's linears against a reference's."""

    model: Path
    reference: Path
    format: str
    layers: list[Layer]
    others: list[str]
    """Tensors beside the linears' weights that are not the same in both folders."""

    @property
    def total(self) -> Distortion:
        """Over all layers."""
        return sum_distortions(self.layers)

    @property
    def bits(self) -> float:
        """Stored bits a weight over all layers."""
        weights = [layer.rows * layer.columns for layer in self.layers]
        return sum(w * layer.bits for w, layer in zip(weights, self.layers, strict=True)) / sum(weights)

    @property
    def by_kind(self) -> dict[str, list[Layer]]:
        """Layers of the same name, in the order of their first."""
        kinds: dict[str, list[Layer]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        return kinds

    @property
    def worst(self) -> list[Layer]:
        """From the lowest SQNR up; exact ones left out."""
        inexact = [layer for layer in self.layers if layer.distortion.sqnr_db < math.inf]
        return sorted(inexact, key=lambda layer: layer.distortion.sqnr_db)


def sum_distortions(layers: list[Layer]) -> Distortion:
    """The distortion of all layers as if they were one matrix."""
    total = Distortion(0.0, 0.0)
    for layer in layers:
        total += layer.distortion
    return total


def stored_format(path: str) -> str | None:
    """The format of a packed folder; None where the folder is not packed. ValueError: no model folder."""
    stored = Checkpoint(model_folder(path)).quantization
    return stored.format if stored is not None else None


def open_pair(config: ModelConfig, against: Path | None) -> tuple[Base, Base]:
    """A model and its reference, matched by name and shape; no weight is read yet.

    ValueError: what `open_base` refuses, a packed model without a reference, a packed reference, layers that differ in
    name or shape.
    """
    model = open_base(config)
    if against is None and model.source.checkpoint.quantization is not None:
        raise ValueError(f"{model.folder} is packed: name the bf16 folder that it was made of, --against BF16_MODEL")
    if against is not None and (packed := stored_format(str(against))) is not None:
        raise ValueError(f"--against {against} is packed itself ({packed}): name the bf16 folder")
    dense = {"path": str(against or config.path), "format": "bf16", "device": config.device, "dtype": config.dtype}
    reference = open_base(ModelConfig.model_validate(dense | {"trust_remote_code": config.trust_remote_code}))
    ours, theirs = _shapes(model), _shapes(reference)
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = (list(shapes[name]) if name in shapes else "nothing" for shapes in (ours, theirs))
        if here != there:
            raise ValueError(
                f"{reference.folder} is another model: {name} is {there} there and {here} in {model.folder}"
            )
    return model, reference


@torch.no_grad()
def compare_weights(model: Base, reference: Base, progress: Progress | None = None) -> WeightComparison:
    """Every linear of `model` against `reference`'s, one group in memory at a time."""
    layers: list[Layer] = []
    folds = read_folds(model.folder) if model.folder != reference.folder else {}
    for done, group in enumerate(model.groups):
        parts = model.codes(group) if group.packed else [model.weight(name) for name in group.names]
        for name, part in zip(group.names, parts, strict=True):
            weight = reference.weight(name)
            if not weight.isfinite().all():
                raise ValueError(f"{reference.folder}: {name}.weight has NaN or infinity: a damaged checkpoint?")
            values = part if isinstance(part, torch.Tensor) else dequantize(part, name=name)
            fold = folds.get(model.source.modules[name])
            if fold is not None:
                values = fold.to(model.device).unfolded(values)
            stored = [part] if isinstance(part, torch.Tensor) else [t for t in part if t is not None]
            bits = 8 * sum(t.nbytes for t in stored) / weight.numel()
            rows, columns = weight.shape
            layers.append(Layer(name, rows, columns, bits, distortion(weight, values)))
        if progress is not None:
            progress(done + 1, len(model.groups))
    others = _others(model, reference, folds)
    return WeightComparison(model.folder, reference.folder, model.config.format, layers, others)


def _shapes(base: Base) -> dict[str, tuple[int, ...]]:
    return {name: tuple(base.model.get_parameter(f"{name}.weight").shape) for g in base.groups for name in g.names}


def _others(model: Base, reference: Base, folds: Mapping[str, Fold]) -> list[str]:
    """Names of tensors that are not the same in both folders, the linears' weights aside.

    What was divided by factors has been rounded once more, to 8 bits at least.
    """
    if model.folder == reference.folder:
        return []
    weights = {f"{name}.weight" for group in model.groups for name in group.names}

    def differs(name: str) -> bool:
        ours, theirs = model.source.tensor(name).float(), reference.source.tensor(name).float()
        fold = folds.get(model.source.tensors[name].rpartition(".")[0])
        if fold is None or fold.outputs is None or ours.shape != theirs.shape:
            return not torch.equal(ours, theirs)
        return not torch.allclose(ours * fold.outputs, theirs, rtol=2**-8, atol=0)

    return [
        name
        for name in sorted(model.model.state_dict())
        if name not in weights and name in model.source.tensors and name in reference.source.tensors and differs(name)
    ]
