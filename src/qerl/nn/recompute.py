"""Activation recomputation: a decoder layer keeps its input alone and runs again in the backward pass.

Memory for activations falls from some thirty hidden-sized tensors a layer to one, for one more forward pass of it.
Where some layers recompute and others do not, the first ones do: when their turn comes in the backward pass, what the
others kept is gone.
With `offload` that one waits in the host's memory: it is copied while the layer computes, by a stream of its own, and
comes back when the layer's turn is in the backward pass.

transformers' own switch acts in training mode only, where dropout acts too, and its name depends on the version; a
frozen base stays in eval mode here. So `forward` is wrapped on each layer. The checkpoints are non-reentrant: they need
no input that requires a gradient, so the first layer's adapters are reached, and keyword arguments pass through.
What a layer reads from outside (`RMSNorm.noise`) must be the same in both passes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from qerl.nn.structure import decoder_layers


def recompute_layers(model: nn.Module, count: int | None = None, *, offload: bool = False) -> None:
    """From now on the first `count` decoder layers (None: all), and no others, recompute where gradients are recorded.

    offload: keep these layers' inputs in the host's memory meanwhile.
    """
    layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        if isinstance(vars(layer).get("forward"), _Recomputed):
            del layer.forward
        if count is None or number < count:
            assert "forward" not in vars(layer), "this layer's forward pass is somebody else's"
            layer.forward = _Recomputed(layer.forward, offload)


class _Recomputed:
    """A layer's forward pass."""

    def __init__(self, forward: Any, offload: bool) -> None:
        self._forward, self._offload = forward, offload
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # A checkpoint saves its positional tensors, the hidden states alone; within it, hooks of its own are on top.
        with saved_tensors_hooks(_to_host, _to_device) if self._offload else nullcontext():
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Its device, and a copy in the host's memory (pinned), which may still be under way."""
    if not tensor.is_cuda:
        return tensor.device, tensor.clone()
    stream = _copies(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)  # its memory is not given away before the copy has been made
    return tensor.device, host


def _to_device(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, host = kept
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_copies(device))
    return host.to(device, non_blocking=True)


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to the host."""
    return torch.cuda.Stream(device)
