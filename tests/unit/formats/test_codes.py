from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from qerl.formats.codes import BF16, INT4, MXFP4, NF4, NVFP4, Format, dequantize

FORMATS: dict[str, Format] = {
    "bf16": BF16(),
    "nvfp4": NVFP4(),
    "nvfp4 amax": NVFP4("amax"),
    "mxfp4": MXFP4(),
    "mxfp4 ocp": MXFP4("amax"),
    "nf4": NF4(double_quant=False),
    "nf4 double": NF4(),
    "int4 g32": INT4(32),
    "int4 g64": INT4(64),
    "int4 g128": INT4(128),
    "int4 g128 amax": INT4(128, scale="amax"),
    "int4 g128 symmetric": INT4(128, symmetric=True),
}


def relative_mse(format: Format) -> float:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    return ((dequantize(format.quantize(weight)) - weight).square().mean() / weight.square().mean()).item()


# docs/formats.md has these figures, in percent.
MEASURED = {
    "bf16": 0.0,
    "nvfp4": 0.66,
    "nvfp4 amax": 0.90,
    "mxfp4": 1.25,
    "mxfp4 ocp": 1.32,
    "nf4": 0.85,
    "nf4 double": 0.85,
    "int4 g32": 0.59,
    "int4 g64": 0.76,
    "int4 g128": 0.91,
    "int4 g128 amax": 1.02,
    "int4 g128 symmetric": 1.03,
}


@pytest.mark.parametrize("name", FORMATS)
def test_squared_error_on_gaussian_weights(name):
    assert 100 * relative_mse(FORMATS[name]) == pytest.approx(MEASURED[name], abs=0.012)


def test_the_order_of_formats_on_gaussian_weights():
    """By the defaults of a run: blocks of 16 beat 64, the normal levels beat equal steps in blocks of 128."""
    order = ["bf16", "nvfp4", "nf4 double", "int4 g128", "mxfp4"]
    errors = [relative_mse(FORMATS[name]) for name in order]
    assert errors == sorted(errors) and all(b > 1.05 * a for a, b in pairwise(errors))


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_what_is_stored(name):
    format, weight = FORMATS[name], torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    codes = format.quantize(weight)
    tensors = [codes] if isinstance(codes, torch.Tensor) else [t for t in codes if t is not None]
    stored = 8 * sum(t.nbytes for t in tensors) / weight.numel()
    assert stored == pytest.approx(format.bits, abs=1e-3)  # one number for the tensor comes on top in some


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_satisfies_the_protocol(name):
    format = FORMATS[name]
    q, k = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert format.fits(64, 256) and (name == "bf16" or not format.fits(64, 33))
    shared = format.share([q, k], ["q", "k"])
    for weight in (q, k):
        codes = format.quantize(weight, shared=shared)
        for dtype in (torch.float32, torch.bfloat16):
            values = dequantize(codes, dtype)
            assert values.shape == weight.shape and values.dtype == dtype
            assert (values.float() - weight.float()).norm() < 0.13 * weight.float().norm()
        assert torch.equal(dequantize(codes, torch.bfloat16), dequantize(codes).bfloat16())
    with pytest.raises(ValueError, match=r"k contains NaN"):
        format.quantize(torch.full_like(k, torch.nan), name="k")


def test_only_nvfp4_shares_something_among_the_matrices_of_a_product():
    weights = [torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * size for size in (1e-5, 3.0)]
    for name, format in FORMATS.items():
        shared = format.share(weights, ["a", "b"])
        together = [dequantize(format.quantize(w, shared=shared)) for w in weights]
        same = [torch.equal(dequantize(format.quantize(w)), t) for w, t in zip(weights, together, strict=True)]
        assert same == [not name.startswith("nvfp4"), True]  # the larger one sets the scale: E4M3 ends
