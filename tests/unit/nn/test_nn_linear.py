from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qerl.formats import int4, nf4
from qerl.formats.nvfp4 import dequantize, quantize
from qerl.kernels.coded import CodedWeight
from qerl.kernels.w4a16 import pack
from qerl.nn.linear import PackedLinear


def problem(n=144, k=80, bias=True, seed=0):
    """A packed linear whose N and K fill no whole tile, and the dense weight that it stands for."""
    torch.manual_seed(seed)
    codes = quantize(torch.randn(n, k))
    linear = PackedLinear(pack([codes]), torch.randn(n) if bias else None)
    return linear, dequantize(codes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(80,), (5, 80), (2, 3, 80), (0, 80)])
def test_forward_and_backward_are_a_dense_linears(shape, bias):
    linear, weight = problem(bias=bias)
    x = torch.randn(shape, requires_grad=True)
    grad = torch.randn(*shape[:-1], 144)
    y = linear(x)
    expected = F.linear(x, weight, linear.bias)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    (actual,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, x, grad)[0], atol=1e-4, rtol=1e-4)


def test_its_result_can_be_added_to_in_place():
    linear, weight = problem()
    x = torch.randn(2, 3, 80, requires_grad=True)
    y = linear(x)
    y += x.sum()
    (actual,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(actual, weight.sum(0).expand(2, 3, -1) + y.numel(), atol=1e-3, rtol=1e-4)


def test_gradient_agrees_with_finite_differences():
    linear, _ = problem(n=16, k=16)
    x, direction = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    (grad,) = torch.autograd.grad(linear(x).square().sum(), x)
    step = 1e-2  # exact for a quadratic, but for rounding
    with torch.no_grad():
        difference = linear(x + step * direction).square().sum() - linear(x - step * direction).square().sum()
    torch.testing.assert_close((grad * direction).sum(), difference / (2 * step), rtol=1e-3, atol=1e-3)


def test_bf16():
    linear, weight = problem()
    linear.bfloat16()
    x = torch.randn(9, 80).bfloat16().requires_grad_()
    y = linear(x)
    expected = F.linear(x.float(), weight, linear.bias.float())
    assert y.dtype == torch.bfloat16 and (y - expected).norm() < 4e-3 * expected.norm()
    grad = torch.randn(9, 144).bfloat16()
    (actual,) = torch.autograd.grad(y, x, grad)
    expected = grad.float() @ weight
    assert actual.dtype == torch.bfloat16 and (actual - expected).norm() < 4e-3 * expected.norm()


def test_bias_can_be_trained():
    linear, _ = problem()
    assert not linear.bias.requires_grad
    linear.bias.requires_grad_()
    x, grad = torch.randn(2, 5, 80), torch.randn(2, 5, 144)
    (actual,) = torch.autograd.grad(linear(x), linear.bias, grad)
    torch.testing.assert_close(actual, grad.sum((0, 1)))


def saved_for_backward(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        module(x).sum().backward()
    return saved


def test_no_dense_weight_is_kept_for_the_backward_pass():
    """A dense linear keeps its weight; a packed one keeps no tensor at all, only its own codes."""
    linear, weight = problem()
    dense = nn.Linear(80, 144)
    dense.weight.requires_grad_(False)
    x = torch.randn(4, 80, requires_grad=True)
    assert [tensor.numel() for tensor in saved_for_backward(dense, x)] == [weight.numel()]  # the hook does see it
    assert saved_for_backward(linear, x) == []
    node = linear(x).grad_fn
    assert node.linear is linear and not any(isinstance(v, torch.Tensor) for v in vars(node).values())


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_a_blanket_cast_leaves_the_codes(cast):
    linear, _ = problem()
    tiles, scale = linear.packed.tiles.clone(), linear.packed.global_scale.clone()
    getattr(nn.Sequential(linear), cast)()
    assert torch.equal(linear.packed.tiles, tiles) and torch.equal(linear.packed.global_scale, scale)
    assert linear.weight.dtype == torch.uint8 and linear.weight.device == torch.device("cpu")
    assert linear.bias.dtype == getattr(
        torch, {"half": "float16", "float": "float32"}.get(cast, cast.replace("double", "float64"))
    )


def test_moving_one_moves_the_owner_of_all():
    torch.manual_seed(0)
    owner = pack([quantize(torch.randn(rows, 32)) for rows in (40, 24)])
    first, second = PackedLinear(owner.part(0)), PackedLinear(owner.part(1))
    first.to("meta")
    assert first.weight.is_meta and second.weight.is_meta and owner.tiles.is_meta
    assert (first.out_features, second.out_features, second.in_features) == (40, 24, 32)


def test_views_compute_their_own_rows():
    torch.manual_seed(0)
    parts = [quantize(torch.randn(rows, 32)) for rows in (40, 24)]
    owner = pack(parts)
    x = torch.randn(3, 32)
    for index, part in enumerate(parts):
        torch.testing.assert_close(PackedLinear(owner.part(index))(x), x @ dequantize(part).T, atol=1e-4, rtol=1e-4)


def test_a_copy_of_a_model_is_independent():
    linear, _ = problem()
    model = nn.Sequential(linear, PackedLinear(linear.packed))
    copied = copy.deepcopy(model)
    assert copied[0].packed is copied[1].packed and copied[0].weight.data_ptr() != linear.weight.data_ptr()
    assert torch.equal(copied[0].weight, linear.weight)


def test_codes_are_no_parameter():
    linear, _ = problem()
    assert list(linear.state_dict()) == ["bias"] and [name for name, _ in linear.named_parameters()] == ["bias"]


# Formats without a fused kernel


def coded_problem(format: str, n: int = 144, k: int = 128, bias: bool = True) -> tuple[PackedLinear, torch.Tensor]:
    """A linear over NF4 or INT4 codes, and the dense weight that it stands for."""
    torch.manual_seed(0)
    weight = torch.randn(n, k)
    module = nf4 if format.startswith("nf4") else int4
    options = {"nf4": {"double_quant": False}, "nf4 double": {}, "int4": {}, "int4 symmetric": {"symmetric": True}}
    codes = module.quantize(weight, **options[format])
    return PackedLinear(CodedWeight(codes), torch.randn(n) if bias else None), module.dequantize(codes)


CODED = ["nf4", "nf4 double", "int4", "int4 symmetric"]


@pytest.mark.parametrize("format", CODED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(128,), (5, 128), (2, 3, 128), (0, 128)])
def test_coded_forward_and_backward_are_a_dense_linears(shape, bias, format):
    linear, weight = coded_problem(format, bias=bias)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 144)
    y, expected = linear(x), F.linear(x, weight, linear.bias)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    (actual,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, x, grad)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("format", CODED)
def test_coded_gradient_agrees_with_finite_differences(format):
    linear, _ = coded_problem(format)
    x, direction = torch.randn(3, 128, requires_grad=True), torch.randn(3, 128)
    (grad,) = torch.autograd.grad(linear(x).square().sum(), x)
    step = 1e-2
    with torch.no_grad():
        difference = linear(x + step * direction).square().sum() - linear(x - step * direction).square().sum()
    torch.testing.assert_close((grad * direction).sum(), difference / (2 * step), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("format", CODED)
def test_a_coded_linear_keeps_its_codes_alone(format):
    """Two products in a row share the scratch buffer, and the first one's backward pass is still right."""
    first, weight = coded_problem(format)
    second, _ = coded_problem(format, n=128)
    x = torch.randn(4, 128, requires_grad=True)
    assert saved_for_backward(first, x) == []
    y = first(x)
    assert y.grad_fn.linear is first
    second(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], weight.sum(0).expand(4, -1), atol=1e-4, rtol=1e-4)
    assert list(first.state_dict()) == ["bias"]


@pytest.mark.parametrize("format", CODED)
def test_coded_in_bf16_multiplies_with_the_rounded_weight(format):
    linear, weight = coded_problem(format)
    before = [None if t is None else t.clone() for t in linear.packed.codes]
    linear.bfloat16()
    for a, b in zip(linear.packed.codes, before, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))
    x = torch.randn(9, 128).bfloat16().requires_grad_()
    y, expected = linear(x), F.linear(x.float(), weight.bfloat16().float(), linear.bias.float())
    assert y.dtype == torch.bfloat16 and (y - expected).norm() < 4e-3 * expected.norm()
    (grad,) = torch.autograd.grad(y.sum(), x)
    expected = weight.bfloat16().float().sum(0).expand(9, -1)
    assert grad.dtype == torch.bfloat16 and (grad - expected).norm() < 4e-3 * expected.norm()


def test_a_coded_linear_moves_and_copies():
    linear, _ = coded_problem("nf4 double")
    copied = copy.deepcopy(linear)
    assert torch.equal(copied.weight, linear.weight) and copied.weight.data_ptr() != linear.weight.data_ptr()
    linear.to("meta")
    assert all(t.is_meta for t in linear.packed.codes) and linear.weight.is_meta and linear.packed.shape == (144, 128)
    with pytest.raises(ValueError, match="the tensor is on cpu, the weight on meta"):
        linear(torch.randn(2, 128))
    with pytest.raises(ValueError, match=r"wants \[\.\., 128\]"):
        copied(torch.randn(2, 96))


def test_torch_compile_leaves_coded_products_to_pytorch():
    linear, _ = coded_problem("nf4")
    x = torch.randn(3, 128, requires_grad=True)
    y = torch.compile(nn.Sequential(linear, nn.ReLU()), backend="eager")(x)
    torch.testing.assert_close(y, linear(x).relu())
    expected = torch.autograd.grad(linear(x).relu().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)
