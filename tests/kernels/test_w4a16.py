import logging

import pytest
import torch
from triton_runs import needs_triton

import qerl.kernels.w4a16 as op
from qerl.formats import mxfp4
from qerl.formats.nvfp4 import NVFP4Tensor, dequantize, quantize
from qerl.kernels.adapter import pack_adapter
from qerl.kernels.layout import PackedWeight, pack
from qerl.kernels.w4a16 import w4a16, w4a16_adapted, w4a16_input_grad
from qerl.kernels.w4a16.dense import w4a16_adapted_dense, w4a16_dense

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [((128,), 64), ((96,), 80), ((128, 64, 64), 128), ((256, 128, 128), 192), ((16, 300), 48)]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return request.param


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(rows: tuple[int, ...], k: int, device: str, shared: bool = True) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight and its exact dense values in float64, scales and all."""
    whole = quantize(draw(sum(rows), k)).global_scale
    parts = [quantize(draw(n, k, seed=n) * (i + 1), global_scale=whole if shared else None) for i, n in enumerate(rows)]
    dense = [exact(t) for t in parts]
    weight = pack(parts)
    weight.to_(device)
    return weight, torch.cat(dense).to(device)


def exact(t: NVFP4Tensor) -> torch.Tensor:
    unscaled = dequantize(t._replace(global_scale=torch.ones(1))).double()
    return unscaled * t.global_scale.double()[:, None]


def assert_rounded_once(result: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within one rounding to the result's dtype plus float32 summation error on `magnitude` (a sum of absolutes)."""
    unit = torch.finfo(result.dtype).eps / 2
    assert ((result.double() - expected).abs() <= unit * expected.abs() * 1.001 + 2e-6 * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows, k", SHAPES)
def test_product(rows, k, shared, with_bias, dtype, device):
    weight, dense = make(rows, k, device, shared)
    x = draw(2, 5, k, seed=1).to(device, dtype)
    bias = draw(sum(rows), seed=2).to(device, dtype) if with_bias else None
    y = w4a16(x, weight, bias)
    b = 0 if bias is None else bias.double()
    assert y.shape == (2, 5, sum(rows)) and y.dtype == dtype
    assert_rounded_once(y, x.double() @ dense.T + b, x.double().abs() @ dense.abs().T + abs(b))


def young_adapter(n: int, k: int, r: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B whose part is less than half a step of bf16 at a product of numbers around sqrt(k)."""
    return integers(r, k, seed=r).to(device, dtype), (draw(n, r, seed=n) * 2e-5).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scales", ["shared", "per row", "tiny"])
@pytest.mark.parametrize("n, k, r", [(128, 64, 32), (96, 80, 5), (300, 128, 64)])
def test_product_with_an_adapter_that_is_trained(n, k, r, scales, with_bias, dtype, device):
    t = quantize(draw(n, k))
    scale = {"shared": t.global_scale, "per row": 2.0 ** torch.arange(n).remainder(3), "tiny": torch.tensor([2e-38])}
    t = t._replace(global_scale=scale[scales])
    weight, dense = pack([t]), exact(t).to(device)
    weight.to_(device)
    x = integers(2, 5, k, seed=1).to(device, dtype)
    a, b = young_adapter(n, k, r, device, dtype)
    bias = draw(n, seed=3).to(device, dtype) if with_bias else None
    y, u = w4a16_adapted(x, weight, bias, a, b, 0.75)
    expected_u = 0.75 * (x.double() @ a.double().T).flatten(0, 1)
    assert u.shape == (10, r) and u.is_contiguous() and torch.equal(u.double(), expected_u.to(dtype).double())
    shift = 0 if bias is None else bias.double()
    expected = x.double() @ dense.T + (u.double() @ b.double().T).view(2, 5, n) + shift
    of_adapter = (u.double().abs() @ b.double().abs().T).view(2, 5, n)
    assert_rounded_once(y, expected, x.double().abs() @ dense.abs().T + of_adapter + abs(shift))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [300, 4096])
@pytest.mark.parametrize("with_bias", [False, True])
def test_as_many_tokens_as_training_has(with_bias, tokens, device):
    """cuBLAS chooses other kernels for them, which round before they add to what is there."""
    if device == "cpu":
        pytest.skip("cuBLAS is a GPU's")
    weight, dense = make((384,), 512, device)
    x, (a, b) = draw(tokens, 512).to(device, torch.bfloat16), young_adapter(384, 512, 32, device, torch.bfloat16)
    bias = draw(384, seed=3).to(device, torch.bfloat16) if with_bias else None
    y, u = w4a16_adapted(x, weight, bias, a, b, 2.0)
    added = u.double() @ b.double().T + (0 if bias is None else bias.double())
    assert_rounded_once(y, x.double() @ dense.T + added, x.double().abs() @ dense.abs().T + added.abs())


def test_autocast_changes_nothing():
    weight, _ = make((128,), 64, "cpu")
    x, (a, b) = integers(5, 64, seed=1).bfloat16(), young_adapter(128, 64, 4, "cpu", torch.bfloat16)

    def results() -> list[torch.Tensor]:
        y, u = w4a16_adapted(x, weight, None, a, b, 1.0)
        return [y, u, w4a16(x, weight), w4a16_input_grad(y, weight)]

    expected = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_factors_that_do_not_fit_are_refused():
    weight, _ = make((128,), 64, "cpu")
    x, a, b = torch.zeros(3, 64), torch.zeros(4, 64), torch.zeros(128, 4)
    for wrong in ((a[:, 1:], b), (a, b[1:]), (a[1:], b)):
        with pytest.raises(ValueError, match=r"do not fit a weight \[128, 64\] of 1 parts"):
            w4a16_adapted(x, weight, None, *wrong, 1.0)
    with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu, the activations torch.float32 on cpu"):
        w4a16_adapted(x, weight, None, a, b.bfloat16(), 1.0)
    two, _ = make((128, 64), 64, "cpu")
    with pytest.raises(ValueError, match="of 2 parts: wants one part"):
        w4a16_adapted(x, two, None, a, torch.zeros(192, 4), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, k", SHAPES)
def test_input_gradient(rows, k, dtype, device):
    weight, dense = make(rows, k, device)
    dy = draw(2, 5, sum(rows), seed=1).to(device, dtype)
    dx = w4a16_input_grad(dy, weight)
    assert dx.shape == (2, 5, k) and dx.dtype == dtype
    assert_rounded_once(dx, dy.double() @ dense, dy.double().abs() @ dense.abs())


def test_input_gradient_with_several_global_scales(device):
    weight, dense = make((128, 64), 64, device, shared=False)
    dy = draw(5, 192, seed=1).to(device, torch.bfloat16)
    dx = w4a16_input_grad(dy, weight)
    expected = dy.double() @ dense  # dy is rounded once more with the scales
    assert (dx.double() - expected).norm() < 4e-3 * expected.norm()


def test_rows_with_scales_of_their_own(device):
    t = quantize(draw(96, 64))._replace(global_scale=torch.linspace(0.5, 2, 96))
    weight = pack([t])
    weight.to_(device)
    x, bias = draw(7, 64, seed=1).to(device, torch.bfloat16), draw(96, seed=2).to(device, torch.bfloat16)
    dense = exact(t).to(device)
    expected = x.double() @ dense.T + bias.double()
    assert_rounded_once(w4a16(x, weight, bias), expected, x.double().abs() @ dense.abs().T + bias.double().abs())


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers, so that float32 sums of products are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scales", ["shared", "per part", "per row"])
@pytest.mark.parametrize(
    "rows, k, ranks", [((96,), 80, (8,)), ((128, 64, 64), 128, (16, None, 5)), ((16, 300), 48, (64, 1))]
)
def test_adapter(rows, k, ranks, scales, with_bias, dtype, device):
    weight, dense = make(rows, k, device, scales == "shared")
    if scales == "per row":
        own = torch.linspace(0.5, 2, sum(rows)).split(rows)
        parts = [quantize(draw(n, k, seed=n))._replace(global_scale=g) for n, g in zip(rows, own, strict=True)]
        weight, dense = pack(parts), torch.cat([exact(t) for t in parts]).to(device)
        weight.to_(device)
    x = integers(2, 5, k, seed=1).to(device, dtype)
    bias = draw(sum(rows), seed=2).to(device, dtype) if with_bias else None
    entries = [
        None if r is None else (integers(r, k, seed=r), draw(n, r, seed=n), 0.75 * (i + 1))
        for i, (n, r) in enumerate(zip(rows, ranks, strict=True))
    ]
    y = w4a16(x, weight, bias, pack_adapter(weight, entries, dtype))

    added = torch.zeros(2, 5, sum(rows), dtype=torch.float64, device=device)
    rounded = False
    for columns, entry in zip(added.split(rows, dim=-1), entries, strict=True):
        if entry is not None:
            a, b, scaling = entry
            exact_u = scaling * (x.double() @ a.to(device).double().T)
            u = exact_u.to(dtype).double()
            rounded |= not torch.equal(u, exact_u)
            columns += u @ b.to(device, dtype).double().T
    assert rounded == (dtype == torch.bfloat16)  # so the test sees where u is rounded
    added += 0 if bias is None else bias.double()
    expected = x.double() @ dense.T + added
    magnitude = x.double().abs() @ dense.abs().T + added.abs().amax()
    assert_rounded_once(y, expected, magnitude)


def double_precision(monkeypatch) -> None:
    """What w4a16_dense asks of a GPU, on a CPU: sums that are rounded once."""
    from qerl.kernels.w4a16 import widen

    def mm(a, b, out_dtype=torch.bfloat16):
        return (a.double() @ b.double()).to(out_dtype)

    def addmm(addend, a, b, *, beta=1, alpha=1, out=None):
        sums = (alpha * (a.double() @ b.double()) + (beta * addend if beta else 0)).to(a.dtype)
        return sums if out is None else out.copy_(sums)

    def widened(x, columns, room):
        out = torch.full((len(x), columns + room), torch.nan, dtype=x.dtype)
        out[:, :columns] = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
        return out

    monkeypatch.setattr(torch, "mm", mm), monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(widen, "widened", widened)


@needs_triton
@pytest.mark.parametrize("scales", ["shared", "per part", "tiny"])
@pytest.mark.parametrize("bias", [None, 100])
def test_a_long_prefill_takes_nothing_of_a_young_adapter(bias, scales, device, monkeypatch):
    """By dequantisation. Qwen2's keys have biases of a hundred."""
    if device == "cpu":
        double_precision(monkeypatch)
    weight, dense = make((128, 64, 96), 80, device, scales == "shared")
    if scales == "tiny":
        parts = [quantize(draw(n, 80, seed=n))._replace(global_scale=torch.tensor([2e-38])) for n in (128, 64, 96)]
        weight, dense = pack(parts), torch.cat([exact(t) for t in parts]).to(device)
        weight.to_(device)
    x = integers(2000, 80, seed=1).to(device, torch.bfloat16)
    shift = None if bias is None else bias + draw(288, seed=2).to(device, torch.bfloat16)
    entries = [(integers(4, 80, seed=3), draw(n, 4, seed=n) * 7e-5, 0.5) if n != 64 else None for n in (128, 64, 96)]
    y = w4a16_dense(x, weight, shift, pack_adapter(weight, entries, torch.bfloat16))
    added = torch.zeros(2000, 288, dtype=torch.float64, device=device)
    for columns, entry in zip(added.split((128, 64, 96), dim=1), entries, strict=True):
        if entry is not None:
            u = (0.5 * (x.double() @ entry[0].to(device).double().T)).bfloat16().double()
            columns += u @ entry[1].to(device, torch.bfloat16).double().T
    without = x.double() @ dense.T + (0 if shift is None else shift.double())
    assert 0 < added.abs().max() < 0.25, "half a step of bf16 at a hundred: behind a rounding nothing would be left"
    assert_rounded_once(y, without + added, without.abs() + added.abs() + x.double().abs() @ dense.abs().T)
    if scales != "tiny":  # there the product vanishes, and what is rounded is the bias
        learned = ((y.double() - without) * added).sum() / (added * added).sum()
        assert abs(learned - 1) < 0.2


@needs_triton
@pytest.mark.parametrize("behind", [0, 8, 24, 64])
@pytest.mark.parametrize("bias", [None, 100])
def test_a_trained_adapter_over_a_dense_copy(bias, behind, device, monkeypatch):
    """With no room behind x's rows, enough, or more than its rank takes; what was in it is nobody's."""
    if device == "cpu":
        double_precision(monkeypatch)
    weight, dense = make((96,), 64, device)
    x = torch.full((500, 64 + behind), torch.nan, device=device, dtype=torch.bfloat16)[:, :64]
    x.copy_(integers(500, 64, seed=1))
    before = x.clone()
    a, b = young_adapter(96, 64, 5, device, torch.bfloat16)
    shift = None if bias is None else bias + draw(96, seed=2).to(device, torch.bfloat16)
    y, u = w4a16_adapted_dense(x, weight, shift, a, b, 0.5, behind)
    assert torch.equal(x, before) and torch.equal(u, (0.5 * (x.double() @ a.double().T)).bfloat16())
    added = u.double() @ b.double().T + (0 if shift is None else shift.double())
    assert_rounded_once(y, x.double() @ dense.T + added, x.double().abs() @ dense.abs().T + added.abs())


def test_an_adapter_of_another_weight_dtype_or_device_is_refused():
    (weight, _), (other, _) = make((128, 64), 64, "cpu"), make((128,), 64, "cpu")
    entry = (draw(4, 64), draw(128, 4), 1.0)
    with pytest.raises(ValueError, match="not packed for this weight of 2 parts"):
        w4a16(torch.zeros(3, 64), weight, None, pack_adapter(other, [entry], torch.float32))
    with pytest.raises(
        ValueError, match=r"packed for torch\.bfloat16 on cpu, the activations are torch\.float32 on cpu"
    ):
        w4a16(torch.zeros(3, 64), other, None, pack_adapter(other, [entry]))
    elsewhere = pack_adapter(other, [entry], torch.float32)
    elsewhere = elsewhere._replace(a=elsewhere.a.to("meta"))
    with pytest.raises(ValueError, match=r"on meta, the activations are torch\.float32 on cpu: pack it anew"):
        w4a16(torch.zeros(3, 64), other, None, elsewhere)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, k", [((96,), 96), ((128, 64, 16), 128)])
def test_mxfp4(rows, k, dtype, device):
    parts = [mxfp4.quantize(draw(n, k, seed=n) * 10.0**-i) for i, n in enumerate(rows)]
    weight, dense = pack(parts), torch.cat([mxfp4.dequantize(t).double() for t in parts]).to(device)
    weight.to_(device)
    x, dy = draw(2, 5, k, seed=1).to(device, dtype), draw(2, 5, sum(rows), seed=2).to(device, dtype)
    assert_rounded_once(w4a16(x, weight), x.double() @ dense.T, x.double().abs() @ dense.abs().T)
    assert_rounded_once(w4a16_input_grad(dy, weight), dy.double() @ dense, dy.double().abs() @ dense.abs())


def test_a_fused_product_is_its_parts_side_by_side(device):
    weight, _ = make((128, 64, 16), 96, device)
    x = draw(5, 96, seed=1).to(device)
    parts = [w4a16(x, weight.part(i)) for i in range(3)]
    fused = w4a16(x, weight).split([p.rows for p in weight.parts], dim=-1)
    for part, piece in zip(parts, fused, strict=True):
        assert torch.allclose(part, piece, rtol=1e-6, atol=1e-6)


def test_the_global_scale_stays_out_of_the_bf16_weights(device):
    """Folding it into rounded weights would change most of them; the product shows which was done."""
    weight, dense = make((128,), 64, device)
    x = torch.eye(64, device=device, dtype=torch.bfloat16)
    assert torch.equal(w4a16(x, weight), dense.T.float().bfloat16())


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,)])
def test_any_number_of_tokens(shape, device):
    weight, _ = make((128,), 64, device)
    for dtype in (torch.float32, torch.bfloat16):
        y = w4a16(torch.ones(shape, device=device, dtype=dtype), weight)
        assert y.shape == (*shape[:-1], 128)
        assert w4a16_input_grad(y, weight).shape == shape


def test_shapes_that_do_not_fit_are_refused():
    weight, _ = make((128,), 64, "cpu")
    with pytest.raises(ValueError, match=r"shape \[3, 80\] against a weight of shape \[128, 64\]: wants \[.., 64\]"):
        w4a16(torch.zeros(3, 80), weight)
    with pytest.raises(ValueError, match=r"wants \[.., 128\]"):
        w4a16_input_grad(torch.zeros(3, 64), weight)
    with pytest.raises(ValueError, match=r"wants \[.., 64\]"):
        w4a16_adapted(torch.zeros(3, 80), weight, None, torch.zeros(4, 80), torch.zeros(128, 4), 1.0)


def test_another_device_is_refused():
    weight, _ = make((128,), 64, "cpu")
    with pytest.raises(ValueError, match="the tensor is on meta, the weight on cpu"):
        w4a16(torch.zeros(3, 64, device="meta"), weight)


def hopper(x, weight, bias, adapter):
    raise NotImplementedError


def portable(x, weight, bias, adapter):
    raise NotImplementedError


@pytest.mark.parametrize(
    "capability, device, dtype, tokens, path, warning",
    [
        ((9, 0), "cuda", torch.bfloat16, 9, hopper, None),
        ((9, 0), "cuda", torch.bfloat16, 8, portable, None),
        ((9, 0), "cuda", torch.bfloat16, op.MAX_FUSED_TOKENS, hopper, None),
        ((9, 0), "cuda", torch.bfloat16, op.MAX_FUSED_TOKENS + 1, op.w4a16_dense, None),
        ((9, 0), "cuda", torch.float32, 1, op.w4a16_reference, "activations are torch.float32: packed products run"),
        ((9, 0), "cpu", torch.bfloat16, 1, op.w4a16_reference, None),
        ((8, 0), "cuda", torch.bfloat16, 1, portable, None),
        ((12, 0), "cuda", torch.bfloat16, 1, portable, None),
        ((13, 0), "cuda", torch.bfloat16, 1, op.w4a16_dense, "slowly: no kernel is for compute capability 13.0"),
        ((7, 5), "cuda", torch.bfloat16, 1, op.w4a16_reference, "cuda has compute capability 7.5: packed products run"),
    ],
)
def test_the_choice_of_a_path(capability, device, dtype, tokens, path, warning, monkeypatch, caplog):
    monkeypatch.setattr(op, "_FUSED", (((9, 0), (9, 0), 9, hopper), ((8, 0), (12, 1), 1, portable)))
    monkeypatch.setattr(op, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    op._fused.cache_clear(), op._has_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert op._product(torch.device(device), dtype, tokens) is path
    assert len(caplog.messages) == (warning is not None) and (warning or "") in caplog.text


@pytest.mark.parametrize("bias", [torch.zeros(64), torch.zeros(127).bfloat16(), torch.zeros(128, 1).bfloat16()])
def test_a_bias_that_does_not_fit_is_refused(bias):
    weight, _ = make((128,), 64, "cpu")
    with pytest.raises(ValueError, match=r"for 128 rows and activations of torch\.bfloat16 on cpu"):
        w4a16(torch.zeros(3, 64).bfloat16(), weight, bias)
