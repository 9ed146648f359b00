"""Folders exchanged with compressed-tensors itself, both ways, on a tiny model: NVFP4 and MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from qerl.formats import mxfp4, nvfp4
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import MXFP4, format_named
from qerl.formats.writing import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("compressed_tensors_alone")

PRESETS = {"nvfp4": NVFP4A16, "mxfp4": MXFP4A16}
FORMATS = {"nvfp4": nvfp4, "mxfp4": mxfp4}


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    with torch.no_grad():  # blocks of different size, one of them all zeros
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(torch.linspace(-8, 3, parameter.shape[1]).exp2())
        model.get_parameter("model.layers.0.mlp.down_proj.weight")[:3, 32:64] = 0
    return model


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "bf16"
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=PRESETS)
def ours(request, bf16) -> tuple[str, Path]:
    target = bf16.parent / request.param
    quantize_checkpoint(bf16, target, format=format_named(request.param))
    return request.param, target


@pytest.fixture(scope="module", params=PRESETS)
def theirs(request, tmp_path_factory) -> tuple[str, Path]:
    """A folder that the library has quantised, packed and written, by the steps that llm-compressor takes."""
    model, format = tiny_model(), request.param
    scheme = QuantizationScheme(targets=["Linear"], **PRESETS[format])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        amax = module.weight.detach().unflatten(1, (-1, FORMATS[format].BLOCK)).abs().amax(2).float()
        if format == "mxfp4":
            exponents = torch.where(amax > 0, generate_mx_scales(amax), 0)
            module.weight_scale.data = (2.0 ** (exponents - 127)).to(module.weight_scale.dtype)
        else:
            divisor = (448 * 6 / amax.max()).reshape(1)
            module.weight_global_scale.data = divisor
            module.weight_scale.data = (divisor * amax / 6).to(torch.float8_e4m3fn).float()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder = tmp_path_factory.mktemp("theirs") / format
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return format, folder


def decompressed(folder: Path, dtype: torch.dtype | str) -> dict[str, torch.Tensor]:
    """The weights that transformers computes with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        model(torch.arange(4)[None])  # the first forward decompresses
    return dict(model.named_parameters())


def check_equal(format: str, folder: Path, *, exact: bool, dtype: torch.dtype | str = "auto") -> None:
    checkpoint, weights = Checkpoint(folder), decompressed(folder, dtype)
    assert checkpoint.quantization == ("compressed-tensors", format)
    packed = {name.rpartition(".")[0] for name in checkpoint.names() if name.endswith("weight_packed")}
    assert len(packed) == 14
    for name in packed:
        values = FORMATS[format].dequantize(checkpoint.codes(name), torch.bfloat16)
        weight = weights[f"{name}.weight"]
        if exact:
            assert torch.equal(values, weight), name
        else:  # under a divisor that is no power of two, dividing the block's scale by it first rounds: a bf16 step
            assert torch.allclose(values.float(), weight.float(), rtol=2.0**-7, atol=0), name
            assert (values != weight).float().mean() < 0.02, name


def test_the_library_reads_what_we_write(ours):
    check_equal(*ours, exact=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_library_reads_what_we_write_of_other_dtypes(dtype, tmp_path):
    """It makes bf16 of any folder's codes, whose values are the same numbers here in float32."""
    tiny_model().to(dtype).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "packed")
    check_equal("nvfp4", tmp_path / "packed", exact=True, dtype=torch.bfloat16)
    checkpoint = Checkpoint(tmp_path / "packed")
    codes = checkpoint.codes("model.layers.1.mlp.up_proj")
    assert torch.equal(nvfp4.dequantize(codes), nvfp4.dequantize(codes, torch.bfloat16).float())


def test_we_read_what_the_library_writes(theirs):
    check_equal(*theirs, exact=theirs[0] == "mxfp4")


@pytest.mark.parametrize(("option", "scale"), [("sweep", "sweep"), ("amax", "ocp")])
def test_what_is_read_back_is_what_quantize_gives(bf16, tmp_path, option, scale):
    """MXFP4; NVFP4 in tests/unit/formats/test_checkpoint.py."""
    quantize_checkpoint(bf16, tmp_path / "out", format=MXFP4(option))
    dense, checkpoint = load_file(bf16 / "model.safetensors"), Checkpoint(tmp_path / "out")
    for name in checkpoint.names():
        if name.endswith("weight_packed"):
            linear = name.rpartition(".")[0]
            expected = mxfp4.quantize(dense[f"{linear}.weight"], scale=scale)
            assert all(torch.equal(a, b) for a, b in zip(checkpoint.codes(linear), expected, strict=True))


def test_the_config_is_the_librarys_preset(ours):
    format, folder = ours
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = QuantizationConfig.model_validate(written).config_groups.values()
    preset = PRESETS[format]["weights"]
    for field in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic"):
        assert getattr(group.weights, field) == getattr(preset, field)
    assert format == "nvfp4" or group.weights.scale_dtype == preset.scale_dtype == torch.uint8
    assert group.input_activations is None and group.format == f"{format}-pack-quantized"


# Damage


def test_mxfp4_folders_that_are_damaged(bf16, tmp_path):
    quantize_checkpoint(bf16, tmp_path / "packed", format=MXFP4())
    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    changes = {
        r"weight_scale\b.* 255, which is NaN in E8M0": torch.full((96, 2), 255, dtype=torch.uint8),
        r"weight_scale has shape \[96, 4\], where \[96, 2\]": torch.zeros(96, 4, dtype=torch.uint8),
        r"weight_scale is torch\.float8_e4m3fn, where torch\.uint8": torch.ones(96, 2).to(torch.float8_e4m3fn),
    }
    for message, scale in changes.items():
        save_file(tensors | {f"{name}.weight_scale": scale}, tmp_path / "packed" / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            Checkpoint(tmp_path / "packed").codes(name)


def test_blocks_of_another_size_are_refused(bf16, tmp_path):
    quantize_checkpoint(bf16, tmp_path / "packed", format=MXFP4())
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantized as .*mxfp4-pack-quantized.*not understood"):
        Checkpoint(tmp_path / "packed")


def test_columns_that_32_does_not_divide_stay_in_bf16(tmp_path):
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    config = Qwen2Config(intermediate_size=80, num_hidden_layers=1, **sizes)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "bf16")
    report = quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", format=MXFP4())
    assert report["kept_layers"] == ["model.layers.0.mlp.down_proj"] and report["packed_layers"] == 6
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(4)[None])
