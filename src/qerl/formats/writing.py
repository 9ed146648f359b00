"""Writing model folders shard by shard, packed or dense, from tensors that come one at a time.

    quantize_checkpoint(a, b)      bf16 folder -> compressed-tensors `nvfp4-pack-quantized` or `mxfp4-pack-quantized`
    write_quantized, write_dense   the same, and a plain copy, from anything that gives tensors by name (DenseSource)
    staged(target)                 a folder under a temporary name, which gets its own when all is there

What is read and what is written need not fit into memory: it holds one tensor and one of the new shards, which are
those of the source, cut further where one would exceed MAX_SHARD_BYTES. Written folders load in transformers (packed
ones with compressed-tensors) and in vLLM. q, k, v and gate, up share one global scale, which vLLM needs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from qerl.formats.checkpoint import COMPRESSED_TENSORS, FUSED_GROUPS, MODELOPT_CONFIG, Checkpoint
from qerl.formats.codes import BLOCKS, PackedCodes, PackedFormat, Scale, packed_format
from qerl.formats.nvfp4 import NVFP4Tensor

MAX_SHARD_BYTES = 5_000_000_000
"""A new shard is closed before it grows beyond this: it is held in memory until it is written."""

Progress = Callable[[int, int], None]
"""Told how many of how many tensors are done."""

Observer = Callable[[str, Tensor, PackedCodes], None]
"""Told a linear layer's name, its weight, and what became of it."""

_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_NOT_A_PRODUCT = re.compile(r"norm|embed|router|(^|_)gate$")  # last names of matrices that are kept: norms, MoE routers
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_NOT_COPIED = (*_WEIGHT_FILES, "config.json", MODELOPT_CONFIG)
_INDEX = "model.safetensors.index.json"


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


def quantize_checkpoint(
    source: Path | str,
    target: Path | str,
    *,
    format: PackedFormat = "nvfp4",
    scale: Scale = "sweep",
    keep: Sequence[str] = (),
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a bf16 (fp16, fp32) folder's decoder linears in `format` into the new folder `target`; see write_quantized.

    ValueError: what `Checkpoint`, `staged` and `write_quantized` refuse, and a packed source.
    """
    source, target = Path(source), Path(target)
    checkpoint = Checkpoint(source)
    if checkpoint.quantization is not None:
        raise ValueError(f"{source} is packed already ({checkpoint.quantization.format}): give the bf16 folder")
    with staged(target) as folder:
        report = write_quantized(
            checkpoint, folder, format=format, scale=scale, keep=keep, device=device, progress=progress
        )
    return report | {"source_bytes": _shard_bytes(source, checkpoint.shards)}


@contextmanager
def staged(target: Path, *, needs_bytes: int = 0) -> Generator[Path]:
    """A new folder `<target>.partial` to fill, which gets its name at the end and is removed after an exception.

    ValueError, before anything is written: the target exists, or its disk has less than `needs_bytes` left.
    """
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists: remove it, or choose another name")
    existing = next(parent for parent in target.absolute().parents if parent.exists())
    if (free := shutil.disk_usage(existing).free) < needs_bytes:
        raise ValueError(
            f"{target} takes about {needs_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: make room first"
        )
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was cut off
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_dense(source: DenseSource, folder: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write a source's tensors as they come, and all that goes with them, into an empty folder."""
    return _write(source, folder, lambda name: [(name, source.tensor(name))], {}, progress)


def write_quantized(
    source: DenseSource,
    folder: Path,
    *,
    format: PackedFormat = "nvfp4",
    scale: Scale = "sweep",
    keep: Sequence[str] = (),
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Write a source's decoder linears in `format`, all else as it is, into an empty folder.

    Embedding, head, norms, biases and MoE routers stay, as do layers whose names match a glob of `keep` and matrices
    whose columns are no multiple of the block. Returns the counts that a user wants to see.
    ValueError: a pattern of `keep` that matches nothing or parts a fused group, NaN or infinity in a weight.
    """
    groups, codec = _plan(source, keep, format), packed_format(format, scale)
    shared: dict[tuple[str, ...], Tensor | None] = {}

    def convert(name: str) -> Iterable[tuple[str, Tensor]]:
        module = name.removesuffix(".weight")
        if module == name or module not in groups:
            return [(name, source.tensor(name))]
        members = groups[module]
        if members not in shared:
            names = [f"{member}.weight" for member in members]
            shared[members] = codec.share((source.tensor(n).to(device) for n in names), names)
        weight = source.tensor(name).to(device)
        codes = codec.quantize(weight, shared=shared[members], name=name)
        if observe is not None:
            observe(module, weight, codes)
        return as_stored(module, codes)

    kept = [
        name.removesuffix(".weight")
        for name in source.names()
        if name.endswith(".weight") and name.removesuffix(".weight") not in groups and len(source.shape(name)) == 2
    ]
    config = {"quantization_config": compressed_tensors_config(format, sorted({"lm_head", *kept}))}
    return {
        "packed_layers": len(groups),
        "kept_layers": [name for name in kept if _IN_A_LAYER.search(name)],
        **_write(source, folder, convert, config, progress),
    }


# ---------------------------------------------------------------------------------------------------- what is packed


def packable(source: DenseSource, format: PackedFormat) -> set[str]:
    """The linear layers that `format` can hold."""
    block = BLOCKS[format]
    return {name.removesuffix(".weight") for name in source.names() if _is_linear(source, name, block)}


def _plan(source: DenseSource, keep: Sequence[str], format: PackedFormat) -> dict[str, tuple[str, ...]]:
    """Linears to pack -> those that share a global scale with it, itself among them."""
    linears = packable(source, format)
    if not linears:
        raise ValueError(f"{source.folder} has no linear layers named `..layers.<n>..weight`: not a decoder model?")
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


def _is_linear(source: DenseSource, name: str, block: int) -> bool:
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or not _IN_A_LAYER.search(name) or _NOT_A_PRODUCT.search(module.rpartition(".")[2]):
        return False
    shape = source.shape(name)
    return len(shape) == 2 and shape[1] % block == 0


def as_stored(module: str, codes: PackedCodes) -> list[tuple[str, Tensor]]:
    """A packed layer's tensors, on the host, as compressed-tensors names them."""
    tensors = [(f"{module}.weight_packed", codes.packed.cpu()), (f"{module}.weight_scale", codes.block_scale.cpu())]
    if isinstance(codes, NVFP4Tensor):
        tensors.append((f"{module}.weight_global_scale", (1 / codes.global_scale).cpu()))
    return tensors


def compressed_tensors_config(format: PackedFormat, ignore: list[str]) -> dict[str, Any]:
    """config.json's entry for 4-bit weights and bf16 activations (compressed-tensors' presets NVFP4A16, MXFP4A16)."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if format == "nvfp4" else "group",
        "group_size": BLOCKS[format],
        "symmetric": True,
        "dynamic": False,
    }
    if format == "mxfp4":
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": COMPRESSED_TENSORS[format],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": COMPRESSED_TENSORS[format]}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


# --------------------------------------------------------------------------------------------------------- the files


def _write(
    source: DenseSource,
    folder: Path,
    convert: Callable[[str], Iterable[tuple[str, Tensor]]],
    config: dict[str, Any],
    progress: Progress | None,
) -> dict[str, Any]:
    """Shards of what `convert` makes of each name, their index, config.json, and the source's other files."""
    shards: list[tuple[str, list[str]]] = []  # file, tensors in it
    total, done, size = len(source.names()), 0, 0
    for shard in source.shards:
        tensors: dict[str, Tensor] = {}
        held = 0
        for name in source.names(shard):
            for new_name, tensor in convert(name):
                if tensors and held + tensor.nbytes > MAX_SHARD_BYTES:
                    shards.append((_save(tensors, folder, f"{len(shards)}.part"), list(tensors)))
                    tensors, held = {}, 0
                tensors[new_name] = tensor
                held += tensor.nbytes
                size += tensor.nbytes
            done += 1
            if progress is not None:
                progress(done, total)
        shards.append((_save(tensors, folder, f"{len(shards)}.part"), list(tensors)))
    if len(shards) == len(source.shards):
        names = list(source.shards)
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for (file, _), name in zip(shards, names, strict=True):
        (folder / file).rename(folder / name)
    if len(shards) > 1:
        weight_map = {tensor: name for (_, stored), name in zip(shards, names, strict=True) for tensor in stored}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(source.config | config, indent=2) + "\n")
    for file in source.folder.iterdir():  # tokenizer, generation_config, chat template, licence
        if file.is_file() and not any(file.match(pattern) for pattern in _NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    return {"target_bytes": _shard_bytes(folder, names)}


def _save(tensors: dict[str, Tensor], folder: Path, file: str) -> str:
    save_file(tensors, folder / file, metadata={"format": "pt"})  # transformers asks for this entry
    return file


def _shard_bytes(folder: Path, shards: Sequence[str]) -> int:
    return sum((folder / shard).stat().st_size for shard in shards)


def dense_bytes(source: DenseSource) -> int:
    """About what the source takes in 16 bits."""
    return sum(2 * prod(source.shape(name)) for name in source.names())
