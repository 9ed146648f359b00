"""The fused products on a GPU, each over all that w4a16 may ask of it, against float64."""

from functools import cache

import pytest
import torch
from problems import ADVERSARIAL, adversarial, check, draw, empty_is_nan, random_adapter, random_weight, whole

from qerl.formats import mxfp4
from qerl.formats.nvfp4 import quantize
from qerl.kernels.activation import swiglu
from qerl.kernels.adapter import PackedAdapter, pack_adapter
from qerl.kernels.layout import PackedWeight, pack
from qerl.kernels.norm import add_rms_norm_
from qerl.kernels.w4a16 import Product, awaited, hopper, portable, w4a16

pytestmark = pytest.mark.gpu

TOKENS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 300, 1024]
SHAPES = [
    ((2048, 256, 256), 1536),  # as small models have them
    ((300, 16), 80),  # ragged rows and columns, less than a step of K
    ((576,), 592),
    ((8600, 131), 1040),  # more tiles than a wave of blocks; 17 chunks of K; rows of y that 8-byte stores do not fit
    ((200,), 8208),  # two tiles of 129 chunks, for many blocks
]
VARIANTS = [(portable.w4a16_portable, v) for v in portable.VARIANTS]
VARIANTS += [(hopper.w4a16_hopper, v) for v in hopper.VARIANTS]


def skip_where_it_does_not_run(product: Product) -> None:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability < (8, 0):
        pytest.skip("no CUDA GPU with bf16 tensor cores")
    if product is hopper.w4a16_hopper and capability != (9, 0):
        pytest.skip("no Hopper GPU")


@pytest.fixture(params=[portable.w4a16_portable, hopper.w4a16_hopper], ids=["portable", "hopper"])
def product(request) -> Product:
    skip_where_it_does_not_run(request.param)
    return request.param


@pytest.fixture
def nan_workspace(monkeypatch) -> None:
    """Results and workspace begin as NaN."""
    monkeypatch.setattr(torch, "empty", empty_is_nan(torch.empty))


@cache
def weight_of(rows: tuple[int, ...], k: int) -> PackedWeight:
    return random_weight(rows, k, "cuda")


@cache
def adapter_of(rows: tuple[int, ...], k: int, rank: int) -> PackedAdapter:
    return random_adapter(weight_of(rows, k), rank)


def activations(m: int, k: int) -> torch.Tensor:
    return whole(m, k, seed=m).cuda().bfloat16()


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("rows, k", SHAPES)
def test_product(product, rows, k, m, nan_workspace):
    weight, adapter, x = weight_of(rows, k), adapter_of(rows, k, 32), activations(m, k)
    bias = draw(sum(rows)).cuda().bfloat16()
    for extra in ((None, None), (bias, None), (None, adapter), (bias, adapter)):
        y = product(x, weight, *extra)
        check(y, x, weight, *extra)
        assert torch.equal(y, product(x, weight, *extra))


@pytest.mark.parametrize("rank", [None, 64])
@pytest.mark.parametrize(
    "product, variant", VARIANTS, ids=lambda v: getattr(v, "__name__", None) or "-".join(map(str, v))
)
def test_every_variant(product, variant, rank, nan_workspace):
    """Also for the shapes and numbers of tokens for which another is chosen."""
    skip_where_it_does_not_run(product)
    for rows, k in SHAPES:
        weight, adapter = weight_of(rows, k), rank and adapter_of(rows, k, rank)
        beyond = () if getattr(variant, "resident", False) else (variant.tokens + 1, 3 * variant.tokens + 2)
        for m in (1, variant.tokens - 1, variant.tokens, *beyond):
            x = activations(m, k)
            y = product(x, weight, None, adapter, variant)
            check(y, x, weight, None, adapter)
            assert torch.equal(y, product(x, weight, None, adapter, variant))


@pytest.mark.parametrize("rank", [1, 16, 24, 33, 64])
def test_ranks(product, rank):
    weight = weight_of((2048, 256, 256), 1536)
    adapter = random_adapter(weight, rank)
    for m in (1, 8, 20, 64, 100, 300):
        x = activations(m, 1536)
        check(product(x, weight, None, adapter), x, weight, None, adapter)


@pytest.mark.parametrize("m", [1, 8, 16, 40, 128])
def test_the_product_with_each_unit_vector_is_a_column(product, m):
    """Nothing to sum: the weights themselves come out, each in its place."""
    weight = weight_of((300, 16), 80)
    dense, scale = weight.dequantize()
    columns = (dense * scale[:, None]).bfloat16().T
    unit = torch.eye(80, dtype=torch.bfloat16, device="cuda")
    for first in range(0, 80, m):
        assert torch.equal(product(unit[first : first + m], weight), columns[first : first + m])


@pytest.mark.parametrize("m", [1, 8, 16, 40, 128, 200])
def test_rows_with_scales_of_their_own(product, m):
    t = quantize(draw(400, 256).cuda())
    weight, x = pack([t._replace(global_scale=torch.linspace(0.5, 2, 400, device="cuda"))]), activations(m, 256)
    check(product(x, weight), x, weight)


@pytest.mark.parametrize("m", [1, 8, 16, 40, 128, 200])
@pytest.mark.parametrize("rows, k", [((1000, 512), 1024), ((9000, 16), 96)])
def test_mxfp4(product, rows, k, m):
    weight = pack([mxfp4.quantize((draw(n, k, seed=n) * n).cuda()) for n in rows])
    adapter, x = random_adapter(weight, 32), activations(m, k)
    check(product(x, weight), x, weight)
    check(product(x, weight, None, adapter), x, weight, None, adapter)


@pytest.mark.parametrize("m", [1, 8, 9, 16, 32, 64, 128, 200, 1024])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_inputs(product, name, m):
    x, weight = adversarial(name, m, 1000, 2064, "cuda")
    check(product(x, weight), x, weight)


@pytest.mark.parametrize("m", [3, 40, 150])
def test_views_of_the_parts(product, m):
    weight, x = weight_of((2048, 256, 256), 1536), activations(m, 1536)
    for i, n in enumerate((2048, 256, 256)):
        part, bias = weight.part(i), draw(n).cuda().bfloat16()
        adapter = random_adapter(part, 32)
        check(product(x, part, bias, adapter), x, part, bias, adapter)


@pytest.mark.parametrize("m", [3, 40, 150])
def test_a_weight_that_was_moved(product, m):
    weight, x = random_weight((300, 16), 80, "cuda"), activations(m, 80)
    first = product(x, weight)
    weight.to_("cpu")
    other = random_weight((300, 16), 80, "cuda")  # perhaps in the memory that became free
    other.storage.tiles.fill_(0)
    weight.to_("cuda")
    assert torch.equal(product(x, weight), first)


@pytest.mark.parametrize("m", [1, 3, 8, 20, 64, 65, 130])
@pytest.mark.parametrize("rows, k", [((40,), 16), ((300, 16), 80), ((576,), 592)])
def test_foreign_memory_is_not_read(product, rows, k, m):
    """x between NaN: the columns beyond K have codes of zero, but zero times NaN is NaN."""
    weight, adapter = weight_of(rows, k), adapter_of(rows, k, 32)
    around = torch.full((m + 2, k), torch.nan, dtype=torch.bfloat16, device="cuda")
    around[1:-1] = activations(m, k)
    x = around[1:-1]
    check(product(x, weight, None, adapter), x, weight, None, adapter)


@pytest.mark.parametrize("m", [3, 40, 150])
def test_x_with_any_strides(product, m):
    weight, adapter, x = weight_of((300, 16), 80), adapter_of((300, 16), 80, 32), activations(m, 80)
    expected = product(x, weight, None, adapter)
    wider = torch.full((2 * m, 112), torch.nan, dtype=torch.bfloat16, device="cuda")
    wider[::2, 16:96] = x
    for same in (x.T.contiguous().T, wider[::2, 16:96]):
        assert not same.is_contiguous() and torch.equal(product(same, weight, None, adapter), expected)


@pytest.mark.parametrize("m", [1, 8, 12, 40, 100, 300])
@pytest.mark.parametrize("rows, k", SHAPES)
def test_a_graph_has_the_eager_bits(product, rows, k, m):
    """Also with another x and adapter in the same memory."""
    weight, x = weight_of(rows, k), activations(m, k)
    adapter = random_adapter(weight, 32)
    product(x, weight, None, adapter)  # the tile table is made before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x, weight, None, adapter)
    for seed in range(2):
        x.copy_(whole(m, k, seed=seed + 1000))
        adapter.a.copy_(whole(*adapter.a.shape, seed=seed) / 32)
        graph.replay()
        assert torch.equal(y, product(x, weight, None, adapter))


@pytest.mark.parametrize("m", [1, 8, 12, 40, 100, 300])
def test_products_that_read_the_one_before(product, m):
    """Each may start while the one before it runs; none may read x before that one has written it."""
    k = 2048
    weight, x = weight_of((k,), k), draw(m, k).cuda().bfloat16()
    adapter = pack_adapter(weight, [(draw(16, k) / k**0.5, draw(k, 16), 1.0)])

    def chain(wait: bool = False) -> torch.Tensor:
        y = x
        for _ in range(8):
            y = product(y, weight, None, adapter)
            y /= k**0.5
            y = product(y, weight)
            if wait:
                torch.cuda.synchronize()
        return y

    expected = chain(wait=True)
    assert expected.isfinite().all() and expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, expected) and torch.equal(chain(), expected)


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("m", [1, 5, 8])
def test_x_that_is_announced_by_the_kernel_right_before(m, rank):
    """Layers of a norm, a product, SwiGLU and a product, with and without announcements, eager and in a graph."""
    skip_where_it_does_not_run(hopper.w4a16_hopper)
    k, n = 1536, 4096
    weights = [(weight_of((n, n), k), weight_of((k,), n))] * 6
    adapters = [random_adapter(weights[0][i], rank) if rank else None for i in (0, 1)]
    gain, x = torch.ones(k, device="cuda"), draw(m, k, seed=m).cuda().bfloat16()

    def layers(x: torch.Tensor, announced: bool) -> torch.Tensor:
        x, delta = x.clone(), None
        for first, second in weights:
            told = [awaited(x.device, x.dtype, m) if announced else None for _ in (first, second)]
            assert not announced or None not in told
            normed = add_rms_norm_(x, delta, gain, 1e-6, announcement=told[0])
            gate, up = w4a16(normed, first, None, adapters[0], told[0]).split(n, dim=-1)
            delta = w4a16(swiglu(gate, up, told[1]), second, None, adapters[1], told[1])
        return x + delta

    expected = layers(x, announced=False)
    assert expected.isfinite().all() and expected.std() > 0
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    layers(x, announced=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = layers(static, announced=True)
    for i in range(20):
        other = torch.roll(x, i, 0)
        static.copy_(other)
        graph.replay()
        assert torch.equal(captured, layers(other, announced=False))
        assert torch.equal(layers(x, announced=True), expected)


@pytest.mark.parametrize("rows, k", [((384, 128), 4096), ((8600, 131), 1040)])
def test_graphs_and_streams_at_once(product, rows, k):
    """Two graphs of several shared products, captured on one stream, replayed on two at once, beside eager calls."""
    weight, adapter = weight_of(rows, k), adapter_of(rows, k, 32)
    xs = [activations(m, k) for m in (4, 40, 12)]
    expected = [product(x, weight, None, adapter) for x in xs]
    graphs, results = [], []
    for x in xs[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append([product(x, weight, None, adapter) for _ in range(4)])
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            beside = product(xs[0], weight, None, adapter)
        assert torch.equal(product(xs[2], weight, None, adapter), expected[2])
        streams[2].synchronize()
        assert torch.equal(beside, expected[0])
    torch.cuda.synchronize()
    for ys, y in zip(results, expected, strict=False):
        assert all(torch.equal(own, y) for own in ys)


def test_an_unaligned_x(product):
    """Last: a kernel that reads what is not aligned to 16 bytes leaves this process no working GPU."""
    weight, adapter = weight_of((300, 16), 80), adapter_of((300, 16), 80, 32)
    x = draw(20 * 80 + 1).cuda().bfloat16()[1:].view(20, 80)
    assert x.data_ptr() % 16
    check(product(x, weight, None, adapter), x, weight, None, adapter)
