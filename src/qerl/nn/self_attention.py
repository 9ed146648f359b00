"""The attention block of Llama's kind over packed sequences: rotation of q and k in one pass, in place.

    q, k, v = q_proj(x), k_proj(x), v_proj(x);  q, k = norms of heads, where there are some
    q, k    = rotated by each token's angle            kernels/rope; its gradient is the rotation back
    y       = o_proj(attend_packed(q, k, v))           nn/attention.py

transformers writes the rotation as a dozen operations. `fuse` gives a block that is shown to compute the above a
subclass of its own class, whose forward pass is this one when a call says where sequences end (`packing`), and
transformers' own otherwise: with a cache, or with padded batches. Its linears, names and files do not change.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.kernels.room import mark, room_behind
from qerl.kernels.rope import Rotation, rotate_and_store_
from qerl.nn.attention import Packing, attend_packed
from qerl.nn.rmsnorm import RMSNorm

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")


def fuse(module: nn.Module) -> bool:
    """Change an attention block's forward pass; False for a module that computes something else, by trying it out."""
    children = dict(module.named_children())
    linears = {name: children.pop(name, None) for name in _LINEARS}
    has_norms = list(children) == list(_NORMS) and all(isinstance(norm, RMSNorm) for norm in children.values())
    if not all(isinstance(linear, nn.Linear) for linear in linears.values()) or (children and not has_norms):
        return False
    d = getattr(module, "head_dim", None)
    if not isinstance(d, int) or not hasattr(module, "scaling"):
        return False
    # Without weights, which are not there yet: with small stand-ins in their places.
    probe, width = copy.copy(module), 8
    generator = torch.Generator().manual_seed(0)

    def stand_in(rows: int) -> nn.Linear:
        linear = nn.Linear(width, rows, device="meta")
        linear.weight = nn.Parameter(torch.randn(rows, width, generator=generator), requires_grad=False)
        linear.bias = nn.Parameter(torch.randn(rows, generator=generator), requires_grad=False)
        return linear

    sizes = {name: linear.out_features for name, linear in linears.items() if isinstance(linear, nn.Linear)}
    modules: dict[str, nn.Module] = {name: stand_in(sizes[name]) for name in _LINEARS[:3]}
    modules |= {name: RMSNorm(torch.linspace(0.5, 1.5, d), 1e-6) for name in children}
    probe._modules = module._modules | modules | {"o_proj": nn.Identity()}
    x = torch.randn(1, 7, width, generator=generator)
    angles = torch.arange(7.0)[:, None] * torch.linspace(1, 0.1, d // 2)
    cos, sin = (torch.cat([values, values], -1)[None] for values in (angles.cos(), angles.sin()))
    call: dict[str, Any] = {
        "position_embeddings": (cos, sin),
        "attention_mask": None,
        "packing": Packing(torch.tensor([0, 3, 7], dtype=torch.int32), (3, 4)),
    }
    try:
        expected = probe(x, **call)[0]
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants to be called in another way
        return False
    fused = _fused(type(module))
    probe.__class__ = fused
    if not torch.allclose(probe(x, **call)[0], expected, rtol=1e-4, atol=1e-5):
        return False
    module.__class__ = fused
    return True


@cache
def _fused(block: Any) -> Any:
    """A subclass of a block's class with our forward pass."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **kwargs: Any) -> Any:
        if packing is None:
            return block.forward(self, hidden_states, *args, **kwargs)
        cos, sin = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[0]
        x = mark(hidden_states[0], room_behind(hidden_states))  # a view of the norm's result has no mark of its own
        return _attend(self, x, cos[0], sin[0], packing)[None], None

    return type(block.__name__, (block,), {"forward": forward})


def _attend(
    block: Any, x: Float[Tensor, "t h"], cos: Float[Tensor, "t d"], sin: Float[Tensor, "t d"], packing: Packing
) -> Float[Tensor, "t h"]:
    """The block's output for one row of packed sequences, without the residual."""
    d = block.head_dim
    q, k, v = (linear(x).unflatten(-1, (-1, d)) for linear in (block.q_proj, block.k_proj, block.v_proj))
    if hasattr(block, "q_norm"):
        q, k = block.q_norm(q), block.k_norm(k)
    q, k = _Rotate.apply(q, k, cos[:, : d // 2], sin[:, : d // 2])
    q, k, v = (y.transpose(0, 1) for y in (q, k, v))
    window = getattr(block, "sliding_window", None)
    return block.o_proj(attend_packed(q, k, v, packing, block.scaling, window).flatten(1))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        # In place: products and norms do not keep their outputs. Had anybody kept them, the backward pass would say so.
        q, k = q.detach(), k.detach()
        rotate_and_store_(q, k, k, Rotation(cos, sin))
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # In place, too: attention's backward pass made them for this one. Of keys that it repeated, heads are apart.
        rows = torch.contiguous_format
        dq, dk = (g if g.stride()[1:] == (g.shape[2], 1) else g.clone(memory_format=rows) for g in (dq, dk))
        rotate_and_store_(dq, dk, dk, Rotation(cos.contiguous(), sin.neg()))
        return dq, dk, None, None
