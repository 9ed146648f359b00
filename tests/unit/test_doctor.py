"""qerl doctor: what it says of a machine without a GPU, what would fit a card, and that it measures what it names."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from qerl import doctor
from qerl.cli import app
from qerl.config import load_config
from qerl.kernels.w4a16 import path_of
from qerl.plan import Target, plan_memory
from qerl.plan.fit import budget_of


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_a_machine_without_a_gpu(no_gpu):
    result = CliRunner().invoke(app, ["doctor", "--no-measure"])
    assert result.exit_code == 0
    assert "gpu            none that torch can see" in result.output
    assert "products       reference\n" in result.output and "decoding" not in result.output


def test_speeds_are_measured_of_what_they_name(no_gpu, monkeypatch):
    monkeypatch.setattr(doctor, "_TOKENS", (1, 8))
    monkeypatch.setattr(doctor, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "_COPIED_BYTES", {"cpu": 1 << 20})
    seen: list[tuple[int, ...]] = []
    product = doctor.w4a16

    def recorded(x, weight):
        seen.append((len(x), *weight.shape))
        return product(x, weight)

    monkeypatch.setattr(doctor, "w4a16", recorded)
    found = dict(doctor.report())
    layer = [(1152, 896), (896, 896), (9728, 896), (896, 4864)]  # q, k, v; o; gate, up; down of Qwen2.5-0.5B
    assert seen[:4] == [(1, *shape) for shape in layer] and seen[-4:] == [(8, *shape) for shape in layer]
    assert "tokens/s" in found["decoding"] and "GB/s" in found["memory"]


def test_what_fits_a_card_is_what_the_plan_says():
    (first, *rest) = list(doctor.what_fits(24_000_000_000))
    assert first == ("trains", "Qwen2.5 0.5B, 1.5B, 3B with the default settings")
    (what, settings) = rest[0]
    assert what == "" and len(rest) == 1
    config = load_config(None, settings.removeprefix("7B with ").split())
    target, budget = Target.of(config, total_bytes=24_000_000_000), budget_of(24_000_000_000)
    assert plan_memory(doctor.qwen2_5("7B"), config, target).peak <= budget


def test_paths_have_the_names_of_their_files():
    assert path_of(torch.device("cpu"), torch.bfloat16, 1) == "reference"
