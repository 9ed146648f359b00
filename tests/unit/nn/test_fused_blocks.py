"""Blocks with one operation between their products: which are changed, and that they compute the same."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from qerl.nn import self_attention
from qerl.nn.architecture import rms_norm_eps
from qerl.nn.attention import ATTENTION, Packing
from qerl.nn.mlp import GatedMLP, gated_mlp
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import decoder_layers

PACKING = Packing(torch.tensor([0, 4, 9], dtype=torch.int32), (4, 5))


def layer_of(family: str) -> nn.Module:
    """The first one, with our norms, as nn/architecture.py has made them by then."""
    model = tiny_model(family)
    model.config._attn_implementation = ATTENTION
    layer = decoder_layers(model)[0]
    for name, module in list(layer.named_modules()):
        if (eps := rms_norm_eps(module)) is not None:
            layer.set_submodule(name, RMSNorm(module.get_parameter("weight"), eps))
    return layer


def attention_inputs(attention) -> dict:
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(1, 9, attention.head_dim // 2, generator=generator)
    angles = torch.cat([half, half], -1)
    x = torch.randn(1, 9, attention.q_proj.in_features, generator=generator)
    embeddings = (angles.cos(), angles.sin())
    return {"hidden_states": x, "position_embeddings": embeddings, "attention_mask": None, "packing": PACKING}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_attention_and_its_gradient_stay_what_they_were(family):
    original = layer_of(family).self_attn
    fused = copy.deepcopy(original)
    kind = type(original)
    assert self_attention.fuse(fused)
    assert isinstance(fused, kind) and type(fused) is not kind and type(original) is kind
    inputs = attention_inputs(original)
    results = []
    for block in (original, fused):
        x = inputs["hidden_states"].clone().requires_grad_()
        weights = [block.q_proj.weight, block.k_proj.weight]
        y = block(**inputs | {"hidden_states": x})[0]
        results.append((y, *torch.autograd.grad(y.sin().sum(), [x, *weights])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.equal(
        results[0][0], original(**inputs | {"position_embeddings": (torch.ones(1), torch.ones(1))})[0]
    )


def test_without_packing_attention_is_transformers_own():
    attention = layer_of("qwen2").self_attn
    inputs = attention_inputs(attention) | {"packing": None}
    expected = attention(**inputs)[0]
    assert self_attention.fuse(attention)
    assert torch.equal(attention(**inputs)[0], expected)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_gated_block_stays_what_it_was(family):
    original = layer_of(family).mlp
    fused = gated_mlp(original)
    assert isinstance(fused, GatedMLP) and fused.state_dict().keys() == original.state_dict().keys()
    x = torch.randn(2, 5, original.gate_proj.in_features, requires_grad=True)
    results = [(y, *torch.autograd.grad(y.sin().sum(), x)) for y in (original(x), fused(x))]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_computes_something_else_is_left():
    layer = layer_of("qwen2")

    class Scaled(type(layer.self_attn)):
        def forward(self, *args, **kwargs):
            output, weights = super().forward(*args, **kwargs)
            return 2 * output, weights

    layer.self_attn.__class__ = Scaled
    assert not self_attention.fuse(layer.self_attn) and type(layer.self_attn) is Scaled
    layer.mlp.act_fn = nn.GELU()
    assert gated_mlp(layer.mlp) is None
    others = layer_of("phi3")
    assert not self_attention.fuse(others.self_attn) and gated_mlp(others.mlp) is None
