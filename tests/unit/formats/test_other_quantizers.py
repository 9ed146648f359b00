"""Codes, scales and values against torchao and ModelOpt, on a CPU.

Both are large and want versions of their own, so they are installed beside the tests where one wants to run these
(docs/development.md); without them the tests are skipped.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from qerl.formats import mxfp4, nvfp4
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.nvfp4 import NVFP4Tensor

DTYPES = [torch.bfloat16, torch.float32]


def gaussian(dtype: torch.dtype, n: int = 64, k: int = 512) -> torch.Tensor:
    """Rows of different sizes; in bf16 values fall on ties."""
    torch.manual_seed(0)
    return (torch.randn(n, k) * torch.linspace(-3, 3, n).exp2()[:, None]).to(dtype)


def nearly_all_equal(theirs: torch.Tensor, t: NVFP4Tensor, weight: torch.Tensor) -> bool:
    """Whether codes differ only where a weight, in units of its scale, is at a tie but for float32's rounding."""
    step = (t.block_scale.double() * t.global_scale.double()).repeat_interleave(16, dim=1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).double()
    at_tie = ((weight.double() / step).abs()[..., None] / ties - 1).abs().amin(-1) < 1e-6
    differ = nvfp4.unpack_nibbles(theirs) != nvfp4.unpack_nibbles(t.packed)
    return not (differ & ~at_tie).any() and differ.float().mean() < 0.01


# torchao


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchao_nvfp4(dtype):
    """It multiplies by a reciprocal, which may move a tie."""
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = gaussian(dtype)
    for divide in (True, False):  # its own global scale, too
        own = nvfp4.shared_global_scale([weight], ["w"]) if divide else weight.abs().max().float().reshape(1) / 2688
        t = nvfp4.quantize(weight, scale="amax", global_scale=own)
        scales, packed = torchao.nvfp4_quantize(weight, per_tensor_scale=own[0])
        assert torch.equal(scales.view(torch.uint8).view(t.block_scale.shape), t.block_scale.view(torch.uint8))
        assert nearly_all_equal(packed.view(torch.uint8), t, weight)
    t = nvfp4.quantize(weight)
    theirs = torchao.NVFP4Tensor(t.packed, t.block_scale, 16, torch.bfloat16, t.global_scale[0])
    for wanted in DTYPES:
        assert torch.equal(theirs.dequantize(wanted), nvfp4.dequantize(t, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchao_mxfp4(dtype):
    """Its FLOOR mode is the OCP rule."""
    torchao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = gaussian(dtype)
    weight[3, :32] = 0
    t = mxfp4.quantize(weight, scale="ocp")
    scales, packed = torchao.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    exponents = scales.view(torch.uint8).view(t.block_scale.shape)
    zero = weight.view(64, -1, 32).abs().amax(2) == 0
    assert torch.equal(exponents[~zero], t.block_scale[~zero])
    assert torch.equal(packed.view(torch.uint8).view(t.packed.shape) & 0x77, t.packed & 0x77)  # signs of zeros aside
    theirs = torchao.to_dtype(
        t.packed, t.block_scale.view(torch.float8_e8m0fnu), torch.float4_e2m1fn_x2, 32, torch.float32
    )
    assert torch.equal(theirs, mxfp4.dequantize(t))


# ModelOpt


@pytest.mark.parametrize("dtype", DTYPES)
def test_modelopt_nvfp4(dtype, tmp_path):
    """Its tensors, stored as it exports them, load with the values that it gives them."""
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    weight = gaussian(dtype)
    theirs, scale, scale_2 = modelopt.quantize(weight, 16)
    t = nvfp4.quantize(weight, scale="amax", global_scale=scale_2.reshape(1))
    assert torch.equal(scale.view(torch.uint8), t.block_scale.view(torch.uint8))
    assert torch.equal(theirs._quantized_data, t.packed)
    name = "model.layers.0.mlp.up_proj"
    stored = {"weight": theirs._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
    save_file({f"{name}.{part}": tensor for part, tensor in stored.items()}, tmp_path / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    read = Checkpoint(tmp_path).codes(name)
    assert isinstance(read, NVFP4Tensor) and all(torch.equal(a, b) for a, b in zip(read, t, strict=True))
    own = nvfp4.quantize(weight)
    for codes in (t, own):
        held = modelopt(weight.shape, torch.float32, codes.packed)
        values = held.dequantize(
            dtype=torch.float32, scale=codes.block_scale, double_scale=codes.global_scale, block_sizes={-1: 16}
        )
        if codes is own:
            assert torch.equal(values, nvfp4.dequantize(codes))
        else:  # it multiplies the scales first
            torch.testing.assert_close(values, nvfp4.dequantize(codes), rtol=2**-22, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_modelopt_mxfp4(dtype):
    """Its exponent is one more where amax is above 6 of the OCP one's; under the same one its codes are ours but for
    ties, which it rounds down."""
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor").MXFP4QTensor
    weight = gaussian(dtype)
    theirs, exponents = modelopt.quantize(weight, 32)
    exponents = exponents.view(64, -1)
    t = mxfp4.quantize(weight, scale="ocp")
    amax = weight.float().view(64, -1, 32).abs().amax(2)
    assert torch.equal(exponents, t.block_scale + (amax > 6 * (t.block_scale.float() - 127).exp2()))
    size = weight.float().abs() / (t.block_scale.float() - 127).exp2().repeat_interleave(32, dim=1)
    tie = (size[..., None] == torch.tensor([0.75, 1.75, 3.5])).any(-1)
    ours, codes = (nvfp4.unpack_nibbles(packed) & 7 for packed in (t.packed, theirs._quantized_data))
    same = (exponents == t.block_scale).repeat_interleave(32, dim=1)
    assert torch.equal((ours - codes)[same], tie[same].byte())
    held = modelopt(weight.shape, torch.float32, t.packed)
    values = held.dequantize(dtype=torch.float32, scale=t.block_scale, block_sizes={-1: 32})
    assert torch.equal(values, mxfp4.dequantize(t))
