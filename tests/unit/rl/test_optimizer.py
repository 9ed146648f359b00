"""The optimizers: what they hold, that they learn alike, and that their state comes back bit for bit."""

from __future__ import annotations

import builtins

import pytest
import torch

from qerl.config import LoraConfig, ModelConfig, OptimizerConfig, RunConfig
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora, load_adapter_weights
from qerl.rl.checkpoint import load_parameters, save_checkpoint
from qerl.rl.optimizer import build_optimizer, learning_rate
from qerl.rl.trainer import Trainer


def adapted():
    return attach_lora(load_model(ModelConfig(device="cpu"))[0], LoraConfig(r=32, target_modules=["q_proj"]), seed=0)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def take_steps(model, optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in trained(model):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("type", ["adamw", "adamw_8bit"])
def test_state_comes_back_bit_for_bit(type, tmp_path):
    config = OptimizerConfig(type=type, learning_rate=1e-2)
    model = adapted()
    optimizer = build_optimizer(model, config)
    take_steps(model, optimizer, 0, 3)
    folder = save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer, state={}, config=RunConfig())
    again = adapted()
    other = build_optimizer(again, config)
    load_parameters(folder, again, other)
    take_steps(model, optimizer, 3, 6)
    take_steps(again, other, 3, 6)
    assert all(map(torch.equal, trained(model), trained(again)))
    load_adapter_weights(again, folder / "adapter")
    assert not any(map(torch.equal, trained(model), trained(again)))


def test_8_bits_learn_as_32_do():
    steps = []
    for type in ("adamw", "adamw_8bit"):
        model = adapted()
        before = [p.detach().clone() for p in trained(model)]
        optimizer = build_optimizer(model, OptimizerConfig(type=type, learning_rate=1e-2))
        take_steps(model, optimizer, 0, 8)
        steps.append(torch.cat([(p - b).flatten() for p, b in zip(trained(model), before, strict=True)]))
    exact, rounded = steps
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.99
    assert not torch.equal(exact, rounded)


def test_8_bits_without_bitsandbytes_are_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    find = builtins.__import__

    def missing(name: str, *args, **kwargs):
        if name == "bitsandbytes":
            raise ImportError(name)
        return find(name, *args, **kwargs)

    config = OptimizerConfig(type="adamw_8bit")
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"pip install qerl\[bitsandbytes\]"):
        Trainer(RunConfig(output_dir=str(tmp_path), optimizer=config), load=lambda _: pytest.fail("it was loaded"))


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_rate_rises_and_falls(scheduler, expected):
    config = OptimizerConfig(learning_rate=1.0, warmup_ratio=1 / 3, lr_scheduler=scheduler)
    assert [learning_rate(config, update, 6) for update in range(6)] == pytest.approx(expected, abs=1e-6)
