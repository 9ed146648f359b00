"""The paged engine on a GPU in bf16: as close to fp32 as transformers is, and independent of the batch's company."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engine"))
from tiny_policies import CONFIGS, assert_as_exact_as_transformers, gap, policy, requests, scatter_adapters

from qerl.config import RolloutConfig
from qerl.engine.engine import build_engine
from qerl.engine.projection import Projection, sync
from qerl.kernels.announcement import Announcement
from qerl.nn.structure import decoder_layers
from qerl.noise import NoiseDraw
from qerl.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("per", ["rollout", "completion"])
@pytest.mark.parametrize("family", CONFIGS)
def test_bf16_is_as_exact_as_transformers(family: str, per: str) -> None:
    assert_as_exact_as_transformers(family, per, "cuda")


def test_a_full_house_gives_what_one_slot_gives() -> None:
    """In fp32, where rounding does not decide between tokens: slots, pages, late looks and moves on the device."""
    model = policy("qwen2", device="cuda")
    asked = requests(5, 33, 17, 2, samples=7, max_new_tokens=40)
    crowded, alone = (
        build_engine(model, eos_ids=range(9), config=RolloutConfig(max_batch_size=n)).generate(asked, SamplingParams())
        for n in (11, 1)
    )
    for group, other in zip(crowded, alone, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in other]


@pytest.mark.parametrize("batch_invariant, dtype", [(False, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_guesses_change_no_token(slots: int, batch_invariant: bool, dtype: torch.dtype) -> None:
    """In fp32, where rounding does not decide between tokens; in bf16 where a token's bits depend on no company."""
    model = policy("qwen2", dtype=dtype, device="cuda")
    asked = requests(5, 33, 17, samples=6, max_new_tokens=90)
    results = []
    for speculation in (False, True):
        config = RolloutConfig(speculation=speculation, batch_invariant=batch_invariant, max_batch_size=slots)
        engine = build_engine(model, eos_ids=range(2), config=config)
        engine.sync(NoiseDraw(seed=1, step=2, sigma=1e-2, per="completion"))
        results.append(engine.generate(asked, SamplingParams(temperature=0.1)))
    plain, guessed = ([c.token_ids for group in result for c in group] for result in results)
    assert guessed == plain
    if batch_invariant:
        assert results[0] == results[1]


@pytest.mark.parametrize("params", [SamplingParams(greedy=True), SamplingParams(temperature=1.3, top_k=40, top_p=0.9)])
def test_greedy_and_truncated_logprobs_are_those_of_transformers(params: SamplingParams) -> None:
    """In fp32; on a GPU the draw is the fused kernel's."""
    model = policy("qwen3", device="cuda")
    engine, asked = build_engine(model, eos_ids=(), config=RolloutConfig()), requests(6, 21, samples=4)
    results = engine.generate(asked, params)
    assert gap(model, asked, results, None, temperature=params.temperature) <= 1e-4
    assert engine.generate(asked, params) == results
    for group in results:
        assert all((c.token_ids == group[0].token_ids) == params.greedy for c in group[1:])


@pytest.mark.parametrize("per", ["rollout", "completion"])
def test_graphs_give_the_bits_of_eager_steps(per: str) -> None:
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda")
    asked = requests(5, 33, 17, 2, 130, samples=7, max_new_tokens=150)
    graphs, eager = (
        build_engine(model, eos_ids=range(2), config=RolloutConfig(max_batch_size=20, cuda_graphs=on))
        for on in (True, False)
    )
    for engine in (graphs, eager):
        engine.sync(NoiseDraw(seed=1, step=2, sigma=1e-2, per=per))
    assert graphs.generate(asked, SamplingParams()) == eager.generate(asked, SamplingParams())


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("adapters", [True, False])
def test_what_is_announced_changes_no_bit(adapters: bool, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of up to 8 tokens that wait for x by a count, beside those that wait for the kernel that makes it."""
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda", lora=adapters)
    asked, config = requests(5, 130, 300, samples=2, max_new_tokens=150), RolloutConfig(cuda_graphs=cuda_graphs)
    made: list[Announcement] = []

    def noted(projection: Projection, tokens: int) -> Announcement | None:
        announcement = announce(projection, tokens)
        made.extend([announcement] if announcement else [])
        return announcement

    announce = Projection.announcement
    monkeypatch.setattr(Projection, "announcement", noted)
    announced = build_engine(model, eos_ids=range(2), config=config).generate(asked, SamplingParams())
    if torch.cuda.get_device_capability() == (9, 0):
        assert any(a.publishers for a in made)
        assert not any(a.counter.any() for a in made)
    monkeypatch.setattr(Projection, "announcement", lambda *_: None)
    assert build_engine(model, eos_ids=range(2), config=config).generate(asked, SamplingParams()) == announced


@torch.inference_mode()
def test_a_captured_product_sees_the_adapters_of_the_next_sync() -> None:
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda")
    attention = decoder_layers(model)[0].self_attn
    fused = Projection([attention.q_proj, attention.k_proj, attention.v_proj], torch.bfloat16)
    sync([fused])
    x = torch.randn(8, 64, device="cuda").bfloat16()
    before = torch.cat([*fused(x)], dim=1).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(x)
    scatter_adapters(model)
    sync([fused])
    graph.replay()
    after = torch.cat([*captured], dim=1)
    assert torch.equal(after, torch.cat([*fused(x)], dim=1)) and not torch.equal(after, before)


@pytest.mark.parametrize("per", ["rollout", "completion"])
def test_graphs_serve_the_next_sync_asleep_between_or_not(per: str) -> None:
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda")
    asked = requests(5, 33, 17, samples=7, max_new_tokens=60)
    graphs, eager = (
        build_engine(model, eos_ids=range(2), config=RolloutConfig(max_batch_size=20, cuda_graphs=on))
        for on in (True, False)
    )
    for step in range(4):
        scatter_adapters(model, size=0.1 + 0.1 * step)
        for engine in (graphs, eager):
            engine.sync(NoiseDraw(seed=1, step=step, sigma=1e-2, per=per))
        assert graphs.generate(asked, SamplingParams()) == eager.generate(asked, SamplingParams())
        if step == 1:
            graphs.sleep()
            other = torch.full((1 << 28,), torch.nan, device="cuda")  # takes the addresses over
            graphs.wake()
            del other


def test_a_small_pool_gives_the_tokens_of_a_large_one() -> None:
    """In fp32, where rounding does not decide between tokens."""
    model = policy("qwen2", device="cuda")
    asked = requests(5, 40, 130, samples=4, max_new_tokens=150)
    large, small = (
        build_engine(model, eos_ids=(), config=RolloutConfig(**config)).generate(asked, SamplingParams())
        for config in ({}, {"kv_cache_tokens": 640, "prefill_tokens": 48})
    )
    for group, other in zip(small, large, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in other]


def test_chunks_in_bf16_attend_as_whole_prompts_do() -> None:
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda")
    asked = requests(200, 77, samples=8, max_new_tokens=1)
    whole, chunks = (
        build_engine(model, eos_ids=(), config=RolloutConfig(prefill_tokens=n)).generate(asked, SamplingParams())
        for n in (8192, 48)
    )
    entropies = [torch.tensor([c.entropies[0] for group in results for c in group]) for results in (whole, chunks)]
    torch.testing.assert_close(*entropies, atol=2e-2, rtol=0)
