import math

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from hypothesis import given
from hypothesis import strategies as st

from qerl.formats import mxfp4
from qerl.formats.mxfp4 import MXFP4Tensor, dequantize, quantize
from qerl.formats.nvfp4 import E2M1_VALUES, pack_nibbles, unpack_nibbles


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block(amax: float) -> torch.Tensor:
    """A block whose other values are 0."""
    weight = torch.zeros(1, 32)
    weight[0, 7] = amax
    return weight


# What the bits mean


@pytest.mark.parametrize("e", range(255))
def test_every_scale(e):
    t = MXFP4Tensor(
        pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(1, 2)), torch.tensor([[e]], dtype=torch.uint8)
    )
    expected = torch.tensor([E2M1_VALUES], dtype=torch.float64).repeat(1, 2) * 2.0 ** (e - 127)
    assert torch.equal(dequantize(t), expected.float())


def test_nan_scales_are_refused_by_name():
    t = quantize(gaussian(2, 64))
    t.block_scale[1, 1] = 255
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.up_proj has a block scale of 255, which is NaN"):
        dequantize(t, name="layers.3.mlp.up_proj")


# The OCP rule


@pytest.mark.parametrize(
    "amax, e, to",
    [
        (4.0, 127, 4.0),  # floor(log2 4) - 2 = 0
        (3.9999, 126, 3.0),  # 7.9998 saturates
        (5.0, 127, 4.0),  # a tie, to the even code
        (5.001, 127, 6.0),
        (7.99, 127, 6.0),  # above the largest value: saturates
        (8.0, 128, 8.0),
        (0.75, 124, 0.75),
        (-0.75, 124, -0.75),
        (6 * 2.0**-127, 0, 6 * 2.0**-127),
        (2.0**-128, 0, 2.0**-128),  # a subnormal float32; the scale cannot go below 2^-127
        (2.0**-130, 0, 0.0),
        (3.4e38, 252, 6 * 2.0**125),
    ],
)
def test_ocp_scale(amax, e, to):
    t = quantize(block(amax))
    assert t.block_scale.item() == e and dequantize(t)[0, 7].item() == to


@given(st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32))
def test_values_are_rounded_to_nearest_even_under_that_scale(values):
    weight = torch.tensor([values])
    amax = weight.abs().max().item()
    exponent = max(math.frexp(amax)[1] - 1 - 2, -127) if amax else -127
    t = quantize(weight)
    assert t.block_scale.item() == exponent + 127
    scaled = (weight.double() * 2.0**-exponent).clamp(-6, 6)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (scaled.abs().flatten()[:, None] - grid).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = nearest & (torch.arange(8) % 2 == 0)
    code = torch.where(nearest.sum(1) > 1, even.int().argmax(1), nearest.int().argmax(1))
    assert torch.equal((unpack_nibbles(t.packed)[0] & 7).long(), code)


@pytest.mark.parametrize("scale", ["ocp", "sweep"])
def test_zeros(scale):
    weight = gaussian(2, 96)
    weight[1, 32:64] = 0
    t = quantize(weight, scale=scale)
    assert t.block_scale[1, 1] == 0 and not t.packed[1, 16:32].any()
    zero = quantize(torch.zeros(2, 32), scale=scale)
    assert not zero.packed.any() and not zero.block_scale.any() and not dequantize(zero).any()


# The sweep


def squared_errors(weight: torch.Tensor, scale: str) -> torch.Tensor:
    return (dequantize(quantize(weight, scale=scale)).double() - weight).square().unflatten(1, (-1, 32)).sum(2)


@given(st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32), st.integers(-30, 30))
def test_the_sweep_takes_the_best_of_three(values, shift):
    weight = torch.tensor([values]) * 2.0**shift
    ocp, swept = quantize(weight), quantize(weight, scale="sweep")
    e = ocp.block_scale.item()
    errors = []
    for candidate in {e, max(e - 1, 0), e + 1}:
        scaled = (weight.double() * 2.0 ** (127 - candidate)).abs().clamp(max=6)
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        rounding = (scaled.flatten()[:, None] - grid).abs().amin(1)
        beyond = (weight.double().abs() * 2.0 ** (127 - candidate) - 6).clamp(min=0).flatten()
        errors.append(((rounding + beyond) * 2.0 ** (candidate - 127)).square().sum().item())
    assert abs(swept.block_scale.item() - e) <= 1
    assert squared_errors(weight, "sweep").item() == pytest.approx(min(errors), rel=1e-5, abs=1e-300)


def test_the_sweep_avoids_saturation_where_that_is_better():
    weight = torch.full((1, 32), 7.9)
    assert quantize(weight).block_scale.item() == 127 and dequantize(quantize(weight)).unique().item() == 6
    swept = quantize(weight, scale="sweep")
    assert swept.block_scale.item() == 128 and dequantize(swept).unique().item() == 8


def test_the_sweep_gives_up_an_outlier_where_that_is_better():
    weight = torch.full((1, 32), 0.25)  # rounds to 0 under amax's scale, is exact under half of it
    weight[0, 0] = 4.0
    assert quantize(weight).block_scale.item() == 127
    assert quantize(weight, scale="sweep").block_scale.item() == 126 and squared_errors(weight, "sweep").item() == 1.0


def test_the_sweep_on_gaussian_weights():
    weight = gaussian(256, 1024)
    ratio = squared_errors(weight, "sweep").sum() / squared_errors(weight, "ocp").sum()
    assert 0.93 < ratio < 0.96


@pytest.mark.parametrize("scale", ["ocp", "sweep"])
def test_the_largest_weights_stay_finite(scale):
    weight = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert dequantize(quantize(weight, scale=scale)).isfinite().all()


# Mistakes, dtypes, devices


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_name_the_tensor(bad):
    weight = gaussian(2, 32)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match=r"^up_proj contains (NaN|an infinity)"):
        quantize(weight, name="up_proj")


def test_columns_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="lm_head has 48 columns: MXFP4 needs a multiple of 32"):
        quantize(torch.zeros(2, 48), name="lm_head")


@pytest.mark.parametrize("scale", ["ocp", "sweep"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_equal_their_float32_values(dtype, scale):
    weight = gaussian(16, 64).to(dtype)
    a, b = quantize(weight, scale=scale), quantize(weight.float(), scale=scale)
    assert torch.equal(a.packed, b.packed) and torch.equal(a.block_scale, b.block_scale)


def test_rows_worked_through_in_pieces_change_nothing(monkeypatch):
    weight = gaussian(37, 64)
    whole = quantize(weight)
    monkeypatch.setattr(mxfp4, "_PIECE", 5 * 64)
    pieces = quantize(weight)
    assert torch.equal(whole.packed, pieces.packed) and torch.equal(whole.block_scale, pieces.block_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["ocp", "sweep"])
def test_every_device_chooses_the_same_bits(scale):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    weight = gaussian(512, 1024).bfloat16()
    a, b = quantize(weight, scale=scale), quantize(weight.cuda(), scale=scale)
    assert torch.equal(a.packed, b.packed.cpu()) and torch.equal(a.block_scale, b.block_scale.cpu())
    assert torch.equal(dequantize(a), dequantize(b).cpu())


# Another implementation

SCHEME = QuantizationScheme(targets=["Linear"], **MXFP4A16)


def test_compressed_tensors_reads_our_tensors():
    t = quantize(gaussian(16, 128) * torch.logspace(-6, 6, 16)[:, None])
    theirs = MXFP4PackedCompressor.decompress({"weight_packed": t.packed, "weight_scale": t.block_scale}, SCHEME)
    assert torch.equal(theirs["weight"].float(), dequantize(t))


def test_compressed_tensors_writes_the_same_bytes_under_our_scales():
    weight = gaussian(64, 128, seed=3)
    t = quantize(weight)
    module = {"weight": weight, "weight_scale": torch.exp2(t.block_scale.float() - 127)}
    theirs = MXFP4PackedCompressor.compress(module, SCHEME)
    assert torch.equal(theirs["weight_packed"], t.packed) and torch.equal(theirs["weight_scale"], t.block_scale)


def test_compressed_tensors_chooses_a_larger_scale_only_where_it_would_round_amax_up():
    """It rounds amax to two bits first, so from 1.75 * 2^n on (where 6 would saturate) it is one exponent higher."""
    weight = gaussian(64, 1024)
    amax = weight.abs().unflatten(1, (-1, 32)).amax(2)
    mantissa, _ = torch.frexp(amax)
    higher = generate_mx_scales(amax).int() - quantize(weight).block_scale.int()
    assert torch.equal(higher, (mantissa * 2 >= 1.75).int()) and 0 < higher.sum() < higher.numel()
