"""What a run has learned, as a folder that other programs load: `qerl export RUN --to OUT`.

    adapter       A and B in PEFT's layout (and trained norms), in fp32 as they were trained
    merged        W + scaling * B A for every linear with an adapter, in the base's 16 bits; all else as in the base
    requantized   merged, in 4 bits again

W is the weight that the adapter was trained over: the codes' values, also where the run quantised a bf16 folder while
it loaded. The sum is taken in fp32 and rounded once: to 4 bits, or to 16 with dither. W lies on the grid of 16 bits
already: rounding to nearest would give W back wherever B A is less than half a step. Dithered, B A is kept in the
mean, and what nothing was added to stays as it is. Trained norms replace the base's; exploration noise is never
part of a weight, so there is none to take out. Over a base that AWQ's factors are folded into (formats/folding.py), all
three belong to the folded model. `unfold` makes an adapter fit the model before: A diag(1 / inputs), diag(outputs) B,
trained norms times their factors.

Rounding what was learned is what can go wrong here: 16 bits, and 4 bits all the more, may be too coarse for a small
B A. So every layer is measured while it is written (`Rounding`). All is checked before anything is written,
and OUT gets its name when it is complete. Tensors are made one at a time: memory is that of formats/writing.py.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl import __version__
from qerl.config import ModelConfig
from qerl.formats.codes import BF16, Codes, Distortion, FormatName, dequantize, distortion, inner
from qerl.formats.folding import RECORD as QUANTIZE_RECORD
from qerl.formats.folding import Fold, read_folds
from qerl.formats.writing import (
    Progress,
    dense_bytes,
    packable,
    packed_groups,
    staged,
    write_dense,
    write_quantized,
)
from qerl.nn.load import Base, base_format, open_base
from qerl.nn.lora import SavedAdapter, read_adapter
from qerl.rl.checkpoint import list_checkpoints, read_state
from qerl.rl.log import read_run

logger = logging.getLogger(__name__)

Kind = Literal["adapter", "merged", "requantized"]

RECORD = "qerl_export.json"
"""In the exported folder: where it comes from, and what rounding has cost."""


@dataclass(frozen=True)
class Trained:
    """An adapter and the settings it was trained with."""

    folder: Path
    model: ModelConfig
    step: int | None
    """Steps that it was trained for, where it is a checkpoint's; None: the run's last."""


@dataclass(frozen=True)
class Rounding:
    """What writing one weight in fewer bits has cost."""

    name: str
    sqnr_db: float
    """Of the written weight against the exact one: 10 log10(sum w^2 / sum error^2)."""
    change_snr_db: float | None
    """Of what was learned: 10 log10(sum change^2 / sum error^2). Below 0 the rounding is louder; None: unchanged."""
    change_kept: float | None
    """Share of the change that is still there: 1 + <error, change> / <change, change>. 1 where errors are like noise,
    0 where every value fell back to what it was before. None: unchanged."""


@dataclass(frozen=True)
class Export:
    """What was written."""

    kind: Kind
    folder: Path
    trained: Trained
    base: Path
    total: Rounding | None
    """Over all weights that were rounded; None for an adapter, where none is."""
    layers: list[Rounding]


def find_adapter(run: Path) -> Trained:
    """The adapter of a run's output_dir (its newest checkpoint's where the run is not done), or of a checkpoint.

    ValueError: none there, or nothing that says what model it was trained on.
    """
    checkpoints = list_checkpoints(run)
    folder = run if (run / "adapter").is_dir() or not checkpoints else checkpoints[-1]
    adapter = folder / "adapter"
    if not adapter.is_dir():
        raise ValueError(f"{run} holds no adapter/ and no checkpoints/: is it the output_dir of a run?")
    state = read_state(folder) if (folder / "state.json").is_file() else read_run(folder)
    if "config" not in state:
        raise ValueError(f"{folder} has no run.json, which says what model the adapter was trained on")
    return Trained(adapter, ModelConfig.model_validate(state["config"]["model"]), state.get("step"))


def export(
    run: Path,
    target: Path,
    kind: Kind,
    *,
    format: FormatName = "nvfp4",
    base_folder: Path | None = None,
    unfold: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> Export:
    """Write what `run` has learned into the new folder `target`; `format` is that of a requantized one.

    The format's other settings are the run's. `base_folder` stands for the run's model.path where that has moved.
    ValueError: no adapter, one that does not fit the base, a base that cannot be read, an existing target, too small a
    disk, `unfold` where nothing is folded.
    """
    if unfold and kind != "adapter":
        raise ValueError("--unfold is for --adapter: a merged model is the folded one, and computes what it should")
    trained = find_adapter(run)
    changes: dict[str, Any] = {"device": device} | ({"path": str(base_folder)} if base_folder else {})
    base = open_base(ModelConfig.model_validate(trained.model.model_dump() | changes))
    adapter = read_adapter(base.model, trained.folder)
    if not adapter.norms and not any(factors.b.any() for factors in adapter.factors.values()):
        logger.warning("%s changes nothing: B is zero in every layer, as before the first update", trained.folder)
    folds = read_folds(base.folder)
    if unfold and not folds:
        raise ValueError(f"--unfold: nothing is folded into {base.folder}, the adapter fits the model as it is")
    ledger = _Ledger()
    merged = Merged(base, adapter, ledger.add if kind == "merged" else None)
    written = base_format(base.config.model_copy(update={"format": format}))
    if isinstance(written, BF16):
        raise ValueError("a model in bf16 is not requantized: use --merged")
    needs = 0 if kind == "adapter" else dense_bytes(merged) // (2 if kind == "requantized" else 1)
    with staged(target, needs_bytes=needs) as folder:
        if kind == "adapter":
            _copy_adapter(trained.folder, folder, base_folder)
            if unfold:
                _unfold_adapter(folder, base, folds)
        elif kind == "merged":
            write_dense(merged, folder, progress=progress)
        else:

            def observe(name: str, weight: Tensor, codes: Codes) -> None:
                ledger.add(name, weight, dequantize(codes), merged.change(f"{name}.weight"))

            keep = sorted(merged.dense_linears & packable(merged, written)) if trained.model.format != "bf16" else []
            merged.exact = packed_groups(merged, keep, written).keys()
            write_quantized(
                merged, folder, format=written, keep=keep, device=base.device, progress=progress, observe=observe
            )
        result = Export(kind, target, trained, base.folder, ledger.total(), ledger.layers)
        (folder / RECORD).write_text(json.dumps(_record(result, run), indent=1) + "\n")
    return result


class Merged:
    """The base with the adapter in it, as a folder of dense tensors that are computed when they are asked for."""

    def __init__(
        self,
        base: Base,
        adapter: SavedAdapter,
        observe: Callable[[str, Tensor, Tensor, Tensor | None], None] | None = None,
    ) -> None:
        """`observe` is told name, exact value, rounded value and change (None: unchanged) of what is rounded."""
        self.base, self.adapter, self.observe = base, adapter, observe
        self.exact: Collection[str] = ()
        """Linears that are given in fp32, since they are quantised next."""
        self.checkpoint = base.source.checkpoint
        self.folder, self.shards = base.folder, self.checkpoint.shards
        self.config = {key: value for key, value in self.checkpoint.config.items() if key != "quantization_config"}
        self.dtype = getattr(torch, str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16"))
        stored = base.source.modules
        self._linears = {
            f"{stored[name]}.weight": (group, i, name) for group in base.groups for i, name in enumerate(group.names)
        }
        self._norms = {base.source.tensors[name]: weight for name, weight in adapter.norms.items()}
        self._codes = lru_cache(maxsize=2)(base.codes)  # members of a group follow one another, or nearly

    @property
    def dense_linears(self) -> set[str]:
        """Linears of the decoder layers that the base holds in 16 bits."""
        return {name.removesuffix(".weight") for name, (group, *_) in self._linears.items() if not group.packed}

    def names(self, shard: str | None = None) -> list[str]:
        """As stored, with a packed layer's tensors replaced by one weight."""
        names = []
        for name in self.checkpoint.names(shard):
            module, _, leaf = name.rpartition(".")
            if not self.checkpoint.is_packed(module) or leaf == "bias":
                names.append(name)
            elif leaf in ("weight", "weight_packed"):
                names.append(f"{module}.weight")
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without making it."""
        if name in self._linears:
            return tuple(self.base.model.get_parameter(f"{self._linears[name][2]}.weight").shape)
        return self.checkpoint.shape(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor with what was learned. ValueError names one that holds NaN or infinity."""
        linear, norm = self._linears.get(name), self._norms.get(name)
        if norm is not None:
            before = self.checkpoint.tensor(name)
            return self._rounded(name, norm, before.dtype, norm - before.float())
        if linear is None:
            return self.checkpoint.tensor(name)
        group, i, module = linear
        change = self.change(name)
        if group.packed:
            weight, dtype = dequantize(self._codes(group)[i], name=name), self.dtype
        else:
            stored = self.base.weight(module)
            weight, dtype = stored.float(), stored.dtype
        exact = weight if change is None else weight + change
        if name.removesuffix(".weight") in self.exact:
            return exact
        return self._rounded(name, exact, dtype, change)

    def change(self, name: str) -> Tensor | None:
        """scaling * B A of a linear's weight, in fp32 on the base's device; None where there is no adapter."""
        factors = self.adapter.factors.get(self._linears[name][2])
        if factors is None:
            return None
        device = self.base.device
        return (factors.b.to(device) @ factors.a.to(device)).mul_(factors.scaling)

    def _rounded(self, name: str, exact: Tensor, dtype: torch.dtype, change: Tensor | None) -> Tensor:
        rounded = exact.to(dtype) if change is None else dithered(exact, dtype, seed=zlib.crc32(name.encode()))
        if not (exact.isfinite() & rounded.isfinite()).all():
            raise ValueError(f"{name} contains NaN or infinity once it is merged: a damaged base?")
        if self.observe is not None:
            self.observe(name.removesuffix(".weight"), exact, rounded, change)
        return rounded.cpu()


def dithered(exact: Float32[Tensor, "*shape"], dtype: torch.dtype, *, seed: int) -> Float[Tensor, "*shape"]:
    """Each value rounded up or down by chance, so that the mean is kept; what `dtype` holds stays as it is.

    Random bits are added where bits will be cut off: as many as float32's mantissa has more than that of `dtype`.
    """
    cut = 23 + round(math.log2(torch.finfo(dtype).eps))
    generator = torch.Generator(exact.device).manual_seed(seed)
    noise = torch.randint(0, 1 << cut, exact.shape, generator=generator, dtype=torch.int32, device=exact.device)
    return ((exact.view(torch.int32) + noise) & -(1 << cut)).view(torch.float32).to(dtype)


class _Ledger:
    """Collects the sums that a Rounding is made of, by layer and over all of them."""

    def __init__(self) -> None:
        self.layers: list[Rounding] = []
        self.distortion = Distortion(0.0, 0.0)
        self.changed = self.overlap = 0.0

    def add(self, name: str, exact: Tensor, written: Tensor, change: Tensor | None) -> None:
        """Enter one weight."""
        sums, changed, overlap = distortion(exact, written), 0.0, 0.0
        if change is not None:
            changed, overlap = inner(change, change), inner(written.float() - exact.float(), change)
        self.layers.append(_rounding(name, sums, changed, overlap))
        self.distortion += sums
        self.changed += changed
        self.overlap += overlap

    def total(self) -> Rounding | None:
        """Of all weights as if they were one."""
        return _rounding("all", self.distortion, self.changed, self.overlap) if self.layers else None


def _rounding(name: str, sums: Distortion, changed: float, overlap: float) -> Rounding:
    if not changed:
        return Rounding(name, sums.sqnr_db, None, None)
    return Rounding(name, sums.sqnr_db, Distortion(changed, sums.noise).sqnr_db, 1 + overlap / changed)


def _copy_adapter(adapter: Path, folder: Path, base: Path | None) -> None:
    shutil.copyfile(adapter / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    if base is not None:
        config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _unfold_adapter(folder: Path, base: Base, folds: Mapping[str, Fold]) -> None:
    """Rewrite a copied adapter for the model that `base` was before anything was folded into it."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        module, _, part = name.removesuffix(".weight").removeprefix("base_model.model.").partition(".lora_")
        fold = folds.get(base.source.modules.get(module, ""), Fold())
        unfolded = tensor.float()
        if part == "A" and fold.inputs is not None:
            unfolded = unfolded / fold.inputs
        elif part != "A" and fold.outputs is not None:  # B, or the weight of a norm
            unfolded = unfolded * (fold.outputs[:, None] if tensor.ndim == 2 else fold.outputs)
        tensors[name] = unfolded.to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    record = base.folder / QUANTIZE_RECORD
    if record.is_file():
        before = {"base_model_name_or_path": json.loads(record.read_text())["source"]}
        config.write_text(json.dumps(json.loads(config.read_text()) | before, indent=2) + "\n")


def _record(result: Export, run: Path) -> dict[str, Any]:
    record = {
        "qerl": __version__,
        "kind": result.kind,
        "run": str(run),
        "step": result.trained.step,
        "base": str(result.base),
        "model": result.trained.model.model_dump(),
    }
    if result.total is not None:
        record |= {"total": _plain(result.total), "layers": [_plain(layer) for layer in result.layers]}
    return record


def _plain(layer: Rounding) -> dict[str, Any]:
    """JSON has no infinity: what is exact is null."""
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in asdict(layer).items()}
