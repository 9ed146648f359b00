"""w4a16 as PyTorch operators, so that torch.compile and torch.export see one node and do not look inside.

    qerl::w4a16(x, weight.., bias, adapter..) -> y           with an autograd formula: dx, and the bias's gradient
    qerl::w4a16_input_grad(dy, weight..) -> dx

An operator takes plain tensors and numbers, so a PackedWeight and a PackedAdapter are taken apart (`_arguments`) and
put together again behind it. For the backward pass it keeps the packed codes and nothing else. Adapters have no
gradient here (nn/lora.py trains them beside the product), so one together with an x that wants a gradient is refused.

Called by w4a16 and w4a16_input_grad while a compiler traces them; eager calls go past the operators, which would cost
them some ten microseconds each.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import qerl.kernels.w4a16 as op
from qerl.kernels.adapter import PackedAdapter
from qerl.kernels.layout import PackedWeight, ScaleFormat, Storage, view

_WEIGHT = "Tensor tiles, Tensor global_scale, int first_row, int[] rows, int columns, str scale_format"
_ADAPTER = "Tensor? a, Tensor? b, Tensor? scaling"
_NO_ADAPTER = (None, None, None)

torch.library.define("qerl::w4a16", f"(Tensor x, {_WEIGHT}, Tensor? bias, {_ADAPTER}) -> Tensor")
torch.library.define("qerl::w4a16_input_grad", f"(Tensor dy, {_WEIGHT}) -> Tensor")


def w4a16(
    x: Float[Tensor, "*batch k"],
    weight: PackedWeight,
    bias: Float[Tensor, " n"] | None,
    adapter: PackedAdapter | None,
) -> Float[Tensor, "*batch n"]:
    """The operator; arguments are checked by its caller."""
    return torch.ops.qerl.w4a16(x, *_arguments(weight), bias, *(adapter or _NO_ADAPTER))


def w4a16_input_grad(dy: Float[Tensor, "*batch n"], weight: PackedWeight) -> Float[Tensor, "*batch k"]:
    """The operator; arguments are checked by its caller."""
    return torch.ops.qerl.w4a16_input_grad(dy, *_arguments(weight))


def _arguments(weight: PackedWeight) -> tuple[Any, ...]:
    """What the schema calls _WEIGHT: the whole storage, and which rows of it, so that equal layers are equal calls."""
    storage, rows = weight.storage, [part.rows for part in weight.parts]
    return storage.tiles, storage.global_scale, weight.first_row, rows, weight.columns, storage.scale_format


_weights: MutableMapping[Tensor, dict[tuple[Any, ...], PackedWeight]] = WeakTensorKeyDictionary()


def _weight(
    tiles: UInt8[Tensor, "tiles_n tiles_k 4608"], global_scale: Int32[Tensor, " padded_rows"], *numbers: Any
) -> PackedWeight:
    """The inverse of `_arguments`: the same object each time, as a path may keep what it worked out for a weight."""
    first_row, rows, columns, scale_format = numbers
    known, key = _weights.setdefault(tiles, {}), (first_row, *rows)
    if key not in known:
        storage = Storage(tiles.detach(), global_scale, scale_format)  # an alias: the key itself would live for ever
        known[key] = view(storage, columns, rows, first_row)
    return known[key]


@torch.library.impl("qerl::w4a16", "default")
def _w4a16(
    x: Tensor,
    tiles: Tensor,
    global_scale: Tensor,
    first_row: int,
    rows: Sequence[int],
    columns: int,
    scale_format: ScaleFormat,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scaling: Tensor | None,
) -> Tensor:
    weight = _weight(tiles, global_scale, first_row, rows, columns, scale_format)
    adapter = None if a is None or b is None or scaling is None else PackedAdapter(a, b, scaling)
    return op.compute(x, weight, bias, adapter)


@torch.library.register_fake("qerl::w4a16")
def _w4a16_fake(x: Tensor, tiles: Tensor, global_scale: Tensor, first_row: int, rows: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(rows))


@torch.library.impl("qerl::w4a16_input_grad", "default")
def _w4a16_input_grad(dy: Tensor, *weight: Any) -> Tensor:
    return op.compute_input_grad(dy, _weight(*weight))


@torch.library.register_fake("qerl::w4a16_input_grad")
def _w4a16_input_grad_fake(
    dy: Tensor, tiles: Tensor, global_scale: Tensor, first_row: int, rows: Sequence[int], columns: int, _: ScaleFormat
) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], columns)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, tiles, global_scale, *numbers, _, a, _, _ = inputs
    if a is not None:
        raise ValueError("the product with a packed adapter has no gradient: train the adapter beside it (nn/lora.py)")
    ctx.save_for_backward(tiles, global_scale)
    ctx.numbers = numbers


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = (
        torch.ops.qerl.w4a16_input_grad(grad, *ctx.saved_tensors, *ctx.numbers) if ctx.needs_input_grad[0] else None
    )
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[7] else None
    return grad_x, None, None, None, None, None, None, grad_bias, None, None, None


torch.library.register_autograd("qerl::w4a16", _backward, setup_context=_setup_context)
