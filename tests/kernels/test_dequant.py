"""dequant: the look-up path on any device; the Triton kernel on a GPU, and in Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from triton_runs import DEVICES, needs_triton, outer_run, run_interpreted

import qerl.kernels.dequant as op
from qerl.formats.mxfp4 import MXFP4Tensor
from qerl.formats.nvfp4 import NVFP4Tensor
from qerl.kernels.dequant import dequant
from qerl.kernels.dequant.reference import dequant_reference
from qerl.kernels.layout import PackedWeight, ScaleFormat, pack


def random_weight(*rows: int, k: int, device: str = "cpu", scale_format: ScaleFormat = "e4m3") -> PackedWeight:
    """Parts of any code and any finite scale."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for n in rows:
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        if scale_format == "e4m3":
            scale = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=generator)
            parts.append(NVFP4Tensor(packed, scale.view(torch.float8_e4m3fn), torch.tensor([0.5])))
        else:
            scale = torch.randint(0, 255, (n, k // 32), dtype=torch.uint8, generator=generator)
            parts.append(MXFP4Tensor(packed, scale))
    weight = pack(parts)
    weight.to_(device)
    return weight


def every_product(device: str = "cpu", scale_format: ScaleFormat = "e4m3") -> PackedWeight:
    """Every code under every scale that is stored, in every position of its row's words."""
    codes = torch.stack([torch.arange(16).roll(shift) for shift in range(16)])  # [16 positions, 16 codes]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).repeat(1, 127)  # [16, 127 groups of 8 bytes]
    scale = torch.arange(127, dtype=torch.uint8).repeat(16, 1)
    if scale_format == "e4m3":
        weight = pack([NVFP4Tensor(packed, scale.view(torch.float8_e4m3fn), torch.ones(1))])
    else:
        twice = packed.unflatten(1, (127, 8)).repeat(1, 1, 2).flatten(1)  # [16, 127 blocks of 16 bytes]
        weight = pack([MXFP4Tensor(twice, scale + 2)])
    weight.to_(device)
    return weight


def check(weight: PackedWeight, out: torch.Tensor) -> None:
    """Exactly the reference, padding zero."""
    k = weight.columns
    assert out.shape == weight.padded_shape
    inside = weight.without_row_padding(out)[:, :k]
    assert torch.equal(inside, dequant_reference(weight, torch.bfloat16))
    assert out.count_nonzero() == inside.count_nonzero()


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rows, k, scale_format",
    [
        ((128,), 64, "e4m3"),
        ((256,), 192, "e4m3"),
        ((130,), 80, "e4m3"),
        ((64, 1, 200), 336, "e4m3"),
        ((128,), 64, "e8m0"),
        ((64, 1, 200), 352, "e8m0"),
    ],
)
def test_the_kernel_equals_the_reference(rows, k, scale_format, device):
    from qerl.kernels.dequant.dequant import dequant_bf16

    weight = random_weight(*rows, k=k, device=device, scale_format=scale_format)
    out = torch.full(weight.padded_shape, torch.nan, dtype=torch.bfloat16, device=device)
    dequant_bf16(weight.tiles, scale_format, out)
    check(weight, out)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_format", ["e4m3", "e8m0"])
def test_the_kernel_has_every_product_exact(scale_format, device):
    from qerl.kernels.dequant.dequant import dequant_bf16

    weight = every_product(device, scale_format)
    out = torch.empty(weight.padded_shape, dtype=torch.bfloat16, device=device)
    dequant_bf16(weight.tiles, scale_format, out)
    check(weight, out)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_reads_a_view(device):
    from qerl.kernels.dequant.dequant import dequant_bf16

    part = random_weight(128, 256, k=128, device=device).part(1)
    out = torch.empty(part.padded_shape, dtype=torch.bfloat16, device=device)
    dequant_bf16(part.tiles, "e4m3", out)
    check(part, out)


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("scale_format", ["e4m3", "e8m0"])
def test_the_look_up_has_every_product_exact(scale_format):
    weight = every_product(scale_format=scale_format)
    check(weight, dequant(weight, torch.bfloat16))


@pytest.mark.parametrize("scale_format", ["e4m3", "e8m0"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_op_equals_the_reference(device, scale_format):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    weight = random_weight(64, 1, 200, k=352, device=device, scale_format=scale_format)
    check(weight, dequant(weight, torch.bfloat16))


def test_a_buffer_made_in_inference_mode_serves_training(monkeypatch):
    monkeypatch.setattr(op, "_buffers", {})
    weight = random_weight(128, k=64)
    with torch.inference_mode():
        dequant(weight, torch.float32)
    x = torch.ones(2, 64, requires_grad=True)
    assert (x @ dequant(weight, torch.float32).T).requires_grad


def test_the_scratch_buffer_is_reused_and_grows(monkeypatch):
    monkeypatch.setattr(op, "_buffers", {})
    large, small = random_weight(256, k=128), random_weight(128, k=64)
    first = dequant(small, torch.bfloat16)
    grown = dequant(large, torch.bfloat16)
    again = dequant(small, torch.bfloat16)
    assert grown.data_ptr() == again.data_ptr() != first.data_ptr()
    assert [(d.type, t, b.numel()) for (d, t), b in op._buffers.items()] == [("cpu", torch.bfloat16, 256 * 128)]
    check(small, again)
