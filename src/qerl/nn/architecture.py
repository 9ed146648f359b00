"""An architecture of transformers without weights, made to compute what the rest of the package relies on.

    empty_model   config.json -> a causal language model on the meta device (no memory), rotary frequencies computed,
                  RMSNorms that take noise in place of its own, blocks of Llama's kind with fewer passes over memory
    check_head    of a loaded model: logits are the head's output, and nothing else

Any decoder of transformers loads whose attention goes through its attention interface and whose logits are its head's
output; what would compute something else here is refused by name. What takes another's place is shown to compute the
same, by trying both out: a norm w * x / rms(x) (others, Gemma's 1 + w and LayerNorms, stay and take no noise), a gated
block (mlp.py), an attention block (self_attention.py).

Called by load.py, and `rms_norm_eps` by integrations/trl.
"""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from qerl.nn import self_attention
from qerl.nn.attention import ATTENTION
from qerl.nn.mlp import gated_mlp
from qerl.nn.rmsnorm import RMSNorm, rms_norm
from qerl.nn.structure import decoder, head

logger = logging.getLogger(__name__)

# What packed attention computes; other layers carry a state from token to token, or attend in chunks.
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def empty_model(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """What a folder's config.json describes, on the meta device; buffers that no file holds, on `device`.

    ValueError for a model that cannot train here.
    """
    model = _model_on_meta(folder, dtype, trust_remote_code)
    _materialize_buffers(model, device)
    _replace_norms(model)
    _fuse_blocks(model)
    return model


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


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
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


def read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """A folder's config.json, as transformers reads it. ValueError, naming the file, for one that it cannot read."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{folder}/config.json: {' '.join(str(error).split())}") from error


def _model_on_meta(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture without weights. ValueError for one that cannot train here."""
    config = read_config(folder, trust_remote_code)
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


class _Output(BaseModelOutputWithPast):
    """Has what some decoders return besides (router logits, cross attentions), as nothing."""

    def __getattr__(self, name: str) -> None:
        return None
