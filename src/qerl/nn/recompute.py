"""Activation recomputation: a decoder layer keeps its input alone and runs again in the backward pass.

Memory for activations falls from some thirty hidden-sized tensors a layer to one, for one more forward pass of it.

transformers' own switch acts in training mode only, where dropout acts too, and its name depends on the version; a
frozen base stays in eval mode here. So `forward` is wrapped on each layer. The checkpoints are non-reentrant: they need
no input that requires a gradient, so the first layer's adapters are reached, and keyword arguments pass through.
What a layer reads from outside (`RMSNorm.noise`) must be the same in both passes.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qerl.nn.structure import decoder_layers


def recompute_layers(model: nn.Module) -> None:
    """From now on every decoder layer recomputes its activations, whenever gradients are recorded."""
    for layer in decoder_layers(model):
        assert "forward" not in vars(layer), "this layer recomputes already"
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Any) -> Any:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
