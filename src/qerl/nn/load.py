"""A folder becomes a model ready to train adapters on: frozen, packed, with norms that take noise.

    open_base    config.json -> transformers' model on the meta device (no memory); what is packed, in which groups
    load_model   shards -> one tensor at a time -> device -> codes -> PackedLinear      linears of decoder layers
                                                          -> one bf16 tensor a group    the same where `keep` says so
                                                -> as it is                             embedding, head, norms, biases

Codes are those of `config.format` (formats/codes.py). q, k, v and gate, up share what the format shares (NVFP4's global
scale) and one PackedWeight (or one dense tensor, of which their weights are row views), so that the engine computes
each group as one product from the trainer's own storage. Folders that are packed already load exactly. The most memory
above the model's own is one group's bf16 weights.

Any decoder of transformers loads whose attention goes through its attention interface and whose logits are its head's
output; what would compute something else here is refused by name. A norm is replaced by our RMSNorm only if it is shown
to compute w * x / rms(x); the others (Gemma's 1 + w, LayerNorms) stay and take no noise. Blocks of
Llama's kind, shown to be that, have one operation between their products (nn/mlp.py, nn/self_attention.py).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.modeling_outputs import BaseModelOutputWithPast

from qerl.config import ModelConfig
from qerl.formats.checkpoint import FUSED_GROUPS, Checkpoint, Quantization
from qerl.formats.codes import BF16, Codes, FourBits, format_named
from qerl.formats.folding import read_folds
from qerl.formats.nvfp4 import finite_amax
from qerl.nn import self_attention
from qerl.nn.attention import ATTENTION
from qerl.nn.linear import PackedLinear, frozen_weights
from qerl.nn.mlp import gated_mlp
from qerl.nn.rmsnorm import RMSNorm, rms_norm
from qerl.nn.structure import causal_lm, decoder, decoder_layers, head

logger = logging.getLogger(__name__)

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
"""The small model that comes with the package."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# What packed attention computes; other layers carry a state from token to token, or attend in chunks.
_LAYER_TYPES = {"full_attention", "sliding_attention"}


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


def model_folder(path: str) -> Path:
    """The folder that `path` names. ValueError: it is no transformers model's."""
    folder = EMBEDDED if path == "embedded" else Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path: {folder} is not the folder of a transformers model (it has no config.json): "
            "download one first, or use path = 'embedded'"
        )
    return folder


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
    model = _model_on_meta(folder, dtype, config.trust_remote_code)
    _materialize_buffers(model, device)
    _replace_norms(model)
    _fuse_blocks(model)
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
    _check_head(model)
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
    return device


# ------------------------------------------------------------------------------------------------- an empty model


def _model_on_meta(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture without weights. ValueError for one that cannot train here."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{folder}/config.json: {error}") from error
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        raise ValueError(
            f"{folder} is a {config.model_type} model: only text decoders can be trained, no multimodal ones"
        )
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise ValueError(f"{folder} has layers of type {', '.join(sorted(other))}: only attention layers can be packed")
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")  # the weights come from us, not from one of transformers' quantizers
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        raise ValueError(
            f"{folder} ({config.model_type}) cannot be built as a causal language model: {error}"
        ) from error
    if not model._supports_attention_backend:
        raise ValueError(f"{type(model).__name__} does not use transformers' attention interface: not supported")
    model.name_or_path = str(folder)
    return model


def _materialize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers that no file holds (rotary frequencies), by transformers' own rule for models built on meta."""
    names = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set and buffer.is_meta and buffer.is_floating_point():
                module._buffers[name] = torch.full_like(buffer, torch.nan, device=device)
                names.append(f"{prefix}.{name}")
            elif name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    model.initialize_weights()  # what it writes into parameters is overwritten by the folder's tensors
    for name in names:
        if model.get_buffer(name).isnan().any():
            raise ValueError(f"{type(model).__name__} does not say how its buffer {name} is computed: not supported")


def _replace_norms(model: PreTrainedModel) -> None:
    left: list[str] = []
    for name, module in list(model.named_modules()):
        eps = rms_norm_eps(module)
        if eps is not None:
            model.set_submodule(name, RMSNorm(module.get_parameter("weight"), eps))
        elif "RMSNorm" in type(module).__name__:
            left.append(name)
    if left:
        logger.warning("%d RMSNorms are not w * x / rms(x) and take no noise, such as %s", len(left), left[0])


def _fuse_blocks(model: PreTrainedModel) -> None:
    """Let what stands between two products be one operation, in blocks of Llama's kind."""
    for name, module in list(model.named_modules()):
        block = gated_mlp(module)
        if block is not None:
            model.set_submodule(name, block)
        else:
            self_attention.fuse(module)


def rms_norm_eps(module: nn.Module) -> float | None:
    """The eps of a module that computes weight * x / sqrt(mean(x^2) + eps); None if it does not, by trying it out."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(parameters) != ["weight"] or parameters["weight"].ndim != 1 or not isinstance(eps, float):
        return None
    arguments = inspect.signature(module.forward).parameters.values()
    if sum(argument.default is argument.empty for argument in arguments) != 1:
        return None
    width = parameters["weight"].numel()
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    weight = torch.linspace(0.5, 1.5, width)
    probe.load_state_dict({"weight": weight})
    x = torch.arange(2.0 * width).sin().view(2, width)
    x[1] *= eps**0.5  # so small that eps counts
    return eps if torch.allclose(probe(x), rms_norm(x, weight, eps), rtol=1e-4, atol=1e-6) else None


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
    for pattern in config.keep:
        if not any(fnmatchcase(name, pattern) for name in matched):
            raise ValueError(f"model.keep: {pattern!r} matches no linear layer; names look like {linears[0]}")
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
        kept = any(fnmatchcase(name, pattern) for pattern in config.keep)
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


class _Output(BaseModelOutputWithPast):
    """Has what some decoders return besides (router logits, cross attentions), as nothing."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def _check_head(model: PreTrainedModel) -> None:
    """ValueError if logits are not the head's output as it is (Granite scales them, Gemma 2 caps them).

    nn/head.py and the engine apply the head's weight themselves. The decoder is replaced by a constant for the check.
    """
    body, output = decoder(model), head(model)
    hidden = torch.arange(2.0 * output.in_features, device=output.weight.device).sin().view(1, 2, -1)
    hidden *= 50 / output(hidden.to(output.weight.dtype)).abs().amax()  # caps at 30 and the like must show
    hidden = hidden.to(output.weight.dtype)

    def constant(*args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]

    body.forward = constant
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=hidden.device)).logits
    finally:
        del body.forward
    if not torch.allclose(logits.float(), output(hidden).float(), rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} changes the logits after its head (a scale or a soft cap): not supported"
        )


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. ValueError: it has none that transformers can read."""
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):  # transformers would make an empty one
        raise ValueError(f"{folder} has no tokenizer: {', '.join(_TOKENIZER_FILES)} are all missing")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder} has no tokenizer that transformers can read: {error}") from error
