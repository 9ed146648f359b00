"""Settings that change memory or speed, and must not change what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from qerl.config import load_config
from qerl.display import Display
from qerl.nn.structure import decoder_layers
from qerl.rl import trainer
from qerl.rl.batch import TrainBatch, TrainSequence
from qerl.rl.trainer import Trainer
from qerl.rl.update import Learner

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
SHORT = [
    "steps=2",
    "lora.r=4",
    "rollout.prompts_per_step=4",
    "rollout.num_generations=4",
    "optimizer.warmup_ratio=0",
    "noise.num_stages=2",
    "noise.per=completion",
    "eval.num_problems=0",
]


def trained(output_dir: Path, *settings: str, resume: bool = False) -> dict[str, torch.Tensor]:
    config = load_config(DEMO, [*SHORT, f"output_dir={output_dir}", *settings])
    with (output_dir.parent / "out.txt").open("w") as stream:
        Trainer(config, display=Display(config.steps, stream=stream), resume=resume).train()
    return load_file(output_dir / "adapter" / "adapter_model.safetensors")


def metrics_of(output_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    """All but one number in a thousand: of a gradient that is 0 but for rounding Adam makes a step up or down."""
    off = torch.cat([((got[name] - tensor).abs() > atol).flatten() for name, tensor in expected.items()])
    assert got.keys() == expected.keys() and off.float().mean() < 1e-3


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, torch.Tensor]:
    return trained(tmp_path_factory.mktemp("expected") / "run")


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.micro_batch_tokens=64"],
        ["optimizer.gradient_checkpointing=true"],
        ["optimizer.gradient_checkpointing=1"],
        ["optimizer.logprob_chunk=7"],
        ["rollout.max_batch_size=3"],
        ["rollout.kv_cache_tokens=176", "task.max_prompt_length=64", "rollout.prefill_tokens=16"],
    ],
    ids=lambda settings: settings[0],
)
def test_nothing_but_memory_changes(settings, expected, tmp_path):
    got = trained(tmp_path / "run", *settings)
    moved = max(tensor.abs().max().item() for name, tensor in expected.items() if "lora_B" in name)
    assert moved > 1e-4
    assert_same(got, expected, atol=moved * 1e-2)


@pytest.mark.parametrize("set_to, passes_of", [("null", 96), ("80", 80)])
def test_a_micro_batch_is_as_long_as_planned_where_it_is_left_open(set_to, passes_of, expected, tmp_path, monkeypatch):
    """On a GPU: here the plan is somebody's word for it."""
    logprobs, seen = Learner._logprobs, []

    def noted(self, micro):
        seen.append(len(micro.input_ids))
        first, *others = decoder_layers(self.model)
        assert "forward" in vars(first) and not any("forward" in vars(layer) for layer in others)
        return logprobs(self, micro)

    monkeypatch.setattr(Learner, "_logprobs", noted)
    monkeypatch.setattr(trainer, "check_fits", lambda *_: Mock(micro_batch_limit=96, recomputed_layers=1))
    got = trained(tmp_path / "run", f"optimizer.micro_batch_tokens={set_to}", "optimizer.gradient_checkpointing=auto")
    lines = metrics_of(tmp_path / "run")
    assert {line["micro_batch_tokens"] for line in lines} == {passes_of} and max(seen) <= passes_of < sum(seen)
    assert {line["recomputed_layers"] for line in lines} == {1}
    assert all(line["decode_steps"] > 0 and 0 < line["time/scoring"] < line["time/rollout"] for line in lines)
    assert_same(got, expected, atol=1e-5)


@pytest.mark.parametrize("settings", [["noise.enabled=false"], ["seed=1"], ["loss.type=grpo"]], ids=lambda s: s[0])
def test_what_matters_does_change_it(settings, expected, tmp_path):
    got = trained(tmp_path / "run", *settings)
    assert any(not torch.allclose(got[name], tensor, atol=1e-5) for name, tensor in expected.items())


def test_running_out_of_memory_changes_nothing_but_the_micro_batch(expected, tmp_path, monkeypatch):
    """Twice, when gradients of the same optimizer step are there already."""
    logprobs, seen = Learner._logprobs, []

    def failing(self, micro):
        seen.append(len(micro.input_ids))
        if len(seen) in (2, 4):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logprobs(self, micro)

    monkeypatch.setattr(Learner, "_logprobs", failing)
    got = trained(tmp_path / "run", "optimizer.micro_batch_tokens=128")
    lines = metrics_of(tmp_path / "run")
    assert lines[-1]["micro_batch_tokens"] < 128 and max(seen[4:]) < max(seen[:4])
    assert "out of memory in the update; it begins again with micro-batches of" in (tmp_path / "out.txt").read_text()
    assert_same(got, expected, atol=1e-5)


def test_running_out_of_memory_makes_all_layers_recompute_first(expected, tmp_path, monkeypatch):
    """Where their number was the plan's; only then micro-batches shrink."""
    logprobs, tried = Learner._logprobs, []

    def failing(self, micro):
        tried.append((self.recomputed_layers, self.micro_batch_tokens))
        if len(tried) in (2, 4):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logprobs(self, micro)

    monkeypatch.setattr(Learner, "_logprobs", failing)
    monkeypatch.setattr(trainer, "check_fits", lambda *_: Mock(micro_batch_limit=128, recomputed_layers=0))
    got = trained(tmp_path / "run", "optimizer.gradient_checkpointing=auto", "optimizer.micro_batch_tokens=128")
    assert tried[:4] == [(0, 128), (0, 128), (4, 128), (4, 128)]
    assert all(count == 4 and tokens < 128 for count, tokens in tried[4:])
    assert metrics_of(tmp_path / "run")[-1]["recomputed_layers"] == 4
    text = (tmp_path / "out.txt").read_text()
    assert "with all layers recomputed (set optimizer.gradient_checkpointing = true and optimizer.micro" in text
    assert_same(got, expected, atol=1e-5)


def test_a_scoring_pass_without_memory_makes_no_layer_recompute(expected, tmp_path, monkeypatch):
    """It keeps no activations: only shorter micro-batches are of use."""
    score, tried = Learner._score, []

    def failing(self, *args):
        tried.append((self.recomputed_layers, self.micro_batch_tokens))
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(self, *args)

    monkeypatch.setattr(Learner, "_score", failing)
    monkeypatch.setattr(trainer, "check_fits", lambda *_: Mock(micro_batch_limit=128, recomputed_layers=0))
    trained(
        tmp_path / "run", "optimizer.gradient_checkpointing=auto", "optimizer.micro_batch_tokens=128", "loss.beta=0.1"
    )
    assert tried[0] == (0, 128) and all(count == 0 and tokens < 128 for count, tokens in tried[1:])


def test_a_run_without_enough_memory_is_saved_and_goes_on_with_less(expected, tmp_path, monkeypatch):
    """In the update of the second step, however small its micro-batches, after gradients of the first ones."""
    logprobs, sizes = Learner._logprobs, []

    def failing(self, micro):
        if self.step == 1:
            sizes.append(len(micro.input_ids))
            if len(micro.members) == 1 and len(sizes) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return logprobs(self, micro)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "_logprobs", failing)
        with pytest.raises(trainer.RunFailed, match=r"one sequence of .* tokens: turn .*\nSaved .*step-000001"):
            trained(tmp_path / "run", "optimizer.micro_batch_tokens=16")
    less = ["optimizer.micro_batch_tokens=64", "optimizer.gradient_checkpointing=true", "optimizer.logprob_chunk=64"]
    got = trained(tmp_path / "run", *less, "rollout.max_batch_size=3", resume=True)
    assert_same(got, expected, atol=1e-5)


def test_an_optimizer_without_memory_goes_on_from_what_was_saved(expected, tmp_path, monkeypatch):
    """A step that may be half applied is not saved."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", full)
        with pytest.raises(trainer.RunFailed, match=r"middle of a step's updates: --resume goes on from the start"):
            trained(tmp_path / "run")
    got = trained(tmp_path / "run", resume=True)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_micro_batches_shrink_down_to_the_longest_sequence_that_counts():
    """A longer one, which overlong filtering leaves out, is no reason to give up."""

    def sequence(new: int, kept: bool) -> TrainSequence:
        return TrainSequence([1] * 4, [2] * new, 1.0, kept, prompt_index=0, sample_index=0, first_slot=0)

    batch = TrainBatch([sequence(96, False), *(sequence(6, True) for _ in range(4))], torch.zeros(120))
    run, tried = Mock(micro_batch_tokens=1000, device=torch.device("cpu"), step=0, _may_recompute_more=False), []

    def work() -> None:
        tried.append(max(len(micro.input_ids) for micro in batch.micro_batches(range(5), run.micro_batch_tokens)))
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError, match="no memory for the update of one sequence of 10 tokens"):
        Learner._within_memory(run, batch, range(5), work)
    assert tried == [40, 20, 10]
    assert run.display.warning.call_count == run.optimizer.zero_grad.call_count == 2


def test_the_update_has_the_memory_of_keys_and_values(tmp_path, monkeypatch):
    awake, engines = {"rollout": [], "update": []}, []
    update, collect = Learner.update, trainer.collect_groups

    def updating(self, *of):
        awake["update"].append(engines[-1]._cache is not None)
        return update(self, *of)

    def collecting(step, stream, engine, *of):
        engines.append(engine)
        awake["rollout"].append(engine._cache is not None)
        return collect(step, stream, engine, *of)

    monkeypatch.setattr(Learner, "update", updating)
    monkeypatch.setattr(trainer, "collect_groups", collecting)
    trained(tmp_path / "run")
    # The first rollout is where the engine learns how much it needs; the second one takes it beforehand.
    assert awake == {"rollout": [False, True], "update": [False, False]}
