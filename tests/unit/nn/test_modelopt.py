"""Whole folders in ModelOpt's NVFP4 layout, by a small writer of it; q, k and v with scales of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from qerl.config import ModelConfig
from qerl.formats.nvfp4 import dequantize, quantize
from qerl.nn.attention import packed_forward
from qerl.nn.linear import PackedLinear
from qerl.nn.load import load_model

IDS, ENDS = torch.arange(3, 33), torch.tensor([0, 11, 30])
EXCLUDED = "model.layers.1.mlp.down_proj"


def write_modelopt(source: Path, folder: Path, style: str) -> dict[str, torch.Tensor]:
    """Every linear of the layers quantised by itself, as ModelOpt exports it; the values of the dense model."""
    tensors, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        values[name] = tensor.float()
        if ".layers." not in name or tensor.ndim != 2 or module == EXCLUDED:
            tensors[name] = tensor
            continue
        scale = tensor.abs().max().float().reshape(1) / (6 * 448)  # and not a power of two, as qerl takes it
        t = quantize(tensor, scale="amax", global_scale=scale)
        values[name] = dequantize(t)
        tensors |= {name: t.packed, f"{name}_scale": t.block_scale, f"{name}_scale_2": t.global_scale.reshape(())}
        tensors[f"{module}.input_scale"] = torch.tensor(0.01)
        if module.endswith(("k_proj", "v_proj")):  # of a quantised cache, which is left out
            tensors[f"{module}.{module[-6]}_scale"] = torch.tensor(0.5)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_text(file.read_text())
    producer, excluded = {"name": "modelopt", "version": "0.39.0"}, ["lm_head", EXCLUDED]
    if style == "hf_quant_config.json":
        quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
        saved = {"producer": producer, "quantization": quantization | {"exclude_modules": excluded}}
        (folder / style).write_text(json.dumps(saved))
    else:
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"input_activations": weights, "weights": weights, "targets": ["Linear"]}
        saved = {"config_groups": {"group_0": group}, "ignore": excluded, "quant_algo": "NVFP4", "producer": producer}
        config = json.loads((folder / style).read_text())
        (folder / style).write_text(json.dumps(config | {"quantization_config": saved | {"quant_method": "modelopt"}}))
    return values


@pytest.mark.parametrize(("family", "style"), [("qwen2", "hf_quant_config.json"), ("llama", "config.json")])
def test_a_modelopt_folder_loads_exactly(tmp_path, family, style):
    source = save_model(tiny_model(family), tmp_path / "bf16")
    values = write_modelopt(source, tmp_path / "in", style)
    model = load_model(ModelConfig(path=str(tmp_path / "in"), device="cpu"))[0]
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    assert [name for name, m in linears.items() if not isinstance(m, PackedLinear)] == [EXCLUDED]
    scales = {linears[f"model.layers.0.self_attn.{p}_proj"].packed.dequantize()[1][0].item() for p in "qkv"}
    assert len(scales) == 3
    for name, linear in linears.items():
        if isinstance(linear, PackedLinear):
            dense, row_scale = linear.packed.dequantize()
            assert torch.equal(dense * row_scale[:, None], values[f"{name}.weight"]), name
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected.load_state_dict(values, strict=False)
    with torch.no_grad():
        found = model.lm_head(packed_forward(model, IDS, ENDS))
        whole = torch.cat([expected(IDS[None, i:j]).logits[0] for i, j in ((0, 11), (11, 30))])
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "FP8", "MIXED_PRECISION"])
def test_other_layouts_of_modelopt_are_refused(tmp_path, algorithm):
    source = save_model(tiny_model("qwen2"), tmp_path / "bf16")
    write_modelopt(source, tmp_path / "in", "hf_quant_config.json")
    file = tmp_path / "in" / "hf_quant_config.json"
    file.write_text(file.read_text().replace('"NVFP4"', f'"{algorithm}"'))
    with pytest.raises(ValueError, match=f"quantized as .*{algorithm}.*not understood"):
        load_model(ModelConfig(path=str(tmp_path / "in"), device="cpu"))
