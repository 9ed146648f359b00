"""A folder becomes a model ready to train adapters on: frozen, packed, with norms that take noise.

    open_base    config.json -> an empty model (architecture.py); the folder's tensors matched with it: what is packed,
                 in which groups
    load_model   shards -> one tensor at a time -> device -> codes -> PackedLinear      linears of decoder layers
                                                          -> one bf16 tensor a group    the same where `keep` says so
                                                -> as it is                             embedding, head, norms, biases

Codes are those of `config.format` (formats/codes.py). q, k, v and gate, up share what the format shares (NVFP4's global
scale) and one PackedWeight (or one dense tensor, of which their weights are row views), so that the engine computes
each group as one product from the trainer's own storage. Folders that are packed already load exactly. The most memory
above the model's own is one group's bf16 weights.

architecture.py says which models load, and what of a model is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from qerl.config import ModelConfig, model_folder
from qerl.formats.checkpoint import FUSED_GROUPS, Checkpoint, Quantization
from qerl.formats.codes import BF16, Codes, FourBits, format_named
from qerl.formats.folding import read_folds
from qerl.formats.nvfp4 import finite_amax
from qerl.nn.architecture import check_head, empty_model
from qerl.nn.linear import PackedLinear, frozen_weights
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import causal_lm, decoder_layers

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@runtime_checkable  # for the run-time type checks of the tests
class Weights(Protocol):
    """Where a model's tensors come from: a `Checkpoint`, or what stands in for the files of a folder."""

    @property
    def quantization(self) -> Quantization | None:
        """How packed linears are stored; None where none is."""
        ...

    def names(self) -> list[str]:
        """Of all stored tensors."""
        ...

    def is_packed(self, module: str) -> bool:
        """Whether a linear is stored in 4 bits."""
        ...

    def codes(self, module: str) -> Codes:
        """A packed linear's codes."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Any other tensor, in bf16, fp16 or fp32, on any device."""
        ...


@dataclass(frozen=True)
class Group:
    """Linears that read the same input and share one storage."""

    names: tuple[str, ...]
    """As the model names them."""
    packed: bool


@dataclass(frozen=True)
class Base:
    """A model folder, checked against its architecture, before any weight is read."""

    config: ModelConfig
    folder: Path
    model: PreTrainedModel
    """On the meta device, with our RMSNorms."""
    source: Source
    groups: list[Group]
    """Every linear of the decoder layers."""
    device: torch.device

    def codes(self, group: Group) -> list[Codes]:
        """A packed group's codes on the device: as stored, or quantised now under what the group shares."""
        if self.source.weights.quantization is not None:
            parts = [self.source.codes(name) for name in group.names]
            for name, part in zip(group.names, parts, strict=True):
                shape = (part.packed.shape[0], 2 * part.packed.shape[1])
                _check_shape(f"{name}.weight", shape, _linear(self.model, name).weight)
            return [_moved(part, self.device) for part in parts]
        format = base_format(self.config)
        assert not isinstance(format, BF16), "a group of a bf16 base is dense"
        names = [f"{name}.weight" for name in group.names]
        weights = [self.weight(name) for name in group.names]
        shared = format.share(weights, names)
        return [format.quantize(w, shared=shared, name=n) for w, n in zip(weights, names, strict=True)]

    def weight(self, name: str) -> Tensor:
        """The stored weight of a dense linear, in its own dtype, on the device."""
        return _read(self.source, f"{name}.weight", _linear(self.model, name).weight, self.device, cast=False)


def _moved(codes: Codes, device: torch.device) -> Codes:
    tensors: list[Any] = [None if tensor is None else tensor.to(device) for tensor in codes]
    return type(codes)(*tensors)


def open_base(config: ModelConfig, weights: Weights | None = None) -> Base:
    """Match a folder's tensors (or `weights`) with its architecture; nothing but the files' headers is read.

    ValueError, naming the place and the fix: no such folder or a damaged one, an architecture that cannot train here,
    tensors missing by name, a stored format that contradicts `config.format`, `keep` patterns that match nothing.
    """
    folder = model_folder(config.path)
    weights = weights or Checkpoint(folder)
    stored = weights.quantization
    if stored is not None and stored.format != config.format:
        raise ValueError(
            f"model.format is {config.format}, but {folder} holds {stored.format} weights: use model.format = "
            f"'{stored.format}', or the bf16 folder"
        )
    device = resolve_device(config.device)
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = automatic if config.dtype == "auto" else getattr(torch, config.dtype)
    model = empty_model(folder, dtype, device, config.trust_remote_code)
    source = Source(weights, model)
    groups = plan_linears(model, source, config)
    check_names(model, source, groups)
    return Base(config, folder, model, source, groups, device)


def load_model(
    config: ModelConfig,
    weights: Weights | None = None,
    *,
    adapter_rank: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen model in eval mode on `config.device`, and its tokenizer. ValueError as `open_base` has it.

    weights: instead of those in the folder's files, which then has only the config and the tokenizer; adapter_rank:
    rows to leave free behind a dense product's weight, for each of its linears; progress: told how many of how many
    products are loaded.
    """
    base = open_base(config, weights)
    model = base.model
    load_all_but_groups(base)
    for done, group in enumerate(base.groups, start=1):
        load_group(base, group, adapter_rank)
        if progress is not None:
            progress(done, len(base.groups))
    model.tie_weights()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    model.eval().requires_grad_(False)
    if (base.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(base.folder)
    check_head(model)
    return model, load_tokenizer(base.folder, config.trust_remote_code)


def base_format(config: ModelConfig) -> FourBits | BF16:
    """The format that `config` names, with its settings."""
    return format_named(
        config.format,
        scale=config.scale,
        double_quant=config.double_quant,
        group_size=config.group_size,
        symmetric=config.symmetric,
    )


def eos_token_ids(model: nn.Module) -> list[int]:
    """Every token id that ends a completion: all of generation_config's, else the config's. ValueError when none."""
    base = causal_lm(model)
    for source in (base.generation_config, base.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return sorted({ids} if isinstance(ids, int) else set(ids))
    raise ValueError(
        f"{base.name_or_path} names no eos_token_id in generation_config.json or config.json: add it there"
    )


def resolve_device(name: str) -> torch.device:
    """The device called "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:1". ValueError otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"model.device is {name!r}: use 'auto', 'cpu', 'cuda' or 'cuda:1'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"model.device is {name}, but torch sees no CUDA GPU: use 'auto' or 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"model.device is {name}, and the last GPU here is cuda:{torch.cuda.device_count() - 1}")
    return device


# ------------------------------------------------------------------------------------------------- its weights


class Source:
    """A folder's tensors under the names that the model gives them; transformers has renamed some since (embed_out)."""

    def __init__(self, weights: Weights, model: PreTrainedModel) -> None:
        self.weights = weights
        renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
        present: dict[str, Any] = model.state_dict()

        def name_in_model(name: str) -> str:
            return rename_source_key(name, renamings, [], model.base_model_prefix, present)[0]

        self.tensors = {name_in_model(name): name for name in weights.names()}
        modules = {name.rpartition(".")[0] for name in weights.names()}
        self.modules = {name_in_model(f"{name}.weight").removesuffix(".weight"): name for name in modules}

    @property
    def checkpoint(self) -> Checkpoint:
        """The folder's files, for what works on files."""
        assert isinstance(self.weights, Checkpoint), "these weights are in no folder"
        return self.weights

    def is_packed(self, module: str) -> bool:
        """Whether a linear is stored in 4 bits."""
        return module in self.modules and self.weights.is_packed(self.modules[module])

    def holds(self, module: str) -> bool:
        """Whether a linear is stored, packed or not."""
        return self.is_packed(module) or f"{module}.weight" in self.tensors

    def codes(self, module: str) -> Codes:
        """A packed linear's codes as stored."""
        return self.weights.codes(self.modules[module])

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, where the checkpoint has it: files give it on the host."""
        return self.weights.tensor(self.tensors[name])


def plan_linears(model: PreTrainedModel, source: Source, config: ModelConfig) -> list[Group]:
    """Every linear of the decoder layers, in fused groups, and whether it is packed."""
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    linears = [f"{prefix}.{name}" for name, module in layers.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(f"the layers of {type(model).__name__} have no nn.Linear to pack or adapt: not supported")
    matched = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]  # the head, too
    config.check_keep(linears, matched)
    format = base_format(config)
    undivided = [
        name
        for names in _fused(linears)
        if source.weights.quantization is None
        and not all(format.fits(*_linear(model, name).weight.shape) for name in names)
        for name in names
    ]
    if undivided:
        logger.warning(
            "%d linears stay dense, not being whole blocks of %s: %s", len(undivided), config.format, _some(undivided)
        )

    def is_packed(name: str) -> bool:
        kept = config.keeps(name)
        if source.weights.quantization is None:
            return config.format != "bf16" and not kept and name not in undivided
        if kept and source.is_packed(name):
            raise ValueError(f"model.keep names {name}, which {model.name_or_path} holds packed: use the bf16 folder")
        return source.is_packed(name)

    groups = []
    for names in _fused(linears):
        packed = {is_packed(name) for name in names}
        if len(packed) > 1:
            _refuse_missing(model, [name for name in names if not source.holds(name)])
            raise ValueError(f"{', '.join(names)} are one product: pack all of them or (model.keep) none")
        groups.append(Group(names, packed.pop()))
    if config.format != "bf16" and not any(group.packed for group in groups):
        raise ValueError(f"no layer of {model.name_or_path} is packed: use model.format = 'bf16', or keep fewer layers")
    return groups


def _fused(linears: list[str]) -> Iterator[tuple[str, ...]]:
    """The names in order, with those of one fused group together."""
    present, done = set(linears), set[str]()
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        group = next((group for group in FUSED_GROUPS if leaf in group), (leaf,))
        names = tuple(f"{parent}.{member}" for member in group)
        if not present.issuperset(names):
            names = (name,)
        if name not in done:
            done.update(names)
            yield names


def check_names(model: PreTrainedModel, source: Source, groups: list[Group]) -> None:
    """ValueError for what the model needs and the folder lacks; a warning for what the folder has in vain."""
    tied = set(model.all_tied_weights_keys)
    packed = {name for group in groups if group.packed for name in group.names if source.is_packed(name)}
    needed = set(model.state_dict()) - tied - {f"{name}.weight" for name in packed}
    missing = sorted(needed - set(source.tensors))
    spare = sorted(
        name
        for name in set(source.tensors) - needed - tied
        if name.rpartition(".")[0] not in packed and not name.endswith("rotary_emb.inv_freq")  # in old Llama folders
    )
    _refuse_missing(model, missing, spare)
    if spare:
        logger.warning("%s: %d tensors are not part of the model: %s", model.name_or_path, len(spare), _some(spare))


def _refuse_missing(model: PreTrainedModel, missing: list[str], spare: Sequence[str] = ()) -> None:
    if missing:
        instead = f"; it has {_some(spare)} instead" if spare else ""
        raise ValueError(f"{model.name_or_path} lacks {len(missing)} tensors of the model: {_some(missing)}{instead}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def load_all_but_groups(base: Base) -> None:
    """Everything but the weights of groups: embedding, head, norms with their folds, biases, persistent buffers.

    ValueError names a tensor with NaN or infinity.
    """
    model = base.model
    later = {f"{name}.weight" for group in base.groups for name in group.names} | set(model.all_tied_weights_keys)
    for name, tensor in list(model.state_dict(keep_vars=True).items()):
        if name not in later:
            value = _read(base.source, name, tensor, base.device)
            if value.is_floating_point():
                finite_amax([value], [name])
            parent, _, leaf = name.rpartition(".")
            setattr(
                model.get_submodule(parent), leaf, nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
            )

    folds = read_folds(base.folder)
    for name, module in model.named_modules():
        fold = folds.get(base.source.modules.get(name, ""))
        if isinstance(module, RMSNorm) and fold is not None and fold.outputs is not None:
            _check_shape(f"the fold of {name}", tuple(fold.outputs.shape), module.weight)
            module.fold = fold.outputs.to(base.device)


def load_group(base: Base, group: Group, adapter_rank: int = 0) -> None:
    """Fill a group's weights from one storage. Its biases are there already.

    The rows that are left free behind dense weights are the last linear's `spare_rows`: there the engine keeps the
    adapters' A, so that one product gives x W^T and x A^T.
    """
    linears = [_linear(base.model, name) for name in group.names]
    if group.packed:
        weights = frozen_weights(base.codes(group))
        for name, linear, weight in zip(group.names, linears, weights, strict=True):
            base.model.set_submodule(name, PackedLinear(weight, linear.bias))
        return
    dtype = linears[0].weight.dtype
    rows = [linear.out_features for linear in linears]
    spare = len(rows) * adapter_rank
    fused = torch.empty(sum(rows) + spare, linears[0].in_features, device=base.device, dtype=dtype)
    *views, free = fused.split([*rows, spare])
    for name, linear, view in zip(group.names, linears, views, strict=True):
        view.copy_(_read(base.source, f"{name}.weight", linear.weight, base.device))
        finite_amax([view], [f"{name}.weight"])
        linear.weight = nn.Parameter(view, requires_grad=False)
    linears[-1].spare_rows = free


def _linear(model: PreTrainedModel, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def _read(source: Source, name: str, like: Tensor, device: torch.device, *, cast: bool = True) -> Tensor:
    """One tensor on the device, of the shape and (unless told not to) the dtype of `like`. ValueError: it is other."""
    tensor = source.tensor(name)
    _check_shape(name, tuple(tensor.shape), like)
    if like.is_floating_point() and not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype} in the file, where bf16, fp16 or fp32 was expected")
    return tensor.to(device, like.dtype if cast else None)


def _check_shape(name: str, shape: tuple[int, ...], like: Tensor) -> None:
    if shape != tuple(like.shape):
        raise ValueError(f"{name} is {list(shape)} in the file, but config.json makes it {list(like.shape)}")


# ------------------------------------------------------------------------------------------------- what goes with it


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. ValueError: it has none that transformers can read."""
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):  # transformers would make an empty one
        raise ValueError(f"{folder} has no tokenizer: {', '.join(_TOKENIZER_FILES)} are all missing")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder} has no tokenizer that transformers can read: {error}") from error
