"""Memory that comes and goes under one address: a driver that keeps books in place of CUDA's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl.engine import mapped
from qerl.engine.mapped import MappedMemory, mapped_bytes, reserve

MIB = 1 << 20
GPU = torch.device("cuda", 0)


class Driver:
    """What the driver is asked for, in its own words: a call gives (error, result)."""

    def __init__(self) -> None:
        self.free, self.reserved, self.behind = 10 * MIB, {}, {}
        self.created: dict[int, int] = {}
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.supported = 1

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return {
                "CUmemAllocationProp": lambda: SimpleNamespace(location=SimpleNamespace()),
                "CUmemAccessDesc": SimpleNamespace,
            }.get(name, SimpleNamespace(**dict.fromkeys(_CONSTANTS)))

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if error := self.fails.get(name):
                return error, None
            return getattr(self, f"_{name}")(*arguments)

        return call

    def _cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return 0, index

    def _cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        return 0, self.supported

    def _cuMemGetAllocationGranularity(self, what: Any, least: Any) -> tuple[Any, ...]:
        return 0, 2 * MIB

    def _cuMemAddressReserve(self, size: int, *_: int) -> tuple[Any, ...]:
        address = 1 << 40
        self.reserved[address] = size
        return 0, address

    def _cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.reserved.pop(address) == size and address not in self.behind
        return (0,)

    def _cuMemCreate(self, size: int, what: Any, flags: int) -> tuple[Any, ...]:
        assert size % (2 * MIB) == 0 and what.location.id == 0
        if size > self.free:
            return 2, None
        self.free -= size
        handle = len(self.calls)
        self.created[handle] = size
        return 0, handle

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        assert self.reserved[address] == size == self.created[handle] and address not in self.behind
        self.behind[address] = size
        return (0,)

    def _cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        size = self.created.pop(handle)
        self.free += 0 if size in self.behind.values() else size
        return (0,)

    def _cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert self.behind[address] == size and len(access) == count == 1
        return (0,)

    def _cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.behind.pop(address) == size
        self.free += size
        return (0,)


_CONSTANTS = (
    "CU_MEM_ALLOCATION_TYPE_PINNED",
    "CU_MEM_LOCATION_TYPE_DEVICE",
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM",
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(mapped, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: driver.calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver.free, 80 * MIB))
    monkeypatch.setattr(mapped, "LEFT_FREE", 1 * MIB)
    mapped._can_map.cache_clear()
    yield driver
    mapped._can_map.cache_clear()


def test_memory_comes_and_goes_and_the_address_stays(driver: Driver) -> None:
    memory = reserve(3 * MIB, GPU)
    assert memory is not None and not memory.is_mapped and driver.free == 10 * MIB
    interface = memory.__cuda_array_interface__
    assert interface["shape"] == (4 * MIB,) and interface["data"] == (1 << 40, False)
    for _ in range(2):
        memory.map()
        memory.map()
        assert memory.is_mapped and driver.free == 6 * MIB == 10 * MIB - mapped_bytes(GPU)
        assert driver.created == {}  # the mapping alone holds it
        driver.calls.clear()
        memory.unmap()
        memory.unmap()
        assert driver.calls == ["synchronize", "cuMemUnmap"]
        assert not memory.is_mapped and driver.free == 10 * MIB and mapped_bytes(GPU) == 0
        assert memory.__cuda_array_interface__ == interface


@pytest.mark.parametrize("is_mapped", [False, True])
def test_all_is_given_back_with_the_last_reference(driver: Driver, is_mapped: bool) -> None:
    memory = MappedMemory(MIB, GPU)
    if is_mapped:
        memory.map()
    gc.disable()
    try:
        del memory
        assert driver.reserved == {} and driver.free == 10 * MIB and mapped_bytes(GPU) == 0
    finally:
        gc.enable()


def test_torch_gives_back_what_it_has_unused_first(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MappedMemory(8 * MIB, GPU)
    driver.free = 4 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        memory.map()
    assert driver.calls.count("empty_cache") == 1
    assert not memory.is_mapped and driver.free == 4 * MIB

    def give_back() -> None:
        driver.free = 10 * MIB

    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    memory.map()
    assert memory.is_mapped and driver.free == 2 * MIB


@pytest.mark.parametrize(("free", "gives_back"), [(9 * MIB, False), (9 * MIB - 1, True)])
def test_torch_keeps_what_it_has_unused_where_there_is_room(driver: Driver, free: int, gives_back: bool) -> None:
    """8 MiB, and what is left free for others."""
    driver.free = free
    MappedMemory(8 * MIB, GPU).map()
    assert driver.calls.count("empty_cache") == gives_back


def test_torch_gives_back_what_it_has_unused_where_the_room_has_gone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took it between the question and the call, or the driver counts as free what it cannot give."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * MIB, 80 * MIB))
    driver.free = 4 * MIB

    def give_back() -> None:
        driver.free = 10 * MIB

    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    memory = MappedMemory(8 * MIB, GPU)
    memory.map()
    assert memory.is_mapped and driver.free == 2 * MIB


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize(("error", "kind"), [(2, torch.OutOfMemoryError), (700, RuntimeError)])
def test_what_was_half_made_is_undone(driver: Driver, name: str, error: int, kind: type[Exception]) -> None:
    memory = MappedMemory(2 * MIB, GPU)
    driver.fails = {name: error}
    with pytest.raises(kind, match=name):
        memory.map()
    assert not memory.is_mapped and driver.free == 10 * MIB and driver.created == driver.behind == {}
    assert mapped_bytes(GPU) == 0
    driver.fails = {}
    memory.map()
    assert driver.free == 8 * MIB


def test_who_cannot_map_does_without(driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    assert reserve(MIB, torch.device("cpu")) is None and mapped_bytes(torch.device("cpu")) == 0
    driver.supported = 0
    assert reserve(MIB, GPU) is None
    mapped._can_map.cache_clear()

    def missing() -> None:
        raise ImportError

    monkeypatch.setattr(mapped, "_driver", missing)
    assert reserve(MIB, GPU) is None and reserve(MIB, GPU) is None
    assert caplog.text.count("without cuda-bindings the engine captures its CUDA graphs again") == 1


def test_cuda_bindings_has_what_is_called() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    what = driver.CUmemAllocationProp()
    what.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    what.location.id = 3
    access = driver.CUmemAccessDesc()
    access.location = what.location
    assert access.location.id == 3 and int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY) == mapped._OUT_OF_MEMORY
    kinds = ("CUmemAllocationType", "CUmemLocationType", "CUmemAllocationGranularity_flags", "CUmemAccess_flags")
    for kind, constant in zip((*kinds, "CUdevice_attribute"), _CONSTANTS, strict=True):
        assert hasattr(getattr(driver, kind), constant)
    assert all(hasattr(driver, name[1:]) for name in vars(Driver) if name.startswith("_cu"))
