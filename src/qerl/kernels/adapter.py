"""PackedAdapter: the LoRA factors of one fused product, side by side, as the kernels read them.

    y_p += u_p B_p^T,   u_p = round(scaling_p * (x A_p^T))      p: a part of the product (q, k, v), with its own factors

Contract: A is padded to the weight's padded K, B to its padded rows, so that a kernel's tiles of A, B and W have the
same bounds; all ranks are padded to one multiple of 32. B is kept in slices of 16 ranks, the k of one tensor core
instruction, so that a tile's share of a slice is contiguous: one bulk copy. What pads is zero and adds nothing.
Factors are rounded once, to the dtype of the activations (bf16 for the kernels). New ones go into the same memory,
`copies` says where: a CUDA graph that was captured with an adapter sees them. So `scaling` is a tensor, too: zero turns
a part off.

Called by the engine; kernels/w4a16 has the product. Leaves out gradients: trained factors go through nn/lora.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from qerl.kernels.layout import PackedWeight, Part

SLICE = 16  # k of mma.m16n8k16
RANK_STEP = 2 * SLICE  # the Hopper kernel takes two slices a step
MAX_RANK = 64  # u and B's rows stay in registers and shared memory while a tile is finished

Factors = tuple[Float[Tensor, "_ _"], Float[Tensor, "_ _"], float]
"""A [r, K], B [N, r] and the scaling (alpha / r) of one linear; sizes differ from part to part."""


class PackedAdapter(NamedTuple):
    """The adapter of a PackedWeight; made by `pack_adapter`."""

    a: Float[Tensor, "parts r k"]
    """k: the weight's padded K."""
    b: Float[Tensor, "slices padded_rows 16"]
    """Slice i has the ranks 16 i .. 16 i + 15. Rows as in the weight's tiles: each part starts on a multiple of 128."""
    scaling: Float32[Tensor, " parts"]
    """0 where a part has no adapter."""

    def part_b(self, part: Part) -> Float[Tensor, "n r"]:
        """B of one of the weight's parts as a matrix, a copy."""
        return self.b[:, part.start : part.start + part.rows].transpose(0, 1).flatten(1)

    def copies(self, weight: PackedWeight, factors: Sequence[Factors | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """(to, from) of what has to be copied so that A and B are those of new factors, in place.

        `weight` is the one that this was packed for, and ranks are as they were. ValueError: not one entry a part, or
        shapes that are not the part's.
        """
        _check(weight, factors)
        for part, of_part, entry in zip(weight.parts, self.a, factors, strict=True):
            if entry is None:
                continue
            a, b, _ = entry
            rows, slices, rest = self.b[:, part.start : part.start + part.rows], len(a) // SLICE, len(a) % SLICE
            yield of_part[: len(a), : weight.columns], a
            if slices:
                yield rows[:slices], b[:, : slices * SLICE].unflatten(1, (slices, SLICE)).transpose(0, 1)
            if rest:
                yield rows[slices, :, :rest], b[:, slices * SLICE :]


@torch.no_grad()
def pack_adapter(
    weight: PackedWeight, factors: Sequence[Factors | None], dtype: torch.dtype = torch.bfloat16
) -> PackedAdapter:
    """Bring the factors of `weight`'s parts (None: a part without any) into one adapter on the weight's device.

    ValueError: as `copies` says, no factors at all, or a rank above 64.
    """
    _check(weight, factors)
    largest = max((entry[0].shape[0] for entry in factors if entry is not None), default=0)
    if largest == 0:
        raise ValueError("no part has LoRA factors: leave the adapter out")
    if largest > MAX_RANK:
        raise ValueError(
            f"LoRA rank {largest} is more than the {MAX_RANK} that the fused product takes: lower lora.r, "
            "or apply the adapter beside the product"
        )
    rank = -(-largest // RANK_STEP) * RANK_STEP
    rows, columns = weight.padded_shape
    a = torch.zeros(len(weight.parts), rank, columns, dtype=dtype, device=weight.device)
    b = torch.zeros(rank // SLICE, rows, SLICE, dtype=dtype, device=weight.device)
    scaling = torch.tensor([0.0 if entry is None else entry[2] for entry in factors], device=weight.device)
    adapter = PackedAdapter(a, b, scaling)
    for to, new in adapter.copies(weight, factors):
        to.copy_(new)
    return adapter


def _check(weight: PackedWeight, factors: Sequence[Factors | None]) -> None:
    if len(factors) != len(weight.parts):
        raise ValueError(f"{len(factors)} LoRA entries for a product of {len(weight.parts)} parts: give one for each")
    for i, (part, entry) in enumerate(zip(weight.parts, factors, strict=True)):
        if entry is None:
            continue
        a, b, _ = entry
        if a.shape != (b.shape[1], weight.columns) or b.shape[0] != part.rows:
            raise ValueError(
                f"part {i} of the product is [{part.rows}, {weight.columns}]; "
                f"its LoRA factors A {list(a.shape)} and B {list(b.shape)} do not fit"
            )
