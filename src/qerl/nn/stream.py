"""A model larger than memory, for a forward pass: each decoder layer's weights are there while the layer runs.

    with streamed(base) as model: packed_forward(model, ids, cu_seqlens)      for each layer: load -> run -> forget

Embedding, head, norms and biases stay; the linears of one layer come and go, packed or dense as load_model would have
them, so the numbers are those of the loaded model. One pass over all tokens reads the folder once. Used by
qerl/inspection; nothing here is trained, and generating this way would read the folder for every token.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from qerl.nn.load import Base, Group, load_all_but_groups, load_group
from qerl.nn.structure import decoder_layers


@contextmanager
def streamed(base: Base) -> Generator[PreTrainedModel]:
    """`base`'s model, frozen and in eval mode, whose layers load themselves. `base` serves no second time."""
    model, layers = base.model, decoder_layers(base.model)
    load_all_but_groups(base)
    model.tie_weights()
    model.eval().requires_grad_(False)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    hooks = []
    for index, layer in enumerate(layers):
        groups = [group for group in base.groups if group.names[0].startswith(f"{prefix}.{index}.")]
        empty = {name: model.get_submodule(name) for group in groups for name in group.names}
        hooks.append(layer.register_forward_pre_hook(_Loader(base, groups)))
        hooks.append(layer.register_forward_hook(_Unloader(model, empty)))
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()


class _Loader:
    """Fills a layer's linears before it runs."""

    def __init__(self, base: Base, groups: list[Group]) -> None:
        self.base, self.groups = base, groups

    def __call__(self, *_: Any) -> None:
        for group in self.groups:
            load_group(self.base, group)


class _Unloader:
    """Puts a layer's empty linears back after it has run."""

    def __init__(self, model: PreTrainedModel, empty: dict[str, nn.Module]) -> None:
        self.model, self.empty = model, empty
        self.weights = {name: module.get_parameter("weight") for name, module in empty.items()}  # on the meta device

    def __call__(self, *_: Any) -> None:
        for name, module in self.empty.items():
            module.weight = self.weights[name]
            self.model.set_submodule(name, module)
