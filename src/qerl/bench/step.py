"""One whole step of a run under a card's memory: where its seconds and its bytes go.

    plan (before anything is made) -> settings that fit the cap -> the trainer over random weights (models.py)
      -> a short step, so that everything is compiled -> the step that counts: wake, sync, rollout, sleep,
         forward and backward of each micro-batch, optimizer -> wake, sync and one decode step of the next rollout

The trainer, the engine and the plan are those of `qerl train`; only the weights, the prompts (all of one length), the
rewards (random) and the end-of-text token (never drawn) are made up. Adapters sit on the seven projections, with a B
that is not zero; noise is on.

    update_mfu = 6 * (weights * tokens + head * completion tokens) / (forward + backward seconds) / measured bf16 rate

Weights are those of the decoder layers' linears; 6 FLOPs: forward, recomputation (where there is none, 4) and the
gradient of the input, each 2. Attention and adapters are work, too, and are not counted. `run_step` returns one record;
benchmarks/README.md has its keys.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import qerl.kernels.coded
import qerl.kernels.w4a16.dense
import qerl.nn.head
from qerl.bench.meter import Meter, Part, matrix_flops, timed_functions
from qerl.bench.models import SIZES, RandomWeights, prompt_text, word_tokenizer, write_folder
from qerl.config import RunConfig, validate
from qerl.display import Display
from qerl.nn.load import load_model, resolve_device
from qerl.nn.lora import lora_factors
from qerl.philox import fold
from qerl.plan.fit import CONTEXT_BYTES, SLACK_BYTES, budget_of, describe, nearest_settings, with_settings
from qerl.plan.memory import Memory, plan_memory, product_bytes
from qerl.plan.shapes import ModelShape, read_shape
from qerl.plan.target import Target
from qerl.rl.trainer import Trainer
from qerl.tasks.rewards import RewardRunner, RewardSpec
from qerl.tasks.rows import RowsTask
from qerl.types import Request, SamplingParams

LORA_STD = 0.03  # of B: an adapter's output is then about a tenth of the product's
WARMUP_TOKENS = 24
_UPDATE = ("forward", "backward")
_PLANNED = {"load": "load", "rollout": "rollout", "forward": "update", "backward": "update", "optimizer": "update",
            "next decode": "rollout"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is run."""

    model: str
    """A key of `models.SIZES`."""
    format: str = "nvfp4"
    rank: int = 32
    completions: int = 16
    group: int = 8
    """Completions of a prompt."""
    prompt_tokens: int = 256
    new_tokens: int = 2048
    cap_bytes: int | None = None
    """Of device memory; None: all of it."""
    stop_after: int | None = None
    """Completions end after so many tokens, to save time; plan and memory of keys and values are for `new_tokens`."""
    overrides: tuple[str, ...] = ()
    """Further settings of the run, section.key=value."""

    @property
    def drawn_tokens(self) -> int:
        """Tokens that a completion really gets."""
        return self.new_tokens if self.stop_after is None else self.stop_after


def dry_run(case: Case, *, run: str = "", commit: str | None = None, device: str = "auto") -> dict[str, Any]:
    """The record of a case as far as it is known before anything is made: settings, planned bytes."""
    where = resolve_device(device)
    with tempfile.TemporaryDirectory() as folder:
        _, memory, config, chosen = _planned_case(case, Path(folder), on_gpu=True)
        planned = {name: round(size / 1e9, 3) for name, size in memory.peaks.items()}
        return describe_case(case, config, memory, chosen, run, commit, where) | {"planned_gb": planned}


def run_step(case: Case, *, run: str = "", commit: str | None = None, device: str = "auto") -> dict[str, Any]:
    """Run the case; see the module's text. ValueError for a case that cannot be or does not fit."""
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    with tempfile.TemporaryDirectory() as folder, Meter(where) as meter:
        shape, memory, config, chosen = _planned_case(case, Path(folder), on_gpu=on_gpu)
        record = describe_case(case, config, memory, chosen, run, commit, where)
        if not on_gpu:
            meter.say("no GPU: the step runs on the CPU, slowly")
        meter.say(f"{case.model} {case.format}: planned {_planned(memory)}" + (f"; with {chosen}" if chosen else ""))
        rate = None
        if on_gpu:
            rate = matrix_flops(where)
            torch.cuda.empty_cache()
            meter.say(f"bf16 products reach {rate / 1e12:.0f} TFLOP/s")
            if case.cap_bytes is not None:
                meter.cap(case.cap_bytes)
        try:
            with timed_functions(_DEQUANTISATION, where) as dequantisation, timed_functions(_HEAD, where) as head:
                prompts = [prompt_text(case.prompt_tokens, i) for i in range(64)]
                trainer = random_trainer(config, prompts, meter)
                trainer.watch = meter
                _warm_up(trainer, meter)
                load = meter.parts.pop("load")
                meter.forget()
                meter.parts["load"] = load
                before = dequantisation.seconds, head.seconds
                if case.stop_after is not None:
                    trainer.config = with_settings(config, {"rollout.max_completion_length": case.stop_after})
                metrics = trainer.train_step()
                inside = {
                    "dequantisation": dequantisation.seconds - before[0],
                    "head": head.seconds - before[1],
                }
                _next_decode(trainer, meter, case)
            record |= results(case, shape, config, meter, metrics, inside, rate)
        except (RuntimeError, ValueError) as error:  # torch.OutOfMemoryError is the former
            first, _, _ = str(error).partition("\n")
            record |= {"error": f"{type(error).__name__}: {first}"}
            meter.say(record["error"])
        return record | {"parts": parts_record(meter.parts, memory)}


_OF_THE_CASE = {
    "model.path": "--model",
    "model.format": "--format",
    "lora.r": "--rank",
    "task.max_prompt_length": "--prompt",
    "rollout.prompts_per_step": "--completions",
    "rollout.num_generations": "--group",
    "rollout.max_completion_length": "--new",
}


def run_config(case: Case, folder: Path) -> RunConfig:
    """The run that the step is of."""
    if case.stop_after is not None and not 2 <= case.stop_after <= case.new_tokens:
        raise ValueError(f"--stop-after {case.stop_after}: give 2 to {case.new_tokens} (--new) tokens")
    if case.completions % case.group:
        raise ValueError(f"{case.completions} completions are no whole groups of {case.group}: change one of them")
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model"), "format": case.format},
        "lora": {"r": case.rank, "alpha": case.rank},
        "task": {"name": "data", "grader": "none", "system_prompt": "", "max_prompt_length": case.prompt_tokens},
        "rollout": {
            "prompts_per_step": case.completions // case.group,
            "num_generations": case.group,
            "max_completion_length": case.new_tokens,
        },
        "noise": {"controller": "divergence", "on_divergence": "off"},  # sigma_start from the first step on
        "eval": {"num_problems": 0},
    }
    config = validate({"output_dir": str(folder / "run"), "log_completions": 0, **settings})
    pairs = [override.partition("=") for override in case.overrides]
    data = config.model_dump()
    for key, separator, value in pairs:
        section, _, name = key.partition(".")
        if key in _OF_THE_CASE:
            raise ValueError(f"{key}={value}: that is what {_OF_THE_CASE[key]} says")
        if not (separator and name and name in data.get(section, {})):
            raise ValueError(f"{key}{separator}{value}: settings are section.key=value, as in a run's TOML")
        try:
            data[section][name] = json.loads(value)
        except json.JSONDecodeError:
            data[section][name] = value
    return validate(data)


def _planned_case(case: Case, folder: Path, *, on_gpu: bool) -> tuple[ModelShape, Memory, RunConfig, str]:
    """The model's shape and the plan, with the nearest settings that fit the cap and how they are written.

    ValueError: nothing fits.
    """
    if case.model not in SIZES:
        raise ValueError(f"--model {case.model}: choose one of {', '.join(SIZES)}")
    write_folder(folder / "model", case.model)
    config = run_config(case, folder)
    free = None if case.cap_bytes is None else budget_of(case.cap_bytes)
    if free is None and on_gpu and torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0] - SLACK_BYTES
    target = Target.of(config, on_gpu=on_gpu, total_bytes=case.cap_bytes, free_bytes=free)
    shape = read_shape(config.model)
    chosen = ""
    if case.cap_bytes is not None:
        settings = nearest_settings(shape, config, target, budget_of(case.cap_bytes))
        if settings is None:
            raise ValueError(f"{case.model} in {case.format} does not fit {case.cap_bytes / 1e9:g} GB with any setting")
        if "rollout.max_completion_length" in settings:
            raise ValueError(f"{case.new_tokens} new tokens do not fit; would fit: {describe(settings)}")
        config, chosen = with_settings(config, settings), describe(settings)
    memory = plan_memory(shape, config, target)
    passes = {
        "optimizer.micro_batch_tokens": memory.micro_batch_limit,
        "optimizer.gradient_checkpointing": memory.recomputed_layers,
    }
    return shape, memory, with_settings(config, passes), chosen  # what is planned is run


# ------------------------------------------------------------------------------------------------- running it

_DEQUANTISATION = ((qerl.kernels.w4a16.dense, "dequant"), (qerl.kernels.coded, "_dense"))
_HEAD = ((qerl.nn.head._TokenLogprobs, "forward"), (qerl.nn.head._TokenLogprobs, "backward"))


def random_trainer(config: RunConfig, prompts: Sequence[str], meter: Meter) -> Trainer:
    """A trainer over random weights, with adapters that do something, random rewards. Its making is a part, "load"."""

    def load(model_config: Any) -> Any:
        model, _ = load_model(model_config, RandomWeights(model_config, meter.device), adapter_rank=config.lora.r)
        return model, word_tokenizer()

    task = RowsTask(config.task, [{"prompt": prompt} for prompt in prompts])
    draws = random.Random(0)

    def random_reward(completions: list[Any], **_: Any) -> list[float | None]:
        return [draws.random() for _ in completions]

    specs = [RewardSpec("random", random_reward)]
    rewards = RewardRunner(specs, columns=task.train_example(0).columns, max_steps=config.steps)
    with meter("load"):
        trainer = Trainer(config, task=task, rewards=rewards, load=load, display=Display(config.steps, quiet=True))
    generator = torch.Generator(meter.device).manual_seed(1)
    with torch.no_grad():
        for factors in filter(None, map(lora_factors, trainer.model.modules())):
            factors.b.normal_(std=LORA_STD, generator=generator)
    return trainer


def _warm_up(trainer: Trainer, meter: Meter) -> None:
    """A step of short completions: kernels are compiled, and the driver has loaded them."""
    config = trainer.config
    new = min(WARMUP_TOKENS, config.rollout.max_completion_length)
    meter.say(f"warm-up: a step of {new} new tokens")
    trainer.config = with_settings(config, {"rollout.max_completion_length": new})
    trainer.train_step()
    trainer.config = config


def _next_decode(trainer: Trainer, meter: Meter, case: Case) -> None:
    """The first tokens of the next rollout: a prefill and one decode step, under the new policy."""
    with meter("next decode"):
        trainer.engine.wake()
        trainer.engine.sync(None)
        requests = [
            Request([1 + i] * case.prompt_tokens, [fold(i, j) for j in range(case.group)], 2, i)
            for i in range(case.completions // case.group)
        ]
        completions = trainer.engine.generate(requests, SamplingParams())
    assert all(len(c.token_ids) == 2 for group in completions for c in group)


# ------------------------------------------------------------------------------------------------- the record


def describe_case(
    case: Case,
    config: RunConfig,
    memory: Memory,
    chosen: str,
    run: str,
    commit: str | None,
    device: torch.device,
) -> dict[str, Any]:
    """What is known before anything is run."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "bench": "step",
        "run": run,
        "commit": commit or commit_here(),
        "gpu": gpu,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "model": f"Qwen2.5-{case.model}",
        "format": case.format,
        "cap_gb": None if case.cap_bytes is None else case.cap_bytes / 1e9,
        "rank": case.rank,
        "completions": case.completions,
        "group": case.group,
        "prompt_tokens": case.prompt_tokens,
        "new_tokens": case.drawn_tokens,
        "planned_new_tokens": case.new_tokens,
        "settings": " ".join([*case.overrides, chosen]).strip(),
        "micro_batch_tokens": memory.micro_batch_tokens,
        "recomputed_layers": memory.recomputed_layers,
        "sequences_at_a_time": memory.sequences_at_a_time,
        "planned_peak_gb": round((memory.peak + CONTEXT_BYTES) / 1e9, 3),
    }


def results(
    case: Case,
    shape: ModelShape,
    config: RunConfig,
    meter: Meter,
    metrics: dict[str, Any],
    inside: dict[str, float],
    rate: float | None,
) -> dict[str, Any]:
    """Seconds, FLOPs and bytes of the step that counts."""
    size, parts = SIZES[case.model], meter.parts
    head = size.hidden * size.vocabulary
    linears = size.layers * (
        2 * size.hidden**2 + 2 * size.hidden * (size.hidden // size.heads) * size.kv_heads
        + 3 * size.hidden * size.intermediate
    )  # fmt: skip
    new = case.completions * case.drawn_tokens
    tokens = new + case.completions * case.prompt_tokens
    products = sum(parts[name].seconds for name in _UPDATE)
    recomputed = metrics["recomputed_layers"] / size.layers
    passes = config.loss.num_iterations * (2 + recomputed)
    update_flops = round(2 * passes * (linears * tokens + head * new))
    rollout_flops = 2 * (linears * (new + case.completions // case.group * case.prompt_tokens) + head * new)
    weights = sum(product_bytes(product, 2) for product in shape.products) + 2 * head
    context = case.prompt_tokens + case.drawn_tokens / 2
    kv = 4 * size.layers * size.kv_heads * (size.hidden // size.heads) * context * new
    record = {
        "rollout_s": metrics["time/rollout"],
        "update_s": metrics["time/update"],
        "step_s": metrics["time/step"],
        "forward_s": parts["forward"].seconds,
        "backward_s": parts["backward"].seconds,
        "dequantisation_s": inside["dequantisation"],
        "head_s": inside["head"],
        "optimizer_s": parts["optimizer"].seconds,
        "micro_batches": parts["forward"].times,
        "micro_batch_tokens": metrics["micro_batch_tokens"],
        "recomputed_layers": metrics["recomputed_layers"],
        "rollout_tokens_per_s": new / metrics["time/rollout"],
        "update_tokens_per_s": tokens / metrics["time/update"],
        "rollout_flops": rollout_flops,
        "rollout_bytes": weights * case.drawn_tokens + kv,
        "update_flops": update_flops,
        "update_tflops": update_flops / products / 1e12,
        "matrix_tflops": None if rate is None else rate / 1e12,
        "update_mfu": None if rate is None else update_flops / products / rate,
    }
    record["peak_gb"] = max(part.device_bytes for part in parts.values()) / 1e9
    if case.cap_bytes is not None:
        record["below_cap"] = record["peak_gb"] < case.cap_bytes / 1e9
    return {name: round(v, 4) if isinstance(v, float) and v < 1e6 else v for name, v in record.items()}


def parts_record(parts: dict[str, Part], memory: Memory) -> dict[str, dict[str, Any]]:
    """Every part's seconds and peaks, beside what was planned for tensors, and with the context: GB of 1e9 bytes."""
    record = {}
    for name, part in parts.items():
        planned = memory.peaks.get(_PLANNED.get(name, ""))
        record[name] = {
            "seconds": round(part.seconds, 3),
            "times": part.times,
            "device_gb": round(part.device_bytes / 1e9, 3),
            "reserved_gb": round(part.reserved_bytes / 1e9, 3),
            "allocated_gb": round(part.allocated_bytes / 1e9, 3),
            "planned_gb": None if planned is None else round(planned / 1e9, 3),
            "planned_device_gb": None if planned is None else round((planned + CONTEXT_BYTES) / 1e9, 3),
            "retries": part.retries,
        }
    return record


def commit_here() -> str | None:
    """The commit of the working tree that this file is in, "+" behind it where files differ; None outside of one."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _planned(memory: Memory) -> str:
    return ", ".join(f"{phase} {size / 1e9:.2f} GB" for phase, size in memory.peaks.items())


def show(record: dict[str, Any]) -> list[str]:
    """The record as lines to read."""
    lines = [f"{'part':<16}{'times':>7}{'seconds':>10}{'device':>9}{'reserved':>10}{'tensors':>9}{'planned':>9}  GB"]
    for name, part in record["parts"].items():
        planned = "" if part["planned_gb"] is None else f"{part['planned_gb']:.2f}"
        lines.append(
            f"{name:<16}{part['times']:>7}{part['seconds']:>10.2f}{part['device_gb']:>9.2f}"
            f"{part['reserved_gb']:>10.2f}{part['allocated_gb']:>9.2f}{planned:>9}"
        )
    if "error" in record:
        return [*lines, record["error"]]
    mfu = "" if record["update_mfu"] is None else f", {record['update_mfu']:.1%} of the measured bf16 rate"
    return [
        *lines,
        f"rollout {record['rollout_s']:.2f} s ({record['rollout_tokens_per_s']:.0f} tokens/s), update "
        f"{record['update_s']:.2f} s ({record['update_tokens_per_s']:.0f} tokens/s), step {record['step_s']:.2f} s",
        f"forward and backward: {record['update_tflops']:.1f} TFLOP/s{mfu}; in it dequantisation "
        f"{record['dequantisation_s']:.2f} s, head {record['head_s']:.2f} s",
    ]
