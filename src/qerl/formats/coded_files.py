"""NF4 and INT4 layers as files hold them: bitsandbytes' serialised Linear4bit, compressed-tensors' `pack-quantized`.

    bitsandbytes     m.weight u8 [N*K/2, 1]      m.weight.absmax fp32 or u8 [N*K/64]     m.weight.quant_map fp32 [16]
                     m.weight.quant_state.bitsandbytes__nf4: JSON as bytes, with shape, block sizes and offset
                     double quantization:        m.weight.nested_absmax fp32, m.weight.nested_quant_map fp32 [256]
    pack-quantized   m.weight_packed i32 [N, K/8], eight codes an int, lowest bits first;        m.weight_shape [2]
                     m.weight_scale bf16 [N, K/group]; with zero points m.weight_zero_point i32 [N/8, K/group]

compressed-tensors counts codes from -8 and stores them from 0 on, as formats/int4.py has them; on a little-endian
machine the eight codes of an int are four bytes with the even k in the low nibble, which is its order. Called by
checkpoint.py, which finds the tensors, and by writing.py; both name them by what stands behind `m.`
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qerl.formats.int4 import GROUPS, INT4Tensor
from qerl.formats.nf4 import ABSMAX_GROUP, BLOCK, NF4_VALUES, NF4Tensor, dynamic_values
from qerl.formats.nvfp4 import pack_nibbles, unpack_nibbles

NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


def nf4_from_stored(parts: Mapping[str, Tensor], place: str) -> NF4Tensor:
    """A layer of bitsandbytes. ValueError, with `place` in it, for other tables, block sizes, shapes or dtypes."""
    try:
        state: dict[str, Any] = json.loads(_stored(parts, NF4_STATE, place).numpy().tobytes())
        n, k = (int(size) for size in state["shape"])
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{place}.{NF4_STATE} is damaged ({error}): download it again") from None
    nested = "weight.nested_absmax" in parts
    if state.get("quant_type") != "nf4" or state.get("blocksize") != BLOCK:
        raise ValueError(
            f"{place} is {state.get('quant_type')} in blocks of {state.get('blocksize')}: not NF4 of {BLOCK}"
        )
    if nested and state.get("nested_blocksize") != ABSMAX_GROUP:
        raise ValueError(f"{place} has maxima in groups of {state.get('nested_blocksize')}: not {ABSMAX_GROUP}")
    tables = {"quant_map": torch.tensor(NF4_VALUES)} | ({"nested_quant_map": dynamic_values()} if nested else {})
    for name, table in tables.items():
        if not torch.equal(_stored(parts, f"weight.{name}", place).float(), table):
            raise ValueError(f"{place}.weight.{name} is not the table of NF4: not supported")
    num_blocks = n * k // BLOCK
    packed = _shaped(parts, "weight", torch.uint8, n * k // 2, place).view(n, k // 2)
    if not nested:
        return NF4Tensor(packed, _finite(parts, "weight.absmax", torch.float32, num_blocks, place))
    absmax = _shaped(parts, "weight.absmax", torch.uint8, num_blocks, place)
    scale = _finite(parts, "weight.nested_absmax", torch.float32, -(-num_blocks // ABSMAX_GROUP), place)
    offset = state.get("nested_offset")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise ValueError(f"{place}.{NF4_STATE} has a nested_offset of {offset}: download it again")
    return NF4Tensor(packed, absmax, scale, torch.tensor([offset]))


def int4_from_stored(parts: Mapping[str, Tensor], place: str) -> INT4Tensor:
    """A layer of compressed-tensors. ValueError, with `place` in it, for groups, dtypes or an order that differ."""
    if "weight_g_idx" in parts:
        raise ValueError(f"{place} has its columns reordered (weight_g_idx): not supported")
    shape = _shaped(parts, "weight_shape", _stored(parts, "weight_shape", place).dtype, 2, place)
    n, k = (int(size) for size in shape)
    stored = _stored(parts, "weight_scale", place)
    num_groups = stored.shape[1] if stored.ndim == 2 else 0
    if num_groups == 0 or len(stored) != n or k % num_groups or k // num_groups not in GROUPS:
        raise ValueError(f"{place} has scales of shape {list(stored.shape)} for [{n}, {k}]: not groups of {GROUPS}")
    scale = stored.to(torch.bfloat16)
    _finite(parts, "weight_scale", stored.dtype, n * num_groups, place)
    if not torch.equal(scale.to(stored.dtype), stored):
        raise ValueError(f"{place}.weight_scale is {stored.dtype} and no bf16 numbers: not supported")
    packed = _shaped(parts, "weight_packed", torch.int32, n * k // 8, place).view(torch.uint8).view(n, k // 2)
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        by_group = zero.t().contiguous().view(torch.uint8)  # [groups, N/2 bytes]
        zero = unpack_nibbles(by_group)[:, :n].t().contiguous()
    elif zero is not None:
        zero = (zero.to(torch.int16) + 8).to(torch.uint8)
    if zero is not None and (zero.shape != scale.shape or (zero > 15).any()):
        raise ValueError(f"{place}.weight_zero_point is no code for each of {list(scale.shape)} groups")
    return INT4Tensor(packed, scale.contiguous(), zero)


def nf4_as_stored(codes: NF4Tensor, dtype: str) -> dict[str, Tensor]:
    """The inverse of `nf4_from_stored`, on the host; `dtype`: what others dequantise to, such as "bfloat16"."""
    n, half = codes.packed.shape
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": dtype, "shape": [n, 2 * half]}
    parts = {
        "weight": codes.packed.reshape(-1, 1),
        "weight.absmax": codes.absmax,
        "weight.quant_map": torch.tensor(NF4_VALUES),
    }
    if codes.absmax_scale is not None and codes.offset is not None:
        state |= {"nested_blocksize": ABSMAX_GROUP, "nested_dtype": "float32", "nested_offset": codes.offset.item()}
        parts |= {"weight.nested_absmax": codes.absmax_scale, "weight.nested_quant_map": dynamic_values().clone()}
    parts[NF4_STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {name: part.cpu() for name, part in parts.items()}


def int4_as_stored(codes: INT4Tensor) -> dict[str, Tensor]:
    """The inverse of `int4_from_stored`, on the host."""
    n, half = codes.packed.shape
    parts = {
        "weight_packed": codes.packed.contiguous().view(torch.int32),
        "weight_scale": codes.scale,
        "weight_shape": torch.tensor([n, 2 * half]),
    }
    if codes.zero_point is not None:
        by_group = torch.nn.functional.pad(codes.zero_point.t(), (0, -n % 8))  # eight rows an int
        ints = pack_nibbles(by_group).flatten().view(torch.int32)
        parts["weight_zero_point"] = ints.view(len(by_group), -1).t().contiguous()
    return {name: part.cpu() for name, part in parts.items()}


def _stored(parts: Mapping[str, Tensor], name: str, place: str) -> Tensor:
    """A part. ValueError: it is missing."""
    if name not in parts:
        raise ValueError(f"{place}.{name} is missing: download the folder again")
    return parts[name]


def _shaped(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, size: int, place: str) -> Tensor:
    """A part, flat. ValueError: it is missing, of another dtype, or of another size."""
    part = _stored(parts, name, place)
    if part.dtype != dtype or part.numel() != size:
        raise ValueError(
            f"{place}.{name} is {part.dtype} {list(part.shape)}, where {size} numbers of {dtype} were expected"
        )
    return part.contiguous().view(-1)


def _finite(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, size: int, place: str) -> Tensor:
    """A part of scales, flat. ValueError as `_shaped`, and where one is NaN or infinite."""
    part = _shaped(parts, name, dtype, size, place)
    if not part.isfinite().all():
        raise ValueError(f"{place}.{name} contains NaN or infinity: a damaged checkpoint?")
    return part
