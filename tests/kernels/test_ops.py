"""The operators under torch.library's own checks, torch.compile and torch.export."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qerl.formats import mxfp4, nvfp4
from qerl.kernels.adapter import PackedAdapter, pack_adapter
from qerl.kernels.layout import PackedWeight, pack
from qerl.kernels.w4a16 import ops, w4a16, w4a16_input_grad
from qerl.nn.linear import PackedLinear

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
    ),
]
ROWS, K = (96, 32), 96


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(scale_format: str = "e4m3", device: str = "cpu") -> tuple[PackedWeight, torch.Tensor, PackedAdapter]:
    """A weight of two parts (with scales of their own, one of them a row's), a bias, an adapter; bf16 on a GPU."""
    if scale_format == "e8m0":
        weight = pack([mxfp4.quantize(draw(n, K, seed=n)) for n in ROWS])
    else:
        first, second = (nvfp4.quantize(draw(n, K, seed=n)) for n in ROWS)
        weight = pack([first, second._replace(global_scale=torch.linspace(0.5, 2, ROWS[1]))])
    weight.to_(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    adapter = pack_adapter(weight, [(draw(4, K), draw(ROWS[0], 4), 0.5), None], dtype)
    return weight, draw(sum(ROWS)).to(device, dtype), adapter


def activations(*shape: int, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    return draw(*shape, seed=seed).to(device, torch.bfloat16 if device == "cuda" else torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_format", ["e4m3", "e8m0"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 3, K), (0, K)])
def test_the_operator_is_sound(shape, with_bias, scale_format, device):
    weight, bias, _ = problem(scale_format, device)
    x = activations(*shape, device=device).requires_grad_()
    added = (bias.requires_grad_() if with_bias else None, None, None, None)
    torch.library.opcheck(torch.ops.qerl.w4a16.default, (x, *ops._arguments(weight), *added))
    dy = activations(*shape[:-1], sum(ROWS), device=device)
    torch.library.opcheck(torch.ops.qerl.w4a16_input_grad.default, (dy, *ops._arguments(weight)))


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_with_an_adapter_is_sound(device):
    weight, bias, adapter = problem(device=device)
    x = activations(5, K, device=device)
    torch.library.opcheck(torch.ops.qerl.w4a16.default, (x, *ops._arguments(weight), bias, *adapter))


@pytest.mark.parametrize("scale_format", ["e4m3", "e8m0"])
def test_the_operators_are_the_functions(scale_format):
    weight, bias, adapter = problem(scale_format)
    x, dy = activations(2, 3, K), activations(2, 3, sum(ROWS))
    for i in (None, 0, 1):  # a view of one part has tiles of its own
        w = weight if i is None else weight.part(i)
        b, d = (bias, dy) if i is None else (bias.split(ROWS)[i], dy.split(ROWS, dim=-1)[i])
        assert torch.equal(ops.w4a16(x, w, b, None), w4a16(x, w, b))
        assert torch.equal(ops.w4a16_input_grad(d, w), w4a16_input_grad(d, w))
    assert torch.equal(ops.w4a16(x, weight, bias, adapter), w4a16(x, weight, bias, adapter))


def test_only_the_packed_codes_are_saved():
    weight, bias, _ = problem()
    saved: list[torch.Tensor] = []
    x = activations(5, K).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.w4a16(x, weight, bias.requires_grad_(), None).sum().backward()
    assert [t.data_ptr() for t in saved] == [weight.tiles.data_ptr(), weight.global_scale.data_ptr()]


def test_an_adapter_has_no_gradient_here():
    weight, bias, adapter = problem()
    x = activations(5, K).requires_grad_()
    with pytest.raises(ValueError, match="no gradient: train the adapter beside it"):
        ops.w4a16(x, weight, bias, adapter)
    with torch.no_grad():
        assert ops.w4a16(x, weight, bias, adapter).shape == (5, sum(ROWS))


class Block(nn.Module):
    """Two views of one weight (as q, k) and another weight behind them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        weight, bias, _ = problem(device=device)
        self.norm = nn.LayerNorm(K, device=device, dtype=bias.dtype)
        self.first = PackedLinear(weight.part(0), bias[: ROWS[0]].clone())
        self.second = PackedLinear(weight.part(1))
        third = pack([mxfp4.quantize(draw(K, ROWS[0], seed=3))])
        third.to_(device)
        self.third = PackedLinear(third)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.third(torch.tanh(self.first(x)) * self.second(x).mean(-1, keepdim=True))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_whole(device):
    """One graph, for any number of tokens, with the eager values and gradients."""
    model = Block(device)
    model.first.bias.requires_grad_()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        x = activations(2, tokens, K, device=device, seed=tokens).requires_grad_()
        results = []
        for run in (model, compiled):
            y = run(x)
            results.append((y, *torch.autograd.grad(y.square().sum(), [x, model.first.bias])))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


def test_equal_layers_share_a_compiled_graph():
    """Nothing of a weight but its shape is in the graph, so that compiling layer by layer compiles once."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    layers = [Block("cpu") for _ in range(3)]
    layers[2].third = PackedLinear(pack([mxfp4.quantize(100 * draw(K, ROWS[0], seed=9))]))
    x = activations(2, 5, K)
    for layer in layers:
        eager = layer(x)
        layer.compile(fullgraph=True, backend=backend)
        torch.testing.assert_close(layer(x), eager)
    assert len(graphs) == 1


def test_the_operator_keeps_a_weight_as_long_as_its_tensors():
    weight, _, _ = problem()
    x = activations(5, K)
    for i in (0, 1, 0):
        ops.w4a16(x, weight.part(i), None, None)
    known = ops._weights[weight.storage.tiles]
    assert [w.first_row for w in known.values()] == [0, 128]
    first = weakref.ref(next(iter(known.values())))
    del known
    assert first() is not None
    del weight
    assert first() is None


def test_a_compiled_product_with_an_adapter():
    weight, bias, adapter = problem()
    compiled = torch.compile(lambda x: w4a16(x, weight, bias, adapter), fullgraph=True, backend="aot_eager")
    x = activations(5, K)
    assert torch.equal(compiled(x), w4a16(x, weight, bias, adapter))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    """The operators are nodes of the exported graph, the codes its constants."""
    model = Block("cpu").eval()
    tokens = {1: torch.export.Dim("tokens", min=1, max=64)}
    program = torch.export.export(model, (activations(2, 5, K),), dynamic_shapes=(tokens,), strict=strict)
    nodes = [node.target for node in program.graph.nodes]
    assert nodes.count(torch.ops.qerl.w4a16.default) == 3
    x = activations(2, 9, K)
    assert torch.equal(program.module()(x), model(x))


def test_eager_calls_go_past_the_operators(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("an eager call reached the operator")

    monkeypatch.setattr(ops, "w4a16", refuse)
    monkeypatch.setattr(ops, "w4a16_input_grad", refuse)
    Block("cpu")(activations(5, K).requires_grad_()).sum().backward()
