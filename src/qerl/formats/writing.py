"""Writing model folders shard by shard, packed or dense, from tensors that come one at a time.

    quantize_checkpoint(a, b)      bf16 folder -> compressed-tensors `nvfp4-pack-quantized`, `mxfp4-pack-quantized` or
                                   `pack-quantized` (INT4), or bitsandbytes (NF4), laid out as checkpoint.py has it
    write_quantized, write_dense   the same, and a plain copy, from anything that gives tensors by name (DenseSource)
    staged(target)                 a folder under a temporary name, which gets its own when all is there

What is read and what is written need not fit into memory: it holds one product's weights and one of the new shards,
which are those of the source, cut further where one would exceed MAX_SHARD_BYTES. Every tensor is read once. Written
folders load in transformers (packed ones with compressed-tensors or bitsandbytes) and in vLLM. q, k, v and gate, up
share NVFP4's global scale, which vLLM needs.

A quantize_checkpoint that was cut off goes on where it was when it is called again: finished shards stay in
`<target>.partial` with a journal of them (`_Journal`), which says what they were made of. RECORD keeps that for good.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from qerl.formats.checkpoint import COMPRESSED_TENSORS, FUSED_GROUPS, INDEX, MODELOPT_CONFIG, Checkpoint, DenseSource
from qerl.formats.coded_files import int4_as_stored, nf4_as_stored
from qerl.formats.codes import INT4, MXFP4, NF4, NVFP4, Codes, FourBits, Swept
from qerl.formats.folding import (
    CALIBRATION_FILE,
    RECORD,
    Calibration,
    Folded,
    read_calibration,
    read_folds,
    write_calibration,
)
from qerl.formats.int4 import INT4Tensor
from qerl.formats.mxfp4 import BLOCK as MXFP4_BLOCK
from qerl.formats.nf4 import NF4Tensor
from qerl.formats.nvfp4 import BLOCK as NVFP4_BLOCK
from qerl.formats.nvfp4 import NVFP4Tensor, finite_amax

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5_000_000_000
"""A new shard is closed before it grows beyond this: it is held in memory until it is written."""

Progress = Callable[[int, int], None]
"""Told how many of how many of the source's bytes are done."""

Observer = Callable[[str, Tensor, Codes], None]
"""Told a linear layer's name, its weight, and what became of it."""

_DEFAULT = NVFP4()
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_NOT_A_PRODUCT = re.compile(r"norm|embed|router|(^|_)gate$")  # last names of matrices that are kept: norms, MoE routers
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_NOT_COPIED = (*_WEIGHT_FILES, "config.json", MODELOPT_CONFIG, RECORD)


def quantize_checkpoint(
    source: Path | str,
    target: Path | str,
    *,
    format: FourBits = _DEFAULT,
    keep: Sequence[str] = (),
    calibrate: Callable[[], Calibration] | None = None,
    made_with: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a bf16 (fp16, fp32) folder's decoder linears in `format` into the new folder `target`; see write_quantized.

    What an equal call left behind when it was cut off is not done again, calibration included; `made_with` tells calls
    apart, and goes into RECORD. ValueError: what `Checkpoint`, `staged` and `write_quantized` refuse, a packed source,
    a calibration for NF4, which has no choice of scales.
    """
    source, target = Path(source), Path(target)
    checkpoint = Checkpoint(source)
    if checkpoint.quantization is not None:
        raise ValueError(f"{source} is packed already ({checkpoint.quantization.format}): give the bf16 folder")
    if calibrate is not None and read_folds(source):
        raise ValueError(
            f"{source} has AWQ's factors in it already: calibrate the model before, or leave out --calibrate"
        )
    if calibrate is not None and not isinstance(format, Swept):
        raise ValueError(f"{format.name} has no choice of scales to calibrate: leave --calibrate out")
    options: dict[str, Any] = {"source": str(source.absolute()), "format": format.name, **asdict(format)}
    options |= {"keep": list(keep), **(made_with or {})}
    key = {**options, "files": {shard: _stamp(source / shard) for shard in checkpoint.shards}}
    needs_bytes = _packed_bytes(checkpoint, packed_groups(checkpoint, keep, format), format)
    with staged(target, needs_bytes=needs_bytes, journal=key) as folder:
        journal = _Journal(folder, key)
        calibration = None
        if calibrate is not None:
            calibration = read_calibration(folder) if journal.found else None
            if calibration is None:
                calibration = calibrate()
                write_calibration(folder, calibration)
                flush(folder / CALIBRATION_FILE)
                journal.save()
        report = write_quantized(
            checkpoint,
            folder,
            format=format,
            keep=keep,
            calibration=calibration,
            device=device,
            progress=progress,
            journal=journal,
        )
        (folder / RECORD).write_text(json.dumps({**options, "sha256": journal.sha256}, indent=2) + "\n")
        journal.path.unlink()
    return report | {"source_bytes": _shard_bytes(source, checkpoint.shards)}


@contextmanager
def staged(target: Path, *, needs_bytes: int = 0, journal: Mapping[str, Any] | None = None) -> Generator[Path]:
    """A new folder `<target>.partial` to fill, which gets its name at the end and is removed after an exception.

    With a `journal`'s key it stays after an exception once there is one in it, and is there again for the same key.
    ValueError, before anything is written: the target exists, another process is at it, or its disk has less than
    `needs_bytes` left.
    """
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists: remove it, or choose another name")
    existing = next(parent for parent in target.absolute().parents if parent.exists())
    partial = target.with_name(target.name + ".partial")
    held = sum(file.stat().st_size for file in partial.glob("*") if file.is_file())  # of a run before: goes, or counts
    if (free := shutil.disk_usage(existing).free + held) < needs_bytes:
        raise ValueError(
            f"{target} takes about {needs_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: make room first"
        )
    partial.mkdir(parents=True, exist_ok=True)
    with _alone(partial):
        if journal is None or not _Journal(partial, journal).found:
            _empty(partial)  # of a run that was cut off
        try:
            yield partial
            for path in partial.rglob("*"):
                if path.is_file():  # safetensors makes files that only their owner can read
                    path.chmod(partial.stat().st_mode & 0o666)
                flush(path)
            partial.rename(target)
            flush(target.absolute().parent)
        except BaseException:
            if journal is None or not _Journal(partial, journal).found:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                logger.warning("%s keeps what is done: the same command goes on with it", partial)
            raise


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the folder's lock, which ends with the process. ValueError: another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being written by another process: wait for it, or stop it") from None
        except OSError:
            pass  # a network's file system without locks
        yield
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_dense(source: DenseSource, folder: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write a source's tensors as they come, and all that goes with them, into an empty folder."""
    return _write(source, folder, lambda name: [(name, source.tensor(name))], {}, progress)


def write_quantized(
    source: DenseSource,
    folder: Path,
    *,
    format: FourBits = _DEFAULT,
    keep: Sequence[str] = (),
    calibration: Calibration | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    observe: Observer | None = None,
    journal: _Journal | None = None,
) -> dict[str, Any]:
    """Write a source's decoder linears in `format`, all else as it is, into an empty folder.

    Embedding, head, norms, biases and MoE routers stay, as do layers whose names match a glob of `keep` and matrices
    whose columns are no multiple of the block. A calibration's factors are folded in, and its importance weighs the
    sweep. Returns the counts that a user wants to see.
    ValueError: a pattern of `keep` that matches nothing or parts a fused group, NaN or infinity in a weight.
    """
    groups = packed_groups(source, keep, format)
    dtype = str(source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16")
    if calibration is not None:
        source = Folded(source, calibration.folds)
    waiting: dict[str, Codes] = {}  # of products whose first member has been written

    def convert(name: str) -> Iterable[tuple[str, Tensor]]:
        module = name.removesuffix(".weight")
        if module == name or module not in groups:
            return [(name, source.tensor(name))]
        if module not in waiting:
            names = [f"{member}.weight" for member in groups[module]]
            weights = [source.tensor(member).to(device) for member in names]
            shared = format.share(weights, names)
            for member, weight, full_name in zip(groups[module], weights, names, strict=True):
                importance = calibration.importance.get(member) if calibration is not None else None
                if importance is not None and isinstance(format, Swept):
                    codes = format.quantize(weight, shared=shared, importance=importance.to(device), name=full_name)
                else:
                    codes = format.quantize(weight, shared=shared, name=full_name)
                waiting[member] = codes
                if observe is not None:
                    observe(member, weight, codes)
        return as_stored(module, waiting.pop(module), dtype)

    kept = [
        name.removesuffix(".weight")
        for name in source.names()
        if name.endswith(".weight") and name.removesuffix(".weight") not in groups and len(source.shape(name)) == 2
    ]
    config = {"quantization_config": quantization_config(format, sorted({"lm_head", *kept}))}
    return {
        "packed_layers": len(groups),
        "kept_layers": [name for name in kept if _IN_A_LAYER.search(name)],
        **_write(source, folder, convert, config, progress, journal),
    }


# ---------------------------------------------------------------------------------------------------- what is packed


def packable(source: DenseSource, format: FourBits) -> set[str]:
    """The linear layers that `format` can hold; of a fused group all or none."""
    linears = {name.removesuffix(".weight") for name in source.names() if _is_linear(source, name)}
    unfit = {module for module in linears if not format.fits(*source.shape(f"{module}.weight"))}
    return {module for module in linears if unfit.isdisjoint(_fused_with(module))}


def packed_groups(source: DenseSource, keep: Sequence[str], format: FourBits) -> dict[str, tuple[str, ...]]:
    """Linears to pack -> those that share a global scale with it, itself among them. ValueError as write_quantized."""
    linears = packable(source, format)
    if not linears:
        unfit = min((name for name in source.names() if _is_linear(source, name)), default=None)
        if unfit is None:
            raise ValueError(f"{source.folder} has no linear layers named `..layers.<n>..weight`: not a decoder model?")
        raise ValueError(
            f"{format.name} can hold none of {source.folder}'s linear layers: {unfit}, for one, has the shape "
            f"{list(source.shape(unfit))}, whose columns are not whole blocks"
        )
    for pattern in keep:
        if not any(fnmatchcase(module, pattern) for module in linears):
            raise ValueError(f"keep: {pattern!r} matches no linear layer; names look like {min(linears)}")
    packed = {module for module in linears if not any(fnmatchcase(module, pattern) for pattern in keep)}
    if not packed:
        raise ValueError(f"keep: {', '.join(map(repr, keep))} leave no linear layer to pack: use the bf16 folder")
    groups: dict[str, tuple[str, ...]] = {}
    for module in packed:
        members = tuple(member for member in _fused_with(module) if member in linears)
        if not packed.issuperset(members):
            raise ValueError(f"keep: {', '.join(members)} are one product: keep all of them or none")
        groups[module] = members
    return groups


def _fused_with(module: str) -> list[str]:
    """The names that are one product with this linear, itself among them; whether they exist or not."""
    parent, _, leaf = module.rpartition(".")
    fused = next((group for group in FUSED_GROUPS if leaf in group), (leaf,))
    return [f"{parent}.{name}" for name in fused]


def _is_linear(source: DenseSource, name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or not _IN_A_LAYER.search(name) or _NOT_A_PRODUCT.search(module.rpartition(".")[2]):
        return False
    shape = source.shape(name)
    return len(shape) == 2 and shape[0] > 0


def as_stored(module: str, codes: Codes, dtype: str = "bfloat16") -> list[tuple[str, Tensor]]:
    """A packed layer's tensors, on the host, as checkpoint.py lists them; `dtype`: see `nf4_as_stored`."""
    match codes:
        case NF4Tensor():
            parts = nf4_as_stored(codes, dtype)
        case INT4Tensor():
            parts = int4_as_stored(codes)
        case _:
            parts = {"weight_packed": codes.packed.cpu(), "weight_scale": codes.block_scale.cpu()}
            if isinstance(codes, NVFP4Tensor):
                parts["weight_global_scale"] = (1 / codes.global_scale).cpu()
    return [(f"{module}.{name}", part) for name, part in parts.items()]


def quantization_config(format: FourBits, ignore: list[str]) -> dict[str, Any]:
    """config.json's entry for 4-bit weights and 16-bit activations.

    bitsandbytes' for NF4, else compressed-tensors' presets NVFP4A16, MXFP4A16, W4A16 (symmetric) and W4A16_ASYM.
    """
    if isinstance(format, NF4):
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": format.double_quant,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ignore,
        }
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True, "dynamic": False}
    match format:
        case NVFP4():
            weights |= {"strategy": "tensor_group", "group_size": NVFP4_BLOCK}
        case MXFP4():
            weights |= {"group_size": MXFP4_BLOCK, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        case INT4():
            weights |= {"type": "int", "group_size": format.group, "symmetric": format.symmetric}
    name = COMPRESSED_TENSORS[format.name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": name}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


# --------------------------------------------------------------------------------------------------------- the files


class _Part(NamedTuple):
    """A new shard under its temporary name."""

    file: str
    names: list[str]
    num_bytes: int
    """Of its tensors."""


class _Journal:
    """Which shards of a source are done, in the folder that is being filled, and what they were made of."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """The folder's journal if it has this key, else an empty one."""
        self.path = folder / "journal.json"
        self.shards: dict[str, list[_Part]] = {}
        self.sha256: dict[str, str] = {}
        self._key = json.loads(json.dumps(key))
        self._hashing = ThreadPoolExecutor(max_workers=1)
        self.found = False
        if self.path.is_file() and (saved := json.loads(self.path.read_text()))["key"] == self._key:
            self.found = True
            self.shards = {shard: [_Part(*part) for part in parts] for shard, parts in saved["shards"].items()}
            self.sha256 = saved["sha256"]

    def begin(self, path: Path) -> Future[str]:
        """Hash a source shard while it is worked on: its bytes are in the page cache once, for both."""
        return self._hashing.submit(_sha256, path)

    def end(self, shard: str, parts: list[_Part], sha256: str) -> None:
        """Enter a shard whose parts are written."""
        self.shards[shard], self.sha256[shard] = parts, sha256
        self.save()

    def save(self) -> None:
        """Write the file; it is replaced as a whole."""
        saved = {"key": self._key, "shards": self.shards, "sha256": self.sha256}
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(saved))
        flush(beside)
        beside.replace(self.path)


def _write(
    source: DenseSource,
    folder: Path,
    convert: Callable[[str], Iterable[tuple[str, Tensor]]],
    config: dict[str, Any],
    progress: Progress | None,
    journal: _Journal | None = None,
) -> dict[str, Any]:
    """Shards of what `convert` makes of each name, their index, config.json, and the source's other files.

    ValueError names a weight or a bias with NaN or infinity.
    """
    parts: list[_Part] = []
    sizes = {name: prod(source.shape(name)) for name in source.names()}
    # Bytes of a tensor are not known before it is made; 16 bits a number is what nearly all sources have.
    total, done = 2 * sum(sizes.values()), 0
    for shard in source.shards:
        if journal is not None and shard in journal.shards:
            parts += journal.shards[shard]
            done += 2 * sum(sizes[name] for name in source.names(shard))
            continue
        hashed = journal.begin(source.folder / shard) if journal is not None else None
        begun, tensors, held = len(parts), dict[str, Tensor](), 0
        for name in source.names(shard):
            for new_name, tensor in convert(name):
                if tensor.is_floating_point() and new_name.endswith((".weight", ".bias")) and tensor.numel():
                    finite_amax([tensor], [new_name])
                if tensors and held + tensor.nbytes > MAX_SHARD_BYTES:
                    parts.append(_save(tensors, folder, len(parts)))
                    tensors, held = {}, 0
                tensors[new_name] = tensor
                held += tensor.nbytes
            done += 2 * sizes[name]
            if progress is not None:
                progress(done, total)
        parts.append(_save(tensors, folder, len(parts)))
        if journal is not None and hashed is not None:
            journal.end(shard, parts[begun:], hashed.result())
    if len(parts) == len(source.shards):
        names = list(source.shards)
    else:
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for part, name in zip(parts, names, strict=True):
        if not (folder / name).exists():  # renamed before a cut, else
            (folder / part.file).rename(folder / name)
    if len(parts) > 1:
        weight_map = {tensor: name for part, name in zip(parts, names, strict=True) for tensor in part.names}
        index = {"metadata": {"total_size": sum(part.num_bytes for part in parts)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(source.config | config, indent=2) + "\n")
    for file in source.folder.iterdir():  # tokenizer, generation_config, chat template, licence
        if file.is_file() and not any(file.match(pattern) for pattern in _NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    if (source.folder / CALIBRATION_FILE).is_file() and not (
        folder / CALIBRATION_FILE
    ).exists():  # what is merged into a folded base is as folded as that
        (folder / CALIBRATION_FILE).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.folder / CALIBRATION_FILE, folder / CALIBRATION_FILE)
    return {"target_bytes": _shard_bytes(folder, names)}


def _save(tensors: dict[str, Tensor], folder: Path, number: int) -> _Part:
    """Write a shard. OSError, naming the folder: there is no room for it."""
    part = _Part(f"{number}.part", list(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    try:
        save_file(tensors, folder / part.file, metadata={"format": "pt"})  # transformers asks for this entry
    except SafetensorError as error:
        raise OSError(f"{folder}: a shard of {part.num_bytes / 1e9:.1f} GB could not be written ({error})") from None
    flush(folder / part.file)
    return part


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk and not only in the page cache: a power cut may follow."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stamp(path: Path) -> list[int]:
    """Size and time of change: they tell a source from another before its bytes are hashed."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shard_bytes(folder: Path, shards: Sequence[str]) -> int:
    return sum((folder / shard).stat().st_size for shard in shards)


def dense_bytes(source: DenseSource) -> int:
    """About what the source takes in 16 bits."""
    return sum(2 * prod(source.shape(name)) for name in source.names())


def _packed_bytes(source: DenseSource, packed: Collection[str], format: FourBits) -> int:
    """About what it takes with these layers packed."""
    weights = sum(prod(source.shape(f"{module}.weight")) for module in packed)
    return dense_bytes(source) - int(weights * (16 - format.bits) / 8)
