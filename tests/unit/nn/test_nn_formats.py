"""A bf16 folder, loaded in each format: what the model holds, what it computes, what stays dense."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_models import SIZES, save_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import Qwen2Config

from qerl.config import LoraConfig, ModelConfig
from qerl.formats.codes import BF16, INT4, MXFP4, NF4, NVFP4, dequantize
from qerl.formats.int4 import INT4Tensor
from qerl.formats.nf4 import NF4Tensor
from qerl.formats.writing import quantize_checkpoint
from qerl.kernels.coded import CodedWeight
from qerl.kernels.layout import PackedWeight
from qerl.nn.linear import PackedLinear
from qerl.nn.load import base_format, load_model
from qerl.nn.lora import attach_lora
from qerl.nn.structure import decoder_layers

IDS = torch.arange(3, 40)[None]
OPTIONS = {
    "nvfp4": {},
    "mxfp4": {},
    "nf4": {},
    "nf4 once": {"double_quant": False},
    "int4": {"group_size": 32},
    "int4 symmetric": {"group_size": 32, "symmetric": True, "scale": "amax"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tiny_model("qwen2"), tmp_path_factory.mktemp("qwen2"))


def settings(folder: Path, name: str, **options) -> ModelConfig:
    return ModelConfig(
        **({"path": str(folder), "format": name.split()[0], "device": "cpu"} | OPTIONS.get(name, {}) | options)
    )


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in decoder_layers(model).named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_quantised_while_loading_is_the_dequantised_model(folder, name):
    config = settings(folder, name)
    format, (model, _) = base_format(config), load_model(config)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    exact = plain(input_ids=IDS).logits
    dense = linears(plain)
    for layer in range(2):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        for group in (
            [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"],
            [f"{attention}.o_proj"],
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            [f"{mlp}.down_proj"],
        ):
            weights = [dense[n].weight.bfloat16() for n in group]
            shared = format.share(weights, group)
            for n, w in zip(group, weights, strict=True):
                dense[n].weight.copy_(dequantize(format.quantize(w, shared=shared)))
    assert all(isinstance(linear, PackedLinear) for linear in linears(model).values())
    logits, expected = model(input_ids=IDS).logits, plain(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    assert (expected - exact).abs().max() > 1e-2  # quantisation does show


@pytest.mark.parametrize(
    "name, kind", [("nvfp4", "e4m3"), ("mxfp4", "e8m0"), ("nf4", NF4Tensor), ("int4", INT4Tensor), ("bf16", None)]
)
def test_what_each_format_is_held_as(folder, name, kind):
    for linear in linears(load_model(settings(folder, name))[0]).values():
        if kind is None:
            assert not isinstance(linear, PackedLinear)
        elif isinstance(kind, str):
            assert isinstance(linear.packed, PackedWeight) and linear.packed.scale_format == kind
        else:
            assert isinstance(linear.packed, CodedWeight) and isinstance(linear.packed.codes, kind)


def test_settings_reach_the_format():
    def formats(**settings):
        return base_format(ModelConfig(**settings))

    assert formats() == NVFP4("sweep") and formats(scale="amax") == NVFP4("amax")
    assert formats(format="mxfp4", scale="amax") == MXFP4("amax") and formats(format="bf16") == BF16()
    assert formats(format="nf4") == NF4(True) and formats(format="nf4", double_quant=False) == NF4(False)
    assert formats(format="int4") == INT4(128, False, "sweep")
    assert formats(format="int4", group_size=64, symmetric=True, scale="amax") == INT4(64, True, "amax")


@pytest.mark.parametrize("name", ["mxfp4", "nf4", "int4"])
def test_hybrid_precision(folder, name):
    keep = ["model.layers.0.*", "*.down_proj"]
    model, _ = load_model(settings(folder, name, keep=keep))
    kept = {n for n, linear in linears(model).items() if not isinstance(linear, PackedLinear)}
    assert kept == {n for n in linears(model) if n.startswith("0.") or n.endswith("down_proj")}
    assert linears(model)["0.self_attn.q_proj"].weight.dtype == torch.float32


def test_products_that_blocks_do_not_divide_stay_dense_whole(tmp_path, caplog):
    """60 columns are no group of 32; 64 x 60 weights are 60 blocks of NF4, 4 x 60 (k and v) are 3.75."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 60, "num_attention_heads": 16, "num_key_value_heads": 1, "intermediate_size": 64}
    folder = save_model(AutoModelForCausalLM.from_config(Qwen2Config(**(SIZES | sizes), head_dim=4)), tmp_path)
    dense = {}
    for name in ("int4", "nf4"):
        with caplog.at_level(logging.WARNING, "qerl"):
            model, _ = load_model(settings(folder, name))
        dense[name] = {n[2:] for n, linear in linears(model).items() if not isinstance(linear, PackedLinear)}
    qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    assert dense == {"nf4": qkv, "int4": qkv | {"mlp.gate_proj", "mlp.up_proj"}}
    assert "6 linears stay dense, not being whole blocks of nf4" in caplog.text
    report = quantize_checkpoint(folder, tmp_path / "packed", format=NF4())  # which keeps the same, and loads
    assert {name.split(".", 3)[3] for name in report["kept_layers"]} == qkv
    load_model(settings(tmp_path / "packed", "nf4"))


def test_codes_take_no_merge(folder):
    model = attach_lora(load_model(settings(folder, "nf4"))[0], LoraConfig(r=2), seed=0)
    with pytest.raises(ValueError, match="cannot be merged into packed weights"):
        model.merge_adapter()


def test_a_packed_folder_is_of_one_format(folder, tmp_path):
    quantize_checkpoint(folder, tmp_path / "packed")
    with pytest.raises(ValueError, match=r"model\.format is nf4, but .* holds"):
        load_model(settings(tmp_path / "packed", "nf4"))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_loaded_model_is_one_graph_to_a_compiler(family, tmp_path):
    """Norms, products and SwiGLU, as they are put in: nothing in them that cannot be traced."""
    folder = save_model(tiny_model(family), tmp_path, torch.float32)
    model, _ = load_model(ModelConfig(path=str(folder), format="nvfp4", device="cpu", dtype="float32"))
    ids = torch.arange(3, 15).view(2, 6)
    compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids, use_cache=False).logits)
