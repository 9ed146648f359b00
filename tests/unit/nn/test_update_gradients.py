"""The gradient of a whole update against plain transformers and PEFT over the dequantised base.

The trainer: packed codes, sequences side by side, several micro-batches, recomputed layers, the head in chunks. The
reference: dense weights, one sequence at a time, whole logits, the loss written out.
"""

from __future__ import annotations

import peft
import pytest
import torch
from tiny_models import VOCABULARY, quantized_pair, save_model, tiny_model

from qerl.config import LORA_TARGETS, validate
from qerl.display import Display
from qerl.nn.load import load_tokenizer
from qerl.nn.lora import LoraLinear, lora_factors
from qerl.rl.batch import TrainBatch
from qerl.rl.trainer import Trainer
from qerl.types import Completion, Example, RolloutGroup

TEMPERATURE, CAP = 0.8, 2.0
LENGTHS = (1, 2, 3, 4, 6, 9, 20, 70)  # of completions: a long tail


def rollout_batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()

    groups, advantages = [], []
    for number, prompt_length in enumerate((11, 4)):
        lengths = LENGTHS[number::2]
        completions = [
            Completion(ids(n), (-4 - torch.rand(n, generator=generator)).tolist(), [0.0] * n, "stop") for n in lengths
        ]
        groups.append(RolloutGroup(Example([]), ids(prompt_length), number, completions, [""] * 4, rewards=[0.0] * 4))
        advantages.append(torch.randn(4, generator=generator).tolist())
    return TrainBatch.from_groups(groups, advantages)


def trainer_gradients(family: str, folder, loss_type: str, offload: bool):
    save_model(tiny_model(family), folder / "model")  # its tokenizer and its config; the weights are the pair's
    model, dense = quantized_pair(family)
    config = validate({
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "lora": {"r": 4, "alpha": 8},
        "rollout": {"temperature": TEMPERATURE, "max_completion_length": 70},
        "loss": {"type": loss_type},
        "optimizer": {"micro_batch_tokens": 64, "logprob_chunk": 7, "gradient_checkpointing": True,
                      "offload_activations": offload},
        "eval": {"num_problems": 0},
    })  # fmt: skip
    tokenizer = load_tokenizer(folder / "model", False)
    trainer = Trainer(config, load=lambda _: (model, tokenizer), display=Display(1, quiet=True))
    generator = torch.Generator().manual_seed(1)
    for factors in filter(None, map(lora_factors, trainer.model.modules())):
        factors.b.data.normal_(std=0.1, generator=generator)
    modules = {n.partition("model.")[2]: m for n, m in trainer.model.named_modules() if isinstance(m, LoraLinear)}
    gradients, batch = {}, rollout_batch()
    assert len(batch.micro_batches(range(8), 64)) > 2

    def keep_gradients(rate: float) -> tuple[float, float, bool]:
        for name, module in modules.items():
            gradients[name] = [part["default"].weight.grad.clone() for part in (module.lora_A, module.lora_B)]
        return rate, 0.0, True

    trainer.learner._optimizer_step = keep_gradients
    trainer.learner.update(0, batch, None)
    factors = {name: lora_factors(module) for name, module in modules.items()}
    return gradients, factors, dense, batch


def reference_gradients(dense, factors, batch: TrainBatch, loss_type: str):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM")
    model = peft.get_peft_model(dense, config)
    modules = {n.partition("model.")[2]: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    assert modules.keys() == factors.keys() and len(modules) == 14
    with torch.no_grad():
        for name, module in modules.items():
            module.lora_A["default"].weight.copy_(factors[name].a)
            module.lora_B["default"].weight.copy_(factors[name].b)
    tokens, rollout = batch.num_completion_tokens, batch.rollout_logprobs
    for member in batch.sequences:
        start, n = len(member.prompt_ids), len(member.completion_ids)
        input_ids = torch.tensor([member.prompt_ids + member.completion_ids])
        logits = model(input_ids=input_ids).logits[0, start - 1 : -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(-1, input_ids[0, start:, None])[:, 0]
        weight = (logprobs.detach() - rollout[member.first_slot : member.first_slot + n]).exp().clamp(max=CAP)
        divisor = tokens if loss_type == "dapo" else len(batch.sequences) * n
        (-(weight * (logprobs - logprobs.detach()).exp() * member.advantage).sum() / divisor).backward()
    return {
        name: [part["default"].weight.grad for part in (module.lora_A, module.lora_B)]
        for name, module in modules.items()
    }


@pytest.mark.parametrize(
    ("family", "loss_type", "offload"),
    [("qwen2", "dapo", False), ("qwen3", "grpo", False), ("llama", "dapo", True)],
)
def test_every_adapters_gradient_is_that_of_transformers_and_peft(family, loss_type, offload, tmp_path):
    gradients, factors, dense, batch = trainer_gradients(family, tmp_path, loss_type, offload)
    expected = reference_gradients(dense, factors, batch, loss_type)
    for name, pair in expected.items():
        for actual, exact in zip(gradients[name], pair, strict=True):
            assert exact.norm() > 0
            assert (actual - exact).norm() <= 1e-4 * exact.norm(), name
