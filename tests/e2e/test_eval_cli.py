"""`qerl eval` as a user calls it: comparisons, files, and mistakes. The commands of docs/evaluation.md run in
test_docs_commands.py."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config import LoraConfig, ModelConfig
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora, lora_factors
from qerl.rl.checkpoint import save_adapter

SMALL = ["--limit", "8", "--samples", "2", "--max-new-tokens", "40"]


def qerl(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["eval", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Path]:
    """One adapter as before training, one that breaks the model."""
    model, _ = load_model(ModelConfig(path="embedded", device="cpu"))
    model = attach_lora(model, LoraConfig(r=4), seed=0)
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(model, folder / "untrained")
    with torch.no_grad():
        for factors in filter(None, map(lora_factors, model.modules())):
            factors.b.normal_(generator=torch.Generator().manual_seed(0))
    save_adapter(model, folder / "broken")
    return {name: folder / name for name in ("untrained", "broken")}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, adapters) -> tuple[Path, str]:
    """The embedded model against the broken adapter, with files."""
    folder = tmp_path_factory.mktemp("eval") / "results"
    output = qerl(
        "embedded", "task.difficulty=1", *SMALL, "--compare", str(adapters["broken"]), "--output", str(folder)
    )
    return folder, output


def test_an_adapter_is_applied_and_compared(measured):
    folder, output = measured
    summary = json.loads((folder / "summary.json").read_text())
    base, broken = summary["policies"]
    assert base["greedy"]["tagged"]["pass@1"]["value"] > 0.5
    assert broken["greedy"]["tagged"]["pass@1"]["value"] == 0
    difference = summary["difference"]["tagged"]["greedy"]["pass@1"]
    assert difference["value"] == -base["greedy"]["tagged"]["pass@1"]["value"]
    assert (difference["num_better"], difference["num_worse"]) == (0, -8 * difference["value"])
    assert list(summary["difference"]["tag_free"]["sampled"]) == ["pass@1", "pass@2"]
    assert base["sampled"]["num_samples"] == 2
    (adapter,) = re.findall(r"^change from embedded to (.*), tagged \(paired over 8 problems\)$", output, re.MULTILINE)
    assert Path(adapter).name == "broken"
    assert re.search(r"^greedy +-\d.* 0 / \d / \d ", output, re.MULTILINE)


def test_the_files_hold_what_was_sampled(measured):
    rows = pq.read_table(measured[0] / "results.parquet").to_pylist()
    assert [(row["mode"], row["problem"]) for row in rows] == [(m, i) for m in ("greedy", "sampled") for i in range(8)]
    for row in rows:
        assert row["prompt"][-1] == {"role": "user", "content": json.loads(row["columns"])["problem"]}
        counts = {len(row[name]) for name in ("texts", "tagged", "tag_free", "lengths", "finish_reasons", "seeds")}
        assert counts == {1 if row["mode"] == "greedy" else 2}
        assert None not in row["tagged"]
    assert (measured[0] / "compare.parquet").is_file()


def test_saved_completions_are_graded_anew_without_a_model(measured, tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.evaluate.command.load_policy", None)
    folder, output = measured
    results, other = str(folder / "results.parquet"), str(folder / "compare.parquet")
    again = qerl("--from-parquet", results, "--compare", other, "--output", str(tmp_path))
    assert re.findall(r"^pass@1.*|^greedy .*", again, re.MULTILINE) == re.findall(
        r"^pass@1.*|^greedy .*", output, re.MULTILINE
    )
    assert pq.read_table(tmp_path / "results.parquet") == pq.read_table(results)


def test_regrading_uses_the_task_as_it_is_now(measured, monkeypatch):
    monkeypatch.setattr("qerl.tasks.numbers.grade", lambda text, answer, *, require_tags: None)
    output = qerl("--from-parquet", str(measured[0] / "results.parquet"))
    assert "8 / 8 ungraded" in output
    assert "16 / 16 ungraded" in output
    assert re.search(r"^pass@1 +0\.0 ", output, re.MULTILINE)


def test_an_untrained_adapter_is_named_and_changes_nothing(adapters, measured):
    output = qerl("embedded", "task.difficulty=1", *SMALL, "--adapter", str(adapters["untrained"]), "--no-greedy",
                  "--compare", str(measured[0] / "results.parquet"))  # fmt: skip
    assert "every B is zero" in output
    assert re.search(r"^pass@1 .* 0 / 0 / 8 ", output, re.MULTILINE)


def test_settings_that_differ_are_named(measured, tmp_path):
    qerl(
        "embedded", "task.difficulty=1", *SMALL, "--no-greedy", "--temperature", "1", "--output", str(tmp_path / "hot")
    )
    hot, cold = str(tmp_path / "hot" / "results.parquet"), str(measured[0] / "results.parquet")
    output = qerl("--from-parquet", hot, "--compare", cold)
    assert "note: sampling differs: {'temperature': 1.0" in output
    assert "seed differs" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a model's folder or --from-parquet"),
        (["embedded", "--from-parquet", "x.parquet"], "not both"),
        (["--from-parquet", "no.parquet"], r"no.parquet cannot be read as Parquet"),
        (["embedded", "--no-greedy", "--samples", "0"], "nothing to measure"),
        (["embedded", "--task", "chess"], "there is no task 'chess'"),
        (["embedded", "--task", "gsm8k"], "task.path is not set"),
        (["embedded", "--temperature", "0"], "leave it out and use --greedy"),
        (["embedded", "noise.enabled=true"], "noise.enabled=true: an evaluation reads model., task."),
        (["embedded", "--format", "int3"], "^--format int3: choose one of nvfp4, mxfp4, nf4, int4, bf16$"),
        (["nowhere", "--limit", "1"], "nowhere is not the folder"),
        (["embedded", "--adapter", "nowhere", "--limit", "1"], "no adapter in nowhere"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        qerl(*arguments)


def test_an_evaluation_is_never_overwritten(measured):
    with pytest.raises(ValueError, match="holds an evaluation already"):
        qerl("embedded", *SMALL, "--output", str(measured[0]))


def test_other_problems_are_not_compared(measured):
    with pytest.raises(ValueError, match="different problems"):
        qerl("embedded", "task.difficulty=1", "--limit", "2", "--samples", "0",
             "--compare", str(measured[0] / "results.parquet"))  # fmt: skip


def test_what_was_measured_is_printed_before_a_comparison_fails(measured):
    other = str(measured[0] / "results.parquet")
    result = CliRunner().invoke(
        app, ["eval", "embedded", "task.difficulty=1", "--limit", "2", "--samples", "0", "--compare", other]
    )
    assert "different problems" in str(result.exception)
    assert re.search(r"^greedy +\d", result.output, re.MULTILINE)


def of_another_model(adapter: Path, folder: Path) -> Path:
    """The same adapter, but for one factor's width."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("q_proj.lora_A.weight"))
    save_file(tensors | {name: tensors[name][:, :-16].contiguous()}, file)
    return folder


def test_an_adapter_of_another_model_is_refused_before_that_is_loaded(tmp_path, adapters, monkeypatch):
    monkeypatch.setattr("qerl.generate.load_model", None)
    other = str(of_another_model(adapters["untrained"], tmp_path / "other"))
    for command in (["eval", "--adapter"], ["eval", "--compare"], ["generate", "--adapter"]):
        result = CliRunner().invoke(app, [command[0], "embedded", *command[1:], other])
        assert "is it of another model" in str(result.exception)


def test_what_cannot_be_compared_is_told_before_anything_is_measured(tmp_path, adapters):
    (tmp_path / "adapter").symlink_to(adapters["broken"])
    for other, message in (
        ("nowhere", "--compare nowhere: neither an adapter's folder nor a model's"),
        ("gone.parquet", "--compare gone.parquet: there is no such file"),
        (str(tmp_path), f"did you mean {tmp_path}/adapter?"),
    ):
        result = CliRunner().invoke(app, ["eval", "embedded", "--limit", "2", "--samples", "0", "--compare", other])
        assert message in str(result.exception) and "greedy" not in result.output
