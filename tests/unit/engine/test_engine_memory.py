"""Memory of keys and values changes what waits, never what is drawn: small pools, chunks, sleep, refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policies import gap, policy, requests

from qerl.config import RolloutConfig
from qerl.engine.budget import allowed_pages
from qerl.engine.drafts import Chunk
from qerl.engine.engine import PagedEngine, build_engine
from qerl.engine.graphs import StepRunner
from qerl.engine.kv_cache import KVCache
from qerl.engine.runner import Runner
from qerl.engine.scheduler import Scheduler
from qerl.engine.speculation import Speculation
from qerl.nn.lora import LoraLinear, adapters_disabled
from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams

SAMPLING = SamplingParams()
NOISE = NoiseDraw(seed=3, step=2, sigma=5e-2, per="completion")
PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, kv heads, head dim, fp32: of the tiny qwen2


def engine_of(model: torch.nn.Module, eos_ids: Sequence[int] = (), **config: object) -> PagedEngine:
    engine = build_engine(model, eos_ids=eos_ids, config=RolloutConfig(**config))
    assert isinstance(engine, PagedEngine)
    engine.sync(NOISE)
    return engine


def flat(results: list[list[Completion]]) -> list[Completion]:
    return [completion for group in results for completion in group]


def assert_same(a: list[list[Completion]], b: list[list[Completion]]) -> None:
    assert [c.token_ids for c in flat(a)] == [c.token_ids for c in flat(b)]
    assert [c.finish_reason for c in flat(a)] == [c.finish_reason for c in flat(b)]
    for left, right in zip(flat(a), flat(b), strict=True):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)
        assert left.entropies == pytest.approx(right.entropies, abs=1e-5)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which drafts gave their pages back."""
    seen: list[tuple[int, int]] = []
    suspend = Scheduler.suspend

    def spying(scheduler: Scheduler, slots: Sequence[int], drawn: Sequence[Completion]) -> list[tuple[int, int]]:
        seen.extend(scheduler.running[slot].age for slot in slots)
        return suspend(scheduler, slots, drawn)

    monkeypatch.setattr(Scheduler, "suspend", spying)
    return seen


@pytest.mark.parametrize("steps_per_look", [1, 7])
def test_a_small_pool_gives_the_tokens_of_a_large_one(
    steps_per_look: int, interrupted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl.engine.runner.STEPS_PER_LOOK", {"cpu": steps_per_look})
    lookahead = 1 + Speculation(is_on=True, steps_per_look=steps_per_look).longest_reach
    monkeypatch.setattr("qerl.engine.scheduler.LOOKAHEAD", lookahead)  # careless, so that drafts give way all the time
    model = policy("qwen2")
    asked = requests(5, 40, 16, samples=3, max_new_tokens=120)
    large = engine_of(model).generate(asked, SAMPLING)
    assert interrupted == []
    results = engine_of(model, kv_cache_tokens=480, prefill_tokens=32).generate(asked, SAMPLING)
    assert len(interrupted) >= 4 and (0, 0) not in interrupted
    assert_same(results, large)
    assert gap(model, asked, results, NOISE) <= 1e-4  # what was prefilled again ran under the right noise


def test_long_prompts_run_in_pieces_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("llama")
    asked = requests(3, 150, 60, 31, samples=2)
    whole = engine_of(model).generate(asked, SAMPLING)
    pieces: list[list[int]] = []
    prefill = Runner.prefill

    def spying(runner: Runner, chunks: Sequence[Chunk]) -> None:
        pieces.append([len(chunk.tokens) for chunk in chunks])
        prefill(runner, chunks)

    monkeypatch.setattr(Runner, "prefill", spying)
    results = engine_of(model, prefill_tokens=48).generate(asked, SAMPLING)
    assert [piece for piece in pieces if piece] == [[3, 45], [48], [48], [9, 39], [21, 27], [4]]
    assert_same(results, whole)
    assert gap(model, asked, results, NOISE) <= 1e-4


@cache
def crowd() -> tuple[torch.nn.Module, list[Request], list[list[Completion]]]:
    model = policy("qwen3")
    asked = requests(5, 33, 16, 2, samples=3, max_new_tokens=80)
    return model, asked, [engine_of(model, range(2), max_batch_size=1).generate([r], SAMPLING)[0] for r in asked]


@settings(deadline=None, max_examples=6)
@given(st.permutations(range(4)), st.integers(1, 4), st.integers(1, 12), st.integers(9, 30), st.integers(16, 60))
def test_a_completion_depends_neither_on_company_nor_on_memory(
    order: list[int], num_requests: int, max_batch_size: int, pages: int, prefill_tokens: int
) -> None:
    model, asked, alone = crowd()
    order = order[:num_requests]
    engine = engine_of(
        model,
        eos_ids=range(2),
        max_batch_size=max_batch_size,
        kv_cache_tokens=16 * pages,
        prefill_tokens=prefill_tokens,
    )
    assert_same(engine.generate([asked[i] for i in order], SAMPLING), [alone[i] for i in order])


def test_cache_and_runner_outlive_calls_and_updates() -> None:
    model = policy("qwen2")
    engine = engine_of(model)
    asked = requests(20, samples=4)
    first = engine.generate(asked, SAMPLING)
    cache, runner = engine._cache, engine._runner
    assert engine.generate(asked, SAMPLING) == first
    engine.sync(NoiseDraw(seed=3, step=3, sigma=5e-2, per="completion"))
    other = engine.generate(requests(20, samples=2), SAMPLING)
    assert [c.token_ids for c in flat(other)] != [c.token_ids for c in flat(first)[:2]]
    assert engine._cache is cache and engine._runner is runner
    engine.generate(requests(8, 120, samples=3), SAMPLING)  # needs longer tables and more pages
    assert engine._cache is not cache and engine._runner is not runner
    engine.sync(NOISE)
    assert engine.generate(asked, SAMPLING) == first


def test_what_is_baked_into_graphs_makes_a_new_runner() -> None:
    model = policy("qwen2")
    engine = engine_of(model)
    asked = requests(20, samples=4)
    runners = []

    def run(sampling: SamplingParams = SAMPLING) -> None:
        results = engine.generate(asked, sampling)
        fresh = build_engine(model, eos_ids=(), config=RolloutConfig())
        fresh.sync(engine._decoder.norms.draw)
        assert_same(results, fresh.generate(asked, sampling))
        assert engine._runner not in runners
        runners.append(engine._runner)

    run()
    run(SamplingParams(temperature=0.5))
    engine.sync(None)  # norms are shared by all slots
    run()
    with adapters_disabled(model):
        engine.sync(None)
        run()
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.scaling = {name: 2 * value for name, value in module.scaling.items()}
    engine.sync(None)
    run()


def test_sleep_gives_the_memory_back_at_once_and_wake_takes_it_again() -> None:
    engine = engine_of(policy("qwen2"))
    engine.wake()
    assert engine._cache is None  # nobody knows how much yet
    asked = requests(20, samples=4)
    first = engine.generate(asked, SAMPLING)
    assert engine._cache is not None and engine._runner is not None
    size = engine._cache.num_pages
    memory = [weakref.ref(x) for x in (engine._cache.pool, engine._runner._slots.page_table)]
    gc.disable()
    try:
        engine.sleep()
        assert [ref() for ref in memory] == [None, None]  # no cycle keeps them
    finally:
        gc.enable()
    engine.wake()
    assert engine._cache is not None and engine._cache.num_pages == size
    assert engine.generate(asked, SAMPLING) == first
    engine.sleep()
    assert engine.generate(asked, SAMPLING) == first


class Mapped:
    """A GPU's memory with an address of its own (engine/mapped.py): others write to it while it is theirs."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self.is_mapped = False

    def map(self) -> None:
        self._bytes.fill_(0xFF)  # NaN
        self.is_mapped = True

    def unmap(self) -> None:
        self._bytes.fill_(0xFF)
        self.is_mapped = False

    def tensor(self) -> torch.Tensor:
        return self._bytes


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> type[Mapped]:
    """A CPU whose memory keeps its address, as a GPU's does."""
    monkeypatch.setattr("qerl.engine.kv_cache.reserve", Mapped)
    return Mapped


def test_cache_and_runner_outlive_sleep_where_memory_keeps_its_address(mapped: type[Mapped]) -> None:
    model = policy("qwen2")
    engine = engine_of(model)
    engine.sleep()
    engine.wake()
    assert engine._cache is None
    asked = requests(20, 9, samples=4)
    first = engine.generate(asked, SAMPLING)
    cache, runner = engine._cache, engine._runner
    assert cache is not None and runner is not None
    addresses = [getattr(runner._slots, name).data_ptr() for name in vars(runner._slots)] + [cache.pool.data_ptr()]
    for wakes in (True, False, True):  # `generate` wakes whoever sleeps
        engine.sleep()
        engine.sleep()
        assert not cache._memory.is_mapped and cache.pool.isnan().all()
        engine.sync(NOISE)  # its probe needs no pages
        if wakes:
            engine.wake()
            assert cache._memory.is_mapped and not cache.pool.any()
        assert engine.generate(asked, SAMPLING) == first
        assert engine._cache is cache and engine._runner is runner
        assert addresses == [getattr(runner._slots, name).data_ptr() for name in vars(runner._slots)] + [
            cache.pool.data_ptr()
        ]
    engine.sleep()
    engine.generate(requests(20, 9, samples=4, max_new_tokens=60), SAMPLING)  # needs longer tables and more pages
    assert engine._cache is not cache and engine._runner is not runner
    assert engine.generate(asked, SAMPLING) == first


def test_a_cache_of_codes_outlives_sleep_with_its_scales(mapped: type[Mapped]) -> None:
    engine = engine_of(policy("qwen3"), kv_cache_dtype="fp8")
    asked = requests(20, 9, samples=4)
    first = engine.generate(asked, SAMPLING)
    cache = engine._cache
    assert cache is not None and cache.scales is not None
    engine.sleep()
    engine.wake()
    assert not cache.pool.any() and not cache.scales.any()
    assert engine.generate(asked, SAMPLING) == first and engine._cache is cache


def test_what_is_baked_into_graphs_ends_with_the_runner_alone(mapped: type[Mapped]) -> None:
    """The cache stays. Memory that adapters of other ranks had is read no more, even if these ranks come back."""
    model = policy("qwen2")
    engine = engine_of(model)
    asked = requests(20, samples=4)
    first = engine.generate(asked, SAMPLING)
    cache, runner = engine._cache, engine._runner
    engine.generate(asked, SamplingParams(temperature=0.5))
    assert engine._cache is cache and engine._runner is not runner
    assert engine.generate(asked, SAMPLING) == first
    runner = engine._runner
    with adapters_disabled(model):
        engine.sync(NOISE)  # and nobody samples before
    engine.sync(NOISE)  # the ranks are what they were
    assert engine.generate(asked, SAMPLING) == first
    assert engine._cache is cache and engine._runner is not runner


def test_a_call_that_was_broken_off_keeps_no_logits_while_the_engine_sleeps(mapped: type[Mapped]) -> None:
    engine = engine_of(policy("qwen2"), prefill_tokens=16, max_batch_size=1)
    asked = requests(8, 8, samples=2)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(asked, SAMPLING, stop)
    assert engine._runner is not None and engine._runner._prompt_logits
    engine.sleep()
    assert not engine._runner._prompt_logits
    fresh = engine_of(policy("qwen2"))
    assert_same(engine.generate(asked, SAMPLING), fresh.generate(asked, SAMPLING))


def test_a_wake_that_was_broken_off_is_no_wake(mapped: type[Mapped], monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is there, with what others have left in it, as NaN: 0 * NaN would be NaN."""
    engine = engine_of(policy("qwen2"))
    asked = requests(20, 9, samples=4)
    first = engine.generate(asked, SAMPLING)
    engine.sleep()
    map_memory = Mapped.map

    def interrupted(memory: Mapped) -> None:
        map_memory(memory)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Mapped, "map", interrupted)
        engine.wake()
    assert engine.generate(asked, SAMPLING) == first


def test_a_wake_without_memory_ends_in_a_smaller_cache(mapped: type[Mapped], monkeypatch, caplog) -> None:
    engine = engine_of(policy("qwen2"))
    asked = requests(20, 33, samples=3, max_new_tokens=20)
    first = engine.generate(asked, SAMPLING)
    cache, runner, freed = engine._cache, engine._runner, []
    assert cache is not None and runner is not None
    weakref.finalize(cache._memory, freed.append, True)
    most = len(cache._bytes) - 1
    del cache
    engine.sleep()
    map_memory = Mapped.map

    def scarce(memory: Mapped) -> None:
        if len(memory._bytes) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        map_memory(memory)

    monkeypatch.setattr(Mapped, "map", scarce)
    engine.wake()  # says nothing: `generate` does
    assert engine._cache is not None and not engine._cache._memory.is_mapped and engine._runner is runner
    del runner
    assert_same(engine.generate(asked, SAMPLING), first)
    assert caplog.text.count("out of memory in the rollout") == 1 and freed
    assert len(engine._cache._bytes) <= most
    smaller, runner = engine._cache, engine._runner
    engine.sleep()
    engine.wake()
    assert_same(engine.generate(asked, SAMPLING), first)
    assert engine._cache is smaller and engine._runner is runner


def test_a_call_that_was_broken_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(policy("qwen2"), eos_ids=range(4))
    few, many = requests(20, samples=2), requests(9, 30, 7, samples=4, max_new_tokens=40)
    first = engine.generate(few, SAMPLING)
    # As on a GPU, where a step runs over slots that are not in use: what was left in them would write to pages.
    monkeypatch.setattr(
        StepRunner, "bucket", lambda steps, num_slots, pages, tokens: (steps._max_slots, steps._max_pages, tokens)
    )

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(many, SAMPLING, stop)
    assert_same(engine.generate(few, SAMPLING), first)


@pytest.mark.parametrize(
    ("key", "value", "smallest"),
    [
        ("kv_cache_tokens", 80, 128),
        ("kv_cache_memory", "64KiB", f"{9 * PAGE_BYTES // 1024}KiB"),
        ("kv_cache_memory", "0.0001%", f"{9 * PAGE_BYTES // 1024}KiB"),
    ],
)
def test_a_budget_too_small_for_one_sequence_is_refused_when_the_engine_is_built(
    key: str, value: int | str, smallest: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl.engine.engine.total_bytes", lambda device: 10**9)
    model = policy("qwen2")

    def build(budget: int | str) -> PagedEngine:
        config = RolloutConfig(max_completion_length=70, **{key: budget})
        return build_engine(model, eos_ids=(), config=config, max_prompt_length=41)  # 7 pages, and a part to copy

    with pytest.raises(
        ValueError,
        match=rf"up to 41 tokens and up to 70 new ones take 128 tokens of KV cache, and rollout\.{key} = {value} holds "
        rf"\d+: set it to {smallest} at least",
    ):
        build(value)
    engine = build(smallest)
    assert len(flat(engine.generate(requests(41, samples=2, max_new_tokens=70), SAMPLING))) == 2


def test_budgets_in_every_unit() -> None:
    def pages(**config: object) -> list[int]:
        return list(allowed_pages(RolloutConfig(**config), page_bytes=512, total_bytes=1000 * 512).values())

    assert pages() == []
    assert pages(kv_cache_tokens=330) == [20]
    assert pages(kv_cache_memory="10KiB") == [20 - 1]  # a spare page
    assert pages(kv_cache_memory="0.01 MB") == [10_000 // 512 - 1]
    assert pages(kv_cache_memory="50%") == [500 - 1]
    assert pages(kv_cache_memory="0.1KiB") == [0]
    assert pages(kv_cache_tokens=330, kv_cache_memory="10KiB") == [20, 19]


def test_too_little_memory_names_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: KVCache, **sizes: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(KVCache, "__init__", full)
    with pytest.raises(
        torch.OutOfMemoryError, match="one sequence at a time, with a KV cache of 48 tokens: lower rollout"
    ):
        engine_of(policy("qwen2")).generate(requests(8, samples=3), SAMPLING)


def test_no_more_is_taken_than_the_slots_can_need() -> None:
    for budget, pages in ({}, 15), ({"kv_cache_tokens": 10_000}, 15), ({"kv_cache_memory": "99%"}, 15), (
        {"kv_cache_memory": "99%", "kv_cache_tokens": 100}, 6
    ):  # fmt: skip
        engine = engine_of(policy("qwen2"), max_batch_size=3, **budget)
        engine.generate(requests(20, samples=5, max_new_tokens=30), SAMPLING)
        assert engine._cache is not None and engine._cache.num_pages == pages + 1  # 3 slots of 4 pages, 1 to copy


def test_a_rollout_that_runs_out_of_memory_goes_on_with_a_smaller_cache(monkeypatch, caplog):
    """First when the pool is made, then while it decodes; the tokens are those of a rollout that had enough."""
    asked = requests(20, 33, samples=3, max_new_tokens=20)
    expected = engine_of(policy("qwen2")).generate(asked, SAMPLING)
    pools: list[int] = []
    initialise, decode = KVCache.__init__, Runner.decode

    def making(self: KVCache, **sizes: Any) -> None:
        pools.append(sizes["pages"] - 1)
        if len(pools) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        initialise(self, **sizes)

    def decoding(self: Runner, *of: int) -> list[int]:
        if len(pools) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, *of)

    monkeypatch.setattr(KVCache, "__init__", making)
    monkeypatch.setattr(Runner, "decode", decoding)
    engine = engine_of(policy("qwen2"))
    assert_same(engine.generate(asked, SAMPLING), expected)
    assert pools[0] > pools[1] > pools[2] and len(pools) == 3
    assert caplog.text.count("out of memory in the rollout; it goes on with a KV cache of") == 2
    engine.sleep()
    engine.wake()
    assert pools[3] == pools[2]
