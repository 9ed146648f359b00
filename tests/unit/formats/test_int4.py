from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st

from qerl.formats import int4
from qerl.formats.int4 import GROUPS, INT4Tensor, dequantize, quantize
from qerl.formats.nvfp4 import pack_nibbles, unpack_nibbles


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def group_of(*values: float) -> torch.Tensor:
    """A group of 32 whose other values are 0."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


# What the bits mean


@pytest.mark.parametrize("zero", range(16))
def test_every_code_under_every_zero_point(zero):
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(1, 2))
    t = INT4Tensor(packed, torch.tensor([[0.5]]).bfloat16(), torch.tensor([[zero]], dtype=torch.uint8))
    assert dequantize(t)[0].tolist() == [0.5 * (code - zero) for code in range(16)] * 2
    symmetric = t._replace(zero_point=None)
    assert dequantize(symmetric)[0].tolist() == [0.5 * (code - 8) for code in range(16)] * 2


@pytest.mark.parametrize(
    "values, scale, zero, codes",
    [
        ([-5.0, 10.0], 1.0, 5, [0, 15, 5]),
        ([0.0, 15.0], 1.0, 0, [0, 15, 0]),
        ([-15.0, 0.0], 1.0, 15, [0, 15, 15]),
        ([7.5, 15.0], 1.0, 0, [8, 15, 0]),  # 0 is within the range, though no value is below it
        ([0.5, 1.5, 2.5, 3.5, 15.0], 1.0, 0, [0, 2, 2, 4, 15]),  # ties, to the even code
        ([-2.5, 0.5, 1.5, 12.5], 1.0, 2, [0, 2, 4, 14]),  # ... which is even after the zero point is added
        ([0.0], 1.0, 0, [0]),
    ],
)
def test_asymmetric(values, scale, zero, codes):
    t = quantize(group_of(*values), group=32, scale="amax")
    assert (t.scale.item(), t.zero_point.item()) == (scale, zero)
    assert unpack_nibbles(t.packed)[0, : len(codes)].tolist() == codes
    assert (dequantize(t)[0, len(values) :] == 0).all()


@pytest.mark.parametrize(
    "values, scale, codes",
    [
        ([7.5, -7.5], 1.0, [15, 0, 8]),  # 7.5 is clipped to 7, -7.5 goes to the even code
        ([-7.5, 7.0, 0.5, 1.5, -0.5, -1.5], 1.0, [0, 15, 8, 10, 8, 6]),
        ([3.0], 0.4, [15, 8]),
        ([0.0], 1.0, [8]),
    ],
)
def test_symmetric(values, scale, codes):
    t = quantize(group_of(*values), group=32, symmetric=True, scale="amax")
    assert t.zero_point is None and t.scale.item() == torch.tensor(scale).bfloat16()
    assert unpack_nibbles(t.packed)[0, : len(codes)].tolist() == codes


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32),
    st.booleans(),
    st.sampled_from(["amax", "sweep"]),
)
def test_every_value_is_off_by_half_a_step_or_clipped(values, symmetric, scale):
    weight = torch.tensor([values])
    t = quantize(weight, group=32, symmetric=symmetric, scale=scale)
    back, step, codes = dequantize(t).double(), t.scale.double(), unpack_nibbles(t.packed)
    inside = (codes > 0) & (codes < 15)
    assert ((back - weight).abs()[inside] <= step.item() * 0.5001).all()
    assert (weight[codes == 0] <= back[codes == 0] + step.item() * 0.5001).all()
    assert (weight[codes == 15] >= back[codes == 15] - step.item() * 0.5001).all()


@given(st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32), st.booleans())
def test_the_sweep_is_never_worse(values, symmetric):
    weight = torch.tensor([values])
    amax, sweep = (
        (dequantize(quantize(weight, group=32, symmetric=symmetric, scale=scale)) - weight).double().square().sum()
        for scale in ("amax", "sweep")
    )
    assert sweep <= amax * (1 + 1e-5)


@pytest.mark.parametrize(
    "group, symmetric, gain",
    [(32, False, 0.09), (64, False, 0.08), (128, False, 0.10), (32, True, 0.17), (128, True, 0.16)],
)
def test_what_the_sweep_gains_on_gaussian_weights(group, symmetric, gain):
    weight = gaussian(256, 1024)
    amax, sweep = (
        (dequantize(quantize(weight, group=group, symmetric=symmetric, scale=scale)) - weight).square().mean()
        for scale in ("amax", "sweep")
    )
    assert 1 - sweep / amax == pytest.approx(gain, abs=0.015)


def test_extremes():
    weight = torch.zeros(3, 128)
    weight[0, :2] = torch.tensor([3e38, -3e38])  # their distance is no float32
    weight[1] = 1e-45  # below any step
    for symmetric in (False, True):
        t = quantize(weight, symmetric=symmetric)
        assert dequantize(t).isfinite().all() and (dequantize(t)[1:] == 0).all()
        assert dequantize(t)[0, 0] > 2.5e38 and dequantize(t)[0, 1] < -2.5e38


@pytest.mark.parametrize("symmetric", [False, True])
def test_pieces_do_not_show(symmetric, monkeypatch):
    weight = gaussian(20, 256)
    whole = quantize(weight, symmetric=symmetric)
    values = dequantize(whole)
    monkeypatch.setattr(int4, "_PIECE", {"cpu": 768})
    for a, b in zip(quantize(weight, symmetric=symmetric), whole, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(dequantize(whole), values)


def test_values_are_rounded_once():
    t = quantize(gaussian(32, 128))
    out = torch.empty(32, 128, dtype=torch.bfloat16)
    assert dequantize(t, out=out) is out
    assert torch.equal(out, dequantize(t).bfloat16()) and torch.equal(out, dequantize(t, torch.bfloat16))


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"q_proj: INT4 has groups of 32, 64, 128, not 16"):
        quantize(torch.ones(4, 128), group=16, name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj has 96 columns: INT4 needs a multiple of its group of 128"):
        quantize(torch.ones(4, 96), name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj contains NaN"):
        quantize(torch.full((4, 128), float("nan")), name="q_proj")


# Against compressed-tensors


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_codes_and_values_are_those_of_compressed_tensors(group, symmetric):
    """It counts codes from -8, and keeps the scale in the weight's dtype: its float32 scale is rounded here."""
    weight = gaussian(64, 512).bfloat16().float()
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=symmetric)
    groups = weight.unflatten(1, (-1, group))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
    t = quantize(weight, group=group, symmetric=symmetric, scale="amax")
    assert torch.equal(t.scale, scale.bfloat16())
    stored = t.scale.float()
    # The zero point is worked out from the scale as it is stored.
    zero = torch.zeros_like(stored) if symmetric else ((-8 - groups.amin(2).clamp(max=0) / stored).round()).clamp(-8, 7)
    assert symmetric or torch.equal(t.zero_point.float() - 8, zero)
    codes = their_quantize(weight, stored, zero.to(torch.int8), arguments, dtype=torch.int8)
    assert torch.equal(codes + 8, unpack_nibbles(t.packed).to(torch.int8))
    assert torch.equal(their_dequantize(codes, stored, zero.to(torch.int8), arguments), dequantize(t))


# Against the CPU


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["kernel", "pytorch"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("n, k, group", [(70, 1024, 64), (512, 5120, 128)])
def test_every_device_chooses_the_same_bits(n, k, group, symmetric, path, monkeypatch):
    """With Triton's kernel and without. The large matrix has 20,480 groups: of a difference in one group of a thousand
    it shows nothing with a probability of e^-20. (A step that is max |w| times 1 / 7.5 would change one of a hundred.)
    """
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if path == "kernel":
        pytest.importorskip("triton")
    else:
        monkeypatch.setattr(int4, "find_spec", lambda name: None)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3] = 0
    importance = torch.rand(k, generator=torch.Generator().manual_seed(1))
    for how in ({}, {"scale": "amax"}, {"importance": importance}):
        a = quantize(weight, group=group, symmetric=symmetric, **how)
        on_gpu = {key: value.cuda() if key == "importance" else value for key, value in how.items()}
        b = quantize(weight.cuda(), group=group, symmetric=symmetric, **on_gpu)
        assert all(torch.equal(x, y.cpu()) for x, y in zip(a, b, strict=True) if x is not None)
