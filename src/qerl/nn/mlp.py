"""The gated block of Llama's kind: down(silu(gate(x)) * up(x)), with one operation between the products.

    y = down(swiglu(gate_proj(x), up_proj(x)))          swiglu and its gradient: kernels/activation

It keeps gate, up and their product for the backward pass, where the same written as two operations keeps silu(gate),
too. architecture.py puts it in place of any block that is shown to compute this, with its linears as they are: names,
files and adapters do not change.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.kernels.activation import swiglu, swiglu_grad
from qerl.kernels.room import mark
from qerl.nn.linear import without_view

_LINEARS = ("gate_proj", "up_proj", "down_proj")


class GatedMLP(nn.Module):
    """See the module's text."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.room = 0
        """Columns to leave behind the rows of what `down_proj` reads (kernels/room.py)."""

    def forward(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        """The block's output, without the residual."""
        return self.down_proj(mark(_SwiGLU.apply(self.gate_proj(x), self.up_proj(x), self.room), self.room))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, room: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        return without_view(swiglu(gate.flatten(0, -2), up.flatten(0, -2), room=room).view(gate.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = swiglu_grad(*(x.flatten(0, -2) for x in (grad, gate, up)))
        return dgate.view(gate.shape), dup.view(gate.shape), None


def gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The same block with our operation; None for a module that computes something else, by trying it out."""
    children = dict(module.named_children())
    linears = [children.pop(name, None) for name in _LINEARS]
    if not all(isinstance(linear, nn.Linear) for linear in linears) or list(children) != ["act_fn"]:
        return None
    probe = copy.copy(module)  # without weights, which are gigabytes: with stand-ins in the linears' places
    stand_ins = {name: _Affine(*factors) for name, factors in zip(_LINEARS, ((3, 1), (-2, 5), (1, 0)), strict=True)}
    probe._modules = module._modules | stand_ins
    x = torch.linspace(-2, 2, 16).view(1, 2, 8)
    expected = nn.functional.silu(3 * x + 1) * (5 - 2 * x)
    gate, up, down = linears
    assert gate is not None and up is not None and down is not None
    return GatedMLP(gate, up, down) if torch.allclose(probe(x), expected) else None


class _Affine(nn.Module):
    def __init__(self, factor: float, summand: float) -> None:
        super().__init__()
        self.factor, self.summand = factor, summand

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x + self.summand
