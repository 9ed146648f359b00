"""Folders that llm-compressor itself has written.

llm_compressor/ holds two of a tiny model (0.14 with compressed-tensors 0.19 and transformers 5.17), each with the
weights that transformers computes with when it loads the folder. The library wants its own versions of others, so what
writes such folders anew needs an environment of its own, whose Python LLM_COMPRESSOR_PYTHON names
(docs/development.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from qerl.config import EMBEDDED, ModelConfig
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import dequantize
from qerl.nn.load import load_model

PYTHON = os.environ.get("LLM_COMPRESSOR_PYTHON")
STORED = Path(__file__).parent / "llm_compressor"
SCHEMES = [("NVFP4A16", "nvfp4"), ("MXFP4A16", "mxfp4")]

WRITER = """
import sys, torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

source, target, scheme = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*1.mlp.*"]))
model.save_pretrained(target, save_compressed=True)
loaded = AutoModelForCausalLM.from_pretrained(target)
with torch.no_grad():
    loaded(torch.arange(4)[None])  # the first forward decompresses
weights = {name: p.detach().clone() for name, p in loaded.named_parameters() if p.is_floating_point()}
save_file(weights, target + "/decompressed")
"""


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=16)
    model = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=1, tie_word_embeddings=False, eos_token_id=3, **sizes))
    for parameter in model.parameters():
        parameter.data *= 1 + torch.rand(())  # q, k, v of different sizes
    folder = tmp_path_factory.mktemp("qwen") / "bf16"
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("scheme", "format"), SCHEMES)
def test_a_stored_folder(tmp_path, scheme, format):
    shutil.copytree(STORED / scheme, tmp_path / scheme)
    check(tmp_path / scheme, format)


@pytest.mark.skipif(PYTHON is None, reason="LLM_COMPRESSOR_PYTHON is not set")
@pytest.mark.parametrize(("scheme", "format"), SCHEMES)
def test_a_new_folder(bf16, tmp_path, scheme, format):
    assert PYTHON is not None
    target = tmp_path / scheme
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [PYTHON, "-c", WRITER, str(bf16), str(target), scheme]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    check(target, format)


def check(folder: Path, format: str) -> None:
    """Codes and scales are what transformers made its weights of, and the loaded model computes with them."""
    checkpoint, weights = Checkpoint(folder), load_file(folder / "decompressed")
    stored = load_file(folder / "model.safetensors")
    assert checkpoint.quantization == ("compressed-tensors", format)
    packed = [name for name in weights if checkpoint.is_packed(name.removesuffix(".weight"))]
    assert len(packed) == 11  # of 14: one mlp was ignored
    for name in packed:
        codes = checkpoint.codes(name.removesuffix(".weight"))
        values = dequantize(codes, torch.bfloat16)
        if format == "nvfp4":  # theirs divides the block's scale by the divisor first: another order of rounding
            steps = dequantize(
                codes._replace(block_scale=torch.ones_like(codes.block_scale), global_scale=torch.ones(1))
            )
            scale = codes.block_scale.float() / stored[f"{name}_global_scale"]
            in_their_order = (steps.unflatten(1, (-1, 16)) * scale[..., None]).flatten(1).bfloat16()
            assert torch.equal(in_their_order, weights[name]), name
            assert torch.allclose(values.float(), weights[name].float(), rtol=2.0**-7, atol=0), name
        else:
            assert torch.equal(values, weights[name]), name
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    ours = load_model(ModelConfig(path=str(folder), format=format, device="cpu"))[0]
    dense = Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder)).float().eval()
    dense.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    with torch.no_grad():
        found, expected = (model(torch.arange(9)[None]).logits for model in (ours, dense))
    assert (found - expected).norm() < 0.01 * expected.norm()
