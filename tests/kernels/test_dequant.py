"""dequant: the look-up path on any device; the Triton kernel on a GPU, and in Triton's interpreter on a CPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted tests run in a pytest of their own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import qerl.kernels.dequant as op
from qerl.formats.nvfp4 import NVFP4Tensor
from qerl.kernels.dequant import dequant
from qerl.kernels.dequant.reference import dequant_reference
from qerl.kernels.layout import PackedWeight, pack

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
DEVICES = [
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
    ),
    pytest.param(
        "cpu", id="interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in test_in_tritons_interpreter")
    ),
]


def random_weight(*rows: int, k: int, device: str = "cpu") -> PackedWeight:
    """Parts of any code and any finite scale."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for n in rows:
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        scale = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
        parts.append(NVFP4Tensor(packed, scale, torch.tensor([0.5])))
    weight = pack(parts)
    weight.to_(device)
    return weight


def every_product(device: str = "cpu") -> PackedWeight:
    """Every code under every finite scale, in every position of its row's words."""
    codes = torch.stack([torch.arange(16).roll(shift) for shift in range(16)])  # [16 positions, 16 codes]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).repeat(1, 127)  # [16, 127 blocks of 8 bytes]
    scale = torch.arange(127, dtype=torch.uint8).repeat(16, 1).view(torch.float8_e4m3fn)
    weight = pack([NVFP4Tensor(packed, scale, torch.ones(1))])
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
@pytest.mark.parametrize("rows, k", [((128,), 64), ((256,), 192), ((130,), 80), ((64, 1, 200), 336)])
def test_the_kernel_equals_the_reference(rows, k, device):
    from qerl.kernels.dequant.dequant import dequant_bf16

    weight = random_weight(*rows, k=k, device=device)
    out = torch.full(weight.padded_shape, torch.nan, dtype=torch.bfloat16, device=device)
    dequant_bf16(weight.tiles, out)
    check(weight, out)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_has_every_product_exact(device):
    from qerl.kernels.dequant.dequant import dequant_bf16

    weight = every_product(device)
    out = torch.empty(weight.padded_shape, dtype=torch.bfloat16, device=device)
    dequant_bf16(weight.tiles, out)
    check(weight, out)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_reads_a_view(device):
    from qerl.kernels.dequant.dequant import dequant_bf16

    part = random_weight(128, 256, k=128, device=device).part(1)
    out = torch.empty(part.padded_shape, dtype=torch.bfloat16, device=device)
    dequant_bf16(part.tiles, out)
    check(part, out)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
def test_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreter and kernel", __file__]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 passed" in run.stdout, run.stdout


def test_the_look_up_has_every_product_exact():
    check(every_product(), dequant(every_product(), torch.bfloat16))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_op_equals_the_reference(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    weight = random_weight(64, 1, 200, k=336, device=device)
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
