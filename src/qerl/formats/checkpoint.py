"""Model folders: reading what others wrote, and writing a packed one.

    Checkpoint(folder)              names -> tensors, one at a time, from one or many safetensors shards
    quantize_checkpoint(a, b)       bf16 folder -> compressed-tensors `nvfp4-pack-quantized` folder, shard by shard

How three kinds of folder store a linear layer `m` [N, K]:

                         codes, low nibble = even k     block scales, E4M3          scale of the tensor, fp32
    bf16, fp16, fp32     m.weight [N, K]
    compressed-tensors   m.weight_packed u8 [N, K/2]    m.weight_scale [N, K/16]    m.weight_global_scale, a divisor
    ModelOpt             m.weight        u8 [N, K/2]    m.weight_scale [N, K/16]    m.weight_scale_2, a multiplier

Here alone divisor and multiplier are told apart; everywhere else `global_scale` multiplies. Scales of activations that
such folders may carry are not read: activations stay in bf16.

Written folders load in transformers (with compressed-tensors) and in vLLM. q, k, v and gate, up share one global scale,
which vLLM needs; folders where they differ are read exactly all the same. Pickled weights are never read.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from qerl.formats.nvfp4 import BLOCK, NVFP4Tensor, quantize, shared_global_scale

FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one parent that become one product, in this order."""

FORMAT = "nvfp4-pack-quantized"  # compressed-tensors' name for NVFP4 weights

_DENSE = (torch.bfloat16, torch.float16, torch.float32)
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_NOT_A_PRODUCT = re.compile(r"norm|embed|router|(^|_)gate$")  # last names of matrices that are kept: norms, MoE routers
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


class Checkpoint:
    """A transformers model folder, opened; tensors are read when asked for.

    ValueError, naming the file and what to do: no config.json, no safetensors, a shard that is missing or cut off, a
    tensor that the index promises and no shard has, a quantization that is not understood.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.config = _read_json(self.folder / "config.json")
        self.quantization: Literal["compressed-tensors", "modelopt"] | None = _quantization(self.folder, self.config)
        self.shards = _shard_names(self.folder)
        self._files = {name: _open(self.folder / name) for name in self.shards}  # handles, which have no types
        self._shard_of: dict[str, str] = {name: shard for shard, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        _check_index(self.folder, self._shard_of)

    def names(self, shard: str | None = None) -> list[str]:
        """Names of the stored tensors, of all shards or of one (a file name of `shards`)."""
        return [name for name, place in self._shard_of.items() if shard in (None, place)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor, without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A stored tensor in bf16, fp16 or fp32, on the host. ValueError: not stored, or of another dtype."""
        tensor: Tensor = self._file(name).get_tensor(name)
        if tensor.dtype not in _DENSE:
            raise ValueError(f"{self._place(name)} is {tensor.dtype}, where bf16, fp16 or fp32 was expected")
        return tensor

    def is_packed(self, module: str) -> bool:
        """Whether the linear layer `module` is stored in NVFP4."""
        if self.quantization == "compressed-tensors":
            return f"{module}.weight_packed" in self._shard_of
        return self.quantization == "modelopt" and f"{module}.weight_scale_2" in self._shard_of

    def nvfp4(self, module: str) -> NVFP4Tensor:
        """The linear layer `module` as stored, its global scale turned into a multiplier.

        ValueError names the tensor: not stored, of a wrong dtype or shape, or with a scale that no quantiser writes.
        """
        divides = self.quantization == "compressed-tensors"
        packed_name = f"{module}.weight_packed" if divides else f"{module}.weight"
        global_name = f"{module}.weight_global_scale" if divides else f"{module}.weight_scale_2"
        packed = self._checked(packed_name, torch.uint8)
        n, half = packed.shape
        block_scale = self._checked(f"{module}.weight_scale", torch.float8_e4m3fn, (n, half * 2 // BLOCK))
        if (block_scale.view(torch.uint8) > 126).any():
            raise ValueError(
                f"{self._place(f'{module}.weight_scale')} has negative or NaN scales: a damaged checkpoint?"
            )
        global_scale = self._checked(global_name, torch.float32).reshape(-1)
        if global_scale.numel() != 1 or not (global_scale.isfinite() & (global_scale > 0)).all():
            raise ValueError(f"{self._place(global_name)} must be one positive number, is {global_scale}")
        return NVFP4Tensor(packed, block_scale, 1 / global_scale if divides else global_scale)

    def _file(self, name: str) -> Any:
        if name not in self._shard_of:
            raise ValueError(f"{self.folder} has no tensor {name}")
        return self._files[self._shard_of[name]]

    def _place(self, name: str) -> str:
        return f"{self.folder / self._shard_of[name]}: {name}"

    def _checked(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        if tensor.dtype != dtype:
            raise ValueError(f"{self._place(name)} is {tensor.dtype}, where {dtype} was expected")
        if shape is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{self._place(name)} has shape {list(tensor.shape)}, where {list(shape)} was expected")
        return tensor


def quantize_checkpoint(
    source: Path | str,
    target: Path | str,
    *,
    scale: Literal["sweep", "amax"] = "sweep",
    keep: Sequence[str] = (),
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the decoder layers' linears of a bf16 (fp16, fp32) folder in NVFP4; all else is copied as it is.

    Embedding, head, norms, biases and MoE routers stay, as do layers whose names match a glob of `keep` and matrices
    whose columns are no multiple of 16. One shard is written for each that is read, so that memory holds about one of
    the new shards. They go to `<target>.partial`, which gets its name when all is there. `progress` is told how many of
    how many tensors are done. Returns the counts that a user wants to see.
    ValueError: what `Checkpoint` refuses, a packed source, an existing target, a pattern of `keep` that matches nothing
    or parts a fused group, NaN or infinity in a weight.
    """
    source, target = Path(source), Path(target)
    checkpoint = Checkpoint(source)
    if checkpoint.quantization is not None:
        raise ValueError(f"{source} is packed already ({checkpoint.quantization}): give the bf16 folder")
    if target.exists():
        raise ValueError(f"{target} exists: remove it, or choose another name")
    groups = _plan(checkpoint, keep)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was cut off
    partial.mkdir(parents=True)
    try:
        weight_map, size = _write_shards(checkpoint, partial, groups, scale, torch.device(device), progress)
        _copy_other_files(source, partial)
        kept = [
            name.removesuffix(".weight")
            for name in checkpoint.names()
            if name.endswith(".weight") and name in weight_map and len(checkpoint.shape(name)) == 2
        ]
        config = checkpoint.config | {"quantization_config": _quantization_config(sorted({"lm_head", *kept}))}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if len(checkpoint.shards) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {
        "packed_layers": len(groups),
        "kept_layers": [name for name in kept if _IN_A_LAYER.search(name)],
        "source_bytes": sum((source / shard).stat().st_size for shard in checkpoint.shards),
        "target_bytes": sum((target / shard).stat().st_size for shard in checkpoint.shards),
    }


# ---------------------------------------------------------------------------------------------------------- reading


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {path.parent} is not a complete transformers model folder") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: download the folder again") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off ({error}): download it again") from None


def _shard_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(_read_json(index)["weight_map"].values()))
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise ValueError(f"{folder} has no model.safetensors (nor an index of shards): only safetensors are read")


def _check_index(folder: Path, shard_of: dict[str, str]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name, shard in _read_json(index)["weight_map"].items():
            if shard_of.get(name) != shard:
                raise ValueError(f"{folder / shard} lacks {name}, which {index.name} promises: download it again")


def _quantization(folder: Path, config: dict[str, Any]) -> Literal["compressed-tensors", "modelopt"] | None:
    """Which packed format the folder is in. ValueError for one that is not NVFP4 weights in blocks of 16."""
    found: dict[str, Any] = config.get("quantization_config") or {}
    if not found and (folder / "hf_quant_config.json").is_file():  # where ModelOpt wrote it before transformers read it
        found = {"quant_method": "modelopt", **_read_json(folder / "hf_quant_config.json").get("quantization", {})}
    if not found:
        return None
    method = found.get("quant_method")
    groups: dict[str, dict[str, Any]] = found.get("config_groups") or {}
    weights = [cast(dict[str, Any], group.get("weights") or {}) for group in groups.values()]
    blocks = {found.get("group_size", BLOCK), *(w.get("group_size", BLOCK) for w in weights)}
    if method == "compressed-tensors" and found.get("format") == FORMAT and blocks == {BLOCK}:
        return "compressed-tensors"
    if method == "modelopt" and found.get("quant_algo") == "NVFP4" and blocks == {BLOCK}:
        return "modelopt"
    what = {key: found[key] for key in ("quant_method", "format", "quant_algo", "group_size") if key in found}
    raise ValueError(
        f"{folder} is quantized as {what}, which is not understood: give a bf16 folder, or one in compressed-tensors "
        f"{FORMAT} or ModelOpt NVFP4 with blocks of {BLOCK}"
    )


# ---------------------------------------------------------------------------------------------------------- writing


def _plan(checkpoint: Checkpoint, keep: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Linears to pack -> those that share a global scale with it, itself among them."""
    linears = {name.removesuffix(".weight") for name in checkpoint.names() if _is_linear(checkpoint, name)}
    if not linears:
        raise ValueError(f"{checkpoint.folder} has no linear layers named `..layers.<n>..weight`: not a decoder model?")
    for pattern in keep:
        if not any(fnmatchcase(module, pattern) for module in linears):
            raise ValueError(f"keep: {pattern!r} matches no linear layer; names look like {min(linears)}")
    packed = {module for module in linears if not any(fnmatchcase(module, pattern) for pattern in keep)}
    groups: dict[str, tuple[str, ...]] = {}
    for module in packed:
        parent, _, leaf = module.rpartition(".")
        fused = next((group for group in FUSED_GROUPS if leaf in group), (leaf,))
        members = tuple(f"{parent}.{name}" for name in fused if f"{parent}.{name}" in linears)
        if not packed.issuperset(members):
            raise ValueError(f"keep: {', '.join(members)} are one product: keep all of them or none")
        groups[module] = members
    return groups


def _is_linear(checkpoint: Checkpoint, name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or not _IN_A_LAYER.search(name) or _NOT_A_PRODUCT.search(module.rpartition(".")[2]):
        return False
    shape = checkpoint.shape(name)
    return len(shape) == 2 and shape[1] % BLOCK == 0


def _write_shards(
    checkpoint: Checkpoint,
    folder: Path,
    groups: dict[str, tuple[str, ...]],
    scale: Literal["sweep", "amax"],
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, str], int]:
    """One new shard for each old one. Returns the shard of each new tensor, and their bytes."""
    weight_map: dict[str, str] = {}
    size, done, total = 0, 0, len(checkpoint.names())
    shared: dict[tuple[str, ...], Tensor] = {}
    for shard in checkpoint.shards:
        tensors: dict[str, Tensor] = {}
        for name in checkpoint.names(shard):
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in groups:
                members = groups[module]
                if members not in shared:
                    names = [f"{member}.weight" for member in members]
                    shared[members] = shared_global_scale((checkpoint.tensor(n).to(device) for n in names), names)
                weight = checkpoint.tensor(name).to(device)
                codes = quantize(weight, scale=scale, global_scale=shared[members], name=name)
                tensors[f"{module}.weight_packed"] = codes.packed.cpu()
                tensors[f"{module}.weight_scale"] = codes.block_scale.cpu()
                tensors[f"{module}.weight_global_scale"] = (1 / codes.global_scale).cpu()
            else:
                tensors[name] = checkpoint.tensor(name)
            done += 1
            if progress is not None:
                progress(done, total)
        save_file(tensors, folder / shard, metadata={"format": "pt"})  # transformers asks for this entry
        weight_map |= dict.fromkeys(tensors, shard)
        size += sum(tensor.nbytes for tensor in tensors.values())
    return weight_map, size


def _copy_other_files(source: Path, target: Path) -> None:
    """Tokenizer, generation_config, chat template, licence: whatever is neither weights nor config.json."""
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and not any(file.match(p) for p in _WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)


def _quantization_config(ignore: list[str]) -> dict[str, Any]:
    """config.json's entry for NVFP4 weights and bf16 activations (compressed-tensors' preset NVFP4A16)."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": FORMAT}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
