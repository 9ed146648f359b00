"""The slow engine gives what the paged engine gives, and runs what that one cannot."""

from __future__ import annotations

import pytest
import torch
from tiny_policies import SIZES, gap, policy, requests, scatter_adapters
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox import GPTNeoXConfig

from qerl.config import RolloutConfig
from qerl.engine.engine import PagedEngine, build_engine
from qerl.engine.hf import TransformersEngine
from qerl.noise import NoiseDraw
from qerl.types import SamplingParams

SAMPLING = SamplingParams()


def slow(model: torch.nn.Module, **config: object) -> TransformersEngine:
    with pytest.warns(UserWarning, match="slow"):
        engine = build_engine(model, eos_ids=[3, 50], config=RolloutConfig(engine="hf", **config))
    assert isinstance(engine, TransformersEngine)
    return engine


@pytest.mark.parametrize("per", ["off", "rollout", "prompt", "completion"])
def test_both_engines_agree(per: str) -> None:
    model = policy("qwen3")
    draw = None if per == "off" else NoiseDraw(seed=3, step=2, sigma=5e-2, per=per)
    engine = slow(model, max_batch_size=5)
    ours = build_engine(model, eos_ids=[3, 50], config=RolloutConfig())
    assert isinstance(ours, PagedEngine)
    slow_report, report = engine.sync(draw), ours.sync(draw)
    assert slow_report.num_adapters == report.num_adapters == slow_report.num_live_adapters == 14
    assert slow_report.num_noised_vectors == report.num_noised_vectors
    assert slow_report.adapter_change == pytest.approx(report.adapter_change, rel=1e-3)
    assert slow_report.noise_change == pytest.approx(report.noise_change, rel=1e-3)
    asked = requests(5, 1, 30, 12, samples=3)
    asked[1].max_new_tokens = 0
    asked[2].max_new_tokens = 7
    seen: list[tuple[int, int]] = []
    results = engine.generate(asked, SAMPLING, lambda done, total: seen.append((done, total)))
    expected = ours.generate(asked, SAMPLING)
    assert seen[-1] == (12, 12)
    for group, other in zip(results, expected, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in other]
        assert [c.finish_reason for c in group] == [c.finish_reason for c in other]
        for a, b in zip(group, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
            assert a.entropies == pytest.approx(b.entropies, abs=1e-4)


def test_an_unknown_architecture_falls_back_loudly() -> None:
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes), dtype=torch.float32).eval()
    with pytest.warns(UserWarning, match="its architecture is gpt_neox"):
        engine = build_engine(model, eos_ids=[], config=RolloutConfig())
    asked = requests(4, 9)
    assert gap(model, asked, engine.generate(asked, SAMPLING), None) <= 1e-4
    with pytest.raises(ValueError, match=r'"qerl" cannot sample .* gpt_neox'):
        build_engine(model, eos_ids=[], config=RolloutConfig(engine="qerl"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (dict(sliding_window=24), "sees? 24 tokens"),
        (dict(hidden_act="gelu"), "activation is gelu"),
        (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "rotary embedding is dynamic"),
    ],
)
def test_what_the_paged_engine_cannot_compute_falls_back(config: dict[str, object], reason: str) -> None:
    model = policy("mistral", packed=False, lora=False, **config)
    with pytest.warns(UserWarning, match=reason):
        engine = build_engine(model, eos_ids=[], config=RolloutConfig(max_completion_length=24))
    asked = requests(20)
    assert gap(model, asked, engine.generate(asked, SAMPLING), None) <= 1e-4


def test_the_model_is_sampled_in_eval_mode_and_left_as_it_was() -> None:
    model = policy("qwen2").train()
    model.get_base_model().model.layers[1].mlp.eval()
    modes = [module.training for module in model.modules()]
    engine = slow(model)
    results = engine.generate(requests(5), SAMPLING)
    assert [module.training for module in model.modules()] == modes
    assert results[0][0].token_ids == slow(model.eval()).generate(requests(5), SAMPLING)[0][0].token_ids


def test_dead_adapters_and_noise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2")
    engine = slow(model)
    with monkeypatch.context() as patch:
        patch.setattr("qerl.nn.lora.lora_factors", lambda linear: None)
        with pytest.raises(RuntimeError, match="dead adapters: 14 of 14"):
            engine.sync(None)
    scatter_adapters(model, size=0.0)
    monkeypatch.setattr(NoiseDraw, "rows", lambda self, site, streams, size: torch.zeros(len(streams), size))
    with pytest.raises(RuntimeError, match="dead noise"):
        engine.sync(NoiseDraw(seed=0, step=0, sigma=1e-2))
