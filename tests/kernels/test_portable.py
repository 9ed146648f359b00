"""The portable kernel's own source, run on a CPU (emulation.py), against float64; test_fused.py runs it on a GPU."""

import itertools

import pytest
import torch
from emulation import EmulatedKernel, emulation
from problems import ADVERSARIAL, adversarial, check, draw, empty_is_nan, random_adapter, random_weight, whole

from qerl.formats import mxfp4
from qerl.formats.nvfp4 import NVFP4Tensor
from qerl.kernels import nvrtc
from qerl.kernels.announcement import Announcement
from qerl.kernels.layout import ScaleFormat, pack
from qerl.kernels.nvrtc import signature_of
from qerl.kernels.w4a16 import portable, prepare
from qerl.kernels.w4a16.portable import VARIANTS, Variant, w4a16_portable


@pytest.fixture
def emulate(monkeypatch):
    """w4a16_portable on a CPU, on a chip of so many multiprocessors; and its counters, to look at."""
    monkeypatch.setattr(torch, "empty", empty_is_nan(torch.empty))

    def set_up(multiprocessors: int, backwards: bool = False, shared_memory: int = 227 << 10) -> torch.Tensor:
        def kernel(name: str, variant: Variant, scale_format: ScaleFormat, _: torch.device) -> EmulatedKernel:
            exports = "RUN(w4a16) RUN(adapter_input)"
            library = emulation(portable.SOURCE, variant.defines(scale_format), exports, "shared")
            return EmulatedKernel(library, name, signature_of(portable.SOURCE, name), backwards)

        counters = torch.zeros(4 * portable._MAX_BLOCKS, dtype=torch.int32)
        monkeypatch.setattr(portable, "multiprocessors", lambda _: multiprocessors)
        monkeypatch.setattr(portable, "shared_memory", lambda _: shared_memory)
        monkeypatch.setattr(portable, "_has_overlap", lambda _: False)
        monkeypatch.setattr(portable, "stream_counters", lambda _: counters)
        monkeypatch.setattr(portable, "_kernel", kernel)
        return counters

    return set_up


SHAPES = [((128,), 64), ((96,), 80), ((300, 16), 144), ((8, 136, 128), 528), ((200,), 1040)]


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 100])
@pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 150])
def test_product(emulate, m, multiprocessors):
    """Small weights, whole and ragged tiles of tokens, rows and columns, and shares that end anywhere."""
    for i, (rows, k) in enumerate(SHAPES if m <= 64 else SHAPES[2:3]):
        counters = emulate(multiprocessors, backwards=(i + m) % 2 == 0)
        weight, x = random_weight(rows, k), whole(m, k, seed=m).bfloat16()
        bias = draw(sum(rows), seed=3).bfloat16() if i != 1 else None
        adapter = random_adapter(weight, rank=(4, 40)[i % 2]) if i != 2 else None
        y = w4a16_portable(x, weight, bias, adapter)
        check(y, x, weight, bias, adapter)
        assert not counters.any()


@pytest.mark.parametrize("multiprocessors", [1, 7])
@pytest.mark.parametrize("variant", [v for v in portable.VARIANTS if v.tokens == 8], ids=str)
def test_every_variant_for_few_tokens(emulate, variant, multiprocessors):
    for m, (rows, k) in ((1, SHAPES[2]), (7, SHAPES[3]), (8, SHAPES[4])):
        counters = emulate(multiprocessors, backwards=m == 7)
        weight, x = random_weight(rows, k), whole(m, k, seed=m).bfloat16()
        adapter = random_adapter(weight, rank=20) if m > 1 else None
        check(w4a16_portable(x, weight, None, adapter, variant), x, weight, None, adapter)
        assert not counters.any()


def test_the_variant_for_few_tokens_is_chosen_by_the_weights_size():
    """On a chip of 132 multiprocessors: rows and columns of Qwen2.5's products."""

    def of(rows: int, columns: int, *, processors: int = 132, shared_memory: int = 227 << 10) -> Variant:
        return portable.choose(8, rows, columns, processors, shared_memory)

    assert of(5120, 5120) == of(4608, 3584) == of(896, 4864) == portable._NARROWEST  # o of 14B and 32B, qkv of 7B
    assert of(7168, 5120) == of(6144, 4096) == portable._NARROW  # qkv of 32B, of Llama 8B
    assert of(3584, 18944) == portable._NARROW_LONG  # down of 7B
    assert of(2048, 11008) == of(5120, 13824) == of(55296, 5120) == portable._WIDE  # down of 3B, of 14B; gate+up
    assert of(55296, 5120, shared_memory=99 << 10) == portable._WIDE_PASSING
    assert portable.choose(8, 55296, 5120, 132, 227 << 10, adapter=True) == portable._WIDE_BESIDE


@pytest.fixture
def beside(emulate, monkeypatch):
    """`emulate` on a chip where prepare.cu computes u, beside the product."""

    def emulated(source, name, defines, device, *, cluster):
        library = emulation(source, defines, f"RUN({name})", "unused")
        return EmulatedKernel(library, name, signature_of(source, name), False, cluster)

    monkeypatch.setattr(portable, "awaits_count", lambda _: True)
    monkeypatch.setattr(prepare, "kernel", emulated)
    monkeypatch.setattr(prepare, "multiprocessors", lambda _: 132)
    return emulate


@pytest.mark.parametrize("multiprocessors", [1, 7])
@pytest.mark.parametrize("m", [1, 8])
def test_an_adapter_beside_the_product(beside, m, multiprocessors):
    """x is waited for by a count, which is taken back: with x that stays, and from registers."""
    for variant in (portable._WIDE_BESIDE, portable._NARROW, portable._NARROWEST, portable._NARROW_LONG):
        counters = beside(multiprocessors)
        weight, x = random_weight((8, 136, 128), 528), whole(m, 528, seed=m).bfloat16()
        adapter = random_adapter(weight, 20)
        check(w4a16_portable(x, weight, None, adapter, variant), x, weight, None, adapter)
        assert not counters.any()


@pytest.mark.parametrize("rank", [0, 20])
@pytest.mark.parametrize("m", [1, 8])
def test_x_that_was_announced(beside, m, rank):
    """The product waits for the publishers' counts, and takes them back; what computes u beside it counts nothing."""
    for variant in (portable._WIDE, portable._NARROW, portable._NARROWEST, portable._NARROW_LONG):
        counters = beside(3)
        weight, x = random_weight((8, 136, 128), 528), whole(m, 528, seed=m).bfloat16()
        adapter = random_adapter(weight, rank) if rank else None
        announcement = Announcement(prepare.x_ready_of(counters))
        announcement.by(5).copy_(torch.tensor([5, 0]))
        check(w4a16_portable(x, weight, None, adapter, variant, announcement), x, weight, None, adapter)
        assert not counters.any()


def test_a_product_that_was_broken_off_leaves_nothing_to_the_next(beside, monkeypatch):
    """An interrupt between the two kernels: the first has counted, the second does not come to take that back."""
    beside(2)
    monkeypatch.setattr(portable, "stream_counters", nvrtc.stream_counters)
    weight, x = random_weight((96,), 80), whole(3, 80).bfloat16()
    adapter, launch = random_adapter(weight, 20), EmulatedKernel.launch

    def interrupted(kernel: EmulatedKernel, *args: object, **more: object) -> None:
        if kernel.run.__name__ == "run_w4a16":
            raise KeyboardInterrupt
        launch(kernel, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EmulatedKernel, "launch", interrupted)
        w4a16_portable(x, weight, None, adapter)
    check(w4a16_portable(x, weight, None, adapter), x, weight, None, adapter)


@pytest.mark.parametrize("m", [3, 16])
def test_mxfp4(emulate, m):
    emulate(3)
    weight = pack([mxfp4.quantize(draw(n, 96, seed=n) * n) for n in (100, 130)])
    x = draw(m, 96).bfloat16()
    check(w4a16_portable(x, weight), x, weight)


@pytest.mark.parametrize("m", [5, 20])
def test_every_row_and_column_of_a_tile_has_its_place(emulate, m):
    """One weight at a time would be slow: row n has its only weight at column (7 n) % 64, x tells the columns apart."""
    emulate(1)
    codes = torch.zeros(128, 64, dtype=torch.uint8)
    columns = torch.arange(128) * 7 % 64
    codes[torch.arange(128), columns] = 2  # 1.0
    t = NVFP4Tensor(codes[:, ::2] | codes[:, 1::2] << 4, torch.ones(128, 4).to(torch.float8_e4m3fn), torch.ones(1))
    x = (torch.arange(64) + 64 * torch.arange(m)[:, None] % 256).bfloat16()
    assert torch.equal(w4a16_portable(x, pack([t])), x[:, columns])


def test_foreign_memory_is_not_read(emulate):
    """x lies between NaN: the columns beyond k have codes of zero, but zero times NaN is NaN."""
    emulate(2)
    for m, (rows, k) in itertools.product((3, 20), [((40,), 16), ((130,), 112)]):
        weight = random_weight(rows, k)
        around = torch.full((m + 2, k), torch.nan, dtype=torch.bfloat16)
        x = around[1:-1]
        x.copy_(draw(m, k))
        check(w4a16_portable(x, weight), x, weight)


def test_an_unaligned_x_is_copied(emulate):
    emulate(1)
    weight, flat = random_weight((64,), 64), draw(8 * 64 + 1).bfloat16()
    x = flat[1:].view(8, 64)
    assert x.data_ptr() % 16
    check(w4a16_portable(x, weight), x, weight)


def test_the_same_bits_whatever_block_comes_last(emulate):
    weight, x = random_weight((300,), 1040), draw(5, 1040).bfloat16()
    results = []
    for backwards in (False, True):
        emulate(7, backwards)
        results.append(w4a16_portable(x, weight, None, random_adapter(weight, 16)))
    assert torch.equal(*results)


def test_a_view_of_one_part(emulate):
    emulate(2)
    weight, x = random_weight((130, 64, 300), 128), draw(6, 128).bfloat16()
    for i in range(3):
        check(w4a16_portable(x, weight.part(i)), x, weight.part(i))


def test_the_tile_table():
    weight = random_weight((300, 16, 128), 64)
    assert weight.tile_table.tolist() == [[0, 128, 0], [128, 128, 0], [256, 44, 0], [300, 16, 1], [316, 128, 2]]
    assert weight.tile_table is weight.tile_table
    assert weight.part(1).tile_table.tolist() == [[0, 16, 0]]
    weight.to_("meta")
    assert weight.tile_table.device.type == "meta"


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_fit_the_smallest_chip(variant):
    """sm_86, 89 and 120: 100 KiB a multiprocessor, of which 1 KiB a block is the system's; 1,536 threads.

    Those that keep x are chosen by what a chip has.
    """
    assert variant.resident or variant.blocks * (variant.shared_bytes(steps=1) + 1024 + 16) <= 100 * 1024
    assert variant.blocks * variant.threads <= 1536


@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize("multiprocessors", [1, 3, 7])
@pytest.mark.parametrize("warps", [(4, 2), (1, 8), (2, 4)])
def test_x_that_stays(emulate, m, multiprocessors, warps):
    """Shares longer than K, shorter, and with their beginning behind their end; ragged K; x between NaN."""
    emulate(multiprocessors)
    v = Variant(8 if m <= 8 else 16, *warps, slices=2, depth=3, chunks=1, stages=1, blocks=1, resident=True)
    for rows, k in [((300, 16), 1040), ((128,), 64), ((520,), 528)]:
        weight = random_weight(rows, k)
        around = torch.full((m + 2, k), torch.nan, dtype=torch.bfloat16)
        x = around[1:-1]
        x.copy_(whole(m, k, seed=m))
        check(w4a16_portable(x, weight, variant=v), x, weight)


def test_what_stays_is_what_fits_and_pays():
    """Of an H200, and of a chip with 99 KiB a multiprocessor: gate and up of 32B and of 3B, down of 32B."""
    for m, columns, rows, large, small in [
        (8, 5120, 55_296, True, False),
        (8, 2048, 22_016, True, True),
        (8, 27_648, 5120, True, False),
    ]:
        assert portable.choose(m, rows, columns, 132, 227 << 10).resident == large
        assert portable.choose(m, rows, columns, 84, 99 << 10).resident == small


@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_inputs(emulate, name, m):
    emulate(3)
    x, weight = adversarial(name, m, 200, 208)
    check(w4a16_portable(x, weight), x, weight)
