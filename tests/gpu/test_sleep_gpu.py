"""An engine that sleeps has given its pages to others, and wakes with the graphs that read them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engine"))
from tiny_policies import policy, requests, scatter_adapters

from qerl.bench.meter import Meter
from qerl.config import RolloutConfig
from qerl.engine.engine import PagedEngine, build_engine
from qerl.engine.mapped import MappedMemory, mapped_bytes
from qerl.engine.runner import Runner
from qerl.noise import NoiseDraw
from qerl.types import Completion, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPU = torch.device("cuda")
MIB = 1 << 20
LARGE = {"samples": 512, "max_new_tokens": 4000}
"""A pool of a gigabyte in fp32: 512 slots of 257 pages, 8 KiB each. Most completions end early by EOS."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    before = mapped_bytes(GPU)
    yield
    gc.collect()
    torch.cuda.empty_cache()
    assert mapped_bytes(GPU) == before


def engine_of(model: torch.nn.Module, num_eos: int = 0, **config: object) -> PagedEngine:
    engine = build_engine(model, eos_ids=range(num_eos), config=RolloutConfig.model_validate(config))
    assert isinstance(engine, PagedEngine)
    return engine


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def scribble(leave: int = 1024 * MIB) -> None:
    """Fill nearly all of the device, and leave it to torch's allocator, which keeps it until somebody asks."""
    num_bytes = torch.cuda.mem_get_info()[0] - leave
    torch.full((num_bytes // 2,), torch.nan, dtype=torch.bfloat16, device="cuda")


def token_ids(results: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in results for completion in group]


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("per", ["rollout", "completion"])
def test_graphs_outlive_sleep(per: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, captured in the first rollout; then there are replays alone, with the bits of eager steps.

    Nothing ends by EOS, and there are no guesses, so that every rollout has the same buckets.
    """
    monkeypatch.setattr("qerl.engine.graphs.IDLE", 16)
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda")
    long = requests(5, 300, samples=9, max_new_tokens=180) + requests(33, 17, samples=9, max_new_tokens=60, seed=1)
    short = requests(9, samples=4, max_new_tokens=100)
    stepped: list[Runner] = []
    step = Runner._step
    monkeypatch.setattr(Runner, "_step", lambda self, *sizes: (stepped.append(self), step(self, *sizes))[1])

    def rollout(engine: PagedEngine, number: int) -> list[list[list[Completion]]]:
        engine.sync(NoiseDraw(seed=1, step=number, sigma=1e-2, per=per))
        return [engine.generate(asked, SamplingParams()) for asked in (long, short)]

    graphs = engine_of(model, kv_cache_dtype=dtype, speculation=False)
    rollout(graphs, 0)
    runner = graphs._runner
    assert runner is not None and runner in stepped
    captured = dict(runner._steps._graphs)
    assert captured.keys() == {(36, 31, 1), (32, 31, 1), (8, 8, 1)} and None not in captured.values()
    for number in range(1, 4):
        graphs.sleep()
        scribble()
        scatter_adapters(model, size=0.1 * number)  # as an update does
        if number != 2:  # `generate` wakes an engine that sleeps
            graphs.wake()
        stepped.clear()
        results = rollout(graphs, number)
        assert stepped == [] and graphs._runner is runner and runner._steps._graphs == captured
        eager = engine_of(model, kv_cache_dtype=dtype, speculation=False, cuda_graphs=False)
        assert results == rollout(eager, number)


def test_sleep_gives_the_memory_to_the_device_and_wake_takes_it() -> None:
    model = policy("qwen2", device="cuda", max_position_embeddings=8192)
    engine = engine_of(model, num_eos=60, max_batch_size=512)
    engine.generate(requests(100, **LARGE), SamplingParams())
    cache = engine._cache
    assert cache is not None
    pool = mapped_bytes(GPU)
    assert 0 <= pool - cache.pool.nbytes < 4 * MIB and pool > 1024 * MIB
    torch.cuda.empty_cache()
    awake = free_bytes()
    for _ in range(3):
        engine.sleep()
        assert mapped_bytes(GPU) == 0 and abs(free_bytes() - awake - pool) <= 4 * MIB
        engine.wake()
        assert mapped_bytes(GPU) == pool and abs(free_bytes() - awake) <= 4 * MIB
        assert not cache.pool.any()


@pytest.mark.parametrize("is_awake", [False, True])
def test_an_engine_that_is_gone_leaves_nothing(is_awake: bool) -> None:
    """Neither the pool nor the slots and graphs that slept."""
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda", max_position_embeddings=8192)
    left = []
    for _ in range(3):
        engine = engine_of(model, num_eos=60, max_batch_size=512)
        engine.generate(requests(100, **LARGE), SamplingParams())
        if not is_awake:
            engine.sleep()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        assert mapped_bytes(GPU) == 0
        left.append(free_bytes())
    assert left[2] >= left[1] - 4 * MIB  # the first one loaded kernels


def test_a_wake_on_a_full_device_ends_in_a_smaller_pool(caplog: pytest.LogCaptureFixture) -> None:
    """In fp32, where rounding does not decide between tokens; without graphs, whose nodes need the driver's memory."""
    model = policy("qwen2", device="cuda", max_position_embeddings=8192)
    engine = engine_of(model, num_eos=60, max_batch_size=512, cuda_graphs=False)
    asked = requests(100, **LARGE)
    expected = engine.generate(asked, SamplingParams())
    pool = mapped_bytes(GPU)
    engine.sleep()
    with Meter(GPU) as meter:
        meter.cap(meter.used_bytes() + pool * 85 // 100)
        engine.wake()
        assert mapped_bytes(GPU) == 0
        assert token_ids(engine.generate(asked, SamplingParams())) == token_ids(expected)
        smaller = mapped_bytes(GPU)
        assert pool // 4 < smaller <= pool * 3 // 4 + 4 * MIB
        assert "out of memory in the rollout; it goes on with a KV cache of" in caplog.text
        engine.sleep()
    engine.wake()
    assert mapped_bytes(GPU) == smaller


def test_memory_keeps_its_address_and_all_or_nothing_of_it_is_there() -> None:
    memory = MappedMemory(300 * MIB, GPU)
    assert not memory.is_mapped
    memory.map()
    tensor = memory.tensor()
    address = tensor.data_ptr()
    for value in (3, 7):
        tensor.fill_(value)
        assert tensor.sum().item() == value * 300 * MIB
        memory.unmap()
        assert mapped_bytes(GPU) == 0
        scribble(leave=128 * MIB)
        memory.map()  # torch's allocator has what is missing, and gives it back
        assert memory.tensor().data_ptr() == tensor.data_ptr() == address
    too_large = MappedMemory(torch.cuda.mem_get_info()[1], GPU)
    with pytest.raises(torch.OutOfMemoryError):
        too_large.map()
    assert not too_large.is_mapped and mapped_bytes(GPU) == 300 * MIB
    del memory
    assert tensor.fill_(1).all()  # a tensor holds it
    del tensor
    assert mapped_bytes(GPU) == 0


def test_a_cap_holds_for_torch_and_for_what_is_mapped() -> None:
    before = free_bytes()
    memory = MappedMemory(600 * MIB, GPU)
    with Meter(GPU) as meter:
        cap = meter.used_bytes() + 1000 * MIB
        meter.cap(cap)
        assert abs(free_bytes() - 1000 * MIB) <= 8 * MIB
        with meter("mapped"):
            memory.map()
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
            held = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        part = meter.parts["mapped"]
        assert 900 * MIB <= part.allocated_bytes <= part.reserved_bytes <= part.device_bytes < cap
        memory.unmap()
        more = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            memory.map()
        del held, more
        with pytest.raises(ValueError, match="are in use"):
            meter.cap(1 * MIB)
    torch.cuda.empty_cache()
    assert free_bytes() >= before - 64 * MIB
