from __future__ import annotations

import importlib.util

import pytest
import torch

from qerl.formats import nf4
from qerl.formats.nf4 import NF4_VALUES, NF4Tensor, dequantize, dynamic_values, maxima, quantize
from qerl.kernels.coded import product_by_bitsandbytes

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
oracle = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes_of(t: NF4Tensor) -> torch.Tensor:
    return torch.stack((t.packed >> 4, t.packed & 15), 2).flatten(1)


# The tables


def test_levels_are_quantiles_of_a_normal_distribution():
    """arXiv 2305.14314, section 3: 8 quantiles up to 0, 9 from 0 on, evenly in probability, over the last one."""
    outermost = 0.9677083
    below = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64))
    above = torch.special.ndtri(torch.linspace(0.5, outermost, 9, dtype=torch.float64))
    expected = torch.cat([below, above[1:]]) / above[-1]
    torch.testing.assert_close(torch.tensor(NF4_VALUES, dtype=torch.float64), expected, atol=1e-6, rtol=0)
    assert len(NF4_VALUES) == 16 and NF4_VALUES[7] == 0 and list(NF4_VALUES) == sorted(NF4_VALUES)


def test_the_table_of_maxima_has_finer_steps_near_zero():
    values = dynamic_values()
    assert len(values) == len(values.unique()) == 256 and torch.equal(values, values.sort().values)
    assert torch.equal(-values[:127].flip(0), values[128:255]) and values[127] == 0 and values[255] == 1
    decades = [((values > 10.0 ** (d - 1)) & (values < 10.0**d)).sum().item() for d in range(-6, 1)]
    assert decades == [1, 2, 4, 8, 16, 32, 64]
    assert values[128].item() == pytest.approx(0.55e-6) and values[254].item() == pytest.approx(1 - 0.45 / 64)


# What the bits mean


@pytest.mark.parametrize("code", range(16))
def test_every_code(code):
    other = 15 - code
    t = NF4Tensor(torch.full((1, 32), code << 4 | other, dtype=torch.uint8), torch.tensor([3.0]))
    expected = torch.tensor([[NF4_VALUES[code], NF4_VALUES[other]] * 32]) * 3
    assert torch.equal(dequantize(t), expected)


@pytest.mark.parametrize("code", range(15))
def test_rounding_is_to_the_nearest_level_and_a_tie_goes_down(code):
    low, high = torch.tensor(NF4_VALUES[code]), torch.tensor(NF4_VALUES[code + 1])
    middle = (low + high) / 2
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.stack([torch.tensor(1.0), middle, middle.nextafter(high), middle.nextafter(low)])
    t = quantize(weight, double_quant=False)
    assert codes_of(t)[0, :4].tolist() == [15, code, code + 1, code] and t.absmax.tolist() == [1.0]


def test_blocks_go_on_into_the_next_row():
    weight = torch.ones(2, 96)  # blocks of 64, 32 + 32, 64
    weight[0, :64], weight[1, 32:] = 4, 2
    weight[0, 70] = -8
    t = quantize(weight, double_quant=False)
    assert t.absmax.tolist() == [4, 8, 2]
    assert torch.equal(dequantize(t)[0, :64], weight[0, :64]) and dequantize(t)[0, 70] == -8


def test_a_block_of_zeros_is_zero_and_the_smallest_numbers_are_finite():
    weight = torch.zeros(3, 64)
    weight[1] = 1e-42  # subnormal
    weight[2] = gaussian(64)
    for double_quant in (False, True):
        t = quantize(weight, double_quant=double_quant)
        assert (codes_of(t)[0] == 7).all() and (dequantize(t)[0] == 0).all() and dequantize(t).isfinite().all()


@pytest.mark.parametrize("double_quant", [False, True])
def test_pieces_do_not_show(double_quant, monkeypatch):
    weight = gaussian(20, 96)
    whole = quantize(weight, double_quant=double_quant)
    values = dequantize(whole)
    monkeypatch.setattr(nf4, "_PIECE", {"cpu": 128})
    for a, b in zip(quantize(weight, double_quant=double_quant), whole, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(dequantize(whole), values)


def test_double_quantization_is_near():
    weight = gaussian(80, 640, dtype=torch.bfloat16)
    once, twice = quantize(weight, double_quant=False), quantize(weight)
    assert torch.equal(once.packed, twice.packed) and twice.absmax.dtype == torch.uint8
    assert twice.absmax.shape == (800,) and twice.absmax_scale.shape == (4,)  # 256, 256, 256 and 32 maxima
    centred = (once.absmax - once.absmax.mean()).abs()
    scale = centred[:256].max()
    assert twice.absmax_scale[0] == scale and twice.offset == once.absmax.mean()
    # The widest step of the table is 0.9 / 64, so a maximum is off by half of that at most.
    error = (maxima(twice) - once.absmax).abs()
    assert error.max() <= 0.9 / 128 * twice.absmax_scale.max() * 1.001 and error.max() > 0


def test_values_are_rounded_once():
    t = quantize(gaussian(32, 128))
    out = torch.empty(32, 128, dtype=torch.bfloat16)
    assert dequantize(t, out=out) is out
    assert torch.equal(out, dequantize(t).bfloat16()) and torch.equal(out, dequantize(t, torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 32), (64, 3), (5, 66)])
def test_matrices_that_are_no_whole_blocks_are_refused_by_name(shape):
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj is .* multiple of 64 weights; keep this layer in bf16"):
        quantize(torch.ones(shape), name="layers.0.q_proj")


@pytest.mark.parametrize("bad, what", [(float("nan"), "NaN"), (float("-inf"), "an infinity")])
def test_nan_and_infinity_are_refused_by_name(bad, what):
    weight = gaussian(4, 64)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match=rf"layers\.0\.q_proj contains {what}"):
        quantize(weight, name="layers.0.q_proj")


# Against bitsandbytes, which defines the format in practice


@oracle
def test_tables_are_those_of_bitsandbytes():
    import bitsandbytes.functional as bnb

    assert torch.equal(torch.tensor(NF4_VALUES), bnb.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(dynamic_values(), bnb.create_dynamic_map())


@oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 128), (300, 96), (3, 64), (200, 896)])
def test_codes_and_maxima_are_those_of_bitsandbytes(shape, dtype):
    import bitsandbytes.functional as bnb

    weight = 0.03 * gaussian(*shape)
    weight = weight.to(dtype)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    ours = quantize(weight, double_quant=False)
    assert torch.equal(ours.packed.flatten(), packed.flatten()) and torch.equal(ours.absmax, state.absmax)


@oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double_quant", [False, True])
def test_codes_of_bitsandbytes_are_the_values_that_it_makes_of_them(double_quant, dtype):
    """Its CPU kernel wants blocks that end with the row."""
    import bitsandbytes.functional as bnb

    weight = 0.03 * gaussian(200, 896, dtype=dtype)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=double_quant)
    nested = (state.state2.absmax, state.offset.reshape(1)) if double_quant else ()
    theirs = NF4Tensor(packed.view(200, 448), state.absmax, *nested)
    assert torch.equal(dequantize(theirs, dtype), bnb.dequantize_4bit(packed, state))


@oracle
def test_maxima_are_rounded_as_in_bitsandbytes_or_nearer():
    """Scales and offsets are equal; its CPU kernel takes the second nearest value for a few."""
    import bitsandbytes.functional as bnb

    weight = 0.03 * gaussian(700, 896)
    _, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    exact, ours = quantize(weight, double_quant=False).absmax, quantize(weight)
    theirs = ours._replace(absmax=state.absmax)
    assert torch.equal(ours.absmax_scale, state.state2.absmax) and ours.offset == state.offset
    differ = ours.absmax != state.absmax
    assert differ.float().mean() < 5e-3
    assert ((maxima(ours) - exact).abs() <= (maxima(theirs) - exact).abs() + 1e-9).all()


@oracle
@pytest.mark.parametrize("double_quant", [False, True])
def test_a_product_by_bitsandbytes_is_that_of_the_dense_matrices(double_quant):
    weights = [quantize(gaussian(n, 128, seed=n), double_quant=double_quant) for n in (64, 192)]
    x, bias = gaussian(2, 3, 128), gaussian(256)
    dense = torch.cat([dequantize(codes) for codes in weights])
    torch.testing.assert_close(product_by_bitsandbytes(x, weights, bias), x @ dense.T + bias, rtol=1e-4, atol=1e-4)
    one = product_by_bitsandbytes(x, weights[:1], None)
    torch.testing.assert_close(one, x @ dense[:64].T, rtol=1e-4, atol=1e-4)
