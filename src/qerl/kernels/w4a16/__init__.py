"""w4a16: the product of activations and a packed 4-bit weight, with its LoRA adapter, and the gradient.

    y[m, n]  = global_scale[n] * sum_k x[m, k] * (e2m1 * block_scale)[n, k] + bias[n] + sum_r u[m, r] * B[n, r]
    u[m, r]  = round(scaling * sum_k x[m, k] * A[r, k])                  A, B, scaling: those of the part that n is in
    dx[m, k] = sum_n dy[m, n] * global_scale[n] * (e2m1 * block_scale)[n, k]

Numeric contract of every path: e2m1 * block_scale enters exactly; x and dy enter in their own dtype; sums are float32;
global scale, bias and adapter are applied in float32 to the finished sum; the result is rounded once, to x's dtype, as
u is.

Rows come without padding: a PackedWeight of parts q, k, v gives [.., Nq + Nk + Nv], so callers split by true sizes
([p.rows for p in weight.parts]) and never see the tiles. K is the true K too.

    device, dtype of x            tokens   path
    CUDA sm_90, bf16              9 .. 1k  hopper.py: wgmma on the packed codes
    CUDA from sm_80, bf16         1 .. 1k  portable.py: mma.sync on the packed codes
    CUDA from sm_80, bf16         more     dense.py: kernels/dequant into the scratch buffer, then cuBLAS
    anything else                          reference.py: in float32; on a GPU with a warning, once

`_product` chooses. The gradient, and the product with an adapter that is trained (`w4a16_adapted`), go through the
scratch buffer always: training has many tokens. (Sampling through the trainer's model, for architectures that the
engine does not know, has few, and pays for it.)

In eager code no function records a graph for autograd: nn/linear.py and nn/lora.py have the autograd functions. While
a compiler traces, `w4a16` and `w4a16_input_grad` are one operator each (ops.py), with an autograd formula;
`w4a16_adapted` has none, and is not called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.adapter import PackedAdapter, pack_adapter
from qerl.kernels.announcement import Announcement
from qerl.kernels.layout import PackedWeight, Part, pack, unpack
from qerl.kernels.nvrtc import CompilerMissing, compiler_version, stream_counters
from qerl.kernels.w4a16 import ops
from qerl.kernels.w4a16.dense import w4a16_adapted_dense, w4a16_dense, w4a16_input_grad_dense
from qerl.kernels.w4a16.hopper import w4a16_hopper
from qerl.kernels.w4a16.portable import awaits_count, w4a16_portable
from qerl.kernels.w4a16.prepare import x_ready_of
from qerl.kernels.w4a16.reference import w4a16_adapted_reference, w4a16_input_grad_reference, w4a16_reference

logger = logging.getLogger(__name__)

__all__ = [
    "PackedAdapter",
    "PackedWeight",
    "Part",
    "awaited",
    "pack",
    "pack_adapter",
    "unpack",
    "w4a16",
    "w4a16_adapted",
    "w4a16_input_grad",
]

MAX_FUSED_TOKENS = 1024
"""Above this many tokens dequantising first is faster: it costs a quarter of the product at 1024, 6 % at 4096."""

Product = Callable[[Tensor, PackedWeight, Tensor | None, PackedAdapter | None], Tensor]
"""x [m, k], weight, bias, adapter -> y [m, n]: what each path provides."""

# (lowest, highest compute capability, fewest tokens, product), the fastest first. They read the packed codes; none
# makes a dense W.
_FUSED: tuple[tuple[tuple[int, int], tuple[int, int], int, Product], ...] = (
    ((9, 0), (9, 0), 9, w4a16_hopper),
    ((8, 0), (12, 1), 1, w4a16_portable),
)


def w4a16(
    x: Float[Tensor, "*batch k"],
    weight: PackedWeight,
    bias: Float[Tensor, " n"] | None = None,
    adapter: PackedAdapter | None = None,
    announcement: Announcement | None = None,
) -> Float[Tensor, "*batch n"]:
    """x W^T + bias + u B^T. announcement: of x, from `awaited`, where somebody has announced it.

    ValueError: x's last dimension is not the weight's K, x is on another device, or bias or adapter are another
    weight's, or of another dtype or device than x.
    """
    _check(x, weight.columns, weight)
    if bias is not None:
        _check_bias(bias, x, weight)
    if adapter is not None:
        _check_adapter(adapter, x, weight)
    if announcement is not None and announcement.publishers:
        y = w4a16_portable(x.reshape(-1, x.shape[-1]), weight, bias, adapter, announcement=announcement)
        return y.view(*x.shape[:-1], y.shape[1])
    return (ops.w4a16 if torch.compiler.is_compiling() else compute)(x, weight, bias, adapter)


def awaited(device: torch.device, dtype: torch.dtype, tokens: int) -> Announcement | None:
    """For x of a product that the current stream will compute; None where that waits for the kernel before it."""
    if torch.compiler.is_compiling() or path_of(device, dtype, tokens) != "portable" or not awaits_count(device):
        return None
    return Announcement(x_ready_of(stream_counters(device)))


def w4a16_input_grad(dy: Float[Tensor, "*batch n"], weight: PackedWeight) -> Float[Tensor, "*batch k"]:
    """dy W, the gradient of `w4a16` (without an adapter) with respect to x. ValueError as there, with N for K."""
    _check(dy, weight.shape[0], weight)
    return (ops.w4a16_input_grad if torch.compiler.is_compiling() else compute_input_grad)(dy, weight)


def w4a16_adapted(
    x: Float[Tensor, "*batch k"],
    weight: PackedWeight,
    bias: Float[Tensor, " n"] | None,
    a: Float[Tensor, "r k"],
    b: Float[Tensor, "n r"],
    scaling: float,
    *,
    room: int = 0,
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "t r"]]:
    """x W^T + bias + u B^T, and u = scaling * (x A^T) of all t tokens, for who trains A and B.

    room: columns behind x's rows that may be written (kernels/room.py); then nothing is copied.

    ValueError as `w4a16`; for a weight of several parts; for factors that are not the weight's, or of another dtype or
    device than x.
    """
    _check(x, weight.columns, weight)
    if bias is not None:
        _check_bias(bias, x, weight)
    n, k = weight.shape
    if len(weight.parts) != 1 or a.shape != (len(a), k) or b.shape != (n, len(a)):
        raise ValueError(
            f"LoRA factors A {list(a.shape)} and B {list(b.shape)} do not fit a weight [{n}, {k}] of "
            f"{len(weight.parts)} parts: wants one part, A [r, {k}] and B [{n}, r]"
        )
    if any((f.dtype, f.device) != (x.dtype, x.device) for f in (a, b)):
        raise ValueError(
            f"LoRA factors are {a.dtype} on {a.device} and {b.dtype} on {b.device}, the activations {x.dtype} on "
            f"{x.device}: bring them there"
        )
    product = w4a16_adapted_dense if _on_tensor_cores(x.device, x.dtype) else w4a16_adapted_reference
    y, u = product(x.reshape(-1, k), weight, bias, a, b, scaling, room)
    return y.view(*x.shape[:-1], n), u


def path_of(device: torch.device, dtype: torch.dtype, tokens: int) -> str:
    """Which product of the module's table runs there: "hopper", "portable", "dense" or "reference"."""
    return _product(device, dtype, tokens).__name__.removeprefix("w4a16_")


def compute(
    x: Float[Tensor, "*batch k"], weight: PackedWeight, bias: Float[Tensor, " n"] | None, adapter: PackedAdapter | None
) -> Float[Tensor, "*batch n"]:
    """`w4a16` without its checks: what the operator runs."""
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    y = _product(x.device, x.dtype, flat.shape[0])(flat, weight, bias, adapter)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[1])


def compute_input_grad(dy: Float[Tensor, "*batch n"], weight: PackedWeight) -> Float[Tensor, "*batch k"]:
    """`w4a16_input_grad` without its checks: what the operator runs."""
    n, k = weight.shape
    product = w4a16_input_grad_dense if _on_tensor_cores(dy.device, dy.dtype) else w4a16_input_grad_reference
    return product(dy.reshape(-1, n), weight).view(*dy.shape[:-1], k)


def _product(device: torch.device, dtype: torch.dtype, tokens: int) -> Product:
    """The path for activations of this kind."""
    if not _on_tensor_cores(device, dtype):
        return w4a16_reference
    if tokens <= MAX_FUSED_TOKENS:
        for fewest, product in _fused(device):
            if tokens >= fewest:
                return product
    return w4a16_dense


@cache
def _fused(device: torch.device) -> tuple[tuple[int, Product], ...]:
    """(fewest tokens, fused product) for a GPU; none where there is no compiler, or none for its capability."""
    capability = torch.cuda.get_device_capability(device)
    found = tuple((fewest, product) for low, high, fewest, product in _FUSED if low <= capability <= high)
    missing = None if found else f"no kernel is for compute capability {capability[0]}.{capability[1]}"
    try:
        compiler_version()
    except CompilerMissing as error:
        missing = str(error)
    if missing is not None:
        logger.warning("packed products go through a dense copy of each weight, slowly: %s", missing)
        return ()
    return found


def _on_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and _has_kernels(device, dtype)


@cache
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        logger.warning("%s has compute capability %d.%d: packed products run in float32, slowly", device, *capability)
    elif dtype != torch.bfloat16:
        logger.warning(
            "activations are %s: packed products run in float32, slowly; bfloat16 (model.dtype) has kernels", dtype
        )
    return capability >= (8, 0) and dtype == torch.bfloat16


def _check(x: Tensor, size: int, weight: PackedWeight) -> None:
    if x.shape[-1] != size:
        raise ValueError(
            f"a tensor of shape {list(x.shape)} against a weight of shape {list(weight.shape)}: wants [.., {size}]"
        )
    if x.device != weight.device:
        raise ValueError(f"the tensor is on {x.device}, the weight on {weight.device}: move one of them")


def _check_bias(bias: Tensor, x: Tensor, weight: PackedWeight) -> None:
    if bias.shape != weight.shape[:1] or bias.dtype != x.dtype or bias.device != x.device:
        raise ValueError(
            f"a bias {list(bias.shape)}, {bias.dtype} on {bias.device}, for {weight.shape[0]} rows and activations of "
            f"{x.dtype} on {x.device}: its shape, dtype and device must be theirs"
        )


def _check_adapter(adapter: PackedAdapter, x: Tensor, weight: PackedWeight) -> None:
    if len(adapter.a) != len(weight.parts) or (adapter.b.shape[1], adapter.a.shape[2]) != weight.padded_shape:
        raise ValueError(
            f"an adapter with A {list(adapter.a.shape)} and B {list(adapter.b.shape)} was not packed for this weight "
            f"of {len(weight.parts)} parts, {list(weight.padded_shape)} with padding"
        )
    if adapter.a.dtype != x.dtype or adapter.a.device != x.device:
        raise ValueError(
            f"the adapter was packed for {adapter.a.dtype} on {adapter.a.device}, the activations are {x.dtype} on "
            f"{x.device}: pack it anew"
        )
