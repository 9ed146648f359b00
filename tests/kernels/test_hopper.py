"""Hopper's own kernels: their sources, run on a CPU (emulation.py), against float64; test_fused.py has the GPU."""

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch
from emulation import EmulatedKernel, emulation
from problems import ADVERSARIAL, adversarial, check, draw, empty_is_nan, random_adapter, random_weight, whole

from qerl.formats import mxfp4
from qerl.kernels import nvrtc
from qerl.kernels.layout import pack
from qerl.kernels.nvrtc import signature_of
from qerl.kernels.w4a16 import hopper, prepare
from qerl.kernels.w4a16.hopper import VARIANTS, w4a16_hopper

FILES = {  # of each kernel: what its library exports, the name of its dynamic shared memory
    "w4a16_hopper": ("RUN(w4a16_hopper) SEGMENTS", "raw"),
    "w4a16_prepare": ("RUN(w4a16_prepare)", "unused"),
}


@pytest.fixture
def emulate(monkeypatch):
    """w4a16_hopper on a CPU, on a chip of so many multiprocessors; and its counters, to look at."""
    kept, empty = [], empty_is_nan(torch.empty)

    def keep(*size, **more):
        kept.append(empty(*size, **more))
        return kept[-1]

    monkeypatch.setattr(torch, "empty", keep)

    def set_up(multiprocessors: int, backwards: bool = False) -> torch.Tensor:
        def kernel(source, name, defines, device, *, cluster):
            library = emulation(source, defines, *FILES[name])
            return EmulatedKernel(library, name, signature_of(source, name), backwards, cluster)

        counters = torch.zeros(4096, dtype=torch.int32)
        monkeypatch.setattr(hopper, "kernel", kernel)
        monkeypatch.setattr(prepare, "kernel", kernel)
        for module in (hopper, prepare):
            monkeypatch.setattr(module, "multiprocessors", lambda _: multiprocessors)
        monkeypatch.setattr(hopper, "stream_counters", lambda _: counters)
        monkeypatch.setattr(hopper, "_shared", lambda waves, chunks: waves)  # so that small products share, too
        return counters

    return set_up


SHAPES = [((128,), 64), ((300, 16), 80), ((8, 136, 128), 528), ((200,), 1104)]


@pytest.mark.parametrize(
    "variant, multiprocessors",
    [(v, n) for v in VARIANTS for n in (1, 3, 9) if v.cluster == 1 or n == 1],  # to clusters the number is all the same
    ids=str,
)
def test_product(emulate, variant, multiprocessors):
    """Whole and ragged tiles of tokens, rows and columns, a ring filled more than once, shares that end anywhere."""
    for i, (rows, k) in enumerate(SHAPES):
        for m in (1, variant.tokens + 1) if i != 2 else (variant.tokens,):
            counters = emulate(multiprocessors, backwards=(i + m) % 2 == 0)
            weight, x = random_weight(rows, k), whole(m, k, seed=m).bfloat16()
            bias = draw(sum(rows), seed=3).bfloat16() if i != 1 else None
            adapter = random_adapter(weight, 20) if (i + multiprocessors // 2) % 2 else None
            check(w4a16_hopper(x, weight, bias, adapter, variant), x, weight, bias, adapter)
            assert not counters.any()


@pytest.mark.parametrize("m", [16, 70])
def test_the_highest_rank(emulate, m):
    emulate(2)
    weight, x = random_weight((300, 16), 80), whole(m, 80).bfloat16()
    adapter = random_adapter(weight, 64)
    check(w4a16_hopper(x, weight, None, adapter), x, weight, None, adapter)


def test_a_product_that_was_broken_off_leaves_nothing_to_the_next(emulate, monkeypatch):
    """An interrupt between the two kernels: the first has counted, the second does not come to take that back."""
    emulate(1)
    monkeypatch.setattr(hopper, "stream_counters", nvrtc.stream_counters)
    weight, x = random_weight((96,), 80), whole(12, 80).bfloat16()
    adapter, launch = random_adapter(weight, 20), EmulatedKernel.launch

    def interrupted(kernel, *args, **more):
        if kernel.run.__name__ == "run_w4a16_hopper":
            raise KeyboardInterrupt
        launch(kernel, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EmulatedKernel, "launch", interrupted)
        w4a16_hopper(x, weight, None, adapter)
    check(w4a16_hopper(x, weight, None, adapter), x, weight, None, adapter)


@pytest.mark.parametrize("m", [3, 100])
def test_mxfp4(emulate, m):
    emulate(3)
    weight = pack([mxfp4.quantize(draw(n, 96, seed=n) * n) for n in (100, 130)])
    x = draw(m, 96).bfloat16()
    check(w4a16_hopper(x, weight), x, weight)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_inputs(emulate, name):
    emulate(3)
    x, weight = adversarial(name, 10, 200, 208)
    check(w4a16_hopper(x, weight), x, weight)


def test_the_product_with_each_unit_vector_is_a_column(emulate):
    """Nothing to sum: the weights themselves come out, each in its place."""
    emulate(1)
    weight = random_weight((128,), 64)
    dense, scale = weight.dequantize()
    assert torch.equal(w4a16_hopper(torch.eye(64).bfloat16(), weight), (dense * scale[:, None]).bfloat16().T)


def test_the_same_bits_whatever_block_comes_last(emulate):
    x, results = draw(5, 1040).bfloat16(), []
    for backwards in (False, True):
        emulate(7, backwards)
        weight = random_weight((300,), 1040)
        results.append(w4a16_hopper(x, weight, None, random_adapter(weight, 16), VARIANTS[0]))
    assert torch.equal(*results)


def test_foreign_memory_is_not_read(emulate):
    """x lies between NaN: the columns beyond k have codes of zero, but zero times NaN is NaN."""
    emulate(2)
    for m, k in ((3, 16), (20, 112)):
        weight = random_weight((40,), k)
        around = torch.full((m + 2, k), torch.nan, dtype=torch.bfloat16)
        x = around[1:-1]
        x.copy_(whole(m, k))
        adapter = random_adapter(weight, 32)
        check(w4a16_hopper(x, weight, None, adapter), x, weight, None, adapter)


def test_a_view_of_one_part(emulate):
    emulate(2)
    weight, x = random_weight((130, 64, 300), 128), draw(20, 128).bfloat16()
    for i in range(3):
        check(w4a16_hopper(x, weight.part(i)), x, weight.part(i))


@pytest.mark.parametrize("tokens, m", [(8, 3), (8, 20), (16, 16), (32, 50), (64, 1), (128, 130)])
def test_adapter_input(emulate, tokens, m):
    """u alone, as the portable product takes it on this chip."""
    emulate(1)
    weight, x = random_weight((40, 16, 300), 528), whole(m, 528, seed=m).bfloat16()
    adapter = random_adapter(weight, 20)
    x_ready = torch.zeros(2, dtype=torch.int32)
    u = prepare.adapter_input(x, adapter, tokens, x_ready)
    u = u.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)  # tokens, all ranks
    exact = x.double() @ adapter.a[:, :, :528].flatten(0, 1).double().T
    scaling = adapter.scaling.repeat_interleave(adapter.a.shape[1]).double()
    assert torch.equal(u[:m], (exact * scaling).bfloat16())
    assert x_ready.tolist() == [1, 0]


def test_a_long_k_is_dealt_to_more_blocks(emulate, monkeypatch):
    monkeypatch.setattr(prepare, "_LONG", 512)
    monkeypatch.setattr(prepare, "_LARGE_CLUSTERS_FROM", 3)
    for m, multiprocessors, cluster in ((70, 3, 16), (130, 3, 16), (130, 2, 8)):
        emulate(multiprocessors)
        weight, x = random_weight((40, 300), 528), whole(m, 528, seed=m).bfloat16()
        adapter = random_adapter(weight, 20)
        assert prepare.shape_of(m, 128, 2, 528, multiprocessors).cluster == cluster
        check(w4a16_hopper(x, weight, None, adapter), x, weight, None, adapter)


def test_many_tokens_with_large_blocks_before_the_product(emulate, monkeypatch):
    """What prepare.py's blocks are like is a choice by the clock alone."""
    other = prepare.Shape(threads=256, registers=128, batch=32, ahead=2, at_once=False, beside=False)
    monkeypatch.setattr(prepare, "_MORE", other)
    emulate(2)
    weight, x = random_weight((40, 300), 528), whole(130, 528).bfloat16()
    adapter = random_adapter(weight, 20)
    check(w4a16_hopper(x, weight, None, adapter), x, weight, None, adapter)


@pytest.mark.parametrize("tokens", [16, 128])
def test_prepared_activations_are_as_described(emulate, tokens):
    """[token tile, chunk, token, position]: columns as a thread's fragments have them, 16-byte pieces swizzled."""
    emulate(2)
    m, k, chunks = tokens + 5, 208, 4
    x = torch.arange(m * k).view(m, k).to(torch.int16)  # its bits name each place
    tiles = torch.full((2 * chunks * tokens * 64,), -1, dtype=torch.int16)
    kernel = prepare.prepare_kernel(prepare.TILES_ALONE, tokens, 0, x.device)
    kernel.launch(
        (8, 1, 1), prepare.TILES_ALONE.threads, 0, (x, tiles, 0, 0, 0, m, k, chunks, 256, 1, 8, tiles.numel() // 8, 0)
    )
    expected = torch.zeros(2, chunks, tokens, 64, dtype=torch.int16)
    for w, h, t, j in itertools.product(range(4), range(2), range(4), range(2)):
        for chunk in range(chunks):
            column = 64 * chunk + 16 * t + 4 * w + 2 * h + j
            if column < k:
                for row in range(m):
                    piece = (2 * w + h) ^ row % 8
                    expected[row // tokens, chunk, row % tokens, 8 * piece + 2 * t + j] = x[row, column]
    assert torch.equal(tiles, expected.flatten())


@pytest.mark.parametrize("variant", VARIANTS[:2] + VARIANTS[-2:], ids=str)
def test_every_step_is_done_once(variant):
    """hopper.cu's schedule as hopper.py launches it, for all small products.

    The blocks of a tile have to find each other's sums: they are neighbours, in the order of k; `block_of`, repeated
    here, names the first and the last; a block keeps the sums of two tiles at most, in two places.
    """
    library = emulation(hopper.SOURCE, variant.defines(0, prepare.TILES_ALONE, "e4m3"), *FILES["w4a16_hopper"])
    found = torch.zeros(4096, 4, dtype=torch.int32)
    for k_steps, slices, tiles, multiprocessors in itertools.product(
        range(1, 9), (0, 4), range(1, 40), (1, 2, 3, 5, 8)
    ):
        steps, supertiles = k_steps + slices // 2, variant.panels * tiles - tiles % variant.panels
        plan = SimpleNamespace(
            variant=variant,
            steps=k_steps,
            chunks=1 << 20,  # so many that sharing pays wherever it can
            slices=slices,
            shape=prepare.shape_of(variant.tokens, variant.tokens, slices, 1024, multiprocessors),
            supertiles=supertiles,
            multiprocessors=multiprocessors,
            parts=1,
        )
        launch = hopper._Launch.of(plan, variant.tokens)
        assert launch.blocks <= max(multiprocessors * variant.blocks, tiles * variant.cluster * (variant.cluster > 1))
        sizes = (launch.blocks, steps, tiles, launch.shared_tiles, launch.sharers)
        count = library.segments(*sizes, ctypes.c_void_p(found.data_ptr()))
        of_tile = [[] for _ in range(tiles)]
        for block, tile, begin, end in found[:count].tolist():
            of_tile[tile].append((block, begin, end))
        places, total = set(), launch.shared_tiles * steps
        for tile, segments in enumerate(of_tile):
            blocks, begins, ends = zip(*segments, strict=True)
            assert (0, *ends) == (*begins, steps)
            assert blocks == tuple(range(blocks[0], blocks[0] + len(blocks)))
            if variant.cluster > 1:
                assert len(blocks) == variant.cluster and blocks[0] % variant.cluster == 0
            elif len(blocks) > 1:
                first, last = tile * steps, tile * steps + steps - 1
                assert blocks[0] == ((first + 1) * launch.sharers - 1) // total
                assert blocks[-1] == ((last + 1) * launch.sharers - 1) // total
                own = [(block, block * total // launch.sharers < first) for block in blocks]
                assert places.isdisjoint(own)
                places.update(own)
