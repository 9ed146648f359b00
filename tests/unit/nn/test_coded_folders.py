"""NF4 and INT4 folders of bitsandbytes and compressed-tensors load here, and ours there, with the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from safetensors.torch import load_file, save_file
from tiny_models import save_model, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from qerl.config import ModelConfig
from qerl.formats import int4
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.coded_files import int4_as_stored, int4_from_stored
from qerl.formats.codes import INT4, NF4, dequantize
from qerl.formats.writing import quantize_checkpoint
from qerl.kernels.coded import CodedWeight
from qerl.nn.linear import PackedLinear
from qerl.nn.load import load_model
from qerl.plan.memory import model_parts
from qerl.plan.shapes import read_shape
from qerl.plan.target import Target

IDS = torch.arange(3, 33)[None]
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> Path:
    return save_model(tiny_model("qwen2"), tmp_path_factory.mktemp("qwen") / "bf16")


def beside(source: Path, folder: Path) -> None:
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())


def check_model(folder: Path, source: Path, format: str, values: dict[str, torch.Tensor]) -> None:
    """The loaded model computes what a dense one with `values` does, and takes the bytes that were planned."""
    beside(source, folder)
    config = ModelConfig(path=str(folder), format=format, device="cpu")
    ours = load_model(config)[0]
    weights = [module.packed for module in ours.modules() if isinstance(module, PackedLinear)]
    codes = [t for weight in weights if isinstance(weight, CodedWeight) for t in weight.codes if t is not None]
    planned = model_parts(read_shape(config), Target(on_gpu=False, activation_bytes=4))
    assert planned["coded base"] == sum(t.nbytes for t in codes)
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    dense.load_state_dict(values, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, dense(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=[True, False], ids=["double", "plain"])
def bitsandbytes(request, bf16) -> Path:
    pytest.importorskip("bitsandbytes")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=request.param
    )  # fmt: skip
    folder = bf16.parent / f"nf4-{request.param}"
    AutoModelForCausalLM.from_pretrained(
        bf16, dtype=torch.bfloat16, quantization_config=how, device_map="cpu"
    ).save_pretrained(folder)
    return folder


def test_a_folder_of_bitsandbytes(bf16, bitsandbytes):
    from bitsandbytes.functional import QuantState, dequantize_4bit

    checkpoint, stored = Checkpoint(bitsandbytes), load_file(bitsandbytes / "model.safetensors")
    assert checkpoint.quantization == ("bitsandbytes", "nf4")
    values = {}
    for name in checkpoint.names():
        module = name.removesuffix(".weight")
        if not checkpoint.is_packed(module):
            continue
        parts = {k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(f"{name}.")}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        if state.shape[1] % 64 == 0:  # its CPU kernel begins a block with each row, which its quantiser does not
            theirs = dequantize_4bit(stored[name], state)
            assert torch.equal(dequantize(checkpoint.codes(module), theirs.dtype), theirs), name
        values[name] = dequantize(checkpoint.codes(module))
    assert len(values) == 14
    check_model(bitsandbytes, bf16, "nf4", values)


def test_damage_in_a_folder_of_bitsandbytes(bitsandbytes, tmp_path):
    tensors = load_file(bitsandbytes / "model.safetensors")
    config = (bitsandbytes / "config.json").read_text()
    state = f"{UP}.weight.quant_state.bitsandbytes__nf4"
    as_bytes = bytes(tensors[state].tolist())

    def changed(text: bytes) -> torch.Tensor:
        return torch.tensor(list(text), dtype=torch.uint8)

    changes = {
        "is damaged": {state: changed(as_bytes[:-5])},
        "is fp4 in blocks of 64: not NF4": {state: changed(as_bytes.replace(b'"nf4"', b'"fp4"'))},
        "weight.quant_map is not the table": {f"{UP}.weight.quant_map": torch.zeros(16)},
        "weight is torch.uint8 .*, where 3072 numbers": {f"{UP}.weight": torch.zeros(7, 1, dtype=torch.uint8)},
        r"weight.absmax is torch.float64": {f"{UP}.weight.absmax": torch.zeros(96, dtype=torch.float64)},
        r"weight.quant_map is missing": {f"{UP}.weight.quant_map": None},
    }
    scales = f"{UP}.weight.nested_absmax"
    if scales not in tensors:
        scales = f"{UP}.weight.absmax"
    else:
        no_offset = as_bytes.replace(b"nested_offset", b"nested_of")
        changes["nested_offset of None"] = {state: changed(no_offset)}
    changes["absmax contains NaN"] = {scales: torch.full_like(tensors[scales], torch.nan)}
    for message, change in changes.items():
        kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ValueError, match=message):
            Checkpoint(tmp_path).codes(UP)
    (tmp_path / "config.json").write_text(config.replace('"nf4"', '"fp4"'))
    with pytest.raises(ValueError, match=r"quantized as .*'bnb_4bit_quant_type': 'fp4'.* not understood"):
        Checkpoint(tmp_path)


@pytest.fixture(scope="module", params=[True, False], ids=["symmetric", "asymmetric"])
def pack_quantized(request, bf16) -> tuple[Path, dict[str, torch.Tensor]]:
    """W4A16 by the library's own steps, with scales and zero points of formats/int4.py; the values it gives them."""
    model = AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.bfloat16)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": request.param}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    values = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            t = int4.quantize(module.weight.detach(), group=32, symmetric=request.param)
            module.weight_scale.data = t.scale
            if t.zero_point is not None:
                module.weight_zero_point.data = (t.zero_point.to(torch.int8) - 8).to(module.weight_zero_point.dtype)
            zero = None if request.param else module.weight_zero_point
            values[f"{name}.weight"] = fake_quantize(
                module.weight.detach(), t.scale, zero, module.quantization_scheme.weights
            )
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder = bf16.parent / f"int4-{request.param}"
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder, values


def test_a_folder_of_compressed_tensors(bf16, pack_quantized, caplog):
    folder, theirs = pack_quantized
    checkpoint = Checkpoint(folder)
    assert checkpoint.quantization == ("compressed-tensors", "int4") and len(theirs) == 14
    values = {}
    for name, expected in theirs.items():
        codes = checkpoint.codes(name.removesuffix(".weight"))
        assert torch.equal(dequantize(codes, torch.bfloat16), expected), name
        values[name] = dequantize(codes)
    check_model(folder, bf16, "int4", values)
    assert "stay dense" not in caplog.text  # groups of 32 as stored, whatever model.group_size is


def test_orders_and_groups_that_differ_are_refused(pack_quantized, tmp_path):
    config = json.loads((pack_quantized[0] / "config.json").read_text())
    tensors = load_file(pack_quantized[0] / "model.safetensors")
    for key, value in (("actorder", "group"), ("num_bits", 8), ("group_size", 16), ("strategy", "channel")):
        copy = json.loads(json.dumps(config))
        copy["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
        (tmp_path / "config.json").write_text(json.dumps(copy))
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"quantized as .*pack-quantized.*not understood"):
            Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for change, message in (
        ({f"{UP}.weight_g_idx": torch.arange(64)}, "columns reordered"),
        ({f"{UP}.weight_scale": torch.rand(96, 2)}, "weight_scale is torch.float32 and no bf16 numbers"),
        ({f"{UP}.weight_scale": torch.ones(96, 3).bfloat16()}, r"scales of shape \[96, 3\] for \[96, 64\]"),
        ({f"{UP}.weight_packed": torch.zeros(96, 7, dtype=torch.int32)}, "where 768 numbers of torch.int32"),
        ({f"{UP}.weight_scale": torch.full((96, 2), torch.nan).bfloat16()}, "weight_scale contains NaN"),
        ({f"{UP}.weight_scale": None}, "weight_scale is missing"),
        ({f"{UP}.weight_shape": None}, "weight_shape is missing"),
        ({f"{UP}.weight_shape": torch.tensor([96])}, "where 2 numbers"),
    ):
        kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            Checkpoint(tmp_path).codes(UP)


# ------------------------------------------------------------------------------------------------------- ours, there

KEPT = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]  # bitsandbytes' CPU kernel wants rows of whole blocks


def weights_of_compressed_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What its compressor makes of a folder's packed linears."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    stored, weights = load_file(folder / "model.safetensors"), {}
    for name in stored:
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            parts = {k.removeprefix(f"{module}."): v for k, v in stored.items() if k.startswith(f"{module}.weight_")}
            weights[f"{module}.weight"] = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    return weights


def nf4_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The values that bitsandbytes makes of its linears."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    linears = {name: module.weight for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    return {f"{name}.weight": dequantize_4bit(w.data, w.quant_state) for name, w in linears.items()}


@pytest.mark.parametrize("format", [NF4(), NF4(False), INT4(32), INT4(32, symmetric=True)], ids=str)
def test_what_we_write_loads_here_and_there(bf16, tmp_path, format):
    """The codes are those of `quantize`; kept layers stay dense; the libraries have the same weights."""
    if format.name == "nf4":
        pytest.importorskip("bitsandbytes")
    folder, dense = tmp_path / "packed", load_file(bf16 / "model.safetensors")
    report = quantize_checkpoint(bf16, folder, format=format, keep=["*.down_proj"])
    assert report["packed_layers"] == 12 and report["kept_layers"] == KEPT
    theirs = weights_of_compressed_tensors(folder) if format.name == "int4" else {}
    if format != INT4(32):  # transformers 5.24 does not load zero points, not even of compressed-tensors' own folders
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
        theirs |= nf4_weights(model) if format.name == "nf4" else {}  # before its CPU kernel reorders them
        with torch.no_grad():
            logits = model(IDS).logits.float()
        theirs |= {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    checkpoint, values = Checkpoint(folder), {}
    for name, weight in dense.items():
        module = name.removesuffix(".weight")
        if not checkpoint.is_packed(module):
            values[name] = weight.float()
            assert torch.equal(checkpoint.tensor(name), weight) and torch.equal(theirs.get(name, weight), weight)
            continue
        codes, expected = checkpoint.codes(module), format.quantize(weight)
        assert checkpoint.format_of(module).bits == format.bits
        assert all(torch.equal(a, b) for a, b in zip(codes, expected, strict=True) if a is not None), name
        values[name] = dequantize(codes)
        assert torch.equal(dequantize(codes, torch.bfloat16), theirs[name]), name
    check_model(folder, bf16, format.name, values)
    if format != INT4(32):
        plain = AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.bfloat16)
        plain.load_state_dict({name: value.bfloat16() for name, value in values.items()}, strict=False)
        with torch.no_grad():
            assert (logits - plain(IDS).logits.float()).norm() < 0.02 * logits.norm()


@pytest.mark.parametrize(
    ("n", "k", "group", "ints"), [(13, 64, 32, (2, 2)), (16, 128, 128, (2, 1)), (8, 96, 32, (1, 3))]
)
def test_eight_zero_points_share_an_integer(n, k, group, ints):
    t = int4.quantize(torch.randn(n, k), group=group)
    parts = int4_as_stored(t)
    assert parts["weight_zero_point"].shape == ints
    assert all(torch.equal(a, b) for a, b in zip(int4_from_stored(parts, "m"), t, strict=True))


def test_a_calibration_is_refused(bf16, tmp_path):
    with pytest.raises(ValueError, match="nf4 has no choice of scales to calibrate: leave --calibrate out"):
        quantize_checkpoint(bf16, tmp_path / "out", format=NF4(), calibrate=lambda: None)
