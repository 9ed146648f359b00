"""The portable kernel: its own source on a CPU (emulation.cpp), and the real thing on a GPU, against float64."""

import ctypes
import itertools
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from qerl.formats import mxfp4
from qerl.formats.nvfp4 import BLOCK, NVFP4Tensor, quantize
from qerl.kernels.adapter import PackedAdapter, pack_adapter
from qerl.kernels.layout import PackedWeight, pack
from qerl.kernels.nvrtc import KERNELS
from qerl.kernels.w4a16 import portable
from qerl.kernels.w4a16.portable import VARIANTS, Variant, w4a16_portable
from qerl.kernels.w4a16.reference import w4a16_reference

TYPES = {"P": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
TOLERANCE = 2e-3  # relative, of the whole result: rounding it to bf16 alone makes 1.7e-3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_weight(rows: tuple[int, ...], k: int) -> PackedWeight:
    return pack([quantize(draw(n, k, seed=n + i)) for i, n in enumerate(rows)])


def random_adapter(weight: PackedWeight, rank: int) -> PackedAdapter:
    """Every part but the second has factors."""
    k = weight.columns
    factors = [
        None if i == 1 else (draw(rank, k, seed=i) / k**0.5, draw(p.rows, rank, seed=i + 9), 0.5 + i)
        for i, p in enumerate(weight.parts)
    ]
    return pack_adapter(weight, factors)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    assert y.shape == expected.shape
    return ((y.double() - expected).norm() / expected.norm()).item()


def exact(x, weight, bias=None, adapter=None) -> torch.Tensor:
    """The reference in float64, on x's device; u rounded to bf16 as the contract says."""
    dense, scale = weight.dequantize()
    y = x.double() @ dense.double().T * scale.double()
    if bias is not None:
        y += bias.double()
    if adapter is not None:
        columns = y.split([p.rows for p in weight.parts], dim=1)
        for out, part, a, scaling in zip(columns, weight.parts, adapter.a, adapter.scaling, strict=True):
            u = (scaling.double() * (x.double() @ a[:, : x.shape[1]].double().T)).bfloat16()
            out += u.double() @ adapter.part_b(part).double().T
    return y


# --- On a CPU --------------------------------------------------------------------------------------------------------


class EmulatedKernel:
    """A Kernel of nvrtc.py that runs on this machine; it holds on to nothing between launches."""

    def __init__(self, library: ctypes.CDLL, name: str, backwards: bool) -> None:
        self.run, self.signature, self.backwards = library[f"run_{name}"], portable._SIGNATURES[name], backwards

    def launch(self, grid, block, shared, args, *, overlap=False) -> None:
        values = [
            TYPES[letter](a.data_ptr() if isinstance(a, torch.Tensor) else a)
            for letter, a in zip(self.signature, args, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        assert shared <= 99 * 1024
        assert self.run(grid[0], block, self.backwards, pointers) == 0, "threads wait for each other for ever"


@cache
def emulation(variant: Variant, scale_format: str) -> ctypes.CDLL:
    library = Path(mkdtemp()) / "emulation.so"
    defines = [f"-D{name}={value}" for name, value in variant.defines(scale_format).items()]
    folders = [f"-I{KERNELS}", f"-I{portable.SOURCE.parent}"]
    source = f'-DSOURCE="{portable.SOURCE.name}"'
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++17", "-w", source, *defines, *folders]
    subprocess.run([*command, str(Path(__file__).with_name("emulation.cpp")), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(library.parent)
    return loaded


@pytest.fixture
def emulate(monkeypatch):
    """w4a16_portable on a CPU, on a chip of so many multiprocessors; and its counters, to look at."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    empty = torch.empty

    def empty_with_nan(*size, **more):
        """Memory as bad as it can be: results and workspace that nobody has written are NaN."""
        out = empty(*size, **more)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", empty_with_nan)

    def set_up(multiprocessors: int, backwards: bool = False) -> torch.Tensor:
        counters = torch.zeros(max(v.blocks for v in VARIANTS) * multiprocessors, dtype=torch.int32)
        monkeypatch.setattr(portable, "_multiprocessors", lambda _: multiprocessors)
        monkeypatch.setattr(portable, "_has_overlap", lambda _: False)
        monkeypatch.setattr(portable, "zeros", lambda _: counters)
        monkeypatch.setattr(portable, "_kernel", lambda name, v, f, _: EmulatedKernel(emulation(v, f), name, backwards))
        return counters

    return set_up


SHAPES = [((128,), 64), ((96,), 80), ((300, 16), 144), ((8, 136, 128), 528), ((200,), 1040)]


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 100])
@pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 150])
def test_the_source_on_a_cpu(emulate, m, multiprocessors):
    """Every variant, whole and ragged tiles of tokens, rows and columns, and shares that end anywhere."""
    for i, (rows, k) in enumerate(SHAPES if m <= 64 else SHAPES[2:3]):
        counters = emulate(multiprocessors, backwards=(i + m) % 2 == 0)
        weight, x = random_weight(rows, k), draw(m, k, seed=m).bfloat16()
        bias = draw(sum(rows), seed=3).bfloat16() if i != 1 else None
        adapter = random_adapter(weight, rank=(4, 40)[i % 2]) if i != 2 else None
        y = w4a16_portable(x, weight, bias, adapter)
        assert relative_error(y, exact(x, weight, bias, adapter)) < TOLERANCE
        assert not counters.any()


@pytest.mark.parametrize("m", [3, 16])
def test_mxfp4_on_a_cpu(emulate, m):
    emulate(3)
    weight = pack([mxfp4.quantize(draw(n, 96, seed=n) * n) for n in (100, 130)])
    x = draw(m, 96).bfloat16()
    assert relative_error(w4a16_portable(x, weight), exact(x, weight)) < TOLERANCE


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
        assert relative_error(w4a16_portable(x, weight), exact(x, weight)) < TOLERANCE


def test_an_unaligned_x_is_copied(emulate):
    emulate(1)
    weight, flat = random_weight((64,), 64), draw(8 * 64 + 1).bfloat16()
    x = flat[1:].view(8, 64)
    assert x.data_ptr() % 16
    assert relative_error(w4a16_portable(x, weight), exact(x, weight)) < TOLERANCE


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
    whole = w4a16_portable(x, weight).split([130, 64, 300], dim=1)
    for i, expected in enumerate(whole):
        assert relative_error(w4a16_portable(x, weight.part(i)), expected.double()) < TOLERANCE


def test_no_tokens(emulate):
    emulate(1)
    assert w4a16_portable(torch.zeros(0, 64).bfloat16(), random_weight((128,), 64)).shape == (0, 128)


def test_the_tile_table():
    weight = random_weight((300, 16, 128), 64)
    assert weight.tile_table.tolist() == [[0, 128, 0], [128, 128, 0], [256, 44, 0], [300, 16, 1], [316, 128, 2]]
    assert weight.tile_table is weight.tile_table
    assert weight.part(1).tile_table.tolist() == [[0, 16, 0]]
    weight.to_("meta")
    assert weight.tile_table.device.type == "meta"


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_fit_the_smallest_chip(variant):
    """sm_86, 89 and 120: 100 KiB a multiprocessor, of which 1 KiB a block is the system's; 1,536 threads."""
    assert variant.blocks * (variant.shared_bytes + 1024 + 16) <= 100 * 1024
    assert variant.blocks * variant.threads <= 1536


# --- On a GPU --------------------------------------------------------------------------------------------------------

M = [1, 2, 7, 8, 9, 16, 17, 31, 64, 100, 128, 300, 1024]


def on_gpu(weight: PackedWeight, adapter: PackedAdapter | None = None):
    weight.to_("cuda")
    return weight, adapter and PackedAdapter(*(t.cuda() for t in adapter))


@pytest.mark.gpu
@pytest.mark.parametrize("m", M)
@pytest.mark.parametrize("rows, k", [((4096,), 4096), ((1536, 256, 256), 1536), ((300, 16), 80), ((576,), 576)])
def test_product(rows, k, m):
    weight = random_weight(rows, k)
    weight, adapter = on_gpu(weight, random_adapter(weight, 32))
    x, bias = draw(m, k, seed=m).cuda().bfloat16(), draw(sum(rows)).cuda().bfloat16()
    for extra in ((None, None), (bias, None), (None, adapter), (bias, adapter)):
        y = w4a16_portable(x, weight, *extra)
        assert relative_error(y, exact(x, weight, *extra)) < TOLERANCE
        assert relative_error(w4a16_reference(x, weight, *extra), exact(x, weight, *extra)) < TOLERANCE
        assert torch.equal(y, w4a16_portable(x, weight, *extra))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 40, 128])
def test_rows_with_scales_of_their_own(m):
    t = quantize(draw(400, 256))
    weight, _ = on_gpu(pack([t._replace(global_scale=t.global_scale * (0.5 + torch.rand(400)))]))
    x = draw(m, 256).cuda().bfloat16()
    assert relative_error(w4a16_portable(x, weight), exact(x, weight)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 40, 128])
def test_mxfp4(m):
    weight, _ = on_gpu(pack([mxfp4.quantize(draw(n, 1024, seed=n) * n) for n in (1000, 512)]))
    x = draw(m, 1024).cuda().bfloat16()
    assert relative_error(w4a16_portable(x, weight), exact(x, weight)) < TOLERANCE


def adversarial(name: str, n: int, k: int) -> NVFP4Tensor:
    t = quantize(draw(n, k))
    scale = t.block_scale.view(torch.uint8).clone()
    if name == "subnormal scales":
        scale = (torch.arange(scale.numel()) % 8).view(scale.shape).to(torch.uint8)
    if name == "largest scales":
        scale.fill_(0x7E)
    if name == "blocks of zeros":
        packed = t.packed.clone().view(n, k // BLOCK, BLOCK // 2)
        packed[:, ::2] = 0
        scale[:, ::2] = 0
        t = t._replace(packed=packed.view(n, -1))
    if name == "all six":
        t = t._replace(packed=torch.where(draw(n, k // 2) > 0, 0x7F, 0xF7).to(torch.uint8))
    return t._replace(block_scale=scale.view(torch.float8_e4m3fn))


ADVERSARIAL = ["subnormal scales", "largest scales", "blocks of zeros", "all six", "outliers in x"]


@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_inputs_on_a_cpu(emulate, name, m):
    emulate(3)
    check_adversarial(name, m, 200, 208, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("m", M)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_inputs(name, m):
    check_adversarial(name, m, 1000, 2064, "cuda")


def check_adversarial(name: str, m: int, n: int, k: int, device: str) -> None:
    weight = pack([adversarial(name, n, k)])
    weight.to_(device)
    x = draw(m, k, seed=m)
    if name == "outliers in x":
        x[:, ::97] *= 1e4
    x = x.to(device).bfloat16()
    y, expected = w4a16_portable(x, weight), exact(x, weight)
    assert relative_error(y, expected) < TOLERANCE
    # Each element: one rounding of the result and float32's of the sums.
    magnitude = x.double().abs() @ weight.dequantize()[0].double().abs().T * weight.row_scale.double()
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 2e-6 * magnitude).all()


@pytest.mark.gpu
def test_graphs_and_streams_at_once():
    """Two graphs of several shared products, captured on one stream, replayed on two at once, beside eager calls."""
    weight = random_weight((384, 128), 4096)
    weight, adapter = on_gpu(weight, random_adapter(weight, 32))
    xs = [draw(m, 4096, seed=m).cuda().bfloat16() for m in (4, 40, 12)]
    expected = [w4a16_portable(x, weight, None, adapter) for x in xs]
    graphs, results = [], []
    for x in xs[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append([w4a16_portable(x, weight, None, adapter) for _ in range(4)])
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        assert torch.equal(w4a16_portable(xs[2], weight, None, adapter), expected[2])
    torch.cuda.synchronize()
    for ys, y in zip(results, expected, strict=False):
        assert all(torch.equal(own, y) for own in ys)
