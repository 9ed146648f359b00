"""CUDA C++ sources compiled when first needed, and launched at little cost. No GPU code of its own.

    source.cu + defines + architecture -> NVRTC (through cuda.core) -> cubin, cached on disk -> Kernel.launch

A source file is one family of kernels; a variant of it is a set of defines (`-D NAME=value`), so each variant compiles
alone, when first asked for. Sources may include files of their own folder and of kernels/, and nothing else: NVRTC sees
no CUDA headers, so that no toolkit has to be installed.

Cache: `$QERL_CACHE_DIR`, else `$XDG_CACHE_HOME/qerl`, else `~/.cache/qerl`. An entry's name has a hash of all that its
content depends on (source with includes, defines, options, architecture, NVRTC's version), so it is never stale; it is
written to a temporary name and renamed, and ends with a checksum, so that a damaged one is compiled anew.

Launch: on torch's current stream, through the driver's cuLaunchKernelEx with structures built once per kernel; a
launch packs its arguments into them and makes one call. (cuda.core and cuda.bindings build Python objects for the
settings and arguments of each launch, at several times the cost.) A graph capture takes it in like any of torch's
kernels, and a kernel may be loaded while one runs.

Who has no NVRTC gets `CompilerMissing`, which says what to install; the products catch it and go another way.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).parent
_OPTIONS = {"std": "c++17"}
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_CHECKSUM = hashlib.sha256().digest_size
_MISSING = "the CUDA kernels need NVRTC: pip install cuda-core 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"


class CompilerMissing(RuntimeError):
    """NVRTC, or the Python packages that reach it, are not installed."""


# --- source -> cubin -------------------------------------------------------------------------------------------------


def compile(source: Path, defines: Mapping[str, int | str], arch: str) -> bytes:
    """The cubin of one variant, from the cache or by NVRTC. Needs no GPU. `arch`: "sm_80", "sm_90a", ...

    Raises CompilerMissing; RuntimeError with NVRTC's log where the source does not compile.
    """
    version = compiler_version()
    key = hashlib.sha256(repr((version, _OPTIONS, arch, sorted(defines.items()))).encode())
    for text in _with_includes(source):
        key.update(hashlib.sha256(text.encode()).digest())
    entry = cache_folder() / "cubin" / f"{source.stem}-{arch}-{key.hexdigest()[:32]}"
    cubin = _read(entry)
    if cubin is None:
        cubin = _compile(source, defines, arch)
        _write(entry, cubin)
    return cubin


def cache_folder() -> Path:
    """Where compiled kernels are kept between processes."""
    if own := os.environ.get("QERL_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl"


def arch_of(device: torch.device) -> str:
    """The architecture to compile for: with the chip's own instructions (wgmma on sm_90a) where it has some."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def compiler_version() -> tuple[int, int]:
    """NVRTC's. Raises CompilerMissing."""
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the packages are there, the library is not
        raise CompilerMissing(_MISSING) from error
    return major, minor


def _compile(source: Path, defines: Mapping[str, int | str], arch: str) -> bytes:
    program = _program(source, defines, arch)
    try:
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core names no public class; its text ends with NVRTC's log
        raise RuntimeError(f"{source} does not compile for {arch} with {dict(defines)}:\n{error}") from error
    finally:
        program.close()


def _program(source: Path, defines: Mapping[str, int | str], arch: str, **more: Any) -> Any:
    """cuda.core's Program; `more` options of it."""
    try:
        from cuda.core import Program, ProgramOptions  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    except ImportError as error:
        raise CompilerMissing(_MISSING) from error
    options = ProgramOptions(
        name=source.name,
        arch=arch,
        define_macro=[(name, str(value)) for name, value in defines.items()] or None,  # it refuses an empty list
        include_path=_include_folders(source),
        **_OPTIONS,
        **more,
    )
    return Program(source.read_text(), "c++", options)


def _include_folders(source: Path) -> list[str]:
    return [str(source.parent), str(KERNELS)]


def _with_includes(source: Path) -> Iterator[str]:
    """The text of a source and of each file that it includes, in a fixed order."""
    seen, waiting = {source}, [source]
    while waiting:
        text = waiting.pop(0).read_text()
        yield text
        for name in _INCLUDE.findall(text):
            found = next((p for folder in _include_folders(source) if (p := Path(folder, name)).is_file()), None)
            if found is not None and found not in seen:  # NVRTC names what it cannot find, better than we could here
                seen.add(found)
                waiting.append(found)


def _read(entry: Path) -> bytes | None:
    """A whole entry's content; None where there is none, or a damaged one."""
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    cubin, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    return cubin if hashlib.sha256(cubin).digest() == checksum else None


def _write(entry: Path, cubin: bytes) -> None:
    """Add an entry: other processes see all of it or nothing. A folder that cannot be written costs only time."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(cubin + hashlib.sha256(cubin).digest())
            os.replace(name, entry)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        logger.warning("compiled kernels are not kept for the next run: %s", error)


# --- cubin -> launch -------------------------------------------------------------------------------------------------

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8  # blocks, on all chips that have clusters; sm_90 takes 16 where a kernel asks for it
_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MAX_SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL

_CONFIG = struct.Struct("@7I4xPPI4x")  # CUlaunchConfig: grid, block, dynamic shared memory, stream, attributes, count
_ATTRIBUTE = struct.Struct("@I4x3I52x")  # CUlaunchAttribute: id, value (a union of 64 bytes)


class Kernel:
    """A loaded kernel of one device. Made by `kernel`; may be launched from any thread."""

    def __init__(self, cubin: bytes, name: str, signature: str, device: torch.device, cluster: int) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._context, self._function = _load(cubin, name, self._device, cluster)
        layout = struct.Struct("@" + signature)
        self._values = ctypes.create_string_buffer(layout.size)
        self._pack_values = layout.pack_into
        first = ctypes.addressof(self._values)
        # The driver takes a pointer to each argument; the first i + 1 of them end with argument i.
        offsets = [struct.calcsize("@" + signature[: i + 1]) - struct.calcsize(c) for i, c in enumerate(signature)]
        self._pointers = (ctypes.c_void_p * len(signature))(*(first + offset for offset in offsets))
        attributes = b"" if cluster == 1 else _ATTRIBUTE.pack(_CLUSTER_DIMENSION, cluster, 1, 1)
        self._always = len(attributes) // _ATTRIBUTE.size
        attributes += _ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0)  # the last: counted only on overlap
        self._attributes = ctypes.create_string_buffer(attributes, len(attributes))
        self._attributes_address = ctypes.addressof(self._attributes)
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._call = _driver().cuLaunchKernelEx
        self._lock = threading.Lock()  # the structures are shared by all launches

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        shared: int,
        args: Sequence[int | float | Tensor],
        *,
        overlap: bool = False,
    ) -> None:
        """Start the kernel on torch's current stream of its device.

        `grid` blocks of `block` threads with `shared` bytes of dynamic shared memory each; `args` as the signature
        says, a tensor standing for its address (the caller has checked device, dtype and strides, and keeps it alive
        as for any of torch's kernels: the caching allocator does the rest). `overlap` lets it start before the
        previous kernel of the stream has ended: the kernel itself must wait (griddepcontrol.wait) before it reads
        what that one writes. In a graph capture it counts only behind kernels. RuntimeError with the driver's words.
        """
        index = self._device
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.launch(grid, block, shared, args, overlap=overlap)
        values = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        stream = current_stream(index)
        if overlap and torch.cuda.is_current_stream_capturing():
            overlap = _follows_kernels(stream)
        count = self._always + overlap
        with self._lock:
            self._pack_values(self._values, 0, *values)
            _CONFIG.pack_into(self._config, 0, *grid, block, 1, 1, shared, stream, self._attributes_address, count)
            status = self._call(self._config, self._function, self._pointers, None)
            if status == _INVALID_CONTEXT:  # a thread in which nothing has called CUDA so far
                _check(_driver().cuCtxSetCurrent(self._context))
                status = self._call(self._config, self._function, self._pointers, None)
        _check(status)


def current_stream(device: int) -> int:
    """The handle of torch's current stream. (torch.cuda.current_stream makes an object first: a microsecond more.)"""
    return torch._C._cuda_getCurrentRawStream(device)


def capture_id(stream: int) -> int:
    """The number of the graph capture that a stream (its handle) takes part in; unique in the process."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    by_reference = ctypes.byref
    _check(
        _driver().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream), by_reference(status), by_reference(number), None, None, None
        )
    )
    return number.value


def _follows_kernels(stream: int) -> bool:
    """Whether all that a capture's next node waits for are kernels.

    A programmatic edge of a graph is defined between kernels; what it would be behind a copy or a memset is not said.
    (Streams are: there the launch waits.)
    """
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count, kind = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t(), ctypes.c_int()
    driver, by_reference = _driver(), ctypes.byref
    failed = driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream),
        by_reference(status),
        by_reference(number),
        by_reference(graph),
        by_reference(nodes),
        by_reference(count),
    )
    if failed or count.value == 0:
        return False
    for i in range(count.value):
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(nodes[i]), by_reference(kind)))
        if kind.value != _KERNEL_NODE:
            return False
    return True


def kernel(
    source: Path,
    name: str,
    defines: Mapping[str, int | str],
    device: torch.device,
    *,
    cluster: int = 1,
) -> Kernel:
    """The kernel `name` (extern "C") of a variant, compiled if need be and loaded; once a process and device.

    `cluster`: blocks a cluster, along x. Errors as in `compile`. Hot paths keep the result.
    """
    return _kernel(source, name, tuple(sorted(defines.items())), device, cluster)


def signature_of(source: Path, name: str) -> str:
    """A letter for each parameter of a kernel, as in Python's struct: P pointer, i int, f float.

    Parameters of other types, and macros among them, are an assertion's business.
    """
    text = re.sub(r"//.*", "", source.read_text())
    found = re.search(rf"__global__[^;{{}}]*?\b{name}\(([^{{}}]*)\)\s*{{", text)
    assert found is not None, f"{source} has no kernel {name}"
    letters = []
    for parameter in found[1].split(","):
        kind = "P" if "*" in parameter else {"int": "i", "float": "f"}.get(parameter.split()[-2])
        assert kind is not None, f"{name} in {source}: a parameter is {parameter.strip()}"
        letters.append(kind)
    return "".join(letters)


@cache
def _kernel(
    source: Path,
    name: str,
    defines: tuple[tuple[str, int | str], ...],
    device: torch.device,
    cluster: int,
) -> Kernel:
    cubin = compile(source, dict(defines), arch_of(device))
    return Kernel(cubin, name, signature_of(source, name), device, cluster)


def _load(cubin: bytes, name: str, index: int, cluster: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """The device's primary context, which is torch's, and the function in it, free to use all shared memory."""
    driver, by_reference = _driver(), ctypes.byref
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    device, most, static, mode = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int(_CAPTURE_RELAXED)
    _check(driver.cuInit(0))
    _check(driver.cuDeviceGet(by_reference(device), index))
    _check(driver.cuDeviceGetAttribute(by_reference(most), _MAX_SHARED_OPTIN, device))
    _check(driver.cuDevicePrimaryCtxRetain(by_reference(context), device))  # for the life of the process, as torch does
    _check(driver.cuCtxPushCurrent_v2(context))
    _check(driver.cuThreadExchangeStreamCaptureMode(by_reference(mode)))  # loading allocates: a capture would refuse it
    try:
        _check(driver.cuModuleLoadData(by_reference(module), cubin))
        _check(driver.cuModuleGetFunction(by_reference(function), module, name.encode()))
        _check(driver.cuFuncLoad(function))  # now, not at the first launch
        _check(driver.cuFuncGetAttribute(by_reference(static), _STATIC_SHARED, function))
        _check(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, most.value - static.value))
        if cluster > _PORTABLE_CLUSTER:
            _check(driver.cuFuncSetAttribute(function, _LARGE_CLUSTERS, 1))
        prefer_shared_memory(function, index)
    finally:
        driver.cuThreadExchangeStreamCaptureMode(by_reference(mode))
        driver.cuCtxPopCurrent_v2(by_reference(ctypes.c_void_p()))
    return context, function


def prefer_shared_memory(function: ctypes.c_void_p, device: int) -> None:
    """As much of a multiprocessor's first-level cache as can be is its shared memory while this function runs.

    A multiprocessor has to be empty to divide its memory anew. So a block of a product, with much of it, would wait for
    those of the small kernels around, where these want another division: what runs beside products wants this one.
    """
    if torch.cuda.get_device_capability(device) >= (9, 0):  # kernels of others do not overlap (overlap.py)
        _check(_driver().cuFuncSetAttribute(function, _PREFERRED_CARVEOUT, 100))


def call_driver(name: str, *arguments: Any) -> None:
    """A function of CUDA's driver, in the current context. RuntimeError with the driver's words, where it fails."""
    _check(getattr(_driver(), name)(*arguments))


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({status})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


# --- devices ---------------------------------------------------------------------------------------------------------


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has: among them a kernel deals out its work."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one block can have on a GPU's multiprocessor."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


# --- arguments -------------------------------------------------------------------------------------------------------


def aligned(x: Tensor) -> Tensor:
    """Rows next to each other, at an address for 16-byte loads (rows are multiples of 16 bytes)."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


# More than any of our kernels starts blocks, or warps that share a tile; and two to tell by.
_NUM_COUNTERS = 4096 + 2
_counters: dict[tuple[torch.device, int, bool], tuple[int, Tensor]] = {}


def stream_counters(device: torch.device) -> Tensor:
    """int32 zeros for kernels of the current stream that count their blocks, and leave zeros again.

    Kernels on one stream follow each other and share them; each stream has its own. So has each stream of each graph
    capture: graphs captured on one stream may be replayed on several at once. There the zeroing is part of the graph,
    once for all its kernels, and the memory is the graph's; here it is held until the stream's next capture. On a CPU,
    where Triton's interpreter runs kernels one at a time, all share one.
    """
    stream = current_stream(device.index) if device.type == "cuda" else 0
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    capture = capture_id(stream) if capturing else 0
    number, counters = _counters.get((device, stream, capturing), (-1, None))
    if counters is None or number != capture:
        counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        _counters[device, stream, capturing] = capture, counters
    return counters


def forget_counters() -> None:
    """Let every stream have new ones: a kernel may have counted in these for one that was not launched after it."""
    _counters.clear()
