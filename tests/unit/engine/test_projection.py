"""Fused products with their adapters: within the packed product where it takes them, beside it elsewhere."""

from __future__ import annotations

import pytest
import torch
from tiny_policies import policy, scatter_adapters
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qerl.engine.projection as projection
from qerl.config import LoraConfig
from qerl.engine.model import Decoder
from qerl.engine.projection import Projection, base_linear, sync
from qerl.kernels.adapter import PackedAdapter
from qerl.nn.lora import attach_lora, lora_factors
from qerl.nn.structure import decoder_layers

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))


def qkv(model: nn.Module) -> list[nn.Module]:
    attention = decoder_layers(model)[0].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def products(monkeypatch: pytest.MonkeyPatch) -> list[PackedAdapter | None]:
    """The adapter of every packed product from here on."""
    seen: list[PackedAdapter | None] = []
    w4a16 = projection.w4a16

    def counting(x, weight, bias, adapter, announcement=None):
        seen.append(None if adapter is None else PackedAdapter(*(t.clone() for t in adapter)))
        return w4a16(x, weight, bias, adapter, announcement)

    monkeypatch.setattr(projection, "w4a16", counting)
    return seen


def same(a: PackedAdapter, b: PackedAdapter) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@torch.no_grad()
def check(fused: Projection, linears: list[nn.Module], gain: float = 1.0) -> None:
    """What the trainer's linears give, with the adapter's part multiplied by `gain`."""
    for got, linear in zip(fused(X, gain), linears, strict=True):
        bare, factors = base_linear(linear)(X), lora_factors(linear)
        delta = 0 if factors is None else factors.scaling * gain * (X @ factors.a.T @ factors.b.T)
        torch.testing.assert_close(got, bare + delta, rtol=1e-5, atol=1e-4 * max(1, gain))
        assert gain != 1 or factors is None or (got - bare).abs().max() > 0.1


def test_biases_that_are_trained_too_are_those_of_the_trainer() -> None:
    linears = qkv(policy("qwen2"))
    fused = Projection(linears, torch.float32)
    for linear in linears:
        bias = base_linear(linear).bias
        assert bias is not None
        bias.requires_grad_().data += 1
    sync([fused])
    check(fused, linears)


def test_one_product_takes_its_adapters_in(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = qkv(policy("qwen2"))
    seen, fused = products(monkeypatch), Projection(linears, torch.float32)
    sync([fused])
    check(fused, linears)
    assert len(seen) == 1 and isinstance(seen[0], PackedAdapter)


def test_a_sync_writes_into_the_memory_that_graphs_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2")
    linears, fused = qkv(model), Projection(qkv(model), torch.float32)
    sync([fused])
    addresses = [t.data_ptr() for t in fused._within]
    scatter_adapters(model)
    linears[0].scaling["default"] = 0.25
    largest = sync([fused])
    assert [t.data_ptr() for t in fused._within] == addresses
    check(fused, linears)
    assert torch.equal(largest, torch.stack([lora_factors(m).b.abs().max() for m in linears]))


def test_a_sync_takes_as_many_operations_for_a_model_as_for_a_layer() -> None:
    """Each costs a GPU some microseconds, and a model has hundreds of adapters."""

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    decoder = Decoder(policy("qwen2"))
    decoder.sync(None)
    for projections in (decoder.projections[:1], decoder.projections):
        names: list[str] = []
        with Writes():
            sync(projections)
        changes = [name for name in names if "copy" in name or "norm" in name or name in ("stack", "abs", "fill_")]
        assert changes == ["_foreach_copy_", "_foreach_copy_", "_foreach_norm", "stack"]


@pytest.mark.parametrize("gain", [0.0, 1e6])
def test_a_gain_lasts_for_one_call(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = qkv(policy("qwen2"))
    seen, fused = products(monkeypatch), Projection(linears, torch.float32)
    sync([fused])
    before = fused(X)
    check(fused, linears, gain)
    after = fused(X)
    assert same(seen[0], seen[2]) and not same(seen[0], seen[1])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_adapters_come_go_and_change_their_rank() -> None:
    model = policy("llama", lora=False)
    bare = Projection(qkv(model), torch.float32)
    assert len(sync([bare])) == 0
    check(bare, qkv(model))
    adapted = attach_lora(model, LoraConfig(r=5, target_modules=["q_proj", "v_proj"]), seed=1)
    scatter_adapters(adapted)
    linears = qkv(adapted)
    fused = Projection(linears, torch.float32)
    assert len(sync([fused])) == 2
    check(fused, linears)
    with adapted.disable_adapter():
        assert len(sync([fused])) == 0
        check(fused, linears)
    sync([fused])
    check(fused, linears)


@pytest.mark.parametrize("packed", [True, False])
def test_a_sync_that_found_no_memory_is_made_up_for_by_the_next(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2", packed=packed)
    linears, fused = qkv(model), Projection(qkv(model), torch.float32)

    def full(*sizes: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(projection, "pack_adapter" if packed else "_Beside", full)
        sync([fused])
    sync([fused])
    check(fused, linears)


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_coded_weights_are_one_product(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2", format=format)
    linears, calls = qkv(model), []
    product = projection.coded_product
    monkeypatch.setattr(projection, "coded_product", lambda *args: calls.append(args) or product(*args))
    fused = Projection(linears, torch.float32)
    (weights,) = fused.weights
    assert all(w is base_linear(linear).packed for w, linear in zip(weights, linears, strict=True))
    sync([fused])
    check(fused, linears)
    assert len(calls) == 1
    check(fused, linears, gain=3.0)
    base_linear(linears[0]).packed.codes.packed.fill_(0)  # the trainer's own storage is what is read
    check(fused, linears)


@pytest.mark.parametrize("why", ["dense", "rank", "several"])
def test_what_no_product_takes_in_is_added_beside(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2", packed=why != "dense", lora=False)
    model = attach_lora(model, LoraConfig(r=65 if why == "rank" else 4, rank_pattern={"k_proj": 3}), seed=2)
    scatter_adapters(model)
    linears = qkv(model)[:: -1 if why == "several" else 1]  # q, k, v is one packed weight; v, k, q is not
    seen, fused = products(monkeypatch), Projection(linears, torch.float32)
    for _ in range(2):
        sync([fused])
        check(fused, linears)
        check(fused, linears, gain=0.0)
        check(fused, linears, gain=3.0)
        scatter_adapters(model)
    assert seen == [None] * (6 * {"dense": 0, "rank": 1, "several": 3}[why])


@torch.no_grad()
def leave_room(linears: list[nn.Module], rows: int) -> None:
    """Weights and free rows behind them in one storage, as nn/load.py leaves them."""
    bases = [base_linear(linear) for linear in linears]
    fused = torch.cat([*(base.weight for base in bases), torch.full((rows, 64), torch.nan)])
    *views, free = fused.split([*(len(base.weight) for base in bases), rows])
    for base, view in zip(bases, views, strict=True):
        base.weight.data = view
    bases[-1].spare_rows = free


@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_product_has_its_adapters_in_the_rows_behind_it(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2" if bias else "mistral", packed=False, lora=False)
    leave_room(qkv(model), rows=12)
    model = attach_lora(model, LoraConfig(r=4, rank_pattern={"k_proj": 3}), seed=2)
    scatter_adapters(model)
    linears, fused = qkv(model), Projection(qkv(model), torch.float32)
    calls: list[torch.Size] = []
    product = torch.nn.functional.linear
    monkeypatch.setattr(projection.F, "linear", lambda x, *more: calls.append(more[0].shape) or product(x, *more))
    sync([fused])
    calls.clear()
    fused(X)
    fused(X, 0.0)
    rows = sum(base_linear(linear).out_features for linear in linears)
    of_x = [shape for shape in calls if shape[1] == 64]
    assert of_x == [(rows + 11, 64), (rows, 64)]
    for _ in range(2):
        for linear in linears if bias else []:
            base_linear(linear).bias.requires_grad_().data += 1
        sync([fused])
        check(fused, linears)
        check(fused, linears, gain=0.0)
        check(fused, linears, gain=3.0)
        scatter_adapters(model)


def test_adapters_that_find_no_room_behind_are_beside() -> None:
    model = policy("qwen2", packed=False, lora=False)
    leave_room(qkv(model), rows=11)
    model = attach_lora(model, LoraConfig(r=4), seed=2)
    scatter_adapters(model)
    linears, fused = qkv(model), Projection(qkv(model), torch.float32)
    sync([fused])
    check(fused, linears)
    assert base_linear(linears[-1]).spare_rows.isnan().all()


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
@torch.no_grad()
def test_a_young_adapter_is_rounded_as_in_the_trainer(family: str) -> None:
    """bf16. Else trainer and engine are two policies: added to a rounded product, a quarter would be other numbers."""
    linears = qkv(policy(family, dtype=torch.bfloat16))
    for linear in linears:
        lora_factors(linear).b.mul_(2**-7)
    fused = Projection(linears, torch.bfloat16)
    sync([fused])
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for got, linear in zip(fused(x), linears, strict=True):
        bare, ours = base_linear(linear)(x), linear(x)
        assert (ours == got).float().mean() > 0.97
        assert 0.1 < (bare == got).float().mean() < 0.4


def test_the_sum_of_a_packed_product_is_rounded_once() -> None:
    """bf16: the nearest number to the sum over the rounded x, A, u and B."""
    linears = qkv(policy("qwen2", dtype=torch.bfloat16))
    fused = Projection(linears, torch.bfloat16)
    sync([fused])
    x = X.bfloat16()
    for got, linear in zip(fused(x), linears, strict=True):
        factors, base = lora_factors(linear), base_linear(linear)
        dense, scale = base.packed.dequantize()
        u = (factors.scaling * (x.float() @ factors.a.bfloat16().float().T)).bfloat16().float()
        exact = (x.double() @ dense.double().T) * scale + base.bias + u.double() @ factors.b.bfloat16().double().T
        assert (got == exact.bfloat16()).float().mean() > 0.99  # but for u's own roundings, and ties
