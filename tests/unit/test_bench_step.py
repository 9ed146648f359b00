"""`qerl bench step` on a CPU: random weights of every format, a whole step of a tiny model, the cases."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from typer.testing import CliRunner

from qerl.bench import endurance
from qerl.bench.endurance import run_endurance
from qerl.bench.meter import Meter, timed_functions
from qerl.bench.models import SIZES, RandomWeights, write_folder
from qerl.bench.step import Case, dry_run, run_config, run_step
from qerl.cli import app
from qerl.config import ModelConfig
from qerl.nn import head as head_module
from qerl.nn.linear import PackedLinear
from qerl.nn.load import load_model
from qerl.nn.structure import decoder_layers, head
from qerl.rl.batch import TrainBatch, TrainSequence

CPU = torch.device("cpu")
TINY = dict(model="tiny", completions=4, group=2, prompt_tokens=12, new_tokens=20)
LAYER = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256
WORK = 2 * LAYER * 4 * 32 + 128 * 2048 * 4 * 20  # weights times tokens: of two layers; of the head, new ones alone


def random_model(folder: Path, format: str):
    write_folder(folder, "tiny")
    config = ModelConfig.model_validate({"path": str(folder), "format": format, "device": "cpu"})
    return load_model(config, RandomWeights(config, CPU))[0]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "int4", "bf16"])
def test_random_weights_are_in_the_format_and_keep_the_size_of_activations(tmp_path, format):
    model = random_model(tmp_path, format)
    linears = [m for m in decoder_layers(model).modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 7 * SIZES["tiny"].layers
    assert all(isinstance(linear, PackedLinear) == (format != "bf16") for linear in linears)
    generator = torch.Generator().manual_seed(0)
    for linear in [*linears, head(model)]:
        x = torch.randn(200, linear.in_features, generator=generator)
        assert 0.6 < linear(x).std() < 1.5
    assert head(model).weight is model.get_input_embeddings().weight


def test_the_same_seed_gives_the_same_weights(tmp_path):
    first, second = (random_model(tmp_path, "nvfp4") for _ in range(2))
    codes = [[m.weight for m in model.modules() if isinstance(m, PackedLinear)] for model in (first, second)]
    assert all(map(torch.equal, *codes))
    assert not torch.equal(codes[0][0], codes[0][-1][: len(codes[0][0])])


@pytest.mark.parametrize("format", ["nvfp4", "nf4"])
def test_a_whole_step_is_timed_part_by_part(format):
    record = run_step(Case(format=format, **TINY, overrides=("optimizer.micro_batch_tokens=64",)), device="cpu")
    assert "error" not in record
    parts = record["parts"]
    assert list(parts) == [
        "load", "wake", "sync", "rollout", "sleep", "forward", "backward", "optimizer", "next decode",
    ]  # fmt: skip
    assert parts["forward"]["times"] == parts["backward"]["times"] == record["micro_batches"] == 2
    assert 0 < parts["rollout"]["seconds"] <= record["rollout_s"] < record["step_s"]
    assert record["forward_s"] + record["backward_s"] < record["update_s"]
    assert 0 < record["head_s"] < record["forward_s"] + record["backward_s"]
    assert (record["dequantisation_s"] > 0) == (format == "nf4")  # packed products have no dense copy on a CPU
    assert record["update_flops"] == 6 * WORK
    assert json.loads(json.dumps(record)) == record


def test_work_is_counted_as_often_as_it_is_done():
    overrides = ("loss.num_iterations=2", "optimizer.gradient_checkpointing=false")
    assert run_step(Case(**TINY, overrides=overrides), device="cpu")["update_flops"] == 2 * 4 * WORK


def test_what_goes_wrong_is_recorded_with_what_was_measured(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr("qerl.rl.update.policy_loss", fail)
    record = run_step(Case(**TINY), device="cpu")
    assert record["error"].startswith("OutOfMemoryError: no memory for the update of one sequence of 32 tokens")
    assert list(record["parts"])[-1] == "forward"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "8B"], "--model 8B: choose one of tiny"),
        (["--model", "tiny", "--completions", "9"], "9 completions are no whole groups of 8"),
        (["--model", "tiny", "optimizer.micro_batch=3"], "settings are section.key=value"),
        (["--model", "tiny", "steps=3"], "steps=3: settings are section.key=value"),
        (["--model", "tiny", "model.format=bf16"], "model.format=bf16: that is what --format says"),
        (["--model", "tiny", "--cap", "1MB"], "--cap 1MB: give the card's memory"),
        (["--model", "tiny", "--cap", "24GB"], "--cap holds a GPU's memory, and there is no GPU"),
        (["--model", "tiny", "--stop-after", "9999"], "--stop-after 9999: give 2 to 2048 (--new) tokens"),
        (["--model", "72B", "--cap", "30GB", "--dry-run"], "72B in nvfp4 does not fit 30 GB with any setting"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    result = CliRunner().invoke(app, ["bench", "step", "--device", "cpu", *arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_functions_are_timed_while_asked_for_and_left_as_they_were():
    function = vars(head_module._TokenLogprobs)["backward"]
    hidden = torch.randn(6, 8, requires_grad=True)
    with timed_functions([(head_module._TokenLogprobs, "backward")], CPU) as timed:
        head_module.token_logprobs(hidden, torch.randn(11, 8), torch.arange(6))[0].sum().backward()
    assert timed.calls == 1 and timed.seconds > 0
    assert vars(head_module._TokenLogprobs)["backward"] is function


def test_a_part_counts_all_its_occurrences():
    with Meter(CPU) as meter:
        for _ in range(3):
            with meter("part"):
                pass
    assert meter.parts["part"].times == 3 and meter.parts["part"].seconds > 0


def script():
    path = Path(__file__).parents[2] / "benchmarks" / "step" / "bench_step.py"
    spec = importlib.util.spec_from_file_location("bench_step", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_models_that_have_to_fit_a_card_are_planned_to():
    planned = {}
    for case in script().CASES["fit"]:
        record = dry_run(case, device="cpu")
        planned[case] = record
        assert record["planned_peak_gb"] < record["cap_gb"] - 0.5, case
        assert record["sequences_at_a_time"] == case.completions or "rollout.kv_cache_tokens" in record["settings"]
    assert len(planned) == 5


def test_a_case_that_fails_has_a_record_and_the_others_go_on(tmp_path, capsys):
    module, out, reports = script(), tmp_path / "records.jsonl", SimpleQueue()
    bad = Case(**TINY, cap_bytes=1_000_000)
    module.work(module.Job((bad, Case(**TINY, stop_after=4))), out, "name", "commit", reports)
    first, second = map(json.loads, out.read_text().splitlines())
    assert "does not fit" in first["error"] and first["case"]["cap_bytes"] == 1_000_000
    assert "error" not in second and (second["new_tokens"], second["planned_new_tokens"]) == (4, 20)
    assert [reports.get(), reports.get()] == [False, True]
    assert "does not fit" in capsys.readouterr().out
    assert module.run(module.Job((bad,)), out, "name", "commit", ends=0.0) == 1  # not begun
    assert json.loads(out.read_text().splitlines()[-1])["error"] == "the time limit"


def test_an_endurance_run_has_a_line_for_each_window():
    record = run_endurance("tiny", windows=(1, 3), device="cpu")
    assert [window["step"] for window in record["windows"]] == [1, 3] and record["steps"] == 3
    assert all(window["seconds"] > 0 for window in record["windows"])
    assert not run_endurance("tiny", windows=(1, 3), max_seconds=0, device="cpu")["flat"]


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_sizes_of_an_endurance_run_come_before_its_last_window(tmp_path, seed):
    """Of a pass, of the logits that exist at a time, of a sequence; lengths drawn as the run's weights draw them."""
    case = Case("tiny", prompt_tokens=endurance.MAX_PROMPT, new_tokens=endurance.MAX_NEW, overrides=endurance.LIMITS)
    config, draws = run_config(case, tmp_path), random.Random(seed)
    log_goes_on, prompts, sizes = math.log(1 - 1 / endurance.MEAN_LENGTH), [], []
    for _ in range(endurance.WINDOWS[-1]):
        sequences: list[TrainSequence] = []
        for number in range(config.rollout.prompts_per_step):
            prompts = prompts or draws.sample(endurance.PROMPT_TOKENS, len(endurance.PROMPT_TOKENS))
            prompt = [0] * prompts.pop()
            for sample in range(case.group):
                length = min(case.new_tokens, 1 + int(math.log(1 - draws.random()) / log_goes_on))
                slot = sum(len(s.completion_ids) for s in sequences)
                sequences.append(TrainSequence(prompt, [0] * length, 0.0, True, number, sample, slot))
        batch = TrainBatch(sequences, torch.zeros(sum(len(s.completion_ids) for s in sequences)))
        passes = batch.micro_batches(range(len(sequences)), config.optimizer.micro_batch_tokens)
        logits = min(config.optimizer.logprob_chunk, max(len(micro.targets) for micro in passes))
        tokens = max(len(micro.input_ids) for micro in passes)
        sizes.append((tokens, logits, max(sequence.num_tokens for sequence in sequences)))
    before, last = (list(map(max, *part)) for part in (sizes[: endurance.WINDOWS[-2]], sizes[endurance.WINDOWS[-2] :]))
    assert all(late <= 1.01 * early for early, late in zip(before, last, strict=True)), (before, last)


def test_recorded_results_are_strict_json():
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for path in (Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            json.loads(line, parse_constant=refuse)
