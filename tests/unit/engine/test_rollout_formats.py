"""Keys and values in FP8, the head in NVFP4: the engine samples from that policy, whatever it does with memory."""

from __future__ import annotations

import pytest
import torch
from tiny_policies import (
    assert_as_exact_as_transformers,
    gap,
    policy,
    requests,
    round_head_,
    rounded_keys_and_values,
)

from qerl.config import RolloutConfig
from qerl.engine.engine import PagedEngine, build_engine
from qerl.noise import NoiseDraw
from qerl.types import Completion, SamplingParams

NOISE = NoiseDraw(seed=3, step=2, sigma=5e-2, per="completion")


def engine_of(model: torch.nn.Module, **config: object) -> PagedEngine:
    engine = build_engine(model, eos_ids=(), config=RolloutConfig(**config))
    assert isinstance(engine, PagedEngine)
    engine.sync(NOISE)
    return engine


def test_fp8_keys_and_values_are_those_of_the_codec() -> None:
    model = policy("qwen3")
    asked = requests(1, 16, 37, max_new_tokens=40)
    results = engine_of(model, kv_cache_dtype="fp8").generate(asked, SamplingParams())
    with rounded_keys_and_values():
        assert gap(model, asked, results, NOISE) <= 1e-4
    assert gap(model, asked, results, NOISE) > 4e-4


def test_fp8_pages_are_read_alike_by_chunks_decode_steps_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut prompts, interrupted completions, one slot: the same tokens, as everyone sees what the pages hold."""
    monkeypatch.setattr("qerl.engine.scheduler.LOOKAHEAD", 9)  # careless, so that drafts give way
    model = policy("llama")
    asked = requests(5, 40, 70, samples=3, max_new_tokens=60)

    def run(**config: object) -> list[Completion]:
        results = engine_of(model, kv_cache_dtype="fp8", **config).generate(asked, SamplingParams())
        return [completion for group in results for completion in group]

    roomy = run()
    for other in (run(kv_cache_tokens=320, prefill_tokens=32), run(max_batch_size=1)):
        assert [c.token_ids for c in other] == [c.token_ids for c in roomy]
        differences = [
            abs(a - b) for c, d in zip(other, roomy, strict=True) for a, b in zip(c.logprobs, d.logprobs, strict=True)
        ]
        assert sum(differences) / len(differences) < 1e-4  # a key next to a tie may change its code


def test_fp8_halves_the_pages() -> None:
    """bf16, heads of 16: 16 codes and a scale of 4 bytes instead of 32 bytes."""
    model = policy("qwen2", dtype=torch.bfloat16)
    plain, fp8 = (engine_of(model, kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert fp8._page_bytes * 32 == plain._page_bytes * 20
    fp8.generate(requests(5, samples=2), SamplingParams())
    cache = fp8._cache
    assert cache is not None and cache.scales is not None
    assert cache.pool.nbytes + cache.scales.nbytes == fp8._page_bytes * cache.num_pages


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_packed_head_samples_from_its_own_weights(batch_invariant: bool) -> None:
    model = policy("qwen3")
    asked = requests(9, 20, samples=4)
    engine = engine_of(model, head_format="nvfp4", batch_invariant=batch_invariant)
    results = engine.generate(asked, SamplingParams())
    assert gap(model, asked, results, NOISE) > 4e-4
    round_head_(model)
    assert gap(model, asked, results, NOISE) <= 1e-4


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "fp8"}, {"head_format": "nvfp4"}])
def test_in_bf16_they_are_as_exact_as_transformers(settings: dict[str, str]) -> None:
    assert_as_exact_as_transformers("qwen3", "completion", "cpu", **settings)


def test_a_packed_head_is_never_unpacked_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.engine.model.MAX_FUSED_TOKENS", 7)
    decoder = engine_of(policy("qwen2"), head_format="nvfp4")._decoder
    hidden = torch.randn(20, 64)
    torch.testing.assert_close(decoder.logits(hidden), torch.cat([decoder.logits(row[None]) for row in hidden]))


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "fp8"}, {"head_format": "nvfp4"}])
def test_the_slow_engine_refuses_them(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.{next(iter(settings))} is of qerl's own engine.*hf"):
        build_engine(policy("qwen2"), eos_ids=(), config=RolloutConfig(engine="hf", **settings))
