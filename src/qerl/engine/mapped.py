"""Memory of a GPU whose address stays while what is behind it comes and goes.

    reserve   cuMemAddressReserve                      an address range, once; it takes no memory
    map       cuMemCreate, cuMemMap, cuMemSetAccess    memory for all of it, with whatever was in there before
    unmap     cuMemUnmap                               back with the driver at once, for anyone; the address stays

So what holds addresses, as CUDA graphs do, outlives that its memory was lent to others. While nothing is mapped, an
access is an illegal one, and nobody may touch the tensor. torch's allocator knows nothing of such memory, and neither
do its counters: `mapped_bytes` counts it, for a run's metrics and bench/. Through cuda.bindings, imported when first
needed; where that is missing, `reserve` gives None, and the caller does without. Called by kv_cache.py.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

logger = logging.getLogger(__name__)

LEFT_FREE = 2_000_000_000
"""Bytes for those who ask the driver itself: graphs, libraries."""

_mapped: Counter[int] = Counter()


def mapped_bytes(device: torch.device) -> int:
    """What is mapped on a device now, in the whole process; 0 on a CPU."""
    return _mapped[_index(device)] if device.type == "cuda" else 0


def reserve(num_bytes: int, device: torch.device) -> MappedMemory | None:
    """An address range with nothing behind it yet; None on a CPU, or where the driver or cuda.bindings cannot."""
    if device.type != "cuda" or not _can_map(_index(device)):
        return None
    return MappedMemory(num_bytes, device)


class MappedMemory:
    """See the module's text. Unmapped, and its address given back, with the last reference, tensors' included."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """num_bytes: rounded up to what the driver hands out, some MiB."""
        self._range = _Range(num_bytes, device)
        weakref.finalize(self, self._range.close).atexit = False  # at the process's end the driver takes it all

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory behind the address."""
        return self._range.is_mapped

    def map(self) -> None:
        """Take memory, unless it is there. torch.OutOfMemoryError: too little, even without what torch has unused.

        What torch has unused stays with it where there is room for both: giving it back and taking it again costs a
        large card some tenths of a second.
        """
        if self.is_mapped:
            return
        free, _ = torch.cuda.mem_get_info(self._range.device)
        if free >= self._range.size + LEFT_FREE:
            with suppress(torch.OutOfMemoryError):  # another process may have taken what was free
                self._range.map()
                return
        torch.cuda.empty_cache()
        self._range.map()

    def unmap(self) -> None:
        """Give the memory back, unless that is done, once the device has finished what it was told to do."""
        if self.is_mapped:
            self._range.unmap()

    def tensor(self) -> UInt8[Tensor, " bytes"]:
        """All of it, at the same address in every life of the memory. To be asked for while mapped."""
        assert self.is_mapped, "torch looks up whose memory it is"
        return torch.as_tensor(self, device=self._range.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How torch finds it; the tensor then holds a reference to `self`."""
        return {"shape": (self._range.size,), "typestr": "|u1", "data": (self._range.address, False), "version": 3}


class _Range:
    """The driver's side; apart from `MappedMemory`, so that it is there to be closed when that is gone."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._driver = driver = _driver()
        self.device = torch.device("cuda", _index(device))
        self._what = what = driver.CUmemAllocationProp()
        what.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        what.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        what.location.id = self.device.index
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(self._call("cuMemGetAllocationGranularity", what, least))
        self.size = -(-num_bytes // step) * step
        self.address = int(self._call("cuMemAddressReserve", self.size, 0, 0, 0))
        self.is_mapped = False

    def map(self) -> None:
        """All or nothing."""
        handle = self._call("cuMemCreate", self.size, self._what, 0)
        try:
            self._call("cuMemMap", self.address, self.size, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # from here on the mapping alone holds the memory
        access = self._driver.CUmemAccessDesc()
        access.location = self._what.location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self._call("cuMemSetAccess", self.address, self.size, [access], 1)
        except BaseException:
            self._call("cuMemUnmap", self.address, self.size)
            raise
        self.is_mapped = True
        _mapped[self.device.index] += self.size

    def unmap(self) -> None:
        torch.cuda.synchronize(self.device)
        self._call("cuMemUnmap", self.address, self.size)
        self.is_mapped = False
        _mapped[self.device.index] -= self.size

    def close(self) -> None:
        if self.is_mapped:
            self.unmap()
        self._call("cuMemAddressFree", self.address, self.size)

    def _call(self, name: str, *arguments: Any) -> Any:
        return _checked(name, getattr(self._driver, name)(*arguments))


def _checked(name: str, result: tuple[Any, ...]) -> Any:
    """What a call of the driver gave. torch.OutOfMemoryError, or RuntimeError for any other failure."""
    error, *values = result
    if int(error) == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {name}")
    if int(error):
        raise RuntimeError(f"CUDA driver: {name} failed with {error!r}")
    return values[0] if values else None


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@cache
def _can_map(index: int) -> bool:
    try:
        driver = _driver()
    except ImportError:
        logger.warning(
            "without cuda-bindings the engine captures its CUDA graphs again after every update: "
            "pip install 'cuda-bindings>=13,<14'"
        )
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    device = _checked("cuDeviceGet", driver.cuDeviceGet(index))
    return bool(_checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, device)))


def _driver() -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    return driver


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
