"""NVFP4 and MXFP4 as quantization methods of transformers: importing this module registers them.

    import qerl.integrations.transformers                                            (or any use of qerl.NVFP4Config)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=qerl.NVFP4Config())

    bf16 folder     each weight as transformers reads it -> on its device -> with all of its group -> codes
    packed folder   the stored tensors as buffers -> packed when all are there
    both            -> PackedLinear, in every linear of the decoder layers; the rest of the model is transformers' own

The codes are those of nn/load.py: the same groups (q, k, v; gate, up) with one global scale and one PackedWeight, the
same `keep`. At most one group's dense weights are in memory at a time. `save_pretrained` writes compressed-tensors'
layout, which vLLM, compressed-tensors and nn/load.py read; `dequantize` gives ordinary linears, rounded once.

What registering changes: two new methods, and one entry of transformers' table. Folders in compressed-tensors'
`nvfp4-pack-quantized` and `mxfp4-pack-quantized` are from then on opened here (their activations stay in 16 bits);
all other compressed-tensors folders as before.

PEFT: its own LoRA layers wrap these linears and compute with factors of their own dtype; DoRA asks `dequantize` for the
weight; merging is refused, since 4 bits would round most of an adapter away. Left out: ModelOpt folders (nn/load.py
reads them), layers on CPU or disk beside a GPU, a `state_dict` in place of files.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, UInt8
from packaging.specifiers import SpecifierSet
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import CompressedTensorsConfig, QuantizationConfigMixin

from qerl.config import ModelConfig
from qerl.formats.checkpoint import COMPRESSED_TENSORS, Checkpoint, from_stored
from qerl.formats.codes import BLOCKS, MXFP4, NVFP4, Codes, PackedCodes, PackedFormat, Scale, dequantize
from qerl.formats.folding import CALIBRATION_FILE
from qerl.formats.writing import as_stored, quantization_config
from qerl.kernels.layout import PackedWeight, unpack
from qerl.nn.linear import PackedLinear, frozen_weights
from qerl.nn.load import Group, Source, check_names, plan_linears

TRANSFORMERS_VERSIONS = ">=5.17,<5.25"
"""What the tests were run against; another version gets a warning."""

logger = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------------- the configs


class _PackedConfig(QuantizationConfigMixin):
    """Settings of both formats; see NVFP4Config."""

    format: ClassVar[PackedFormat]

    def __init__(self, scale: str = "sweep", keep: Sequence[str] = ()) -> None:
        if scale not in ("sweep", "amax"):
            raise ValueError(f"{type(self).__name__}: scale = {scale!r}: choose sweep or amax")
        if isinstance(keep, str):
            raise ValueError(f"{type(self).__name__}: keep = {keep!r}: give a list of patterns, [{keep!r}]")
        self.quant_method: Any = f"qerl_{self.format}"
        self.scale: Scale = cast(Scale, scale)
        self.keep = list(keep)
        self.ignore: list[str] = []
        """Linears that are not packed; known once a model is loaded."""

    def to_dict(self) -> dict[str, Any]:
        """What config.json gets: compressed-tensors' description of the folder."""
        return quantization_config(self.packed_format(), sorted(self.ignore))

    def packed_format(self) -> NVFP4 | MXFP4:
        """The format with its settings."""
        return NVFP4(self.scale) if self.format == "nvfp4" else MXFP4(self.scale)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The inverse of `to_dict`, up to `scale` and `keep`, which a packed folder does not need; or the arguments."""
        given = dict(config_dict)
        config = cls(**given) if given.pop("quant_method", None) == f"qerl_{cls.format}" else cls()
        config.ignore = list(config_dict.get("ignore") or [])
        return (config, kwargs) if return_unused_kwargs else config


class NVFP4Config(_PackedConfig):
    """`quantization_config` of `from_pretrained` for NVFP4 weights and 16-bit activations.

    scale: "sweep" (least squares) or "amax"; keep: globs of linears that stay as they are. Both are for folders that
    are quantised while they load; a packed folder is what it is. ValueError for another scale and, when a model is
    loaded, for a pattern that matches nothing or parts a fused group.
    """

    format = "nvfp4"


class MXFP4Config(_PackedConfig):
    """The same for MXFP4; "amax" is the OCP rule."""

    format = "mxfp4"


class _CompressedTensors(CompressedTensorsConfig):
    """Stands in transformers' table for compressed-tensors: knows whose folder a config describes."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """NVFP4Config or MXFP4Config for their folders, else compressed-tensors' own."""
        for config in (NVFP4Config, MXFP4Config):
            if config_dict.get("format") != COMPRESSED_TENSORS[config.format]:
                continue
            groups = (config_dict.get("config_groups") or {}).values()
            if any(group.get("input_activations") for group in groups):
                logger.warning("the folder is meant for 4-bit activations too; here they stay in the model's dtype")
            return config.from_dict(config_dict, return_unused_kwargs, **kwargs)
        return CompressedTensorsConfig.from_dict(config_dict, return_unused_kwargs, **kwargs)


# -------------------------------------------------------------------------------------------------------- the linears


class _Codes(Tensor):
    """Bytes of a packed weight; what PEFT's merge does to a weight is refused, not cast to bytes or lost."""

    _REFUSED: ClassVar[list[Any]] = [Tensor.add, Tensor.add_, Tensor.sub, Tensor.sub_, Tensor.data.__set__]  # pyright: ignore

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls._REFUSED:
            raise ValueError(
                "an adapter cannot be merged into packed weights, where 4 bits would round most of it away: call "
                "dequantize() on the base model first, or let `qerl export --merged` merge it into the bf16 folder"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


class HubLinear(PackedLinear):
    """A PackedLinear that PEFT's own layers can wrap."""

    @property
    def weight(self) -> UInt8[Tensor, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The codes' bytes; nothing can be added to them."""
        return super().weight.as_subclass(_Codes)

    @property
    def W_q(self) -> UInt8[Tensor, ...]:
        """The sign by which PEFT knows a linear that has `dequantize` (DoRA needs the weight's norm)."""
        return self.weight

    def codes(self) -> PackedCodes:
        """The weight in the order of files."""
        assert isinstance(self.packed, PackedWeight)
        return unpack(self.packed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n k"]:
        """The weight, rounded once to `dtype`."""
        return dequantize(self.codes(), dtype)


class _StoredLinear(nn.Module):
    """A linear's stored tensors, under the names that files give them, until its whole group is loaded."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor | None

    def __init__(self, linear: nn.Linear, format: PackedFormat) -> None:
        super().__init__()
        n, k = linear.weight.shape
        scale = torch.float8_e4m3fn if format == "nvfp4" else torch.uint8
        device = linear.weight.device
        self.register_buffer("weight_packed", torch.empty(n, k // 2, dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", torch.empty(n, k // BLOCKS[format], dtype=scale, device=device))
        global_scale = torch.empty(1, device=device, dtype=torch.float32) if format == "nvfp4" else None
        self.register_buffer("weight_global_scale", global_scale)
        self.register_parameter("bias", linear.bias)

    def codes(self, name: str) -> PackedCodes:
        """ValueError for scales that no quantiser writes."""
        return from_stored(self.weight_packed, self.weight_scale, self.weight_global_scale, divides=True, place=name)


# ------------------------------------------------------------------------------------------------------ the quantizer


class PackedQuantizer(HfQuantizer):
    """What transformers asks while it loads and saves; see the module's text."""

    quantization_config: _PackedConfig

    def __init__(self, quantization_config: _PackedConfig, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs)  # one config may serve several models
        self.format = self.quantization_config.packed_format()
        self.groups: dict[str, Group] = {}
        """By the name of each linear that is packed."""
        self.waiting: dict[str, Tensor] = {}
        """Dense weights on their device whose group is not complete yet."""
        self.calibration: Path | None = None
        """The factors of the folder that was loaded, where it has some: `save_pretrained` cannot write them."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """ValueError for a device map that leaves some layers on the CPU, the disk or nowhere."""
        if isinstance(device_map, dict):
            kinds = {place if place == "disk" else torch.device(place).type for place in device_map.values()}
            if "disk" in kinds or len(kinds) > 1:
                raise ValueError(
                    f"device_map spreads the model over {', '.join(sorted(kinds))}: packed weights run where they are, "
                    "so all layers must be on GPUs, or all on the CPU"
                )
            if "meta" in kinds:
                raise ValueError('device_map is "meta", where there are no weights to pack: take a device')
        _check_version()

    # ------------------------------------------------------------------ loading

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Plan which linears are packed; ValueError as `nn.load` has it, before any weight is read."""
        if not checkpoint_files:
            raise ValueError("packed weights are read from a folder: from_pretrained(folder), without a state_dict")
        checkpoint = Checkpoint(Path(checkpoint_files[0]).parent)
        calibration = checkpoint.folder / CALIBRATION_FILE
        self.calibration = calibration if calibration.is_file() else None
        config = self.quantization_config
        stored = checkpoint.quantization
        if stored is not None and not self.pre_quantized:
            raise ValueError(
                f"{checkpoint.folder} is packed by {stored.writer}: qerl.nn.load.load_model reads it, transformers "
                "needs compressed-tensors' layout"
            )
        settings = {"path": str(checkpoint.folder), "format": config.format, "scale": config.scale, "keep": config.keep}
        source = Source(checkpoint, model)
        groups = plan_linears(model, source, ModelConfig.model_validate(settings))
        check_names(model, source, groups)
        self.groups = {name: group for group in groups if group.packed for name in group.names}
        config.ignore = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in self.groups
        ]
        if self.pre_quantized:
            for name in self.groups:
                model.set_submodule(name, _StoredLinear(_linear(model, name), config.format))

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is the weight of a linear that will be packed."""
        module, _, leaf = param_name.rpartition(".")
        return not self.pre_quantized and leaf == "weight" and module in self.groups

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes of an element once it is loaded: what device_map="auto" counts with."""
        if self.param_needs_quantization(model, param_name):
            return self.format.bits / 8
        return float(param.element_size())

    def get_quantize_ops(self) -> ConversionOps:
        """What a dense weight goes through."""
        return _Quantize(self)

    def take(self, model: PreTrainedModel, name: str, weight: Tensor) -> None:
        """A dense weight, on its device; with the last one of its group, the group is packed."""
        self.waiting[name] = weight
        group = self.groups[name]
        if not self.waiting.keys() >= set(group.names):
            return
        weights = [self.waiting.pop(member) for member in group.names]
        names = [f"{member}.weight" for member in group.names]
        shared = self.format.share(weights, names)
        codes = [self.format.quantize(w, shared=shared, name=n) for w, n in zip(weights, names, strict=True)]
        self._pack(model, group, codes, [_linear(model, member).bias for member in group.names])

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Pack the stored tensors, a group at a time."""
        assert not self.waiting, "check_names found every weight"
        for group in dict.fromkeys(self.groups.values()) if self.pre_quantized else ():
            stored: list[Any] = [model.get_submodule(name) for name in group.names]
            codes: list[PackedCodes] = [linear.codes(name) for linear, name in zip(stored, group.names, strict=True)]
            self._pack(model, group, codes, [linear.bias for linear in stored])

    def _pack(
        self, model: PreTrainedModel, group: Group, codes: Sequence[Codes], biases: Sequence[nn.Parameter | None]
    ) -> None:
        if len(devices := {code.packed.device for code in codes}) > 1:
            raise ValueError(f"{', '.join(group.names)} are one product: device_map puts them on {devices}")
        for name, weight, bias in zip(group.names, frozen_weights(codes), biases, strict=True):
            linear: Any = HubLinear(weight)
            linear.bias = bias  # perhaps still on the meta device: transformers loads it into the new module
            linear._is_hf_initialized = True  # else transformers fills a linear's weight with random numbers
            model.set_submodule(name, linear)

    # ------------------------------------------------------------------ afterwards

    def is_serializable(self) -> bool:
        """`save_pretrained` writes a packed folder."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained on it."""
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The model's tensors with the packed layers as compressed-tensors stores them, on the host."""
        if self.calibration is not None:
            logger.warning(
                "norms and weights hold factors that %s tells of, which is not written along: copy it to the same "
                "place in the new folder, else noise and `qerl export --unfold` take them for none",
                self.calibration,
            )
        state = model.state_dict()
        for name, linear in packed_linears(model):
            state.update(as_stored(name, linear.codes()))
        return state, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
        """Ordinary linears of the same values, which adapters can be merged into; also under PEFT's wrappers."""
        for name, linear in list(packed_linears(model)):
            dense = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
            dense.weight = nn.Parameter(linear.dequantize(dtype), requires_grad=False)
            dense.bias = linear.bias
            model.set_submodule(name, dense)
        return model


for _config in (NVFP4Config, MXFP4Config):
    register_quantization_config(f"qerl_{_config.format}")(_config)
    register_quantizer(f"qerl_{_config.format}")(PackedQuantizer)
AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] = _CompressedTensors


class _Quantize(ConversionOps):
    """transformers' step between reading a weight and placing it: hands it to the quantizer, which places it itself."""

    def __init__(self, quantizer: PackedQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """{name: weight} or {name: [weight]} -> nothing that is left to place."""
        model, missing = kwargs["model"], kwargs.get("missing_keys")
        for name, found in input_dict.items():
            weight = found[0] if isinstance(found, list) else found
            expected = _linear(model, name.removesuffix(".weight")).weight.shape
            if weight.shape != expected:
                raise ValueError(
                    f"{name} is {list(weight.shape)} in the file, but config.json makes it {list(expected)}"
                )
            self.quantizer.take(model, name.removesuffix(".weight"), weight)
            if missing is not None:
                missing.discard(name)
        return {}


def packed_linears(model: nn.Module) -> list[tuple[str, HubLinear]]:
    """Every packed linear of a model that was loaded through transformers, with its name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, HubLinear)]


def _linear(model: PreTrainedModel, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def _check_version() -> None:
    if metadata.version("transformers") not in SpecifierSet(TRANSFORMERS_VERSIONS):
        logger.warning(
            "qerl.integrations.transformers was tested with transformers%s, and this is %s",
            TRANSFORMERS_VERSIONS,
            metadata.version("transformers"),
        )
