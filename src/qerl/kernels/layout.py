"""PackedWeight: NVFP4 or MXFP4 codes in the order in which the kernels read them, and the way there and back.

    NVFP4Tensor or MXFP4Tensor per part -> pack -> PackedWeight (tiles, global scales) -> kernels
    unpack and dequantize lead back

A weight [N, K] is cut into tiles of 128 rows x 64 columns, 4608 contiguous bytes each, stored as
uint8 [ceil(N/128), ceil(K/64), 4608]. The order within a tile is that of the A fragments of `mma m16n8k16` (and of
wgmma's register operand, which is the same warp by warp), so that a thread's 16-byte load is all it needs of 16 rows x
64 columns. With row = 16 i + 8 h + g (i < 8, h < 2, g < 8), column = 16 t + 4 w + j (t < 4, w < 4, j < 4) and
lane = 4 g + t:

    codes    32-bit word at byte 512 i + 16 lane + 4 w: the eight codes (h, j), two rows x four columns
    scales   byte at 4096 + 64 i + 2 lane + h: that of the 16 columns that t names

K is summed over, so its order is free: giving thread t of a quad the columns 16 t .. 16 t + 15 (not the instruction's
own 2 t, 2 t + 1, 2 t + 8, 2 t + 9) leaves it one block scale a row. Within a word, columns of even j are in the lower
half and of odd j in the upper, as the two lanes of a packed bf16 pair. A half holds four codes, number
a = h + 2 (j >> 1), in the order of the instruction's four registers:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    a      0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
          s0 s3 m3 s1 e3 e3 s2 e0 e0 m0 e1 e1 m1 e2 e2 m2

Shifted left by 3 a and masked with 0x81C0, codes 0, 1 and 2 are the bf16 number e2m1 * 2^-126 (sign at bit 15, two
exponent bits at 8 and 7, one mantissa bit at 6); code 3 is put together from three masks. So a decode costs about two
instructions a weight, the scale's multiplication included.

A scale byte b becomes a bf16 number by a shift too; `scale_format` says how, and what is left to the epilogue:

    w = e2m1 * block_scale * global_scale,     y = epilogue_factor * global_scale * (sum of x * product)

            block_scale    scale as bf16                 product with the code's bf16     epilogue_factor
    e4m3    e4m3(b)        b << 4 = e4m3(b) * 2^-120,    e2m1 * block_scale * 2^-20       2^20
                           times 2^226 in two steps
    e8m0    2^(b - 253)    b << 7 = 2^(b - 127)          e2m1 * block_scale               1
            (b = 0: 0)     (b = 0: 0)

E4M3 bytes (NVFP4) are the format's own. E8M0 bytes (MXFP4, block 32: the byte is stored for both halves) are shifted so
that every product is a normal bf16 number or zero: b = e + 254 - e_max, global_scale = 2^(e_max - 128), where e is the
format's byte and e_max the largest e of a block with a code other than zero, over all parts (2 at least, so that the
global scale is a normal float32). Then b = 254 at most, and 128 at least: smaller scales, more than 126 octaves below
the largest, would leave bf16's normal range; such a block is stored as zeros, which changes no weight by more than
2^-123 of the largest. So `unpack` is exact but for them and for the byte of blocks of zeros, which comes back as 0.

Contract: K is a multiple of the block; N and K that do not divide are padded with zero codes and zero scales.
A product of several linears (q, k, v; gate, up) is one PackedWeight of several parts, each padded to whole tiles, never
interleaved: so a part is a view. All tensors are integers, so that no `.to(bfloat16)` can round a scale. Views share
one storage, and moving any of them moves all. How a product is computed is said in kernels/w4a16.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Complex128, Float, Float32, Int16, Int32, Int64, UInt8
from torch import Tensor

from qerl.formats import mxfp4
from qerl.formats.mxfp4 import MXFP4Tensor
from qerl.formats.nvfp4 import BLOCK, E2M1_VALUES, NVFP4Tensor, unpack_nibbles

TILE_ROWS, TILE_COLUMNS = 128, 64
CODE_BYTES, SCALE_BYTES = 4096, 512
TILE_BYTES = CODE_BYTES + SCALE_BYTES

ScaleFormat = Literal["e4m3", "e8m0"]

# E8M0 bytes as stored: that of the largest scale; the least whose products with e2m1 * 2^-126 are normal bf16 numbers
# (0.5 * 2^-126 * 2); and the least e_max, for a global scale of 2^-126.
_E8M0_TOP, _E8M0_LEAST, _MIN_E_MAX = 254, 128, 2

# Bits (sign, exponent, exponent, mantissa) of code a within half a word.
_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))

# A quad is the four codes of one row in a word, 16 bits. In both halves of a word the bits 0x83C7 are row 0's, the bits
# 0x7C38 row 1's; so row 0's bits in the upper half trade places with row 1's in the lower, a group of neighbours at a
# time: (mask in the lower half, distance).
_TRADES = ((0x0038, 13), (0x3C00, 12), (0x4000, 17))
_KEEP = 0x7C38_83C7

_PIECE = {"cpu": 1 << 18, "cuda": 1 << 24}  # weights decoded at a time: temporaries that stay in the second-level cache


class Part(NamedTuple):
    """One linear's rows within a PackedWeight."""

    start: int
    """Its first row, padding counted: a multiple of 128."""
    rows: int
    """Its rows, without padding."""
    global_scale: float | None
    """The scale of all its rows, on the host (a GEMM's alpha); None where they differ."""


@dataclass(eq=False)
class Storage:
    """What views share. A move replaces the tensors here, once."""

    tiles: UInt8[Tensor, "tiles_n tiles_k 4608"]
    global_scale: Int32[Tensor, " padded_rows"]
    scale_format: ScaleFormat


@dataclass(eq=False)
class PackedWeight:
    """A frozen weight [N, K] of one or more parts, or a view of some of them. Made by `pack`."""

    storage: Storage
    columns: int
    """K, without padding."""
    parts: tuple[Part, ...]
    """The linears in it, in order; starts count from this view's own first row."""
    first_row: int = 0
    """Where this view begins in the storage."""
    _plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _plans_for: Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) without padding: N is the sum of the parts' rows."""
        return sum(part.rows for part in self.parts), self.columns

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Rows and columns of the tiles."""
        last = self.parts[-1]
        return _round_up(last.start + last.rows, TILE_ROWS), _round_up(self.columns, TILE_COLUMNS)

    @property
    def tiles(self) -> UInt8[Tensor, "tiles_n tiles_k 4608"]:
        """Codes and block scales; the module's text has the order."""
        first = self.first_row // TILE_ROWS
        return self.storage.tiles[first : first + self.padded_shape[0] // TILE_ROWS]

    @property
    def global_scale(self) -> Int32[Tensor, " padded_rows"]:
        """The bits of the float32 scale of each row; 0 in the padding."""
        return self.storage.global_scale[self.first_row : self.first_row + self.padded_shape[0]]

    @property
    def scale_format(self) -> ScaleFormat:
        """What the bytes of the block scales mean: "e4m3" of NVFP4, "e8m0" of MXFP4."""
        return self.storage.scale_format

    @property
    def epilogue_factor(self) -> float:
        """What the sums over a kernel's bf16 weights lack, beside the global scale; the module's text has it."""
        return 2.0**20 if self.scale_format == "e4m3" else 1.0

    @property
    def row_scale(self) -> Float32[Tensor, " n"]:
        """The global scale of each row, without padding."""
        return self.without_row_padding(self.global_scale.view(torch.float32))

    @property
    def device(self) -> torch.device:
        """Where the storage is."""
        return self.storage.tiles.device

    @property
    def tile_table(self) -> Int32[Tensor, "tiles_n 3"]:
        """Of each row of tiles: its first column in a product's result, its rows without padding, its part.

        On the weight's device; made when first asked for.
        """
        table = self.plans.get("tile_table")
        if table is None:
            rows, column = [], 0
            for i, part in enumerate(self.parts):
                for row in range(0, part.rows, TILE_ROWS):
                    rows.append((column + row, min(TILE_ROWS, part.rows - row), i))
                column += part.rows
            table = self.plans["tile_table"] = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return table

    @property
    def plans(self) -> dict[Hashable, Any]:
        """What products have worked out for this weight as it lies now, by keys of their own; empty after a move."""
        if self._plans_for is not self.storage.tiles:
            self._plans, self._plans_for = {}, self.storage.tiles
        return self._plans

    def part(self, index: int) -> PackedWeight:
        """A view of one part."""
        start, rows, scale = self.parts[index]
        return PackedWeight(self.storage, self.columns, (Part(0, rows, scale),), self.first_row + start)

    def to_(self, device: torch.device | str) -> None:
        """Move the storage, and with it every view."""
        self.storage.tiles = self.storage.tiles.to(device)
        self.storage.global_scale = self.storage.global_scale.to(device)

    @property
    def runs(self) -> list[Part]:
        """Parts, merged where they touch and share a global scale: the fewest row ranges without padding."""
        runs = [self.parts[0]]
        for part in self.parts[1:]:
            last = runs[-1]
            if last.start + last.rows == part.start and last.global_scale == part.global_scale:
                runs[-1] = last._replace(rows=last.rows + part.rows)
            else:
                runs.append(part)
        return runs

    def without_row_padding(self, rows: Tensor) -> Tensor:
        """Drop the padding from a tensor whose first dimension counts padded rows; a view where none lies between."""
        pieces = [rows[start : start + length] for start, length, _ in self.runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Float[Tensor, "n k"], Float32[Tensor, " n"]]:
        """e2m1 * block_scale, exact in bf16 and fp32, and the row scales that it is still to be multiplied by.

        PyTorch on any device, into new memory; the products use kernels/dequant, which has a buffer for it. (In fp16
        it is exact too, but for E8M0 scales more than 24 octaves below the largest.)
        """
        dense = torch.empty(self.padded_shape, dtype=dtype, device=self.device)
        decode(self, dense)
        return self.without_row_padding(dense)[:, : self.columns], self.row_scale


def pack(parts: Sequence[NVFP4Tensor | MXFP4Tensor]) -> PackedWeight:
    """Bring quantised matrices of the same K into the kernels' order, as one weight with a part for each.

    ValueError: different K or formats, or an MXFP4 scale that is NaN.
    """
    if len({type(t) for t in parts}) > 1:
        raise ValueError("parts of one product need the same format, got NVFP4 and MXFP4")
    columns = parts[0].packed.shape[1] * 2
    if any(t.packed.shape[1] * 2 != columns for t in parts):
        raise ValueError(f"parts of one product need the same K, got {[t.packed.shape[1] * 2 for t in parts]}")
    if isinstance(parts[0], MXFP4Tensor):
        rows, scale_format = _relative_e8m0([t for t in parts if isinstance(t, MXFP4Tensor)]), "e8m0"
    else:
        nvfp4 = [t for t in parts if isinstance(t, NVFP4Tensor)]
        rows, scale_format = [_Rows(t.packed, t.block_scale.view(torch.uint8), t.global_scale) for t in nvfp4], "e4m3"
    sizes = [t.packed.shape[0] for t in rows]
    *starts, end = _starts(sizes)
    device = parts[0].packed.device
    tiles = torch.empty(end // TILE_ROWS, -(-columns // TILE_COLUMNS), TILE_BYTES, dtype=torch.uint8, device=device)
    global_scale = torch.zeros(end, dtype=torch.float32, device=device)
    for t, start, n in zip(rows, starts, sizes, strict=True):
        _pack_part(t, tiles[start // TILE_ROWS : -(-(start + n) // TILE_ROWS)])
        global_scale[start : start + n] = t.global_scale
    return view(Storage(tiles, global_scale.view(torch.int32), scale_format), columns, sizes)


def view(storage: Storage, columns: int, rows: Sequence[int], first_row: int = 0) -> PackedWeight:
    """The parts of these sizes that lie one after another in a storage, from `first_row` on.

    It looks at the scales, so it waits for the device.
    """
    scale = storage.global_scale[first_row:].view(torch.float32)
    parts = []
    for start, n in zip(_starts(rows), rows, strict=False):
        values = scale[start : start + n].unique()
        parts.append(Part(start, n, values.item() if values.numel() == 1 else None))
    return PackedWeight(storage, columns, tuple(parts), first_row)


def unpack(weight: PackedWeight) -> NVFP4Tensor | MXFP4Tensor:
    """The inverse of `pack`, parts concatenated; an NVFP4 global_scale is [1] where all rows share one."""
    k = weight.columns
    codes = _quad_codes(weight.device).index_select(0, _quads(weight.tiles).flatten())
    packed = codes.view(torch.uint8).view(weight.padded_shape[0], -1)[:, : k // 2]
    packed = weight.without_row_padding(packed).contiguous()
    scales = weight.without_row_padding(_scales(weight.tiles)[:, : k // BLOCK])
    if weight.scale_format == "e8m0":
        e_max = (weight.without_row_padding(weight.global_scale) >> 23) + 1  # a global scale is 2^(e_max - 128)
        exponents = scales[:, ::2].int() + e_max.unsqueeze(1) - _E8M0_TOP
        return MXFP4Tensor(packed, torch.where(scales[:, ::2] > 0, exponents, 0).to(torch.uint8))
    row_scale = weight.row_scale
    return NVFP4Tensor(
        packed,
        scales.contiguous().view(torch.float8_e4m3fn),
        row_scale[:1].clone() if (row_scale == row_scale[0]).all() else row_scale.clone(),
    )


def decode(weight: PackedWeight, out: Float[Tensor, "padded_rows padded_columns"]) -> None:
    """Write e2m1 * block_scale, exact, padding as zeros: one table look-up for four weights. PyTorch, any device."""
    n_tiles, k_tiles, _ = weight.tiles.shape
    table = _quad_values(weight.device)
    step = max(1, _PIECE.get(weight.device.type, _PIECE["cpu"]) // (TILE_ROWS * TILE_COLUMNS * k_tiles))
    for first in range(0, n_tiles, step):
        tiles = weight.tiles[first : first + step]
        values = table.index_select(0, _quads(tiles).flatten()).view(torch.float32)
        scales = _scale_values(_scales(tiles), weight.scale_format)
        blocks = out[first * TILE_ROWS : (first + step) * TILE_ROWS].unflatten(1, (-1, BLOCK))
        torch.mul(values.view(blocks.shape), scales.unsqueeze(2), out=blocks)


def _starts(rows: Sequence[int]) -> list[int]:
    """Where parts of these sizes start, each on a tile, and where the last one's tiles end."""
    return list(accumulate((_round_up(n, TILE_ROWS) for n in rows), initial=0))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class _Rows(NamedTuple):
    """A matrix in the file's order, with scale bytes as the tiles have them."""

    packed: UInt8[Tensor, "n k_half"]
    scales: UInt8[Tensor, "n k_sixteenth"]
    global_scale: Float32[Tensor, " one_or_n"]


def _relative_e8m0(parts: Sequence[MXFP4Tensor]) -> list[_Rows]:
    """E8M0 scales relative to the largest that matters, which the global scale takes up."""
    for i, t in enumerate(parts):
        mxfp4.refuse_nan(t, f"part {i} of the product")
    used = [((t.packed & 0x77) != 0).unflatten(1, (-1, mxfp4.BLOCK // 2)).any(2) for t in parts]  # 0x88: two times -0
    largest = [torch.where(u, t.block_scale, 0).amax() for t, u in zip(parts, used, strict=True)]
    e_max = max(_MIN_E_MAX, int(torch.stack(largest).amax()))
    global_scale = torch.tensor([2.0 ** (e_max - 128)], device=parts[0].packed.device)
    rows = []
    for t, nonzero in zip(parts, used, strict=True):
        stored = t.block_scale.int() + _E8M0_TOP - e_max
        kept = nonzero & (stored >= _E8M0_LEAST)
        codes = t.packed.unflatten(1, (-1, mxfp4.BLOCK // 2))
        packed = torch.where((nonzero & ~kept).unsqueeze(2), 0, codes).flatten(1)
        scales = torch.where(kept, stored, 0).to(torch.uint8)
        rows.append(_Rows(packed, scales.repeat_interleave(mxfp4.BLOCK // BLOCK, dim=1), global_scale))
    return rows


def _scale_values(scales: UInt8[Tensor, "n b"], scale_format: ScaleFormat) -> Float32[Tensor, "n b"]:
    """The block scales that the bytes stand for."""
    if scale_format == "e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    return ((scales.int() - 126).clamp(min=0) << 23).view(torch.float32)  # 2^(b - 253); 0 stays 0


def _pack_part(t: _Rows, tiles: UInt8[Tensor, "tiles_n tiles_k 4608"]) -> None:
    """Write one matrix, padded with zeros, into its tiles."""
    n_tiles, k_tiles, _ = tiles.shape
    rows, columns = n_tiles * TILE_ROWS, k_tiles * TILE_COLUMNS
    packed = _padded(t.packed, rows, columns // 2).view(n_tiles, 8, 2, 8, k_tiles, 4, 4, 2)  # n i h g k t w (j >> 1)
    table = _byte_words(tiles.device)
    words = torch.zeros(n_tiles, 8, 8, k_tiles, 4, 4, dtype=torch.int32, device=tiles.device)  # n i g k t w
    for h in range(2):
        for pair in range(2):
            words |= table[h, pair][packed[:, :, h, ..., pair].int()]
    tiles[..., :CODE_BYTES] = words.permute(0, 3, 1, 2, 4, 5).flatten(2).view(torch.uint8)
    scales = _padded(t.scales, rows, columns // BLOCK).view(n_tiles, 8, 2, 8, k_tiles, 4)
    tiles[..., CODE_BYTES:] = scales.permute(0, 4, 1, 3, 5, 2).flatten(2)  # n k (i g t h)


def _padded(x: UInt8[Tensor, "_ _"], rows: int, columns: int) -> UInt8[Tensor, "_ _"]:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _scales(tiles: UInt8[Tensor, "tiles_n tiles_k 4608"]) -> UInt8[Tensor, "padded_rows blocks"]:
    """The block scales' bytes, row by row."""
    n_tiles, k_tiles, _ = tiles.shape
    scales = tiles[..., CODE_BYTES:].unflatten(2, (8, 8, 4, 2))  # n k i g t h
    return scales.permute(0, 2, 5, 3, 1, 4).reshape(n_tiles * TILE_ROWS, k_tiles * TILE_COLUMNS // BLOCK)


def _quads(tiles: UInt8[Tensor, "tiles_n tiles_k 4608"]) -> Int32[Tensor, "padded_rows quads"]:
    """The codes row by row, four columns a number: the 16 bits that `_trade` brings together, plus 2^16 where h = 1."""
    n_tiles, k_tiles, _ = tiles.shape
    halves = _trade(tiles[..., :CODE_BYTES].view(torch.int32)).view(torch.int16)
    by_row = halves.view(n_tiles, k_tiles, 8, 8, 4, 4, 2).permute(0, 2, 6, 3, 1, 4, 5)  # n i h g k t w
    quads = by_row.to(torch.int32, memory_format=torch.contiguous_format)
    quads &= 0xFFFF
    quads[:, :, 1] |= 0x10000
    return quads.view(n_tiles * TILE_ROWS, k_tiles * TILE_COLUMNS // 4)


def _trade(words: Int32[Tensor, "*shape"]) -> Int32[Tensor, "*shape"]:
    """Bring the four codes of row h = 0 into the lower half of each word, those of row h = 1 into the upper."""
    traded = words & _KEEP
    for mask, distance in _TRADES:
        traded |= (words & mask) << distance
        traded |= (words >> distance) & mask
    return traded


def _spread(codes: Int64[Tensor, " codes"], a: int) -> Int64[Tensor, " codes"]:
    """Four-bit codes with their bits at the places of code `a` within half a word."""
    return torch.stack([(codes >> (3 - i) & 1) << bit for i, bit in enumerate(_BITS[a])]).sum(0)


@cache
def _byte_words(device: torch.device) -> Int32[Tensor, "2 2 256"]:
    """Bits of a word for each byte (two codes) of a file: [row h, first or second pair of columns, byte]."""
    byte = torch.arange(256)
    words = [_spread(byte & 15, a) | _spread(byte >> 4, a) << 16 for a in range(4)]
    return torch.stack(words).view(2, 2, 256).transpose(0, 1).to(torch.int32).to(device)  # a = h + 2 * pair


@cache
def _quad_codes(device: torch.device) -> Int16[Tensor, " 131072"]:
    """The four codes of each number in `_quads`, as the two bytes that a file stores."""
    table = torch.empty(1 << 17, dtype=torch.int16)
    quad = torch.arange(1 << 16)
    for h, (first, second) in enumerate(_byte_words(torch.device("cpu"))):
        words = _trade(first[quad & 255] | second[quad >> 8])
        table[(h << 16) + (words >> 16 * h & 0xFFFF)] = quad.to(torch.int16)
    return table.to(device)


@cache
def _quad_values(device: torch.device) -> Complex128[Tensor, " 131072"]:
    """The four E2M1 values of each number in `_quads`, as one 16-byte element: looked up in a third of the time."""
    codes = unpack_nibbles(_quad_codes(torch.device("cpu")).view(torch.uint8).view(-1, 2))
    return torch.tensor(E2M1_VALUES)[codes.int()].view(torch.complex128).squeeze(1).to(device)
