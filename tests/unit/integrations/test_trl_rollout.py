"""EngineRollout under TRL's own GRPOTrainer: whose completions, under which noise, and weighed by what."""

from __future__ import annotations

import copy
from importlib import metadata
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from packaging.specifiers import SpecifierSet
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import qerl
from qerl.config import EMBEDDED, ConfigError
from qerl.engine.engine import PagedEngine
from qerl.engine.hf import TransformersEngine
from qerl.integrations.trl import EngineRollout
from qerl.integrations.trl.rollout import ROLLOUT_VERSIONS
from qerl.nn.structure import decoder_layers

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'", "ignore:sampling with transformers")

ROOT = Path(__file__).parents[3]
CHAT = [{"prompt": [{"role": "user", "content": f"{i}+{i}=?"}]} for i in range(8)]
STRONG = {"sigma_start": 5e-2, "sigma_end": 5e-2, "num_stages": 2}  # from the second half of the run on


def rewards(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]


class Spy(trl.GRPOTrainer):
    """Keeps what TRL makes of a rollout, and each loss with its inputs."""

    def _generate_and_score_completions(self, inputs):
        self.rollouts = [*getattr(self, "rollouts", []), super()._generate_and_score_completions(inputs)]
        return copy.copy(self.rollouts[-1])

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.losses = [*getattr(self, "losses", []), (loss.item(), inputs)]
        return loss


def trainer(folder: Path, rollout: EngineRollout, *, model=None, rows=CHAT, kind=Spy, eval=False, **settings):
    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 8,
        "temperature": 0.7,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    } | settings
    torch.manual_seed(0)
    if model is None:
        config = qerl.NVFP4Config()
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED, quantization_config=config, dtype=torch.float32)
    return kind(
        model=model,
        reward_funcs=rewards,
        args=trl.GRPOConfig(str(folder), **settings),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]) if eval else None,
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        rollout_func=rollout,
    )


def test_noisy_completions_of_packed_weights_are_weighed_by_their_own_logprobs(tmp_path):
    rollout = EngineRollout(noise=STRONG)
    run = trainer(tmp_path, rollout)
    norms = [layer.input_layernorm for layer in decoder_layers(run.model)]
    before = [norm.weight.clone() for norm in norms]
    run.train()
    assert isinstance(rollout.engine, PagedEngine)  # PEFT's own adapters, and no copy of the packed weights
    assert rollout.engine._decoder._layers[0].qkv.weights[0].storage is norms_neighbour(run).packed.storage

    clean, noisy = run.rollouts
    for rolled in (clean, noisy):
        mask = rolled["completion_mask"].bool()
        gap = (rolled["old_per_token_logps"] - rolled["sampling_per_token_logps"])[mask]
        # exp(old - rollout), cut at 2: what TRL calls so, and what its loss multiplies with
        torch.testing.assert_close(rolled["importance_sampling_ratio"][mask], gap.exp().clamp(max=2))
        assert gap.abs().max() < 1e-3 if rolled is clean else gap.abs().max() > 1e-2
    for loss, inputs in run.losses:  # one update a rollout: the policy's ratio is 1
        weights = inputs["importance_sampling_ratio"] * inputs["completion_mask"]
        by_hand = -(weights * inputs["advantages"][:, None]).sum() / inputs["num_items_in_batch"]
        assert loss == pytest.approx(by_hand.item(), abs=1e-5)

    logs = [row for row in run.state.log_history if "loss" in row]
    assert [row["noise/sigma"] for row in logs] == [0, 5e-2] and logs[1]["noise/vectors"] == 8
    assert logs[0]["noise/relative"] == 0 < logs[1]["noise/relative"] < 1
    assert logs[1]["sampling/importance_sampling_ratio/min"] < 0.99
    assert logs[1]["grad_norm"] > 0
    assert all(torch.equal(norm.weight, weight) for norm, weight in zip(norms, before, strict=True))


def norms_neighbour(run):
    return decoder_layers(run.model)[0].self_attn.v_proj.get_base_layer()


def test_equal_prompts_are_one_group_and_keys_differ_between_rollouts(tmp_path, monkeypatch):
    rollout = EngineRollout(noise={"enabled": False})
    run = trainer(tmp_path, rollout, eval=True, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2,
                  gradient_accumulation_steps=2, steps_per_generation=1)  # fmt: skip
    asked = []
    generate = PagedEngine.generate

    def recorded(engine, requests, sampling, progress=None):
        asked.append((requests, sampling))
        return generate(engine, requests, sampling, progress)

    monkeypatch.setattr(PagedEngine, "generate", recorded)
    run.train()
    assert all(len(request.seeds) == 2 and request.max_new_tokens == 8 for r, _ in asked for request in r)
    assert {sampling.temperature for _, sampling in asked} == {0.7}
    seeds = [seed for requests, _ in asked for request in requests for seed in request.seeds]
    assert len(seeds) == len(set(seeds)) and len(asked) > 4  # two rollouts a step, and evaluations
    assert not any("noise/sigma" in row for row in run.state.log_history)


@pytest.mark.parametrize("engine", ["qerl", "hf"])
def test_plain_models_and_plain_prompts_are_sampled_under_noise_too(tmp_path, engine):
    rollout = EngineRollout(noise=STRONG, rollout={"engine": engine, "max_batch_size": 3})
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    rows = [{"prompt": f"{i} plus {i} is"} for i in range(8)]
    run = trainer(tmp_path, rollout, model=model, rows=rows)
    run.train()
    assert isinstance(rollout.engine, PagedEngine if engine == "qerl" else TransformersEngine)
    gaps = [
        (r["old_per_token_logps"] - r["sampling_per_token_logps"])[r["completion_mask"].bool()].abs().max()
        for r in run.rollouts
    ]
    assert gaps[0] < 1e-3 and gaps[1] > 1e-2
    assert run.state.log_history[1]["noise/vectors"] == 8


def test_a_rollout_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    rollout = EngineRollout(noise=STRONG)
    run = trainer(tmp_path, rollout, vllm_importance_sampling_mode="sequence_mask")
    norms = [layer.input_layernorm for layer in decoder_layers(run.model)]
    generate = PagedEngine.generate

    def failing(engine, *of):
        completions = generate(engine, *of)
        if run.state.global_step == 1:
            raise RuntimeError("the second rollout")
        return completions

    monkeypatch.setattr(PagedEngine, "generate", failing)
    with pytest.raises(RuntimeError, match="the second rollout"):
        run.train()
    assert isinstance(rollout.engine, PagedEngine) and rollout.engine._cache is None
    assert [layer.input_layernorm for layer in decoder_layers(run.model)] == norms
    assert "'sequence_mask' weighs a completion by the product" in caplog.text


def test_without_correction_the_trainer_is_left_as_it_is(tmp_path):
    run = trainer(tmp_path, EngineRollout(noise=STRONG), vllm_importance_sampling_correction=False, top_p=0.9)
    run.train()
    assert not run.use_vllm and "importance_sampling_ratio" not in run.rollouts[1]


def test_what_the_engine_does_not_compute_is_refused(tmp_path, monkeypatch):
    run = trainer(tmp_path, EngineRollout())
    refused = {
        "top_p": (0.9, r"top_p, top_k or min_p: log-probabilities are those before truncation"),
        "repetition_penalty": (1.1, r"repetition_penalty: the engine has none"),
        "tools": ([len], r"tools: the engine samples a single turn"),
        "max_completion_length": (None, r"max_completion_length=None: the engine needs a length"),
        "temperature": (0.0, r"temperature=0\.0: the engine divides by it"),
        "is_fsdp_enabled": (True, r"FSDP or DeepSpeed: the engine reads whole weights"),
    }
    for name, (value, message) in refused.items():
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
            patch.setattr(run, name, value)
            run.rollout_func([row["prompt"] for row in CHAT], run)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"vespo.: it needs .*token_truncate"):
        patch.setattr(run, "loss_type", "vespo")
        patch.setattr(run, "vllm_importance_sampling_mode", "sequence_mask")
        run.rollout_func([row["prompt"] for row in CHAT], run)
    run.args.generation_kwargs = {"no_repeat_ngram_size": 2}
    with pytest.raises(ValueError, match=r"generation_kwargs: .* leave them out"):
        run.rollout_func([row["prompt"] for row in CHAT], run)

    assert metadata.version("trl") in SpecifierSet(ROLLOUT_VERSIONS)
    assert f"`{ROLLOUT_VERSIONS}`" in (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    monkeypatch.setattr(metadata, "version", lambda name: "1.17.0")
    with pytest.raises(ValueError, match=r"needs trl>=1\.16,<1\.17, and this is 1\.17\.0"):
        run.rollout_func([row["prompt"] for row in CHAT], run)


def test_settings_that_are_not_its_own_are_refused():
    with pytest.raises(ValueError, match=r"temperature is the trainer's: set it in GRPOConfig"):
        EngineRollout(rollout={"temperature": 0.5})
    with pytest.raises(ConfigError, match=r"rollout\.engin"):
        EngineRollout(rollout={"engin": "hf"})
    with pytest.raises(ValueError, match=r"measures nothing for a controller"):
        EngineRollout(noise={"controller": "divergence"})
