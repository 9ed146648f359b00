"""The sizes of a model, from its config.json; of a packed folder also what its layers are packed in, from its headers.

    layer i    q, k, v | o | gate, up | down       a Product each: what is one product, and one storage, once loaded

The rules are those of nn/load.py (which products are packed) and nn/lora.py (which linears have an adapter);
tests/unit/plan holds them against loaded models. Leaves out architectures that engine/model.py does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qerl.config import LoraConfig, ModelConfig, matches_layer, model_folder
from qerl.engine.model import FAMILIES
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import BF16, INT4, MXFP4, NF4, NVFP4
from qerl.nn.architecture import read_config
from qerl.nn.load import base_format
from qerl.nn.structure import head_dim


class NotPlanned(ValueError):
    """A run that can be, but of which a plan does not know enough."""


@dataclass(frozen=True)
class Linear:
    """y = x W^T (+ b), W [rows, columns]."""

    name: str
    """As in the model: model.layers.0.self_attn.q_proj."""
    rows: int
    columns: int
    has_bias: bool


@dataclass(frozen=True)
class Product:
    """Linears that read the same input; all but coded ones share one storage."""

    linears: tuple[Linear, ...]
    format: NVFP4 | MXFP4 | NF4 | INT4 | BF16

    @property
    def packed(self) -> bool:
        """Whether it is in the kernels' tiles (kernels/layout.py)."""
        return isinstance(self.format, NVFP4 | MXFP4)

    @property
    def coded(self) -> bool:
        """Whether each linear is as its format stores it, and made dense for every product (kernels/coded.py)."""
        return isinstance(self.format, NF4 | INT4)

    @property
    def columns(self) -> int:
        """K, the same for all."""
        return self.linears[0].columns

    @property
    def rows(self) -> list[int]:
        """N of each linear."""
        return [linear.rows for linear in self.linears]


@dataclass(frozen=True)
class Layer:
    """A decoder layer's four products."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product

    @property
    def products(self) -> tuple[Product, ...]:
        """All of them."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All seven."""
        return tuple(linear for product in self.products for linear in product.linears)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder of the families that the engine knows."""

    name: str
    """Its folder's, for messages."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    """Rows of the embedding."""
    tied: bool
    """Whether head and embedding are one tensor."""
    has_head_norms: bool
    """Whether q and k have norms (Qwen3)."""
    context: int | None
    """Most tokens of prompt and completion."""
    layers: tuple[Layer, ...]

    @property
    def products(self) -> list[Product]:
        """Of all layers."""
        return [product for layer in self.layers for product in layer.products]

    @property
    def num_norm_weights(self) -> int:
        """Numbers in all RMSNorms: two a layer, the last one, and those of q and k."""
        head_norms = 2 * self.head_dim if self.has_head_norms else 0
        return len(self.layers) * (2 * self.hidden + head_norms) + self.hidden

    @property
    def num_weights(self) -> int:
        """Of the decoder layers' linears."""
        return sum(linear.rows * linear.columns for layer in self.layers for linear in layer.linears)


def read_shape(config: ModelConfig) -> ModelShape:
    """The sizes of the model in `config.path`, whose weights need not be there unless they are packed.

    NotPlanned: an architecture that is not planned for. ValueError: no config.json that can be read, and as `shape_of`.
    """
    folder = model_folder(config.path)
    model: Any = read_config(folder, config.trust_remote_code)
    if model.model_type not in FAMILIES:
        raise NotPlanned(
            f"{folder} is a {model.model_type} model: plans know what qerl's engine knows, {', '.join(FAMILIES)}"
        )
    has_checkpoint = bool(getattr(model, "quantization_config", None)) or (folder / "hf_quant_config.json").is_file()
    return shape_of(model, config, Checkpoint(folder) if has_checkpoint else None, name=folder.name)


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip


def shape_of(model: Any, config: ModelConfig, checkpoint: Checkpoint | None = None, *, name: str) -> ModelShape:
    """The sizes that a config of transformers, of one of FAMILIES, gives; a checkpoint says which layers are packed.

    ValueError for sizes that no model has, and for a pattern of `model.keep` that matches nothing.
    """
    for size in _SIZES:
        value = getattr(model, size, None)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}/config.json: {size} is {value!r}: wants a positive whole number")
    layers = []
    for index in range(model.num_hidden_layers):
        products = []
        for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            linears = tuple(_linear(model, f"model.layers.{index}", linear) for linear in names)
            products.append(Product(linears, _format(linears, config, checkpoint)))
        layers.append(Layer(*products))
    config.check_keep([linear.name for layer in layers for linear in layer.linears], ["lm_head"])
    return ModelShape(
        name=name,
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_dim=head_dim(model),
        vocabulary=model.vocab_size,
        tied=model.tie_word_embeddings,
        has_head_norms=model.model_type == "qwen3",
        context=getattr(model, "max_position_embeddings", None),
        layers=tuple(layers),
    )


def adapter_ranks(shape: ModelShape, lora: LoraConfig) -> dict[str, int]:
    """The rank of every linear that gets an adapter, by its name; PEFT's rules for targets and patterns.

    ValueError for a target that no linear has, and for a pattern that matches none of them.
    """
    linears = [linear for layer in shape.layers for linear in layer.linears]
    for target in lora.target_modules:
        if not any(_is_target(linear, target) for linear in linears):
            there = ", ".join(linear.name.rpartition(".")[2] for linear in shape.layers[0].linears)
            raise ValueError(f"lora.target_modules: no layer is called {target!r}; there are {there}")
    names = [li.name for li in linears if any(_is_target(li, target) for target in lora.target_modules)]
    lora.check_patterns(names)
    return {name: _rank(name, lora) for name in names}


def _is_target(linear: Linear, target: str) -> bool:
    return linear.name == target or linear.name.endswith(f".{target}")


def _rank(name: str, lora: LoraConfig) -> int:
    return next((rank for pattern, rank in lora.rank_pattern.items() if matches_layer(pattern, name)), lora.r)


def _linear(model: Any, layer: str, name: str) -> Linear:
    hidden, intermediate = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * head_dim(model), model.num_key_value_heads * head_dim(model)
    rows, columns = {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }[name]
    if name in ("gate_proj", "up_proj", "down_proj"):
        return Linear(f"{layer}.mlp.{name}", rows, columns, getattr(model, "mlp_bias", False))
    has_bias = name != "o_proj" if model.model_type == "qwen2" else getattr(model, "attention_bias", False)
    return Linear(f"{layer}.self_attn.{name}", rows, columns, has_bias)


def _format(
    linears: tuple[Linear, ...], config: ModelConfig, checkpoint: Checkpoint | None
) -> NVFP4 | MXFP4 | NF4 | INT4 | BF16:
    """What a product's weights are in once loaded; what nn/load.py refuses is left to it."""
    if checkpoint is not None:
        packed = all(checkpoint.is_packed(linear.name) for linear in linears)
        return checkpoint.format_of(linears[0].name) if packed else BF16()
    format = base_format(config)
    kept = any(config.keeps(linear.name) for linear in linears)
    return BF16() if kept or not all(format.fits(linear.rows, linear.columns) for linear in linears) else format
