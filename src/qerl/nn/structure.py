"""The places in a causal language model that the rest of the package needs: the decoder, its layers, the head.

    PeftModel -> causal_lm (PreTrainedModel) -> decoder -> layers [num_hidden_layers]
                                             -> head (nn.Linear, or tied to the embedding)

Every function takes the model with or without PEFT's wrapper. Found by role, never by a model's name.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model with a head; what PEFT wraps, when it does."""
    unwrap = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, unwrap() if unwrap is not None else model)


def decoder(model: nn.Module) -> PreTrainedModel:
    """The model without its head: token ids in, normed hidden states out."""
    return causal_lm(model).get_decoder()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder's layers in order. ValueError where the decoder is not one plain stack of layers."""
    depth = causal_lm(model).config.num_hidden_layers
    stacks = [child for child in decoder(model).children() if isinstance(child, nn.ModuleList) and len(child) == depth]
    if len(stacks) != 1:
        raise ValueError(f"{type(causal_lm(model)).__name__} is not one stack of {depth} decoder layers: not supported")
    return stacks[0]


def head(model: nn.Module) -> nn.Linear:
    """The linear from hidden states to logits. ValueError where the model has none, or PEFT trains it."""
    module = causal_lm(model).get_output_embeddings()
    if hasattr(module, "base_layer") or hasattr(module, "original_module"):
        raise ValueError(
            "the head over the vocabulary has an adapter, or is trained (PEFT's target_modules, modules_to_save): qerl "
            "reads it as it is in the model's folder; leave lm_head out of both"
        )
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{type(causal_lm(model)).__name__} has no linear head over its vocabulary: not supported")
    return module


def max_positions(model: nn.Module) -> int | None:
    """Tokens of the model's context, prompt and completion together; None where its config names no end."""
    return getattr(causal_lm(model).config, "max_position_embeddings", None)


def head_dim(config: Any) -> int:
    """Of attention, from a model's own config, which may leave it to the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
