"""docs/comparison.md: what it says of TRL and of this package is true of both as they are installed."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

from qerl.cli import app
from qerl.config import LossConfig, ModelConfig, RunConfig

PAGE = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text(encoding="utf-8")


def row(name: str) -> list[str]:
    """The cells of a row: qerl, TRL, Unsloth, QeRL's code."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split(" | ")[1:]]


def test_what_is_said_of_trl():
    trl = pytest.importorskip("trl")
    assert metadata.version("trl") in row("TRL")[0]
    assert metadata.version("peft").rpartition(".")[0] in row("TRL")[0]
    for name in ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward"):
        assert hasattr(trl, f"{name}Trainer")
    fields = trl.GRPOConfig.__dataclass_fields__
    described = fields["loss_type"].metadata["help"]
    for loss in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"):
        assert f"'{loss}'" in described
    config = trl.GRPOConfig("unused", use_cpu=True, bf16=False)
    assert config.loss_type == "dapo" and config.num_generations == 8
    for cell in (row("sampler's memory"), row("completions of a prompt")):
        assert re.findall(r"`(\w+)`", cell[1])[0] in fields
    assert {"use_transformers_continuous_batching", "vllm_mode", "vllm_enable_sleep_mode"} <= fields.keys()


def test_what_is_said_of_this_package():
    config = RunConfig()
    assert row("losses")[0].lower().replace(". ", "_").split(", ") == list(
        get_args(LossConfig.model_fields["type"].annotation)
    )
    assert row("frozen weights")[0].lower().split(", ") == list(get_args(ModelConfig.model_fields["format"].annotation))
    assert config.loss.type == "dapo" and config.rollout.num_generations == 8
    for cell in ("noise", "sampler's memory", "loss, by default", "completions of a prompt", "4 bits"):
        for section, name in re.findall(r"`(\w+)\.(\w+)", row(cell)[0]):
            assert name in type(getattr(config, section)).model_fields
    commands = set(get_command(app).commands)
    assert {name for name in re.findall(r"`qerl (\w+)", PAGE)} <= commands
