"""Model folders as others, or writing.py, wrote them: names -> tensors, from one or many safetensors shards.

How the kinds of folder store a linear layer `m` [N, K]; two codes a byte, the low nibble is the even k:

                            codes                        block scales                      scale of the tensor, fp32
    bf16, fp16, fp32        m.weight [N, K]
    compressed-tensors
      nvfp4-pack-quantized  m.weight_packed u8 [N, K/2]  m.weight_scale E4M3 [N, K/16]     m.weight_global_scale divides
      mxfp4-pack-quantized  m.weight_packed u8 [N, K/2]  m.weight_scale E8M0 u8 [N, K/32]
    ModelOpt NVFP4          m.weight u8 [N, K/2]         m.weight_scale E4M3 [N, K/16]     m.weight_scale_2 multiplies
    bitsandbytes NF4, compressed-tensors pack-quantized (INT4): coded_files.py

Here, and in writing.py, divisor and multiplier are told apart; everywhere else `global_scale` multiplies. Scales of
activations that such folders may carry are not read: activations stay in bf16. Folders where q, k, v (or gate, up) have
different global scales are read exactly. Pickled weights are never read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qerl.formats.coded_files import NF4_STATE, int4_from_stored, nf4_from_stored
from qerl.formats.codes import BLOCKS, INT4, MXFP4, NF4, NVFP4, Codes, FormatName, PackedCodes, PackedFormat
from qerl.formats.int4 import GROUPS
from qerl.formats.mxfp4 import MXFP4Tensor, refuse_nan
from qerl.formats.nvfp4 import NVFP4Tensor

FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one parent that become one product, in this order."""

COMPRESSED_TENSORS: dict[FormatName, str] = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "int4": "pack-quantized",
}
"""compressed-tensors' names of the formats."""

MODELOPT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"

_DENSE = (torch.bfloat16, torch.float16, torch.float32)


@runtime_checkable  # for the run-time type checks of the tests
class DenseSource(Protocol):
    """A model in bf16, fp16 or fp32 whose tensors are asked for by name: an unpacked `Checkpoint`, or like one."""

    folder: Path
    """Where tokenizer, licence and the like are."""
    config: dict[str, Any]
    """config.json's."""
    shards: list[str]

    def names(self, shard: str | None = None) -> list[str]:
        """Names of the tensors, of all shards or of one."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without making it."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor, made when it is asked for."""
        ...


class Quantization(NamedTuple):
    """How a folder's packed layers are stored."""

    writer: Literal["compressed-tensors", "modelopt", "bitsandbytes"]
    format: PackedFormat | Literal["nf4", "int4"]


class Checkpoint:
    """A transformers model folder, opened; tensors are read when asked for.

    ValueError, naming the file and what to do: no config.json, no safetensors, a shard that is missing or cut off, a
    tensor that the index promises and no shard has, a quantization that is not understood.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.config = _read_json(self.folder / "config.json")
        self.quantization: Quantization | None = _quantization(self.folder, self.config)
        index = _read_index(self.folder)
        self.shards = _shard_names(self.folder, index)
        self._shard_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for shard in self.shards:
            file = open_tensors(self.folder / shard)
            for name in file.keys():  # noqa: SIM118
                self._shard_of[name] = shard
                self._shapes[name] = tuple(file.get_slice(name).get_shape())
        self._file: tuple[str, Any] = ("", None)
        _check_index(self.folder, index, self._shard_of)

    def names(self, shard: str | None = None) -> list[str]:
        """Names of the stored tensors, of all shards or of one (of `shards`); bitsandbytes' below a weight left out."""
        names = [name for name, place in self._shard_of.items() if shard in (None, place)]
        if self.quantization is None or self.quantization.format != "nf4":
            return names
        return [name for name in names if ".weight." not in name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor, without reading it."""
        self._check_stored(name)
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """A stored tensor on the host: in bf16, fp16 or fp32, or integers that are no weight (masks, positions).

        ValueError: not stored, or of another dtype.
        """
        tensor = self._read(name)
        if tensor.dtype not in _DENSE and (tensor.is_floating_point() or name.endswith(".weight")):
            raise ValueError(f"{self._place(name)} is {tensor.dtype}, where bf16, fp16 or fp32 was expected")
        return tensor

    def is_packed(self, module: str) -> bool:
        """Whether the linear layer `module` is stored in 4 bits."""
        if self.quantization is None:
            return False
        leaves = {"compressed-tensors": "weight_packed", "modelopt": "weight_scale_2", "bitsandbytes": NF4_STATE}
        return f"{module}.{leaves[self.quantization.writer]}" in self._shard_of

    def format_of(self, module: str) -> NVFP4 | MXFP4 | NF4 | INT4:
        """The format of the packed linear layer `module`, with its settings, as the files' headers tell them."""
        assert self.quantization is not None, "only packed folders have one"
        format = self.quantization.format
        if format == "nf4":
            return NF4(double_quant=f"{module}.weight.nested_absmax" in self._shapes)
        if format == "int4":
            packed, groups = self.shape(f"{module}.weight_packed"), self.shape(f"{module}.weight_scale")[-1]
            return INT4(packed[-1] * 8 // groups, symmetric=f"{module}.weight_zero_point" not in self._shapes)
        return NVFP4() if format == "nvfp4" else MXFP4()

    def codes(self, module: str) -> Codes:
        """The packed linear layer `module` as stored, an NVFP4 global scale turned into a multiplier.

        ValueError names the tensor: not stored, of a wrong dtype or shape, or with a scale that no quantiser writes.
        """
        assert self.quantization is not None, "only packed folders have codes"
        writer, format = self.quantization
        if format == "nf4" or format == "int4":
            self._check_stored(f"{module}.{NF4_STATE if format == 'nf4' else 'weight_packed'}")
            parts = {
                name.removeprefix(f"{module}."): self._read(name)
                for name in self._shard_of
                if name.startswith(f"{module}.weight")
            }
            place = str(self.folder / self._shard_of[f"{module}.{'weight' if format == 'nf4' else 'weight_packed'}"])
            from_parts = nf4_from_stored if format == "nf4" else int4_from_stored
            return from_parts(parts, f"{place}: {module}")
        divides = writer == "compressed-tensors"
        packed = self._checked(f"{module}.weight_packed" if divides else f"{module}.weight", torch.uint8)
        n, half = packed.shape
        blocks = (n, half * 2 // BLOCKS[format])
        if format == "mxfp4":
            block_scale, global_scale = self._checked(f"{module}.weight_scale", torch.uint8, blocks), None
        else:
            block_scale = self._checked(f"{module}.weight_scale", torch.float8_e4m3fn, blocks)
            name = f"{module}.weight_global_scale" if divides else f"{module}.weight_scale_2"
            global_scale = self._checked(name, torch.float32)
        place = self._place(f"{module}.weight_scale").removesuffix(".weight_scale")
        return from_stored(packed, block_scale, global_scale, divides=divides, place=place)

    def _read(self, name: str) -> Tensor:
        """A stored tensor. One shard is mapped at a time: what has been read of it counts as this process's memory."""
        self._check_stored(name)
        if self._file[0] != self._shard_of[name]:
            self._file = ("", None)
            self._file = (self._shard_of[name], open_tensors(self.folder / self._shard_of[name]))
        return self._file[1].get_tensor(name)

    def _check_stored(self, name: str) -> None:
        if name not in self._shard_of:
            raise ValueError(f"{self.folder} has no tensor {name}")

    def _place(self, name: str) -> str:
        return f"{self.folder / self._shard_of[name]}: {name}"

    def _checked(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        tensor = self._read(name)
        if tensor.dtype != dtype:
            raise ValueError(f"{self._place(name)} is {tensor.dtype}, where {dtype} was expected")
        if shape is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{self._place(name)} has shape {list(tensor.shape)}, where {list(shape)} was expected")
        return tensor


def from_stored(
    packed: Tensor, block_scale: Tensor, global_scale: Tensor | None, *, divides: bool, place: str
) -> PackedCodes:
    """What a packed layer's stored tensors stand for: NVFP4, or without a global scale MXFP4.

    divides: whether the stored global scale is the inverse of ours, as compressed-tensors has it; place: of the layer,
    for errors. ValueError for scales that no quantiser writes.
    """
    if global_scale is None:
        codes = MXFP4Tensor(packed, block_scale)
        refuse_nan(codes, f"{place}.weight_scale")
        return codes
    if (block_scale.view(torch.uint8) > 126).any():
        raise ValueError(f"{place}.weight_scale has negative or NaN scales: a damaged checkpoint?")
    global_scale = global_scale.reshape(-1)
    if global_scale.numel() != 1 or not (global_scale.isfinite() & (global_scale > 0)).all():
        name = "weight_global_scale" if divides else "weight_scale_2"
        raise ValueError(f"{place}.{name} must be one positive number, is {global_scale}")
    return NVFP4Tensor(packed, block_scale, 1 / global_scale if divides else global_scale)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing: {path.parent} is not a complete transformers model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return cast(dict[str, Any], found)


def open_tensors(path: Path) -> Any:
    """A safetensors file, of which the header is read; ValueError where it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: download the folder again") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off ({error}): download it again") from None


def _read_index(folder: Path) -> dict[str, str]:
    """Shard of each tensor; empty where there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map from tensors to shards: download it again")
    return cast(dict[str, str], weight_map)


def _shard_names(folder: Path, index: dict[str, str]) -> list[str]:
    if index:
        return sorted(set(index.values()))
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise ValueError(f"{folder} has no model.safetensors (nor an index of shards): only safetensors are read")


def _check_index(folder: Path, index: dict[str, str], shard_of: dict[str, str]) -> None:
    for name, shard in index.items():
        if shard_of.get(name) != shard:
            raise ValueError(f"{folder / shard} lacks {name}, which {INDEX} promises: download it again")


def _quantization(folder: Path, config: dict[str, Any]) -> Quantization | None:
    """Which packed format the folder is in. ValueError for one that is not NVFP4 or MXFP4 weights."""
    given: Any = config.get("quantization_config") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{folder / 'config.json'}: quantization_config is {given!r}, and no object with settings")
    found: dict[str, Any] = cast(dict[str, Any], given)
    if not found and (folder / MODELOPT_CONFIG).is_file():  # where ModelOpt wrote it before transformers read it
        found = {"quant_method": "modelopt", **_read_json(folder / MODELOPT_CONFIG).get("quantization", {})}
    if not found:
        return None
    method = found.get("quant_method")
    groups: dict[str, dict[str, Any]] = found.get("config_groups") or {}
    weights = [cast(dict[str, Any], group.get("weights") or {}) for group in groups.values()]
    if found.get("transform_config"):  # Hadamard rotations and the like, which the weights are no good without
        raise ValueError(f"{folder} wants transforms of its activations (transform_config): not supported")
    sizes = {part["group_size"] for part in (found, *weights) if "group_size" in part}
    stored = found.get("format") if method == "compressed-tensors" else None
    for format, block in BLOCKS.items():
        if stored == COMPRESSED_TENSORS[format] and sizes <= {block} and _is_float4(weights):
            return Quantization("compressed-tensors", format)
    if stored == COMPRESSED_TENSORS["int4"] and _is_int4(weights):
        return Quantization("compressed-tensors", "int4")
    storage = found.get("bnb_4bit_quant_type"), found.get("bnb_4bit_quant_storage", "uint8")
    if method == "bitsandbytes" and found.get("load_in_4bit") and storage == ("nf4", "uint8"):
        return Quantization("bitsandbytes", "nf4")
    if method == "modelopt" and found.get("quant_algo") == "NVFP4" and sizes <= {BLOCKS["nvfp4"]}:
        return Quantization("modelopt", "nvfp4")
    told = ("quant_method", "format", "quant_algo", "group_size", "num_bits", "type")
    told += ("load_in_8bit", "bnb_4bit_quant_type")
    what = {key: part[key] for part in (*weights, found) for key in told if key in part}
    raise ValueError(
        f"{folder} is quantized as {what}, which is not understood: give a bf16 folder, or one in compressed-tensors "
        f"{', '.join(COMPRESSED_TENSORS.values())} (NVFP4 in blocks of 16, MXFP4 of 32, INT4 in groups of "
        f"{', '.join(map(str, GROUPS))}), ModelOpt NVFP4, or bitsandbytes NF4"
    )


def _is_float4(weights: list[dict[str, Any]]) -> bool:
    """Whether groups, where there are any, have weights that are 4-bit floating-point numbers."""
    return all(part and (part.get("num_bits", 4), part.get("type", "float")) == (4, "float") for part in weights)


def _is_int4(weights: list[dict[str, Any]]) -> bool:
    """Whether all groups are 4-bit integers with a scale for 32, 64 or 128 columns in their order."""
    return bool(weights) and all(
        (weight.get("num_bits"), weight.get("type"), weight.get("strategy")) == (4, "int", "group")
        and weight.get("group_size") in GROUPS
        and not weight.get("actorder")
        for weight in weights
    )
