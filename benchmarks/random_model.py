"""A model of Qwen2.5's shape with random weights, made on the device in its final form: what needs no checkpoint.

    sizes -> transformers' model on the meta device -> a layer's products at a time, 4-bit or bf16 -> adapters, B != 0

Codes and scale bytes are drawn as they are stored (bits without NaN), so that 72B take seconds and never more memory
than the model itself. Activations stay of order one, logits of random weights mean nothing. Products are fused as the
loader fuses them (nn/load.py): q, k, v and gate, up are neighbours in one storage.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl.config import LoraConfig
from qerl.kernels.layout import CODE_BYTES, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, PackedWeight, Storage, view
from qerl.nn.attention import ATTENTION
from qerl.nn.linear import PackedLinear
from qerl.nn.lora import attach_lora
from qerl.nn.rmsnorm import RMSNorm

Format = Literal["bf16", "nvfp4", "mxfp4"]


class Shape(NamedTuple):
    """Of one Qwen2.5 model; heads are 128 wide but for the smallest."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool


SHAPES = {
    "tiny": Shape(2, 256, 512, 4, 2, 512, False),
    "0.5B": Shape(24, 896, 4864, 14, 2, 151_936, True),
    "3B": Shape(36, 2048, 11008, 16, 2, 151_936, True),
    "7B": Shape(28, 3584, 18944, 28, 4, 152_064, False),
    "14B": Shape(48, 5120, 13824, 40, 8, 152_064, False),
    "32B": Shape(64, 5120, 27648, 40, 8, 152_064, False),
    "72B": Shape(80, 8192, 29568, 64, 8, 152_064, False),
}

_SCALE_BYTES = {"nvfp4": (0x28, 0x48), "mxfp4": (130, 138)}


def random_model(
    size: str, fmt: Format, device: torch.device, *, rank: int = 32, layers: int | None = None
) -> nn.Module:
    """The model with LoRA of `rank` on all seven projections (0: without); `layers` instead of all of its own."""
    shape = SHAPES[size]
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator)

    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Qwen2RMSNorm":
            gain = nn.Parameter(torch.ones(shape.hidden, dtype=torch.bfloat16, device=device))
            model.set_submodule(name, RMSNorm(gain, config.rms_norm_eps))
    model.model.embed_tokens.weight = nn.Parameter(normal(shape.vocabulary, shape.hidden, std=1.0))
    model.lm_head.weight = nn.Parameter(normal(shape.vocabulary, shape.hidden, std=shape.hidden**-0.5))
    for layer in model.model.layers:
        for parent, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
            (layer.self_attn, ("o_proj",)),
            (layer.mlp, ("gate_proj", "up_proj")),
            (layer.mlp, ("down_proj",)),
        ):
            linears = [getattr(parent, n) for n in names]
            rows, k = [linear.out_features for linear in linears], linears[0].in_features
            biases = [
                normal(n, std=0.1) if linear.bias is not None else None for n, linear in zip(rows, linears, strict=True)
            ]
            if fmt == "bf16":
                fused = normal(sum(rows), k, std=k**-0.5)
                for linear, weight, bias in zip(linears, fused.split(rows), biases, strict=True):
                    linear.weight = nn.Parameter(weight, requires_grad=False)
                    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
                continue
            whole = _packed(rows, k, fmt, generator)
            for i, (name, bias) in enumerate(zip(names, biases, strict=True)):
                setattr(parent, name, PackedLinear(whole.part(i), bias))
    model.tie_weights()
    model.eval().requires_grad_(False)
    if rank == 0:
        return model
    adapted = attach_lora(model, LoraConfig(r=rank, alpha=rank), seed=0)
    _fill_b(adapted, generator)
    return adapted


@torch.no_grad()
def _fill_b(model: PeftModel, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.01, generator=generator)


def _packed(rows: list[int], k: int, fmt: Literal["nvfp4", "mxfp4"], generator: torch.Generator) -> PackedWeight:
    """Random tiles; rows of padding are random too, which no result shows."""
    device = generator.device
    tiles_n, tiles_k = sum(-(-n // TILE_ROWS) for n in rows), -(-k // TILE_COLUMNS)
    tiles = torch.empty(tiles_n, tiles_k, TILE_BYTES, dtype=torch.uint8, device=device)
    tiles.view(torch.int64).random_(generator=generator)
    low, high = _SCALE_BYTES[fmt]
    tiles[..., CODE_BYTES:].random_(low, high, generator=generator)
    typical = 1.3 if fmt == "nvfp4" else 2.0**-121  # of a block scale times a code: outputs are of order one
    scale = torch.full((tiles_n * TILE_ROWS,), k**-0.5 / typical / 3, dtype=torch.float32, device=device)
    storage = Storage(tiles, scale.view(torch.int32), "e4m3" if fmt == "nvfp4" else "e8m0")
    return view(storage, k, rows)
