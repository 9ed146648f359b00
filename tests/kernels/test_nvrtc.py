"""The compiler and its cache on any machine; launches as the driver would see them, and on a GPU as they are."""

import ctypes
import io
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from qerl.kernels import nvrtc
from qerl.kernels.w4a16 import hopper, portable, prepare

pytest.importorskip("cuda.core")

SOURCE = """
#include "values.h"
extern "C" __global__ void fill(float* out, int n, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * VALUE + OFFSET;
}
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "fill.cu"
    path.write_text(SOURCE)
    (tmp_path / "values.h").write_text('#include "more.h"\n')
    (tmp_path / "more.h").write_text("#define OFFSET 1.0f\n")
    return path


@pytest.fixture
def compilations(monkeypatch) -> list:
    """One item for each time that NVRTC really runs."""
    calls, real = [], nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *args: calls.append(args) or real(*args))
    return calls


def entries(source) -> list:
    return sorted((source.parent / "cache" / "cubin").iterdir())


@pytest.mark.parametrize(
    "parameters, letters",
    [("float* out, int n, float factor", "Pif"), ("const int* __restrict__ a,  // [n], or null\n    int b", "Pi")],
)
def test_a_kernels_signature_is_that_of_its_source(tmp_path, parameters, letters):
    source = tmp_path / "f.cu"
    source.write_text(
        f'// f(int, int)\nvoid g(int) {{}}\nextern "C" __global__ void __maxnreg__(R)\n    f({parameters}) {{}}'
    )
    assert nvrtc.signature_of(source, "f") == letters


def test_a_parameter_without_a_letter_is_not_passed_over(tmp_path):
    (tmp_path / "f.cu").write_text('extern "C" __global__ void f(double x, int n) {}')
    with pytest.raises(AssertionError, match="double x"):
        nvrtc.signature_of(tmp_path / "f.cu", "f")


def test_a_variant_is_compiled_once(source, compilations):
    first = nvrtc.compile(source, {"VALUE": 3}, "sm_90a")
    assert first[:4] == b"\x7fELF" and nvrtc.compile(source, {"VALUE": 3}, "sm_90a") == first
    assert len(compilations) == 1 and len(entries(source)) == 1


def test_everything_that_the_cubin_depends_on_is_in_the_key(source, compilations, monkeypatch):
    def build(value=3, arch="sm_90a"):
        return nvrtc.compile(source, {"VALUE": value}, arch)

    build()
    build(value=4)
    build(arch="sm_80")
    (source.parent / "more.h").write_text("#define OFFSET 2.0f\n")  # included by a file that the source includes
    build()
    source.write_text(SOURCE + "\n")
    build()
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (99, 0))
    build()
    assert len(compilations) == len(entries(source)) == 6


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-7], lambda b: b[:200] + b"?" + b[201:], lambda b: b"", lambda b: b * 2]
)
def test_a_damaged_entry_is_compiled_anew(source, compilations, damage):
    good = nvrtc.compile(source, {"VALUE": 3}, "sm_90a")
    (entry,) = entries(source)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert nvrtc.compile(source, {"VALUE": 3}, "sm_90a") == good
    assert len(compilations) == 2 and entry.read_bytes() == whole


def test_a_failed_write_leaves_nothing_and_is_no_error(source, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    assert nvrtc.compile(source, {"VALUE": 3}, "sm_90a")
    assert entries(source) == [] and "no space left" in caplog.text


def test_the_log_of_a_failed_compilation_is_told(source):
    with pytest.raises(RuntimeError, match=r"(?s)fill\.cu does not compile for sm_90a with \{\}.*VALUE.* is undefined"):
        nvrtc.compile(source, {}, "sm_90a")


def test_a_missing_include_is_named(source):
    (source.parent / "more.h").unlink()
    with pytest.raises(RuntimeError, match=r"more\.h"):
        nvrtc.compile(source, {"VALUE": 3}, "sm_90a")


@pytest.mark.parametrize("missing", ["cuda.bindings", "cuda.core"])
def test_a_missing_compiler_says_what_to_install(source, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(nvrtc.CompilerMissing, match="pip install cuda-core"):
        nvrtc.compile(source, {"VALUE": 3}, "sm_90a")


def test_the_cache_folder(monkeypatch):
    monkeypatch.delenv("QERL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(nvrtc.cache_folder()) == "/xdg/qerl"
    monkeypatch.setenv("QERL_CACHE_DIR", "/own")
    assert str(nvrtc.cache_folder()) == "/own"


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_driver_reads_what_was_meant(monkeypatch, cluster, overlap):
    """The structures' bytes, read through NVIDIA's own declarations of them."""
    driver = pytest.importorskip("cuda.bindings.driver")
    seen = {}

    def launch(config, function, pointers, _):
        c = driver.CUlaunchConfig(_ptr=config)
        seen["grid"] = (c.gridDimX, c.gridDimY, c.gridDimZ)
        seen["block"] = (c.blockDimX, c.blockDimY, c.blockDimZ)
        seen["shared"], seen["stream"], seen["function"] = c.sharedMemBytes, int(c.hStream), function
        first = ctypes.c_void_p.from_address(config + 40).value
        attributes = [driver.CUlaunchAttribute(_ptr=first + 72 * i) for i in range(c.numAttrs)]
        for a in attributes:
            if a.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                seen["cluster"] = (a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z)
            if a.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
                seen["overlap"] = a.value.programmaticStreamSerializationAllowed
        types = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_int64)
        addresses = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        seen["args"] = [t.from_address(addresses[i]).value for i, t in enumerate(types)]
        return 0

    call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(launch)
    monkeypatch.setattr(nvrtc, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=call))
    monkeypatch.setattr(nvrtc, "_load", lambda *_: (ctypes.c_void_p(1), ctypes.c_void_p(2)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0x7F00_0000_1230, raising=False)
    x = torch.zeros(1)
    loaded = nvrtc.Kernel(b"", "f", "PiPfq", torch.device("cuda", 0), cluster)
    loaded.launch((5, 4, 3), 256, 99 * 1024, [x, -7, 0, 2.5, -(1 << 40)], overlap=overlap)
    assert seen == {
        "grid": (5, 4, 3),
        "block": (256, 1, 1),
        "shared": 99 * 1024,
        "stream": 0x7F00_0000_1230,
        "function": 2,
        "args": [x.data_ptr(), -7, 0, 2.5, -(1 << 40)],
    } | ({"cluster": (2, 1, 1)} if cluster == 2 else {}) | ({"overlap": 1} if overlap else {})


@pytest.mark.parametrize(
    "nodes, status, overlaps",
    [([0], 0, True), ([0, 0], 0, True), ([0, 2], 0, False), ([], 0, False), ([0], 913, False)],
)
def test_a_capture_overlaps_kernels_only(monkeypatch, nodes, status, overlaps):
    """nodes: the kinds of those that the next one waits for; 0 is a kernel, 2 a memset."""
    waiting = (ctypes.c_void_p * len(nodes))(*range(1, len(nodes) + 1))

    def info(stream, capture_status, number, graph, found, count):
        assert stream.value == 42
        found._obj.contents, count._obj.value = waiting if nodes else ctypes.c_void_p(), len(nodes)
        return status

    def kind_of(node, kind):
        kind._obj.value = nodes[node.value - 1]
        return 0

    driver = SimpleNamespace(cuStreamGetCaptureInfo_v2=info, cuGraphNodeGetType=kind_of)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    assert nvrtc._follows_kernels(42) is overlaps


PORTABLE = [(portable.SOURCE, v.defines(f)) for v in portable.VARIANTS for f in ("e4m3", "e8m0")]


def words_of_the_assembler(source, defines, arch) -> str:
    log = io.StringIO()
    nvrtc._program(source, defines, arch, ptxas_options=["-v"]).compile("cubin", logs=log)
    return log.getvalue()


def spilled_bytes(log: str) -> list[int]:
    """Of each kernel: what it stores to its stack because it has no register, and loads again."""
    found = re.findall(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return [max(int(stores), int(loads)) for stores, loads in found]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("source, defines", PORTABLE, ids=lambda v: getattr(v, "stem", None))
def test_every_portable_variant_compiles_and_keeps_its_registers(source, defines, arch):
    """What it spilled it would read back from memory in the inner loop."""
    log = words_of_the_assembler(source, defines, arch)
    assert spilled_bytes(log) == [0] * source.read_text().count('extern "C" __global__'), log


@pytest.mark.parametrize("slices", [0, 2, 4])
@pytest.mark.parametrize(
    "m, tokens, columns", [(t, t, 1024) for t in (8, 16, 32, 64, 128)] + [(129, 128, 1024), (128, 128, 9000)]
)
def test_prepare_compiles_and_keeps_its_registers(m, tokens, slices, columns):
    shape = prepare.shape_of(m, tokens, slices, columns, 132)
    log = words_of_the_assembler(prepare.SOURCE, shape.defines(tokens, slices), "sm_90a")
    assert spilled_bytes(log) == [0], log


@pytest.mark.parametrize("variant", hopper.VARIANTS, ids=lambda v: "-".join(map(str, v)))
def test_every_hopper_variant_compiles(variant):
    """Nothing makes the assembler wait for each wgmma. Spills are few (132 bytes by NVRTC 13.5): they lie outside the
    loop over K."""
    tokens = variant.tokens
    batches = (128, 129) if tokens == 128 else (tokens,)
    others = [(slices, prepare.shape_of(m, tokens, slices, 1024, 132)) for m in batches for slices in (0, 2, 4)]
    variants = [variant.defines(*other_of, f) for other_of in others for f in ("e4m3", "e8m0")]
    with ThreadPoolExecutor(2) as pool:
        logs = pool.map(lambda defines: words_of_the_assembler(hopper.SOURCE, defines, "sm_90a"), variants)
    for log in logs:
        (spilled,) = spilled_bytes(log)
        assert spilled <= 192 and "Potential Performance Loss" not in log, log


def gpu_kernel(source, value: int = 3):
    return nvrtc.kernel(source, "fill", {"VALUE": value}, torch.device("cuda", 0))


@pytest.mark.gpu
def test_launch(source):
    out = torch.zeros(1000, device="cuda")
    gpu_kernel(source).launch((4, 1, 1), 256, 150 * 1024, [out, 999, 0.5])
    assert (out[:999] == 2.5).all() and out[999] == 0


@pytest.mark.gpu
def test_launch_on_a_side_stream_and_in_a_new_thread(source):
    fill, out, errors = gpu_kernel(source), torch.zeros(64, device="cuda"), []
    torch.cuda.synchronize()

    def work():
        try:
            fill.launch((1, 1, 1), 64, 0, [out, 32, 1.0])
            with torch.cuda.stream(torch.cuda.Stream()):
                fill.launch((1, 1, 1), 64, 0, [out[32:], 32, 2.0])
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors and (out[:32] == 4).all() and (out[32:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_replays_a_kernel_that_was_loaded_while_it_was_captured(source, overlap):
    out, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()
        gpu_kernel(source, value=10 + overlap).launch((1, 1, 1), 64, 0, [out, 64, 1.0], overlap=overlap)
    for _ in range(2):
        out.fill_(-1)
        graph.replay()
        if not overlap:  # with it, this kernel does not wait for the zeros, as it would have to
            assert (out == 11).all()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_the_driver_s_words_reach_the_user(source):
    with pytest.raises(RuntimeError, match=r"invalid argument"):
        gpu_kernel(source).launch((1, 1, 1), 4096, 0, [torch.zeros(1, device="cuda"), 1, 1.0])
