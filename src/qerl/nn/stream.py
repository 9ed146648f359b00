"""A model larger than memory, for a forward pass: each decoder layer's weights are there while the layer runs.

    with streamed(base) as model: packed_forward(model, ids, cu_seqlens)      for each layer: load -> run -> forget
    prepared(base)[i].load(), .unload()                                       the same by hand: many passes of one layer

Embedding, head, norms and biases stay; the linears of one layer come and go, packed or dense as load_model would have
them, so the numbers are those of the loaded model. One pass over all tokens reads the folder once. Used by
qerl/inspection and qerl/calibrate.py; nothing here is trained, and generating this way would read the folder for every
token.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from qerl.nn.load import Base, Group, load_all_but_groups, load_group
from qerl.nn.structure import decoder_layers


class LayerWeights:
    """The linears of one decoder layer, which come and go."""

    def __init__(self, base: Base, groups: list[Group]) -> None:
        self.base, self.groups = base, groups
        self._empty = {name: base.model.get_submodule(name) for group in groups for name in group.names}
        self._on_meta = {name: module.get_parameter("weight") for name, module in self._empty.items()}

    def load(self, *_: Any) -> None:
        """Fill them."""
        for group in self.groups:
            load_group(self.base, group)

    def unload(self, *_: Any) -> None:
        """Put the empty ones back."""
        for name, module in self._empty.items():
            module.weight = self._on_meta[name]
            self.base.model.set_submodule(name, module)


def prepared(base: Base) -> list[LayerWeights]:
    """Load all but the decoder layers' linears, freeze the model, and hand those out. `base` serves no second time."""
    model, layers = base.model, decoder_layers(base.model)
    load_all_but_groups(base)
    model.tie_weights()
    model.eval().requires_grad_(False)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    return [
        LayerWeights(base, [group for group in base.groups if group.names[0].startswith(f"{prefix}.{index}.")])
        for index in range(len(layers))
    ]


@contextmanager
def streamed(base: Base) -> Generator[PreTrainedModel]:
    """`base`'s model, frozen and in eval mode, whose layers load themselves. `base` serves no second time."""
    hooks = []
    for layer, weights in zip(decoder_layers(base.model), prepared(base), strict=True):
        hooks.append(layer.register_forward_pre_hook(weights.load))
        hooks.append(layer.register_forward_hook(weights.unload))
    try:
        yield base.model
    finally:
        for hook in hooks:
            hook.remove()
