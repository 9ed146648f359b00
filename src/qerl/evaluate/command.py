"""`qerl eval`: load, measure, compare, write.

    model (+ adapter) -> greedy, sampled -> results.parquet, before and after grading  -+
    the policy to compare with, in the same way -> compare.parquet                      +-> tables, summary.json
    --from-parquet: completions from a file in place of a model                        -+

Two policies are never in memory at the same time: the first one's completions are in its file before the second loads.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import qerl
from qerl.config import EvalConfig, ModelConfig, RolloutConfig, TaskConfig
from qerl.engine import check_engine
from qerl.evaluate.files import read_results, write_results
from qerl.evaluate.sampling import GRADINGS, Evaluation, Grading, compare, grade_problems, sample_problems
from qerl.evaluate.show import LEGEND, print_differences, print_evaluations, show_progress
from qerl.evaluate.statistics import Difference
from qerl.generate import load_policy
from qerl.nn.load import open_base
from qerl.nn.lora import check_saved_adapter
from qerl.tasks import Task, load_task
from qerl.types import Example, SamplingParams

HOW = ("sampling", "max_new_tokens", "seed")  # what two evaluations should share for their difference to mean much
RESULTS, COMPARE, SUMMARY = "results.parquet", "compare.parquet", "summary.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure, and how; the fields' text in the command's help."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Temperature and truncation of the sampled mode, the longest completion, the batch size, the engine."""
    adapter: Path | None = None
    compare_with: str | None = None
    """Folder of an adapter for the same model, or of another model, or the results.parquet of an earlier evaluation.

    The difference is this one's score minus the first policy's.
    """
    greedy: bool = True
    num_samples: int = 4
    limit: int | None = None
    seed: int = 0
    tag_free: bool = False
    """Which grading stands first and is compared; both are reported."""
    output_dir: Path | None = None
    from_parquet: Path | None = None

    def modes(self) -> dict[str, tuple[SamplingParams, int]]:
        """Sampling and completions a problem, by mode; ValueError when there is nothing to do."""
        rollout, modes = self.rollout, dict[str, tuple[SamplingParams, int]]()
        if self.greedy:
            modes["greedy"] = (SamplingParams(greedy=True), 1)
        if self.num_samples > 0:
            sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
            modes["sampled"] = (sampling, self.num_samples)
        if not modes:
            raise ValueError("nothing to measure: leave --no-greedy out, or give --samples of 1 or more")
        return modes


@dataclass(frozen=True)
class Measured:
    """One policy's evaluations by mode, and how they came to be."""

    name: str
    evaluations: dict[str, Evaluation]
    settings: dict[str, Any]


def run(settings: Settings) -> dict[str, Any]:
    """Measure, print, write; returns what summary.json holds. ValueError for settings that cannot be."""
    _check_second(settings)
    _claim(settings.output_dir)
    task = load_task(settings.task, settings.seed)
    if settings.from_parquet is not None:
        first = _read(settings.from_parquet, task)
        _write(first, settings.output_dir, RESULTS)
    else:
        first = _sample(settings, task, settings.model, settings.adapter, RESULTS)
    grading: Grading = "tag_free" if settings.tag_free else "tagged"
    print_evaluations(f"{task.name}: {first.name}", first.evaluations, grading)  # before the second, which may fail
    second = _second(settings, task)
    compared = {} if second is None else {g: _changes(first, second, g) for g in GRADINGS}
    policies = [first] if second is None else [first, second]
    if second is not None:
        print_evaluations(f"{task.name}: {second.name}", second.evaluations, grading)
        for key in (key for key in HOW if first.settings[key] != second.settings[key]):
            print(f"note: {key} differs: {first.settings[key]} and {second.settings[key]}")
        num_problems = len(next(iter(first.evaluations.values())).problems)
        print_differences(
            f"change from {first.name} to {second.name.removeprefix(f'{first.name} + ')}, "
            f"{grading.replace('_', '-')} (paired over {num_problems:,} problems)",
            compared[grading],
        )
    print(LEGEND)
    summary = {
        "qerl": qerl.__version__,
        "task": task.name,
        "grading": grading,
        "policies": [
            {"name": m.name, "settings": m.settings, **{mode: summarize(e) for mode, e in m.evaluations.items()}}
            for m in policies
        ],
        "difference": {
            g: {mode: {name: asdict(d) for name, d in measures.items()} for mode, measures in by_mode.items()}
            for g, by_mode in compared.items()
        },
    }
    if settings.output_dir is not None:
        (settings.output_dir / SUMMARY).write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        print(f"results: {settings.output_dir}")
    return summary


def summarize(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation's numbers, as JSON has them."""
    return {
        "num_problems": len(evaluation.problems),
        "num_samples": evaluation.num_samples,
        "num_truncated": evaluation.num_truncated,
        "mean_length_tokens": evaluation.mean_length_tokens,
        **{
            grading: {
                "num_ungraded": evaluation.num_ungraded(grading),
                **{name: asdict(e) for name, e in evaluation.estimates(grading).items()},
            }
            for grading in GRADINGS
        },
    }


def held_out(task: Task, limit: int | None) -> list[Example]:
    """The problems to measure on: all, or the first `limit`; of endless ones as many as a training run takes."""
    there = task.num_eval_examples
    if there is None:
        return task.eval_examples(EvalConfig().num_problems if limit is None else limit)
    return task.eval_examples(there if limit is None else min(limit, there))


def _sample(settings: Settings, task: Task, model: ModelConfig, adapter: Path | None, file_name: str) -> Measured:
    """Load a policy, run all modes, grade. Completions are on disk before a grader sees them."""
    modes, examples = settings.modes(), held_out(task, settings.limit)
    check_engine(settings.rollout, model)
    name = model.path if adapter is None else f"{model.path} + {adapter}"
    with show_progress(f"{Path(model.path).name}, loading") as progress:
        policy = load_policy(model, adapter, progress)
    if settings.rollout.engine == "vllm":
        print("starting vLLM", file=sys.stderr, flush=True)
    engine = policy.build_engine(settings.rollout)
    if adapter is not None and engine.sync(None).num_live_adapters == 0:
        print(f"{adapter}: every B is zero, so this adapter changes nothing (it is as before training)")
    evaluations: dict[str, Evaluation] = {}
    seconds: dict[str, float] = {}
    for mode, (sampling, num_samples) in modes.items():
        started = time.monotonic()
        with show_progress(f"{Path(model.path).name}, {mode}") as progress:
            problems = sample_problems(
                engine,
                policy.tokenizer,
                examples,
                sampling=sampling,
                num_samples=num_samples,
                max_new_tokens=settings.rollout.max_completion_length,
                seed=settings.seed,
                expect_adapters=adapter is not None,
                progress=progress,
            )
        evaluations[mode], seconds[mode] = Evaluation(problems), time.monotonic() - started
    del engine, policy
    gc.collect()  # CUDA graphs and hooks make cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    rollout = settings.rollout
    how = {
        "model": model.model_dump(mode="json"),
        "adapter": None if adapter is None else str(adapter),
        "task": settings.task.model_dump(mode="json"),
        "sampling": {key: getattr(rollout, key) for key in ("temperature", "top_p", "top_k", "min_p")},
        "max_new_tokens": rollout.max_completion_length,
        "max_batch_size": rollout.max_batch_size,
        "seed": settings.seed,
        "seconds": seconds,
    }
    measured = Measured(name, evaluations, how)
    _write(measured, settings.output_dir, file_name)
    _grade(measured, task)
    _write(measured, settings.output_dir, file_name)
    return measured


def _check_second(settings: Settings) -> None:
    """ValueError for a policy to compare with that is none, before the first one is sampled."""
    if settings.compare_with is None:
        return
    path = Path(settings.compare_with)
    if path.suffix == ".parquet":
        if not path.is_file():
            raise ValueError(f"--compare {path}: there is no such file")
    elif settings.from_parquet is not None:
        raise ValueError(f"--compare {path}: completions of a file are compared with those of another .parquet file")
    elif settings.compare_with != "embedded" and not any(
        (path / name).is_file() for name in ("adapter_config.json", "config.json")
    ):
        inside = path / "adapter"
        found = (inside / "adapter_config.json").is_file()
        raise ValueError(
            f"--compare {path}: neither an adapter's folder nor a model's (there is no adapter_config.json or "
            "config.json), nor a .parquet file of an evaluation" + (f"; did you mean {inside}?" if found else "")
        )
    elif (path / "adapter_config.json").is_file():
        check_saved_adapter(open_base(settings.model).model, path)


def _second(settings: Settings, task: Task) -> Measured | None:
    """The policy to compare with, if one is asked for."""
    if settings.compare_with is None:
        return None
    path = Path(settings.compare_with)
    if path.suffix == ".parquet":
        return _read(path, task)
    if (path / "adapter_config.json").is_file():
        return _sample(settings, task, settings.model, path, COMPARE)
    model = settings.model.model_copy(update={"path": settings.compare_with})
    return _sample(settings, task, model, None, COMPARE)


def _read(path: Path, task: Task) -> Measured:
    """Completions from a file, graded anew by the task as it is now."""
    evaluations, settings = read_results(path)
    measured = Measured(str(path), evaluations, settings)
    _grade(measured, task)
    return measured


def _grade(measured: Measured, task: Task) -> None:
    for evaluation in measured.evaluations.values():
        grade_problems(task, evaluation.problems)


def _changes(first: Measured, second: Measured, grading: Grading) -> dict[str, dict[str, Difference]]:
    """The second's scores minus the first's, by mode and measure, for what both have."""
    both = [mode for mode in first.evaluations if mode in second.evaluations]
    return {mode: compare(second.evaluations[mode], first.evaluations[mode], grading) for mode in both}


def _claim(output_dir: Path | None) -> None:
    """Make the folder; ValueError rather than overwrite an evaluation."""
    if output_dir is None:
        return
    for name in (RESULTS, COMPARE, SUMMARY):
        if (output_dir / name).exists():
            raise ValueError(f"--output: {output_dir} holds an evaluation already ({name}); choose another folder")
    output_dir.mkdir(parents=True, exist_ok=True)


def _write(measured: Measured, output_dir: Path | None, name: str) -> None:
    if output_dir is not None:
        write_results(output_dir / name, measured.evaluations, measured.settings)
