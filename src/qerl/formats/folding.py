"""Channel factors that a calibration has folded into a model's weights, and the file that keeps them.

    W' = diag(1 / outputs) W diag(inputs),  b' = b / outputs      a linear [N, K]
    w' = w / outputs                                              a norm in front of linears

A factor that multiplies columns divides the rows, or the norm, that they read from: so the model computes what it did,
and nothing is left to do at run time. Two things still need the factors, which is why a folder keeps them:

    noise on a folded norm    (w + Z) / s = w' + Z / s: what is added to w' is Z / s                  (qerl/noise.py)
    an adapter trained on it  B A over W' is diag(outputs) B A diag(1 / inputs) over W                (qerl/export.py)

They lie in calibration/channels.safetensors, fp32 vectors of a module: `m.inputs` [K], `m.outputs` [N], and beside them
`m.importance` [K], which has weighed the scales and does nothing afterwards. Not next to config.json, since other
programs load every *.safetensors that they find there. formats/awq.py chooses the factors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from qerl.formats.checkpoint import DenseSource

CALIBRATION_FILE = Path("calibration") / "channels.safetensors"
"""Within a model folder."""

RECORD = "qerl_quantize.json"
"""In a folder of quantize_checkpoint: what it was made of, with the SHA-256 of each file of weights, and how."""


class Fold(NamedTuple):
    """What one module was scaled by; None is all ones."""

    inputs: Float32[Tensor, " k"] | None = None
    """Its columns were multiplied by it."""
    outputs: Float32[Tensor, " n"] | None = None
    """Its rows and its bias, or a norm's weight, were divided by it."""

    def weight(self, weight: Float[Tensor, "*n k"]) -> Float32[Tensor, "*n k"]:
        """A matrix or a norm's vector, folded, in fp32."""
        folded = weight.float()
        if self.outputs is not None:
            folded = folded / (self.outputs[:, None] if weight.ndim == 2 else self.outputs)
        return folded if self.inputs is None else folded * self.inputs

    def unfolded(self, weight: Float[Tensor, "*n k"]) -> Float32[Tensor, "*n k"]:
        """The inverse of `weight`."""
        before = weight.float()
        if self.outputs is not None:
            before = before * (self.outputs[:, None] if weight.ndim == 2 else self.outputs)
        return before if self.inputs is None else before / self.inputs

    def to(self, device: torch.device | str) -> Fold:
        """The same there."""
        return Fold(*(None if factors is None else factors.to(device) for factors in self))

    def bias(self, bias: Float[Tensor, " n"]) -> Float32[Tensor, " n"]:
        """A linear's bias, folded, in fp32."""
        return bias.float() if self.outputs is None else bias.float() / self.outputs


class Calibration(NamedTuple):
    """What a model's activations on text say about quantising it, by the names of the stored modules."""

    folds: Mapping[str, Fold]
    importance: Mapping[str, Float32[Tensor, " k"]]
    """Of linears: the mean square of each input, after folding."""


class Folded:
    """A source of dense tensors with factors folded into them. Matrices come in fp32: they are quantised next."""

    def __init__(self, source: DenseSource, folds: Mapping[str, Fold]) -> None:
        self.source, self.folds = source, folds
        self.folder, self.shards = source.folder, source.shards
        self.config: dict[str, Any] = source.config

    def names(self, shard: str | None = None) -> list[str]:
        """The source's."""
        return self.source.names(shard)

    def shape(self, name: str) -> tuple[int, ...]:
        """The source's."""
        return self.source.shape(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor, folded where there are factors."""
        tensor = self.source.tensor(name)
        module, _, leaf = name.rpartition(".")
        fold = self.folds.get(module)
        if fold is None:
            return tensor
        if leaf == "bias":
            return fold.bias(tensor).to(tensor.dtype)
        folded = fold.weight(tensor)
        return folded if tensor.ndim == 2 else folded.to(tensor.dtype)


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Keep what a calibration has found with the model folder."""
    vectors = {f"{name}.importance": vector for name, vector in calibration.importance.items()}
    for name, fold in calibration.folds.items():
        parts = {f"{name}.{part}": factors for part, factors in fold._asdict().items() if factors is not None}
        vectors |= parts
    (folder / CALIBRATION_FILE).parent.mkdir(exist_ok=True)
    apart = {name: vector.cpu().clone() for name, vector in vectors.items()}  # a file may hold no tensor twice
    save_file(apart, folder / CALIBRATION_FILE)


def read_calibration(folder: Path) -> Calibration | None:
    """What the folder keeps of a calibration; None: it was made without. ValueError: a damaged file, or a lost one."""
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        record = folder / RECORD
        if record.is_file() and json.loads(record.read_text()).get("calibration"):
            raise ValueError(f"{path} is missing, though {RECORD} tells of a calibration: copy it along")
        return None
    try:
        vectors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off ({error}): quantise the model again") from None
    folds: dict[str, Fold] = {}
    importance: dict[str, Tensor] = {}
    for name, vector in vectors.items():
        module, _, part = name.rpartition(".")
        if vector.dtype != torch.float32 or vector.ndim != 1 or not (vector.isfinite() & (vector >= 0)).all():
            raise ValueError(f"{path}: {name} is no vector of finite numbers from 0 on: quantise the model again")
        if part == "importance":
            importance[module] = vector
        elif part in Fold._fields and (vector > 0).all():
            folds[module] = folds.get(module, Fold())._replace(**{part: vector})
        else:
            raise ValueError(f"{path}: {name} holds no factors: quantise the model again")
    return Calibration(folds, importance)


def read_folds(folder: Path) -> Mapping[str, Fold]:
    """The factors in a model folder's weights; empty where nothing was folded. ValueError as `read_calibration`."""
    calibration = read_calibration(folder)
    return {} if calibration is None else calibration.folds
