"""dequant: packed tiles -> the dense matrix e2m1 * block_scale, in a scratch buffer that the next call overwrites.

    out[n, k] = e2m1(code[n, k]) * block_scale[n, k / 16]        block_scale: what layout.py says that the byte means

Every product is exact in bf16 (six significant bits), so all implementations agree (but for the sign of zeros). The
global scale is left out: rounding it into bf16 weights would lose that. Who multiplies by W or W^T applies it to the
rows of W: as a GEMM's alpha, in its fp32 epilogue, or to the columns of dy (kernels/w4a16 does).

    device, dtype           path
    CUDA, bf16              dequant.py: a Triton kernel, one launch, each byte read and written once
    anything else           layout.decode: PyTorch table look-ups

`out` is [padded rows, padded columns] of the tiles, row by row, padding zero, with room behind each row if asked for.
There is one buffer for each device and dtype, as large as the largest matrix so far. Two calls may follow each other on
one stream, but not run on two streams at once. A CUDA graph keeps the buffer that it was captured with; capture after
one warm-up call of the same size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.layout import PackedWeight, decode

_buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
_captured: dict[int, Tensor] = {}  # by address: graphs replay with these, so they are never freed


def dequant(
    weight: PackedWeight, dtype: torch.dtype, *, room: int = 0
) -> Float[Tensor, "padded_rows padded_columns_and_room"]:
    """The exact dense matrix without global scale, valid until the next call for this device and dtype.

    room: columns behind the matrix's own, an even number, for the caller to write.
    """
    rows, columns = weight.padded_shape
    out = scratch(weight.device, dtype, rows * (columns + room)).view(rows, columns + room)
    if weight.device.type == "cuda" and dtype == torch.bfloat16:
        from qerl.kernels.dequant.dequant import dequant_bf16  # Triton is there where CUDA is

        dequant_bf16(weight.tiles, weight.scale_format, out)
    else:
        decode(weight, out[:, :columns])
    return out


def scratch(device: torch.device, dtype: torch.dtype, size: int) -> Float[Tensor, " size"]:
    """The buffer's first `size` numbers, with whatever the last call left there."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    buffer = _buffers.get((device, dtype))
    if buffer is None or buffer.numel() < size:
        assert not capturing, "the scratch buffer must not grow in a CUDA graph: call once before the capture"
        with torch.inference_mode(False):  # the engine may come first, and its tensors could not be written in training
            buffer = _buffers[device, dtype] = torch.empty(size, dtype=dtype, device=device)
    if capturing:
        _captured[buffer.data_ptr()] = buffer
    return buffer[:size]
