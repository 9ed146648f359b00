"""AQNCallback under TRL's own GRPOTrainer: noise while it samples, of the right sigma, and no trace of it otherwise."""

from __future__ import annotations

import copy
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from packaging.specifiers import SpecifierSet
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from qerl import philox
from qerl.config import EMBEDDED, ConfigError
from qerl.formats.awq import exact_in_norm
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.folding import Calibration, Fold, Folded, write_calibration
from qerl.formats.writing import write_dense
from qerl.integrations.trl.callback import TRL_VERSIONS, AQNCallback, find_norms, stand_ins
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import decoder_layers
from qerl.noise import NoiseDraw, NoiseSchedule, applied

ROOT = Path(__file__).parents[3]
SEED = 3
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])


def plain_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)


def norms(model: nn.Module) -> list[nn.Module]:
    return [norm for layer in decoder_layers(model) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]


class Recorder(TrainerCallback):
    """Watches a model: the noise of each generation, and whether anything else ever runs under noise."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules = norms(model)
        self.weights = [norm.weight.detach().clone() for norm in self.modules]
        self.noise: list[list[torch.Tensor] | None] = []
        self.forwards_outside: list[bool] = []  # whether each was one for the gradient
        self.generating = False
        generate = model.generate

        def recorded(*args, **kwargs):
            sites = norms(model)
            noisy = all(isinstance(norm, RMSNorm) for norm in sites)
            assert noisy or sites == self.modules
            self.noise.append([norm.noise.rows[0].clone() for norm in sites] if noisy else None)
            self.generating = True
            try:
                return generate(*args, **kwargs)
            finally:
                self.generating = False

        self.generate = model.generate = recorded
        decoder_layers(model)[0].register_forward_pre_hook(self.forward)

    def forward(self, module, arguments):
        if not self.generating:
            self.assert_clean()
            self.forwards_outside.append(torch.is_grad_enabled())

    def assert_clean(self) -> None:
        assert all(a is b for a, b in zip(norms(self.model), self.modules, strict=True))
        for norm, before in zip(self.modules, self.weights, strict=True):
            assert torch.equal(norm.weight, before)
            assert "weight" in dict(norm.named_parameters())

    def on_step_end(self, args, state, control, **kwargs):
        self.assert_clean()


class Logs(TrainerCallback):
    """What a callback that comes later is told."""

    def __init__(self) -> None:
        self.sigmas: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.sigmas += [logs["noise/sigma"]] if "noise/sigma" in logs else []


def rewards(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def train(folder: Path, *callbacks: TrainerCallback, model=None, resume=None, eval=False, trainer="GRPO", **settings):
    trl = pytest.importorskip("trl")
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}=?"}]} for i in range(8)]
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "beta": 0.1,  # a scoring pass of its own
        "gradient_checkpointing": True,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": SEED,
        "use_cpu": True,
        "bf16": False,
    } | settings
    if eval:
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    run = getattr(trl, f"{trainer}Trainer")(
        model=model or plain_model(),
        reward_funcs=rewards,
        args=getattr(trl, f"{trainer}Config")(str(folder), **settings),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]) if eval else None,
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
        peft_config=LORA,
        callbacks=list(callbacks),
    )
    run.train(resume_from_checkpoint=resume)
    return run


def expected(step: int, sigma: float, stream: int = 0) -> list[torch.Tensor]:
    draw = NoiseDraw(philox.fold(SEED, 0), step, sigma)
    model = plain_model()
    return [draw.rows(i, torch.tensor([stream]), norm.weight.numel())[0] for i, norm in enumerate(norms(model))]


def assert_noise(found: list[torch.Tensor] | None, wanted: list[torch.Tensor]) -> None:
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_grpo_samples_under_scheduled_noise_and_nothing_else_does(tmp_path):
    model = plain_model()
    recorder, callback, later = Recorder(model), AQNCallback(2e-2, 1e-2, 4), Logs()
    run = train(tmp_path, recorder, callback, later, model=model, eval=True)
    schedule = NoiseSchedule("exponential", 2e-2, 1e-2, 4, 4)
    assert schedule.sigma(0) == 0 and schedule.sigma(3) == 1e-2
    # An evaluation of two batches after the second step, and one after the fourth.
    first, second, *clean, third, fourth, _, _ = recorder.noise
    assert first is None and clean == recorder.noise[-2:] == [None, None]
    for step, noise in ((1, second), (2, third), (3, fourth)):
        assert_noise(noise, expected(step, schedule.sigma(step)))
    assert {True, False} == set(recorder.forwards_outside)  # gradients, and scores of the reference
    recorder.assert_clean()
    assert model.generate is recorder.generate

    logs = [row for row in run.state.log_history if "loss" in row]
    assert [row["noise/sigma"] for row in logs] == later.sigmas == [schedule.sigma(step) for step in range(4)]
    assert [row["noise/vectors"] for row in logs] == [0] + 3 * [len(recorder.modules)]
    assert logs[0]["noise/relative"] == 0 < logs[3]["noise/relative"] < logs[1]["noise/relative"]
    assert not any("noise/sigma" in row for row in run.state.log_history if "eval_loss" in row)


def test_a_resumed_run_goes_on_with_the_same_noise(tmp_path):
    model = plain_model()
    recorder = Recorder(model)
    train(tmp_path, recorder, AQNCallback(1e-2, 1e-3, 3), model=model, save_strategy="steps", save_steps=2)
    model = plain_model()
    again = Recorder(model)
    train(tmp_path, again, AQNCallback(1e-2, 1e-3, 3), model=model, resume=str(tmp_path / "checkpoint-2"))
    assert len(recorder.noise) == 4 and len(again.noise) == 2
    for noise, wanted in zip(again.noise, recorder.noise[2:], strict=True):
        assert wanted is not None
        assert_noise(noise, wanted)


def test_several_rollouts_of_one_step_draw_their_own_noise_and_share_its_sigma(tmp_path):
    model = plain_model()
    recorder = Recorder(model)
    train(
        tmp_path, recorder, AQNCallback(1e-2, 1e-2, 2), model=model, max_steps=2,
        gradient_accumulation_steps=2, steps_per_generation=1, beta=0.0,
    )  # fmt: skip
    assert recorder.noise[:2] == [None, None]
    assert_noise(recorder.noise[2], expected(1, 1e-2, stream=0))
    assert_noise(recorder.noise[3], expected(1, 1e-2, stream=1))


def test_rloo_samples_under_noise_too(tmp_path):
    model = plain_model()
    recorder = Recorder(model)
    train(tmp_path, recorder, AQNCallback(1e-2, 1e-3, 2), model=model, max_steps=2, trainer="RLOO")
    assert recorder.noise[0] is None
    assert_noise(recorder.noise[1], expected(1, 1e-2))


# ------------------------------------------------------------------ without a trainer


def arguments() -> TrainingArguments:
    return TrainingArguments("unused", seed=SEED, use_cpu=True, bf16=False)


def begin(model: nn.Module, callback: AQNCallback, *, step: int = 1, max_steps: int = 2, **settings) -> None:
    """What a trainer does up to the rollout of a step."""
    args = arguments()
    for name, value in settings.items():
        setattr(args, name, value)
    state, control = TrainerState(max_steps=max_steps, global_step=step), TrainerControl()
    callback.on_train_begin(args, state, control, model=model)
    callback.on_step_begin(args, state, control, model=model)
    model.train()


TOKENS = torch.arange(5, 17).view(2, 6)


def test_the_noisy_forward_is_that_of_a_model_with_noise_on_its_weights():
    model, noisy = plain_model(), plain_model()
    draw = NoiseDraw(7, 1, 5e-2)
    with torch.no_grad():
        for number, norm in enumerate(norms(noisy)):
            norm.weight += draw.rows(number, torch.tensor([0]), norm.weight.numel())[0]
        with stand_ins(find_norms(model)), applied(model, draw):
            logits = model(TOKENS).logits
        torch.testing.assert_close(logits, noisy(TOKENS).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(logits, plain_model()(TOKENS).logits, atol=1e-2)


def test_noise_is_that_of_the_model_before_awq(tmp_path):
    """The folder of a folded model says what its norms were divided by."""
    checkpoint, name = Checkpoint(EMBEDDED), "model.layers.0.input_layernorm"
    factors = exact_in_norm(checkpoint.tensor(f"{name}.weight"), torch.linspace(0.25, 4, 256))
    folds = {name: Fold(outputs=factors)}
    folds |= {f"model.layers.0.self_attn.{part}_proj": Fold(inputs=factors) for part in "qkv"}
    write_dense(Folded(checkpoint, folds), tmp_path)
    write_calibration(tmp_path, Calibration(folds, {}))
    before, after = plain_model(), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits = []
    for model in (before, after):
        with torch.no_grad(), stand_ins(find_norms(model)), applied(model, NoiseDraw(7, 1, 0.2)):
            logits.append(model(TOKENS).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


def test_bfloat16_models_sample_under_noise_in_float32():
    model, callback = plain_model().bfloat16(), AQNCallback(1e-3, 1e-3, 2)
    recorder = Recorder(model)
    begin(model, callback)
    model.generate(TOKENS, max_new_tokens=2)
    assert_noise(recorder.noise[0], expected(1, 1e-3))
    recorder.assert_clean()


def test_merged_adapters_are_sampled_from_and_come_apart_again():
    base = plain_model()
    recorder, callback = Recorder(base), AQNCallback(1e-2, 1e-2, 2)
    model = get_peft_model(base, LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    other = copy.deepcopy(model)
    begin(model, callback)

    model.merge_adapter()
    other.merge_adapter()
    names = {name for name, _ in model.named_parameters()}
    for text, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[text])  # what a sync of merged weights would send is clean
    model.generate(input_ids=TOKENS, max_new_tokens=2)
    model.unmerge_adapter()
    other.unmerge_adapter()

    assert_noise(recorder.noise[0], expected(1, 1e-2))
    assert {name for name, _ in model.named_parameters()} == names
    for text, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[text])
    recorder.assert_clean()


def test_norms_that_peft_trains_are_noisy_in_the_copy_that_runs():
    base = plain_model()
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["input_layernorm"])
    model, callback = get_peft_model(base, config), AQNCallback(1e-2, 1e-2, 2)
    wrappers = [layer.input_layernorm for layer in decoder_layers(model)]
    with torch.no_grad():
        for wrapper in wrappers:
            wrapper.modules_to_save["default"].weight += 1
    places = find_norms(model)
    with stand_ins(places):
        for wrapper, norm in zip(wrappers, norms(model)[::2], strict=True):
            assert torch.equal(norm.weight, wrapper.modules_to_save["default"].weight)
    begin(model, callback)
    model.generate(input_ids=TOKENS, max_new_tokens=1)
    assert callback.metrics["noise/vectors"] == len(places)
    assert [layer.input_layernorm for layer in decoder_layers(model)] == wrappers


def test_the_norms_come_back_after_an_error():
    model, callback = plain_model(), AQNCallback(1e-2, 1e-2, 2)
    recorder = Recorder(model)
    begin(model, callback)
    with pytest.raises(TypeError):
        model.generate(TOKENS, max_new_tokens=object())
    recorder.assert_clean()


@pytest.mark.parametrize("case", ["between steps", "evaluation", "after the run"])
def test_other_generations_are_clean(case):
    model, callback = plain_model(), AQNCallback(1e-2, 1e-2, 2)
    recorder = Recorder(model)
    begin(model, callback)
    model.generate(TOKENS, max_new_tokens=1)
    if case == "between steps":
        callback.on_step_end(arguments(), TrainerState(), TrainerControl())
    elif case == "evaluation":
        model.eval()
    else:
        callback.on_train_end(arguments(), TrainerState(), TrainerControl())
        assert model.generate is recorder.generate
    model.generate(TOKENS, max_new_tokens=1)
    assert recorder.noise[0] is not None and recorder.noise[1] is None


# ------------------------------------------------------------------ what is refused


def test_a_trainer_that_samples_elsewhere_is_refused(tmp_path):
    def rollout(prompts, trainer):
        ids = [[5, 6]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[-1.0, -1.0]] * len(prompts)}

    trl = pytest.importorskip("trl")
    model = plain_model()
    run = trl.GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=trl.GRPOConfig(str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_steps=1,
                            report_to="none", use_cpu=True, bf16=False, save_strategy="no"),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1=?"}]}] * 2),
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
        rollout_func=rollout,
        callbacks=[AQNCallback()],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"rollout came without model\.generate"):
        run.train()


@pytest.mark.parametrize("setting", ["use_transformers_continuous_batching", "use_liger_kernel"])
def test_settings_under_which_noise_would_touch_nothing_are_refused(setting):
    model = plain_model()
    with pytest.raises(ValueError, match=f"with {setting} .*turn it off"):
        begin(model, AQNCallback(), **{setting: True})
    assert "generate" not in vars(model)


SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, pad_token_id=0)),
            r"model\.layers\.\*\.input_layernorm and model\.layers\.\*\.post_attention_layernorm of "
            r"Gemma2ForCausalLM; at model\.layers\.0\.input_layernorm it is a Gemma2RMSNorm, which is not",
        ),
        (
            lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
            r"gpt_neox\.layers\.\*\.input_layernorm and .*it is a LayerNorm",
        ),
    ],
    ids=["gemma2", "gpt-neox"],
)
def test_an_architecture_without_such_norms_is_refused_by_pattern(model, message):
    with pytest.raises(ValueError, match=message):
        begin(model(), AQNCallback())


def test_a_layer_that_lacks_a_norm_is_named():
    model = plain_model()
    model.model.layers[1].post_attention_layernorm = None
    with pytest.raises(ValueError, match=r"at model\.layers\.1\.post_attention_layernorm there is none"):
        begin(model, AQNCallback())


def test_settings_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match="swap them"):
        AQNCallback(1e-4, 1e-2)
    with pytest.raises(ConfigError, match=r"noise\.num_stages"):
        AQNCallback(num_stages=1)


# ------------------------------------------------------------------ versions


def test_the_tested_versions_are_those_that_are_promised(caplog, monkeypatch):
    promised = SpecifierSet(TRL_VERSIONS)
    assert metadata.version("trl") in promised
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = [line for line in extras["trl"] if line.startswith("trl")]
    assert SpecifierSet(requirement.removeprefix("trl")) == promised
    assert f"`{TRL_VERSIONS}`" in (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")

    begin(plain_model(), AQNCallback())
    assert not caplog.records
    monkeypatch.setattr(metadata, "version", lambda name: "99.0")
    begin(plain_model(), AQNCallback())
    assert "this is 99.0" in caplog.text
