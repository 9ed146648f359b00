"""Programmatic dependent launch for the Triton kernels: a kernel starts while the one before it in the stream ends.

    @overlapping                   says that a kernel's blocks run beside those of products
    @triton.jit
    def kernel(..):
        wait_for_previous(OVERLAP)     first thing: lets the next one start, then waits for the one before it
        ..
        announce(counter, ANNOUNCE)    last thing, of one whose result a product waits for (announcement.py)

    kernel[grid](.., **overlaps(device))

What a start costs (about a microsecond, of two that a small kernel takes) then passes beside the kernel before, and the
weights that w4a16 loads before its own wait come while the small kernels between two products run. It is safe since
each kernel waits for its predecessor before it reads what a kernel may still write, and before it writes: what is
complete for one is for all that follow. (A product may wait for a count of its predecessor's instead, announcement.py:
all before that one are over then. For its end it waits later.) Behind what lets nobody start early (torch's own
kernels, a copy, an event of another stream) a kernel starts when all blocks of that have ended, but what they wrote is
sure to be there only after the wait. So what may be read ahead of the wait (a norm's gain, older keys and values) was
written before the last kernel that lets nobody start early, and not by it.

sm_90 and newer; elsewhere, and in Triton's interpreter, launches are plain.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qerl.kernels.nvrtc import prefer_shared_memory

_Kernel = TypeVar("_Kernel")
_overlapping: set[str] = set()
"""Names of the kernels that run beside products. Another library's of the same name computes what it did before."""


def overlapping(kernel: _Kernel) -> _Kernel:
    """A kernel that, once loaded, wants multiprocessors divided as the products do (nvrtc.prefer_shared_memory)."""
    _overlapping.add(kernel.__name__)  # pyright: ignore[reportAttributeAccessIssue]
    return kernel


def _prefer_shared_memory(module: Any, function: Any, name: Any, metadata_group: Any, hash: Any) -> None:
    if name in _overlapping:
        prefer_shared_memory(ctypes.c_void_p(function), torch.cuda.current_device())  # where Triton loads


with suppress(AttributeError):  # no chain of hooks, but None or somebody's function: loaded as they are, then
    knobs.runtime.kernel_load_end_hook.add(_prefer_shared_memory)


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """The next kernel may start; what earlier kernels wrote is there, and what they read may be written."""
    start_next(OVERLAP)
    wait(OVERLAP)


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """The first half of `wait_for_previous`, for a kernel that reads something ahead of the second."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """The second half."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def announce(counter_ptr, ANNOUNCE: tl.constexpr):
    """Last thing of a program: who sees the count (announcement.py) sees what it has stored."""
    if ANNOUNCE:
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release")


@cache
def overlaps(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch: whether it overlaps the kernel before it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
