import itertools
import re
from collections.abc import Callable

import pytest
import torch

from qerl.formats import mxfp4
from qerl.formats.mxfp4 import MXFP4Tensor
from qerl.formats.nvfp4 import E2M1_VALUES, NVFP4Tensor, dequantize, pack_nibbles, quantize, unpack_nibbles
from qerl.kernels import layout
from qerl.kernels.layout import TILE_BYTES, pack, unpack


def random_tensor(n: int, k: int, seed: int = 0, global_scale: torch.Tensor | None = None) -> NVFP4Tensor:
    """Any code, any finite scale."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    return NVFP4Tensor(packed, scale, torch.tensor([0.125]) if global_scale is None else global_scale)


def same(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    return (
        torch.equal(a.packed, b.packed)
        and torch.equal(a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8))
        and torch.equal(a.global_scale, b.global_scale)
    )


def slow_tiles(t: NVFP4Tensor) -> torch.Tensor:
    """The layout as its description reads, one bit at a time, from the thread's point of view.

    A warp handles 16 rows x 64 columns. Lane 4 g + t has rows g and g + 8 and columns 16 t .. 16 t + 15 in four words
    of four columns each. A word's registers a0..a3 of mma m16n8k16 are (row g, first pair of columns), (row g + 8,
    first pair), (row g, second pair), (row g + 8, second pair); of a pair the even column is the lower half.
    """
    signs, high_exponents, low_exponents, mantissas = (15, 12, 9, 14), (8, 5, 2, 11), (7, 4, 1, 10), (6, 3, 0, 13)
    codes = unpack_nibbles(t.packed)
    n, k = codes.shape
    scales = t.block_scale.view(torch.uint8)
    tiles = torch.zeros(-(-n // 128), -(-k // 64), TILE_BYTES, dtype=torch.uint8)
    for row, column in itertools.product(range(n), range(k)):
        tile = tiles[row // 128, column // 64]
        warp, in_warp = divmod(row % 128, 16)
        lower_rows, g = divmod(in_warp, 8)
        thread, own = divmod(column % 64, 16)
        word, in_word = divmod(own, 4)
        second_pair, odd = divmod(in_word, 2)
        lane = 4 * g + thread
        register = (0, 2)[second_pair] + lower_rows
        code = int(codes[row, column])
        for bit, places in zip((3, 2, 1, 0), (signs, high_exponents, low_exponents, mantissas), strict=True):
            if code >> bit & 1:
                place = places[register] + 16 * odd
                tile[warp * 512 + lane * 16 + word * 4 + place // 8] |= 1 << place % 8
        if column % 16 == 0:
            tile[4096 + warp * 64 + lane * 2 + lower_rows] = scales[row, column // 16]
    return tiles


@pytest.mark.parametrize("n, k", [(128, 64), (128, 128), (256, 64), (130, 80), (16, 16), (1, 48)])
def test_tiles_are_as_described(n, k):
    t = random_tensor(n, k)
    assert torch.equal(pack([t]).tiles, slow_tiles(t))


def places_in_the_text() -> dict[tuple[int, int], int]:
    """(code a, its bit 3 .. 0) -> bit of half a word, read off the table in layout.py's text."""
    (row,) = re.findall(r"^ +((?:[sem][0-3] ){15}[sem][0-3])$", layout.__doc__, re.M)
    places, bits_left = (
        {},
        {(a, kind): bits for a in range(4) for kind, bits in (("s", [3]), ("e", [2, 1]), ("m", [0]))},
    )
    for place, (kind, a) in zip(range(15, -1, -1), row.split(), strict=True):
        places[int(a), bits_left[int(a), kind].pop(0)] = place
    return places


def numbers_of_bits(numbers: torch.Tensor, tile_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Where `tile_of` puts each bit of its argument: bit p of the tile is the bit that `numbers` gives this number.

    `numbers` [.., bits] numbers the argument's bits. The argument is filled with one binary digit of them at a time.
    """
    found = torch.zeros(TILE_BYTES * 8, dtype=torch.int64)
    for digit in range(15):
        filled = ((numbers >> digit & 1) << torch.arange(numbers.shape[-1])).sum(-1).to(torch.uint8)
        found |= (tile_of(filled)[:, None] >> torch.arange(8) & 1).flatten().long() << digit
    return found


def test_every_bit_of_a_tile_is_where_the_text_says():
    """All 128 x 64 codes, four bits each, and all 128 x 4 scales, eight bits each."""
    places = places_in_the_text()
    no_scale, no_code = torch.zeros(128, 4, dtype=torch.uint8), torch.zeros(128, 32, dtype=torch.uint8)

    def tile(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return pack([NVFP4Tensor(packed, scale.view(torch.float8_e4m3fn), torch.ones(1))]).tiles.flatten()

    expected = torch.zeros(TILE_BYTES * 8, dtype=torch.int64)
    for row, column, bit in itertools.product(range(128), range(64), range(4)):
        i, h, g = row // 16, row // 8 % 2, row % 8
        t, w, j = column // 16, column // 4 % 4, column % 4
        byte = 512 * i + 16 * (4 * g + t) + 4 * w
        expected[8 * byte + 16 * (j % 2) + places[h + 2 * (j // 2), bit]] = (row * 64 + column) * 4 + bit
    numbers = torch.arange(128 * 64 * 4).view(128, 64, 4)
    assert torch.equal(numbers_of_bits(numbers, lambda codes: tile(pack_nibbles(codes), no_scale)), expected)

    expected = torch.zeros(TILE_BYTES * 8, dtype=torch.int64)
    for row, block, bit in itertools.product(range(128), range(4), range(8)):
        byte = 4096 + 64 * (row // 16) + 2 * (4 * (row % 8) + block) + row // 8 % 2
        expected[8 * byte + bit] = (row * 4 + block) * 8 + bit
    numbers = torch.arange(128 * 4 * 8).view(128, 4, 8)
    assert torch.equal(numbers_of_bits(numbers, lambda scale: tile(no_code, scale)), expected)


def test_masked_codes_are_bf16_numbers():
    """The decode that the layout is made for: shift, mask, read as bf16, times 2^126."""
    t = random_tensor(128, 64)
    words = pack([t]).tiles[0, 0, : layout.CODE_BYTES].view(torch.int32).view(8, 8, 4, 4)  # i g t w
    values = torch.tensor(E2M1_VALUES)[unpack_nibbles(t.packed).int()].view(8, 2, 8, 4, 4, 2, 2)  # i h g t w pair odd
    mask = 0x81C081C0 - (1 << 32)
    for a in range(4):
        word = (
            ((words << 1) & (0x80008000 - (1 << 32)) | (words >> 3) & 0x01800180 | (words >> 7) & 0x00400040)
            if a == 3
            else (words << 3 * a) & mask
        )
        lanes = word.contiguous().view(torch.bfloat16).view(8, 8, 4, 4, 2).double() * 2.0**126
        assert torch.equal(lanes, values[:, a % 2, :, :, :, a // 2].double())


@pytest.mark.parametrize("n, k", [(128, 64), (256, 192), (130, 80), (1, 16), (300, 208), (576, 576)])
def test_unpack_is_the_inverse(n, k):
    t = random_tensor(n, k, seed=n)
    assert same(unpack(pack([t])), t)


def test_every_quad_of_codes_survives():
    """All 2^16 combinations of four neighbouring codes, in rows of both halves of a 16-row fragment."""
    packed = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8).view(128, -1)
    packed = torch.cat([packed, packed.roll(8, 0)])
    t = NVFP4Tensor(packed, torch.ones(256, packed.shape[1] // 8).to(torch.float8_e4m3fn), torch.ones(1))
    weight = pack([t])
    assert same(unpack(weight), t)
    assert torch.equal(weight.dequantize()[0], dequantize(t))


def test_the_word_that_the_documentation_works_out():
    packed = torch.zeros(1, 8, dtype=torch.uint8)
    packed[0, :2] = torch.tensor([0x45, 0xD3])
    word = pack([NVFP4Tensor(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1))]).tiles[0, 0, :4]
    assert word.view(torch.int32).item() == 0x03050143


def test_padding_is_zero():
    weight = pack([random_tensor(130, 80)])
    whole = torch.full(weight.padded_shape, torch.nan)
    layout.decode(weight, whole)
    assert weight.padded_shape == (256, 128)
    assert not whole[130:].any() and not whole[:, 80:].any()
    assert not weight.global_scale[130:].any()


def test_parts_are_whole_tiles_one_after_another():
    parts = [random_tensor(n, 64, seed=n) for n in (256, 64, 130)]
    weight = pack(parts)
    assert [(p.start, p.rows) for p in weight.parts] == [(0, 256), (256, 64), (384, 130)]
    assert weight.shape == (450, 64) and weight.padded_shape == (640, 64)
    assert torch.equal(weight.tiles, torch.cat([slow_tiles(t) for t in parts]))
    whole = unpack(weight)
    assert torch.equal(whole.packed, torch.cat([t.packed for t in parts]))
    for i, t in enumerate(parts):
        assert same(unpack(weight.part(i)), t)


def test_rows_that_touch_are_one_run():
    shared, other = torch.tensor([0.5]), torch.tensor([0.25])
    parts = [
        random_tensor(n, 64, global_scale=g)
        for n, g in ((128, shared), (256, shared), (64, shared), (128, shared), (128, other))
    ]
    assert [tuple(run) for run in pack(parts).runs] == [(0, 448, 0.5), (512, 128, 0.5), (640, 128, 0.25)]


def test_each_part_keeps_its_global_scale():
    parts = [random_tensor(64, 32, global_scale=torch.tensor([g])) for g in (0.1, 0.7)]
    weight = pack(parts)
    assert [p.global_scale for p in weight.parts] == [torch.tensor(0.1).item(), torch.tensor(0.7).item()]
    assert torch.equal(weight.row_scale, torch.tensor([0.1] * 64 + [0.7] * 64))
    assert torch.equal(dequantize(unpack(weight)), torch.cat([dequantize(t) for t in parts]))


def test_rows_may_have_global_scales_of_their_own():
    t = random_tensor(100, 32, global_scale=torch.rand(100))
    weight = pack([t])
    assert weight.parts[0].global_scale is None
    assert same(unpack(weight), t)


def test_views_share_the_storage_and_follow_a_move():
    weight = pack([random_tensor(128, 64), random_tensor(64, 64, seed=1), random_tensor(128, 64, seed=2)])
    second, third = weight.part(1), weight.part(2)
    assert second.tiles.data_ptr() == weight.tiles[1].data_ptr()
    assert third.tiles.data_ptr() == weight.tiles[2].data_ptr()
    second.to_("meta")
    assert {w.tiles.device.type for w in (weight, second, third)} == {"meta"}
    assert weight.storage is second.storage is third.storage


def test_all_tensors_are_integers():
    weight = pack([random_tensor(64, 64)])
    assert weight.tiles.dtype == torch.uint8 and weight.global_scale.dtype == torch.int32


def test_parts_of_different_k_are_refused():
    with pytest.raises(ValueError, match=r"same K, got \[64, 32\]"):
        pack([random_tensor(16, 64), random_tensor(16, 32)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_is_exact_in_every_dtype(dtype):
    t = random_tensor(130, 80)
    dense, scale = pack([t]).dequantize(dtype)
    assert dense.dtype == dtype and torch.equal(scale, t.global_scale.expand(130))
    assert torch.equal(dense.float(), dequantize(t._replace(global_scale=torch.ones(1))))


def test_pieces_change_nothing(monkeypatch):
    weight = pack([random_tensor(700, 64)])
    whole = weight.dequantize()[0]
    monkeypatch.setitem(layout._PIECE, "cpu", 2 * 128 * 64)
    assert torch.equal(weight.dequantize()[0], whole)


def test_a_quantised_matrix_comes_back_through_both_ways():
    weight = torch.randn(200, 96, generator=torch.Generator().manual_seed(0))
    t = quantize(weight)
    dense, scale = pack([t]).dequantize()
    assert torch.equal(dense * scale[:, None], dequantize(t))


# MXFP4


def random_mxfp4(n: int, k: int, lowest: int, highest: int, seed: int = 0) -> MXFP4Tensor:
    """Any code (no block of zeros), scales from `lowest` to `highest`, which occurs."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    packed[:, ::16] |= 1
    scale = torch.randint(lowest, highest + 1, (n, k // 32), dtype=torch.uint8, generator=generator)
    scale[-1, -1] = highest
    return MXFP4Tensor(packed, scale)


def same_mxfp4(a: MXFP4Tensor, b: MXFP4Tensor) -> bool:
    return torch.equal(a.packed, b.packed) and torch.equal(a.block_scale, b.block_scale)


def exact(t: MXFP4Tensor) -> torch.Tensor:
    """The meaning of the bits, in float64."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)[unpack_nibbles(t.packed).int()]
    return values * torch.exp2(t.block_scale.double() - 127).repeat_interleave(32, dim=1)


@pytest.mark.parametrize("n, k", [(128, 64), (256, 192), (130, 96), (1, 32), (300, 224)])
@pytest.mark.parametrize("lowest, highest", [(100, 130), (0, 126), (128, 254), (0, 1), (0, 0), (254, 254)])
def test_mxfp4_comes_back(n, k, lowest, highest):
    t = random_mxfp4(n, k, lowest, highest)
    weight = pack([t])
    assert weight.scale_format == "e8m0" and same_mxfp4(unpack(weight), t)
    dense, scale = weight.dequantize(torch.bfloat16)
    assert torch.equal(dense.double() * scale.double()[:, None], exact(t))


def test_mxfp4_codes_lie_as_nvfp4s_do_and_each_scale_twice():
    t = random_mxfp4(130, 96, 120, 130)
    stored = (t.block_scale + (254 - 130)).repeat_interleave(2, dim=1).view(torch.float8_e4m3fn)
    assert torch.equal(pack([t]).tiles, slow_tiles(NVFP4Tensor(t.packed, stored, torch.ones(1))))


@pytest.mark.parametrize("e_max", [0, 2, 3, 127, 254])
def test_mxfp4_products_stay_normal_in_bf16_and_float32(e_max):
    """As a kernel computes: masked code times shifted scale in bf16, then the global scale in float32."""
    lowest = max(0, e_max - 126)
    weight = pack([random_mxfp4(64, 64 * 16, lowest, e_max)])
    stored = layout._scales(weight.tiles)[:64].int()
    scale = (stored << 7).to(torch.int16).view(torch.bfloat16)
    tiny = torch.finfo(torch.bfloat16).tiny  # the smallest normal number
    smallest, largest = (torch.tensor(v * 2.0**-126, dtype=torch.bfloat16) * scale for v in (0.5, 6.0))
    assert smallest.min() >= tiny and largest.isfinite().all()
    assert weight.row_scale.min() >= torch.finfo(torch.float32).tiny and weight.row_scale.isfinite().all()
    assert weight.epilogue_factor == 1
    value = smallest.double() * weight.row_scale.double()[:, None]
    exponents = unpack(weight).block_scale.double().repeat_interleave(2, dim=1)
    assert torch.equal(value, 0.5 * torch.exp2(exponents - 127))


def test_nvfp4_products_in_bf16_are_what_the_epilogue_factor_says():
    """As a kernel computes: two steps that bring the scale up by 2^226, then masked code times scale."""
    byte = torch.arange(127, dtype=torch.int16)
    scale = (byte << 4).view(torch.bfloat16) * 2.0**120 * 2.0**106
    product = torch.tensor(E2M1_VALUES).bfloat16()[:, None] * 2.0**-126 * scale
    exact = torch.tensor(E2M1_VALUES)[:, None] * byte.to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(product.float() * pack([random_tensor(16, 16)]).epilogue_factor, exact)


def test_mxfp4_blocks_of_zeros_set_no_scale_and_come_back_with_byte_0():
    t = random_mxfp4(16, 128, 110, 120)
    t.packed[3, 16:32], t.block_scale[3, 1] = 0x80, 200  # codes 0 and -0 under a large scale
    weight = pack([t])
    assert weight.parts[0].global_scale == 2.0 ** (120 - 128)
    assert torch.equal(weight.dequantize()[0][3, 32:64], torch.zeros(32))
    t.block_scale[3, 1] = 0
    assert same_mxfp4(unpack(weight), t)


def test_mxfp4_blocks_far_below_the_largest_are_zeros():
    t = random_mxfp4(16, 96, 200, 200)
    t.block_scale[2] = torch.tensor([200 - 126, 200 - 127, 0])
    weight = pack([t])
    kept = exact(t)
    kept[2, 32:] = 0
    dense, scale = weight.dequantize(torch.bfloat16)
    assert torch.equal(dense.double() * scale.double()[:, None], kept)
    assert torch.equal(mxfp4.dequantize(unpack(weight)).double(), kept)


def test_an_all_zero_mxfp4_matrix():
    t = mxfp4.quantize(torch.zeros(16, 64))
    weight = pack([t])
    assert same_mxfp4(unpack(weight), t) and not weight.dequantize()[0].any() and weight.row_scale.isfinite().all()


def test_mxfp4_parts_share_a_global_scale():
    parts = [random_mxfp4(n, 64, low, low + 9, seed=n) for n, low in ((128, 100), (64, 120), (16, 90))]
    weight = pack(parts)
    assert [tuple(run) for run in weight.runs] == [(0, 192, 2.0), (256, 16, 2.0)]
    assert torch.equal(unpack(weight).packed, torch.cat([t.packed for t in parts]))
    for i, t in enumerate(parts):
        assert same_mxfp4(unpack(weight.part(i)), t) and weight.part(i).scale_format == "e8m0"


def test_mxfp4_nan_scales_and_mixed_formats_are_refused():
    t = random_mxfp4(16, 64, 100, 110)
    t.block_scale[3, 1] = 255
    with pytest.raises(ValueError, match="part 1 of the product has a block scale of 255, which is NaN"):
        pack([random_mxfp4(16, 64, 100, 110), t])
    with pytest.raises(ValueError, match="same format, got NVFP4 and MXFP4"):
        pack([random_tensor(16, 64), t])
