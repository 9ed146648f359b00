"""Seconds and peak bytes of the parts of a step, a memory cap, and a card's measured bf16 rate.

    with meter("rollout"): ...       seconds (device synchronised at both ends), the most that torch held, allocated and
                                     reserved, how often it found no room at first, and the most of the device that was
                                     in use, as the driver reports it
    with timed_functions(...): ...   seconds of functions called within such parts, by CUDA events, without waiting

What the engine maps by itself (engine/mapped.py) counts as allocated and reserved. A cap plays a smaller card: the rest
of the memory is taken, so that torch, the engine and CUDA itself find no more than such a card has.

The driver is asked through NVML, by a thread, every few milliseconds: NVML is no part of CUDA's API, so the question
disturbs neither kernels nor the capture of a graph. Where there is no NVML, torch's own question is put at the ends of
a part alone. On a CPU there are seconds only.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl.engine.mapped import mapped_bytes
from qerl.kernels.nvrtc import call_driver

POLL_SECONDS = 0.02  # the allocator keeps what it once took until a part has ended
HEARTBEAT_SECONDS = 20.0

_RATE_SIZE, _RATE_SECONDS = 8192, 1.0


@dataclass
class Part:
    """What one part of a step took, all its occurrences together."""

    seconds: float = 0.0
    times: int = 0
    device_bytes: int = 0
    """The most in use on the device, everybody's."""
    reserved_bytes: int = 0
    """The most that torch's allocator held, and what was mapped when the part began or ended."""
    allocated_bytes: int = 0
    """The most in tensors, and the same."""
    retries: int = 0
    """How often torch's allocator found no room, and gave back what it held unused; each makes the device wait."""


@dataclass
class Meter:
    """See the module's text; a context manager while the thread is to run."""

    device: torch.device
    parts: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._on_gpu = self.device.type == "cuda"
        if self._on_gpu and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._used = _driver_query(self.device) if self._on_gpu else None
        self._taken: ctypes.c_uint64 | None = None
        self._taken_bytes = 0
        self._current: str | None = None
        self._started = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._taken is not None:
            with torch.cuda.device(self.device):
                call_driver("cuMemFree_v2", self._taken)
            self._taken, self._taken_bytes = None, 0

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Around one part; parts do not nest."""
        self.synchronize()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        retries, mapped = self._retries(), mapped_bytes(self.device)
        part = self.parts.setdefault(name, Part())
        self._current = name
        began = time.perf_counter()
        if part.times == 0:
            self.say(f"{name} ...")
        try:
            yield
            self.synchronize()
        finally:
            part.seconds += time.perf_counter() - began
            part.times += 1
            self._note(name)
            self._current = None
            if self._on_gpu:
                mapped = max(mapped, mapped_bytes(self.device))
                part.reserved_bytes = max(part.reserved_bytes, mapped + torch.cuda.max_memory_reserved(self.device))
                part.allocated_bytes = max(part.allocated_bytes, mapped + torch.cuda.max_memory_allocated(self.device))
                part.retries += self._retries() - retries

    def forget(self) -> None:
        """Begin anew, after a warm-up."""
        self.parts.clear()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def used_bytes(self) -> int:
        """Of the device now, everybody's, without what a cap takes; 0 on a CPU."""
        if not self._on_gpu:
            return 0
        if self._used:
            return self._used() - self._taken_bytes
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - self._taken_bytes

    def cap(self, cap_bytes: int) -> None:
        """From now to the meter's end the device has no more than that: take all memory beyond. Once a meter."""
        used, (free, _) = self.used_bytes(), torch.cuda.mem_get_info(self.device)
        if used >= cap_bytes:
            raise ValueError(f"a cap of {cap_bytes / 1e9:g} GB, and {used / 1e9:.2f} GB are in use")
        beyond = free - (cap_bytes - used)
        if beyond > 0:
            address = ctypes.c_uint64()
            with torch.cuda.device(self.device):
                call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(beyond))
            self._taken, self._taken_bytes = address, beyond

    def say(self, text: str) -> None:
        """A line of progress on stderr."""
        elapsed = time.perf_counter() - self._started
        memory = f"{self.used_bytes() / 1e9:6.2f} GB  " if self._on_gpu else ""
        print(f"{elapsed:7.1f} s  {memory}{text}", file=sys.stderr, flush=True)

    def _retries(self) -> int:
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"] if self._on_gpu else 0

    def _note(self, name: str) -> None:
        part = self.parts.get(name)
        if part is not None:
            part.device_bytes = max(part.device_bytes, self.used_bytes())

    def _poll(self) -> None:
        heard = time.perf_counter()
        while not self._stop.wait(POLL_SECONDS if self._used else HEARTBEAT_SECONDS):
            name = self._current
            if name is None:
                continue
            if self._used:
                self._note(name)
            if time.perf_counter() - heard > HEARTBEAT_SECONDS:
                heard = time.perf_counter()
                print(f"{heard - self._started:7.1f} s  ... {name}", file=sys.stderr, flush=True)


@dataclass
class Timed:
    """What the calls of some functions took together."""

    calls: int = 0
    _seconds: float = 0.0
    _events: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of the device, from the first kernel's start to the last one's end; of the host, on a CPU."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds


@contextmanager
def timed_functions(places: Sequence[tuple[Any, str]], device: torch.device) -> Generator[Timed]:
    """Time the functions (owner, name), called through their owner, a module or a class with static methods."""
    timed = Timed()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            timed.calls += 1
            if device.type != "cuda":
                began = time.perf_counter()
                result = function(*args, **kwargs)
                timed._seconds += time.perf_counter() - began
                return result
            if torch.cuda.is_current_stream_capturing():
                return function(*args, **kwargs)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = function(*args, **kwargs)
            end.record()
            timed._events.append((begin, end))
            return result

        return call

    with ExitStack() as stack:
        for owner, name in places:
            original = vars(owner)[name]
            static = isinstance(original, staticmethod)
            wrapped = wrap(getattr(owner, name))
            setattr(owner, name, staticmethod(wrapped) if static else wrapped)
            stack.callback(setattr, owner, name, original)
        yield timed


def matrix_flops(device: torch.device) -> float:
    """bf16 products of random numbers, FLOPs a second, over about a second: what a card sustains."""
    a, b = (torch.randn(_RATE_SIZE, _RATE_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    seconds(3)
    times = max(3, round(_RATE_SECONDS / (seconds(3) / 3)))
    return 2 * _RATE_SIZE**3 * times / seconds(times)


# ------------------------------------------------------------------------------------------------- the driver


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: unlike the first version's, its `used` is without what the driver keeps for itself."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _driver_query(device: torch.device) -> Callable[[], int] | None:
    """A function that gives the bytes in use on the device; None where NVML or the device is not found."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)):
            return None
    except (OSError, AttributeError):
        return None

    def used() -> int:
        now = _Memory(version=memory.version)
        return now.used if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(now)) == 0 else 0

    return used
