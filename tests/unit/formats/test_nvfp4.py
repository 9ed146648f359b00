import math
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.formats import nvfp4
from qerl.formats.nvfp4 import (
    E2M1_VALUES,
    NVFP4Tensor,
    dequantize,
    e2m1_codes,
    pack_nibbles,
    quantize,
    shared_global_scale,
    unpack_nibbles,
)

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # every finite positive value, by code
ONE = torch.ones(1)


def codes_of(t: NVFP4Tensor) -> torch.Tensor:
    return unpack_nibbles(t.packed)


def scale_codes_of(t: NVFP4Tensor) -> torch.Tensor:
    return t.block_scale.view(torch.uint8)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# E2M1


def test_the_sixteen_values():
    assert E2M1_VALUES == (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def test_code_8_decodes_as_plus_zero():
    t = NVFP4Tensor(torch.full((1, 8), 0x88, dtype=torch.uint8), torch.ones(1, 1).to(torch.float8_e4m3fn), ONE)
    assert torch.equal(dequantize(t).view(torch.int32), torch.zeros(1, 16, dtype=torch.int32))


@pytest.mark.parametrize("code", range(16))
def test_every_value_rounds_to_itself(code):
    expected = 0 if code == 8 else code  # E2M1_VALUES has +0 for code 8
    assert e2m1_codes(torch.tensor([E2M1_VALUES[code]])).item() == expected


def tie(value: float, to: float):
    """A midpoint goes to the even code, its neighbours on either side to theirs, and the negative mirrors it."""
    exact = torch.tensor([value, -value])
    assert [E2M1_VALUES[c] for c in e2m1_codes(exact)] == [to, -to]
    assert e2m1_codes(exact)[0] % 2 == 0
    below, above = math.nextafter(value, 0), math.nextafter(value, 9)
    lower = max(v for v in E2M1_VALUES if v < value)
    upper = min(v for v in E2M1_VALUES if v > value)
    # One float32 step to either side.
    around = torch.nextafter(torch.tensor([value, value]), torch.tensor([below - 1, above + 1]))
    assert [E2M1_VALUES[c] for c in e2m1_codes(around)] == [lower, upper]


def test_tie_0_25_goes_to_0():
    tie(0.25, 0.0)


def test_tie_0_75_goes_to_1():
    tie(0.75, 1.0)


def test_tie_1_25_goes_to_1():
    tie(1.25, 1.0)


def test_tie_1_75_goes_to_2():
    tie(1.75, 2.0)


def test_tie_2_5_goes_to_2():
    tie(2.5, 2.0)


def test_tie_3_5_goes_to_4():
    tie(3.5, 4.0)


def test_tie_5_goes_to_4():
    tie(5.0, 4.0)


def test_above_5_is_6():
    assert [E2M1_VALUES[c] for c in e2m1_codes(torch.tensor([5.0001, 6.0, 7.0, 1e30, -1e30]))] == [6, 6, 6, 6, -6]


def test_rounding_is_to_the_nearest_value():
    y = torch.linspace(-7, 7, 100_001)
    rounded = torch.tensor(E2M1_VALUES)[e2m1_codes(y).int()]
    nearest = (y.double()[:, None] - torch.tensor(E2M1_VALUES).double()).abs().amin(1)
    assert torch.equal((rounded.double() - y.double()).abs(), nearest)


def test_a_small_negative_keeps_its_sign():
    assert e2m1_codes(torch.tensor([-0.1])).item() == 8


# Packing


def test_the_low_nibble_is_the_even_column():
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_packing_is_undone(codes):
    c = torch.tensor([codes], dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(c)), c)


# Block scales


@pytest.mark.parametrize("code", range(1, 127))
def test_every_e4m3_scale(code):
    """A block that is exactly representable under a scale gets that scale and comes back unchanged."""
    weight = torch.tensor([E2M1_VALUES]) * E4M3[code]
    t = quantize(weight, scale="amax", global_scale=ONE)
    assert scale_codes_of(t).item() == code
    assert torch.equal(dequantize(t), weight)


def test_every_product_of_code_and_scale_is_exact_in_bf16():
    products = torch.tensor(E2M1_VALUES)[:, None] * E4M3
    assert torch.equal(products.bfloat16().float(), products)


def test_the_scale_is_rounded_to_nearest_even():
    # amax / 6 halfway between the E4M3 values 16 (code 0x58, even) and 18; and between 18 and 20 (code 0x5A, even).
    for halfway, code in ((17.0, 0x58), (19.0, 0x5A)):
        weight = torch.zeros(1, 16)
        weight[0, 3] = 6 * halfway
        assert scale_codes_of(quantize(weight, scale="amax", global_scale=ONE)).item() == code


def test_the_scale_is_clamped_to_448():
    weight = torch.full((1, 16), 1e6)
    t = quantize(weight, scale="amax", global_scale=ONE)
    assert t.block_scale.float().item() == 448
    assert dequantize(t).unique().item() == 6 * 448


@pytest.mark.parametrize("scale", ["amax", "sweep"])
def test_a_nonzero_block_has_a_scale_of_at_least_2_to_minus_9(scale):
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 2688.0, 1e-6  # the second block's amax / 6 is far below the smallest E4M3 value
    t = quantize(weight, scale=scale)
    assert t.block_scale.float()[0, 1].item() >= 2.0**-9
    assert torch.equal(dequantize(t)[0, 16:], torch.zeros(16))


# Global scale


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(2688.0, 0), (2688.001, 1), (1344.0, -1), (1345.0, 0), (2.5, -10), (1.0, -11), (3.4e38, 117), (1e-40, -117)],
)
def test_global_scale_is_the_power_of_two_that_holds_amax(amax, exponent):
    """2^exponent is at least amax / 2688, and half of it is not."""
    t = quantize(torch.full((1, 16), amax))
    assert t.global_scale.shape == (1,) and t.global_scale.dtype == torch.float32
    assert t.global_scale.item() == 2.0**exponent


@pytest.mark.parametrize("scale", ["amax", "sweep"])
def test_quantised_weights_are_exact_in_bf16(scale):
    t = quantize(gaussian(64, 256), scale=scale)
    assert torch.equal(dequantize(t, torch.bfloat16).double(), dequantize(t).double())
    exact = torch.tensor(E2M1_VALUES).double()[codes_of(t).int()].unflatten(1, (-1, 16))
    exact *= (t.block_scale.double() * t.global_scale.double())[..., None]
    assert torch.equal(dequantize(t).double(), exact.flatten(1))


@pytest.mark.parametrize("largest", [1.0, 1.3, 1.9])
def test_what_a_power_of_two_costs(largest):
    """Against amax / 2688, whatever the mantissa of amax: next to nothing."""
    weight = gaussian(256, 512)
    weight *= largest / weight.abs().max()
    error = [
        (dequantize(quantize(weight, global_scale=scale)) - weight).square().sum().item()
        for scale in (shared_global_scale([weight], ["w"]), weight.abs().max().reshape(1) / 2688)
    ]
    assert error[0] < 1.003 * error[1]


def test_shared_global_scale_is_that_of_the_concatenation():
    q, k = gaussian(32, 64, seed=1), 3 * gaussian(16, 64, seed=2)
    shared = shared_global_scale([q, k], ["q", "k"])
    whole = quantize(torch.cat([q, k]))
    parts = [quantize(w, global_scale=shared) for w in (q, k)]
    assert torch.equal(shared, whole.global_scale)
    assert torch.equal(torch.cat([p.packed for p in parts]), whole.packed)
    assert torch.equal(torch.cat([scale_codes_of(p) for p in parts]), scale_codes_of(whole))


@given(st.integers(-117, 116))
def test_global_scale_survives_a_file_that_stores_its_inverse(exponent):
    scale = quantize(torch.full((1, 16), 2688.0 * 2.0**exponent)).global_scale
    assert torch.equal(1 / (1 / scale), scale) and (1 / scale).isfinite().all()


def test_a_scale_for_each_row_multiplies_its_row():
    t = quantize(gaussian(4, 32), global_scale=ONE)
    rows = torch.tensor([1.0, 2.0, 0.5, 3.0])
    assert torch.equal(dequantize(t._replace(global_scale=rows)), dequantize(t) * rows[:, None])


# Zeros, extremes, mistakes


@pytest.mark.parametrize("scale", ["amax", "sweep"])
def test_an_all_zero_tensor_is_zeros(scale):
    t = quantize(torch.zeros(4, 32), scale=scale)
    assert t.global_scale.item() == 1
    assert not t.packed.any() and not scale_codes_of(t).any()
    assert torch.equal(dequantize(t), torch.zeros(4, 32))


@pytest.mark.parametrize("scale", ["amax", "sweep"])
def test_an_all_zero_block_is_zeros(scale):
    weight = gaussian(2, 48)
    weight[1, 16:32] = 0
    t = quantize(weight, scale=scale)
    assert scale_codes_of(t)[1, 1] == 0
    assert torch.equal(dequantize(t)[1, 16:32], torch.zeros(16))
    assert dequantize(t).isfinite().all()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("scale", ["amax", "sweep"])
def test_extreme_magnitudes_stay_finite_and_close(size, scale):
    weight = gaussian(4, 32).clamp(-1, 1) * size
    t = quantize(weight, scale=scale)
    assert t.global_scale.isfinite().all() and t.global_scale.item() > 0
    assert (dequantize(t) - weight).abs().max().item() <= max(size / 5, 2.0**-126)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("given_scale", [None, ONE])
def test_nan_and_infinity_name_the_tensor(bad, given_scale):
    weight = gaussian(4, 32)
    weight[2, 7] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.up_proj.*(NaN|infinity)"):
        quantize(weight, global_scale=given_scale, name="layers.3.mlp.up_proj")
    with pytest.raises(ValueError, match=r"^second contains"):
        shared_global_scale([gaussian(2, 16), weight], ["first", "second"])


def test_columns_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="lm_head has 24 columns"):
        quantize(torch.zeros(2, 24), name="lm_head")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_equal_their_float32_values(dtype):
    weight = gaussian(16, 64).to(dtype)
    a, b = quantize(weight), quantize(weight.float())
    assert torch.equal(a.packed, b.packed) and torch.equal(scale_codes_of(a), scale_codes_of(b))


def test_dequantize_rounds_once():
    t = quantize(gaussian(8, 64))
    assert torch.equal(dequantize(t, torch.bfloat16), dequantize(t).bfloat16())


def test_rows_worked_through_in_pieces_change_nothing(monkeypatch):
    weight = gaussian(37, 64)
    whole = quantize(weight)
    monkeypatch.setattr(nvfp4, "_PIECE", 5 * 64)
    pieces = quantize(weight)
    assert torch.equal(whole.packed, pieces.packed) and torch.equal(scale_codes_of(whole), scale_codes_of(pieces))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["amax", "sweep"])
def test_every_device_chooses_the_same_bits(scale):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    weight = gaussian(512, 1024).bfloat16()
    a, b = quantize(weight, scale=scale), quantize(weight.cuda(), scale=scale)
    assert torch.equal(a.packed, b.packed.cpu()) and torch.equal(scale_codes_of(a), scale_codes_of(b).cpu())
    assert torch.equal(a.global_scale, b.global_scale.cpu())
    assert torch.equal(dequantize(a), dequantize(b).cpu())


# Properties

blocks = st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32)


@given(blocks)
def test_error_is_at_most_half_the_widest_step(values):
    weight = torch.tensor([values])
    t = quantize(weight, scale="amax")
    step = t.block_scale.float() * t.global_scale  # E2M1's widest gap, 4 to 6, is two of these
    assert ((dequantize(t) - weight).unflatten(1, (2, 16)).abs() <= step[..., None] * 1.00001).all()


@given(blocks)
def test_quantising_is_odd(values):
    weight = torch.tensor([values])
    assert torch.equal(dequantize(quantize(-weight)), -dequantize(quantize(weight)))


@given(st.lists(st.integers(-(2**20), 2**20), min_size=32, max_size=32).filter(any), st.integers(-40, 40))
def test_a_power_of_two_moves_to_the_global_scale(values, exponent):
    weight = torch.tensor([values]).float()
    a, b = quantize(weight), quantize(weight * 2.0**exponent)
    assert torch.equal(a.packed, b.packed) and torch.equal(scale_codes_of(a), scale_codes_of(b))
    assert torch.equal(a.global_scale * 2.0**exponent, b.global_scale)


@given(blocks)
def test_the_sweep_is_never_worse_than_amax(values):
    weight = torch.tensor([values])
    error = {
        scale: (dequantize(quantize(weight, scale=scale)).double() - weight).square().unflatten(1, (2, 16)).sum(2)
        for scale in ("sweep", "amax")
    }
    assert (error["sweep"] <= error["amax"] * 1.00001 + 1e-12).all()


# The sweep

DISTRIBUTIONS = {
    "gaussian": torch.distributions.Normal(0.0, 1.0),
    "laplace": torch.distributions.Laplace(0.0, 1.0),
    "student-t5": torch.distributions.StudentT(5.0),
    "uniform": torch.distributions.Uniform(-1.0, 1.0),
}


@pytest.mark.parametrize("name, at_least", [("gaussian", 0.25), ("laplace", 0.19), ("student-t5", 0.19)])
def test_the_sweep_cuts_the_weight_error(name, at_least):
    torch.manual_seed(0)
    weight = DISTRIBUTIONS[name].sample((512, 1024))
    mse = {s: (dequantize(quantize(weight, scale=s)) - weight).square().mean().item() for s in ("sweep", "amax")}
    assert 1 - mse["sweep"] / mse["amax"] >= at_least


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_sweep_finds_the_best_of_all_126_codes(name):
    torch.manual_seed(1)
    weight = DISTRIBUTIONS[name].sample((1024, 64))
    t = quantize(weight)
    blocks = weight.double().unflatten(1, (-1, 16)) / t.global_scale.double()
    values = torch.tensor(E2M1_VALUES)

    def error(scale):
        codes = e2m1_codes((blocks / scale).float())
        return (values[codes.int()] * scale - blocks).square().sum(2)

    chosen = error(t.block_scale.double()[..., None])
    best = torch.stack([error(value.double()) for value in E4M3[1:]]).amin(0)
    assert torch.allclose(chosen, best, rtol=1e-5, atol=0)


def test_equal_errors_take_the_smallest_scale():
    weight = torch.zeros(1, 16)
    weight[0, 0] = 2688.0  # alone in its block: 6 * 448, 4 * 672 (too large for E4M3) ..., only 448 is exact
    assert scale_codes_of(quantize(weight, global_scale=ONE)).item() == 126
    weight[0, 0] = 12.0  # 6 * 2 = 4 * 3: both exact
    assert quantize(weight, global_scale=ONE).block_scale.float().item() == 2.0


# Another implementation

SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4A16)


def test_compressed_tensors_packs_and_unpacks_the_same_bytes():
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 7)[:, :96].roll(5, 1).contiguous()
    codes[1] = codes[1].flip(0)
    values = unpack_fp4_from_uint8(pack_nibbles(codes), 3, 96, torch.float32)
    assert torch.equal(values, torch.tensor(E2M1_VALUES)[codes.int()])
    assert torch.equal(pack_fp4_to_uint8(values.bfloat16()), pack_nibbles(codes))


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_compressed_tensors_reads_our_tensors(seed):
    """Bit for bit, though it divides the block's scale first: a power of two commutes with rounding."""
    t = quantize(gaussian(16, 64, seed=seed))
    module = {"weight_packed": t.packed, "weight_scale": t.block_scale, "weight_global_scale": 1 / t.global_scale}
    theirs = NVFP4PackedCompressor.decompress(module, SCHEME)["weight"]
    assert torch.equal(theirs, dequantize(t, torch.bfloat16))


def test_under_another_global_scale_compressed_tensors_rounds_in_another_order():
    """code * (scale / divisor), then bf16: at most one bf16 step apart, and hardly ever."""
    weight = gaussian(64, 256)
    divisor = 2688 / weight.abs().max().reshape(1)
    t = quantize(weight, global_scale=1 / divisor)
    module = {"weight_packed": t.packed, "weight_scale": t.block_scale, "weight_global_scale": divisor}
    theirs = NVFP4PackedCompressor.decompress(module, SCHEME)["weight"]
    values = torch.tensor(E2M1_VALUES)[codes_of(t).int()].unflatten(1, (-1, 16))
    assert torch.equal(theirs, (values * (t.block_scale.float() / divisor)[..., None]).flatten(1).bfloat16())
    assert torch.allclose(theirs.float(), dequantize(t), rtol=2.0**-8, atol=0)
    assert (theirs != dequantize(t, torch.bfloat16)).float().mean() < 1e-2


def test_compressed_tensors_rounds_to_the_same_codes():
    weight = gaussian(64, 128, seed=3)
    scale = torch.tensor([2.0**-9])  # a power of two, so that both orders of dividing agree
    t = quantize(weight, scale="amax", global_scale=scale)
    module = {"weight": weight, "weight_scale": t.block_scale.float(), "weight_global_scale": 1 / scale}
    theirs = NVFP4PackedCompressor.compress(module, SCHEME)["weight_packed"]
    assert torch.equal(theirs, t.packed)


# The documentation's block


def test_the_worked_block_of_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "nvfp4.md").read_text()
    weight = torch.zeros(1, 32)
    weight[0, :16] = torch.tensor([51, 30, 22, -50, -60, -27, 23, -23, -10, 33, -16, 0, -13, 0, 47, 50]) / 1024
    weight[0, 16] = 2.5
    for rule, scale, squared_error in (("amax", 10, 375), ("sweep", 16, 67)):
        t = quantize(weight, scale=rule)
        assert t.global_scale.item() == 2.0**-10 and t.block_scale.float()[0, 0].item() == scale
        error = (dequantize(t) - weight)[0, :16].mul(1024).square().sum().item()
        assert error == squared_error and f"Squared error: {squared_error}." in page
        codes = codes_of(t)[0, :16].tolist()
        rows = {
            f"w / {scale}": [f"{round(1024 * w) / scale:.1f}" for w in weight[0, :16].tolist()],
            "e2m1": [f"{E2M1_VALUES[c]:.1f}" for c in codes],
            "back": [f"{1024 * w:.0f}" for w in dequantize(t)[0, :16].tolist()],
        }
        if rule == "sweep":
            rows["code"] = [f"{c:X}" for c in codes]
            assert " ".join(f"{byte:02X}" for byte in t.packed[0, :8].tolist()) in page
        for name, cells in rows.items():
            assert f"{name:<6}" + "".join(f"{cell:>5}" for cell in cells) in page
