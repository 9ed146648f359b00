"""What of the vLLM engine needs no vLLM: noise on a model with its fused names, adapters under them, what is refused.

tests/with_vllm runs the same against vLLM itself.
"""

from __future__ import annotations

import math
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from tiny_policies import policy
from torch import nn

from qerl.config import EMBEDDED, ConfigError, ModelConfig, RolloutConfig, load_config
from qerl.engine.vllm import setup
from qerl.engine.vllm.adapters import adapter_factors, names_missing
from qerl.engine.vllm.norms import NoisyNorms, find_norms
from qerl.formats.folding import Fold
from qerl.formats.writing import quantize_checkpoint
from qerl.nn.lora import adapters_disabled
from qerl.noise import SITE_NAMES, NoiseDraw, applied, noise_sites
from qerl.plan import Target, plan_memory
from qerl.plan.shapes import read_shape
from qerl.rl.rollout import Rollout
from qerl.rl.summary import rollout_metrics
from qerl.tasks import load_task
from qerl.types import Completion, RolloutGroup

DRAW = NoiseDraw(seed=3, step=7, sigma=5e-2)


class RMSNorm(nn.Module):
    """vLLM's, as far as noise is concerned: a weight in the model's dtype."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((1 + 0.2 * torch.randn(size)).to(dtype))


class FusedModel(nn.Module):
    """The modules of vLLM's Llama, by name."""

    def __init__(self, depth: int, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for _ in range(depth):
            layer = nn.Module()
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            layer.self_attn.qkv_proj, layer.self_attn.o_proj = nn.Linear(size, 2 * size), nn.Linear(size, size)
            layer.self_attn.q_norm = RMSNorm(16, dtype)
            layer.mlp.gate_up_proj, layer.mlp.down_proj = nn.Linear(size, 4 * size), nn.Linear(2 * size, size)
            for name in SITE_NAMES:
                setattr(layer, name, RMSNorm(size, dtype))
            self.model.layers.append(layer)
        self.model.norm = RMSNorm(size, dtype)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}


def trainers_noise(model: nn.Module, draw: NoiseDraw) -> list[torch.Tensor]:
    with applied(model, draw):
        return [site.noise.rows[0].clone() for site in noise_sites(model)]


def test_the_noise_is_the_trainers_added_in_fp32_and_rounded_once() -> None:
    trainer = policy("llama", lora=False)
    sites = noise_sites(trainer)
    theirs = FusedModel(len(sites) // 2, sites[0].weight.numel())
    before = theirs.weights()
    applied_noise = NoisyNorms(theirs, {}).apply(DRAW)
    noisy = [norm.weight for norm in find_norms(theirs).values()]
    for weight, clean, z in zip(noisy, find_norms_in(before), trainers_noise(trainer, DRAW), strict=True):
        assert torch.equal(weight, (clean.float() + z).bfloat16())
    changed = {name for name, p in theirs.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"{name}.weight" for name in find_norms(theirs)}
    assert applied_noise.num_vectors == len(sites)
    kept = torch.cat([(w == c) for w, c in zip(noisy, find_norms_in(before), strict=True)])
    assert applied_noise.lost == pytest.approx(kept.float().mean().item())


def find_norms_in(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [w for name, w in weights.items() if name.rpartition(".")[0].endswith(SITE_NAMES)]


def test_restore_is_exact_draws_do_not_pile_up_and_weights_may_be_loaded_in_between() -> None:
    model = FusedModel(2)
    norms, before = NoisyNorms(model, {}), model.weights()
    norms.apply(DRAW)
    norms.apply(NoiseDraw(seed=4, step=7, sigma=5e-2))
    norms.apply(DRAW)
    once = FusedModel(2)
    NoisyNorms(once, {}).apply(DRAW)
    assert all(torch.equal(p, once.get_parameter(name)) for name, p in model.named_parameters())
    norms.restore()
    norms.restore()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        for norm in find_norms(model).values():
            norm.weight.add_(0.5)
    loaded = model.weights()
    norms.apply(DRAW)
    assert norms.apply(NoiseDraw(seed=0, step=0, sigma=0.0)).num_vectors == 0  # sigma 0: clean
    assert all(torch.equal(p, loaded[name]) for name, p in model.named_parameters())


def test_noise_too_small_for_bf16_is_counted_as_lost() -> None:
    model = FusedModel(1, size=256)
    large, small = (NoisyNorms(model, {}).apply(NoiseDraw(0, 0, sigma)).lost for sigma in (5e-2, 1e-5))
    assert large < 0.1 and small > 0.9
    assert NoisyNorms(FusedModel(1, dtype=torch.float32), {}).apply(NoiseDraw(0, 0, 1e-5)).lost < 0.05


def test_a_folded_norm_takes_z_over_s() -> None:
    model, factors = FusedModel(1, dtype=torch.float32), torch.linspace(0.5, 2, 64)
    name = "model.layers.0.post_attention_layernorm"
    plain = FusedModel(1, dtype=torch.float32)
    NoisyNorms(plain, {}).apply(DRAW)
    before = model.weights()
    NoisyNorms(model, {name: Fold(outputs=factors)}).apply(DRAW)
    z = plain.get_parameter(f"{name}.weight") - before[f"{name}.weight"]
    torch.testing.assert_close(model.get_parameter(f"{name}.weight"), before[f"{name}.weight"] + z / factors)


def test_sites_are_in_the_order_of_layers_not_of_names() -> None:
    numbers = [int(name.split(".")[2]) for name in find_norms(FusedModel(12))]
    assert numbers == [i for i in range(12) for _ in SITE_NAMES]


def test_a_model_without_such_norms_is_refused() -> None:
    with pytest.raises(ValueError, match="this model takes none"):
        find_norms(nn.Sequential(nn.Linear(2, 2)))
    model = FusedModel(3)
    del model.model.layers[1].post_attention_layernorm
    with pytest.raises(ValueError, match=r"no layers.1.post_attention_layernorm"):
        find_norms(model)
    model = FusedModel(1)
    model.model.layers[0].input_layernorm = nn.LayerNorm(64)
    with pytest.raises(ValueError, match="is a LayerNorm"):
        find_norms(model)
    model = FusedModel(1)
    model.model.layers[0].pre_feedforward_layernorm = RMSNorm(64, torch.bfloat16)
    with pytest.raises(ValueError, match="pre_feedforward_layernorm"):
        find_norms(model)
    model = FusedModel(1)
    model.draft = FusedModel(1).model
    with pytest.raises(ValueError, match="both of layer 0"):
        find_norms(model)


def test_adapters_have_transformers_names_and_the_scaling_in_b() -> None:
    model = policy("qwen3")
    factors = adapter_factors(model)
    linears = dict(model.get_base_model().named_modules())
    assert len(factors) == 14
    for name, (a, b) in factors.items():
        scaling = linears[name].scaling["default"]
        assert scaling != 1
        torch.testing.assert_close(b @ a, linears[name].get_delta_weight("default"))
        assert len(a) == (3 if name.endswith("k_proj") else 4)
    assert adapter_factors(policy("qwen3", lora=False)) == {}
    with adapters_disabled(model), pytest.raises(ValueError, match="switched off"):
        adapter_factors(model)


def test_an_adapter_without_a_place_is_named() -> None:
    names = adapter_factors(policy("llama"))
    modules = [name for name, module in FusedModel(2).named_modules() if isinstance(module, nn.Linear)]
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    packed = {
        module: [f"{module.rpartition('.')[0]}.{part}" for part in parts[module.rpartition(".")[2]]]
        for module in modules
        if module.rpartition(".")[2] in parts
    }
    assert names_missing(names, modules, packed) == []
    missing = names_missing([*names, "model.layers.0.mlp.router"], modules, packed)
    assert missing == ["model.layers.0.mlp.router"]
    del packed["model.layers.1.mlp.gate_up_proj"]
    assert names_missing(names, modules, packed) == [
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
    ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["rollout.kv_cache_tokens=4096"], "rollout.kv_cache_memory"),
        (['rollout.kv_cache_dtype="fp8"'], "rollout.kv_cache_dtype"),
        (["rollout.head_format=nvfp4"], "rollout.head_format"),
        (["rollout.batch_invariant=true"], "rollout.batch_invariant"),
        (["noise.per=completion"], 'set noise.per = "rollout"'),
        (["noise.controller=entropy", "noise.target=0.5"], "no entropies"),
        (["lora.train_norms=true"], "lora.train_norms"),
        (["rollout.temperature=2.5"], "0.01 to 2"),
        (["eval.temperature=2.5"], "0.01 to 2"),
    ],
)
def test_settings_that_vllm_does_not_have_are_refused_by_name(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, ["rollout.engine=vllm", *settings])
    load_config(None, settings)


def test_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "qerl\[vllm\]"'):
        setup.check_engine(RolloutConfig(engine="vllm"), ModelConfig())
    setup.check_engine(RolloutConfig(), ModelConfig(path="nowhere"))  # not asked for: nothing is looked at


def test_a_base_that_vllm_would_read_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: ModuleSpec(name, None, origin=name))
    rollout = RolloutConfig(engine="vllm")
    setup.check_engine(rollout, ModelConfig(format="bf16"))
    with pytest.raises(ValueError, match="qerl quantize"):
        setup.check_engine(rollout, ModelConfig(format="nvfp4"))
    with pytest.raises(ValueError, match="not from nf4"):
        setup.check_engine(rollout, ModelConfig(format="nf4"))
    quantize_checkpoint(EMBEDDED, tmp_path / "packed")
    with pytest.raises(ValueError, match="on a GPU only"):
        setup.check_engine(rollout, ModelConfig(path=str(tmp_path / "packed"), device="cpu"))
    cut = RolloutConfig(engine="vllm", top_p=0.9)
    setup.check_engine(cut, ModelConfig(format="bf16"))  # evaluation compares nothing
    with pytest.raises(ValueError, match="before truncation"):
        setup.check_engine(cut, ModelConfig(format="bf16"), training=True)


def test_memory_is_not_planned_as_if_there_were_one_base() -> None:
    config = load_config(None, ["rollout.engine=vllm", "model.format=bf16"])
    with pytest.raises(ValueError, match="second copy of the base"):
        plan_memory(read_shape(config.model), config, Target.of(config))


def test_entropies_that_are_not_reported_are_missing_not_zero() -> None:
    task = load_task(load_config(None).task, 0)
    example = task.train_example(0)

    def entropy(entropies: list[float] | None) -> float:
        group = RolloutGroup(example, [1], 0, [Completion([2, 3], [-1.0, -1.0], entropies, "stop")], ["4"], [1.0])
        return rollout_metrics(Rollout([group], [group]), task)["rollout_entropy"]

    assert entropy([0.5, 1.5]) == 1.0
    assert math.isnan(entropy(None))
