"""transformers, PEFT and TRL on a GPU: the same weights on the fused products, the engine as TRL's rollout function."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import qerl
from qerl import doctor
from qerl.config import EMBEDDED, ModelConfig
from qerl.integrations.transformers import packed_linears
from qerl.nn.load import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

TOKENS = torch.arange(5, 29).view(2, 12)


def loaded() -> PreTrainedModel:
    config = qerl.NVFP4Config()
    return AutoModelForCausalLM.from_pretrained(
        EMBEDDED, quantization_config=config, device_map="cuda", dtype=torch.bfloat16
    )


def close(actual, expected, tolerance=3e-2):
    assert (actual.float().cpu() - expected.float().cpu()).norm() < tolerance * expected.float().norm().cpu()


def test_a_model_quantised_on_the_gpu_is_the_one_of_the_cpu(tmp_path):
    model = loaded()
    ours, _ = load_model(ModelConfig.model_validate({"path": str(EMBEDDED), "device": "cpu", "dtype": "float32"}))
    assert {linear.weight.device.type for _, linear in packed_linears(model)} == {"cuda"}
    with torch.no_grad():
        logits = model(TOKENS.cuda()).logits
        close(logits, ours(TOKENS).logits)
    assert model.generate(TOKENS.cuda(), max_new_tokens=4).shape == (2, 16)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=qerl.NVFP4Config(), device_map="cuda")
    assert torch.equal(again(TOKENS.cuda()).logits, logits)


def test_pefts_layers_train_on_packed_weights():
    model = get_peft_model(loaded(), LoraConfig(r=4, target_modules="all-linear"))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(TOKENS.cuda(), labels=TOKENS.cuda()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_trl_samples_with_the_engine(tmp_path):
    trl, datasets = pytest.importorskip("trl", minversion="1.16"), pytest.importorskip("datasets")
    from qerl.engine.engine import PagedEngine
    from qerl.integrations.trl import EngineRollout

    rollout = EngineRollout(noise={"sigma_start": 0.3, "sigma_end": 0.3, "num_stages": 2})
    trainer = trl.GRPOTrainer(
        model=loaded(),
        reward_funcs=lambda completions, **kwargs: [float(len(str(completion))) for completion in completions],
        args=trl.GRPOConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=8, num_generations=4, max_completion_length=16,
            vllm_importance_sampling_mode="token_truncate", logging_steps=1, save_strategy="no", report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"{i}+{i}=?"}]} for i in range(8)]
        ),
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        rollout_func=rollout,
    )  # fmt: skip
    trainer.train()
    assert isinstance(rollout.engine, PagedEngine)
    clean, noisy = [row for row in trainer.state.log_history if "loss" in row]
    gap = "sampling/sampling_logp_difference/mean"
    assert clean[gap] < 0.05 and noisy[gap] > 2 * clean[gap]
    assert noisy["noise/vectors"] == 8 and noisy["grad_norm"] > 0


def test_the_doctor_measures_the_gpu():
    found = dict(doctor.report())
    assert "GB/s" in found["memory"] and "7B" in found["decoding"]
    assert doctor.copy_rate(torch.device("cuda")) > 1e11  # any card that this runs on moves 100 GB/s
