"""One run in qerl and in TRL: seconds until a policy has learned, with the same problems, rewards and settings.

    python benchmarks/time_to_score.py examples/demo.toml [KEY=VALUE ...] [--who qerl trl] [--every 10] [--limit 300]
                                             [--tag-free]

The recipe is what `qerl train` takes. TRL's GRPOTrainer gets what it says: the base in 16 bits (on a CPU in float32),
the same LoRA, the problems in the same order, the task's reward functions with their weights, completions, lengths,
temperature, loss, optimizer and schedule, and transformers' generate(); no noise, which TRL has not. (Prompts are the
first of the task, in order; qerl shuffles those of a data set.) Each runs in a process of its own, and saves its
adapter every so many steps. Seconds are those of the steps: sampling, rewards, update; without loading and saving.

Afterwards `qerl eval`'s evaluation samples the held-out problems with each adapter, over the base that it was trained
on. It prints a table, and appends a line an adapter to --out. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent / "kernels"))
import harness

import qerl
from qerl.config import RolloutConfig, RunConfig, load_config, model_folder
from qerl.evaluate.command import Settings
from qerl.evaluate.command import run as evaluate
from qerl.plan import MICRO_BATCH_TOKENS
from qerl.tasks import load_task
from qerl.tasks.rewards import reward_specs

WHO = ("qerl", "trl")


def train_qerl(config: RunConfig, _: Path) -> dict[int, float]:
    """Seconds at the end of each step."""
    seconds, total = {}, 0.0
    for metrics in qerl.Trainer(args=config).train():
        if "time/step" in metrics:
            seconds[metrics["step"]] = total = total + metrics["time/step"]
    return seconds


def train_trl(config: RunConfig, folder: Path) -> dict[int, float]:
    """The same of TRL's trainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task, on_gpu, path = load_task(config.task, config.seed), torch.cuda.is_available(), model_folder(config.model.path)
    rollout, loss, optimizer, lora = config.rollout, config.loss, config.optimizer, config.lora
    specs = reward_specs(config.rewards, task.reward_functions)
    problems = [task.train_example(i) for i in range(config.steps * rollout.prompts_per_step)]
    completions = rollout.prompts_per_step * rollout.num_generations
    # As many sequences at a time as qerl's micro-batches hold at full length.
    longest = config.task.max_prompt_length + rollout.max_completion_length
    at_once = max(n for n in range(1, completions + 1) if completions % n == 0 and n * longest <= _tokens(config))
    seconds: dict[int, float] = {}

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            before = max(seconds.values(), default=0.0)
            seconds[state.global_step] = before + time.perf_counter() - self.started

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if on_gpu else torch.float32),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=[_named(spec.name, partial(spec.function, **spec.arguments)) for spec in specs],
        train_dataset=Dataset.from_list([{"prompt": p.prompt, **p.columns} for p in problems]),
        peft_config=LoraConfig(
            r=lora.r, lora_alpha=int(lora.alpha), target_modules=list(lora.target_modules), use_rslora=lora.use_rslora
        ),
        callbacks=[Clock()],
        args=GRPOConfig(
            str(folder),
            max_steps=config.steps,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=completions // at_once,
            num_generations=rollout.num_generations,
            max_completion_length=rollout.max_completion_length,
            temperature=rollout.temperature,
            loss_type=loss.type,
            epsilon=loss.epsilon,
            epsilon_high=loss.epsilon_high,
            beta=loss.beta,
            scale_rewards=loss.scale_rewards,
            mask_truncated_completions=loss.mask_truncated_completions,
            reward_weights=[spec.weight for spec in specs],
            learning_rate=optimizer.learning_rate,
            lr_scheduler_type=optimizer.lr_scheduler,
            warmup_steps=round(optimizer.warmup_ratio * config.steps),
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            gradient_checkpointing=optimizer.recomputed_layers(1) != 0,  # all or none; by default all
            shuffle_dataset=False,
            seed=config.seed,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            save_steps=config.save_every,
            save_only_model=True,
            report_to="none",
            logging_steps=1,
        ),
    )
    trainer.train()
    return seconds


def _tokens(config: RunConfig) -> int:
    longest = config.task.max_prompt_length + config.rollout.max_completion_length
    return max(config.optimizer.micro_batch_tokens or MICRO_BATCH_TOKENS, longest)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name  # pyright: ignore[reportFunctionMemberAccess]
    return function


TRAINERS = {"qerl": train_qerl, "trl": train_trl}


def _train(who: str, recipe: Path, settings: list[str], folder: Path, result: Path) -> None:
    """In a process of its own."""
    config = load_config(recipe, [*settings, f"output_dir={folder}"])
    result.write_text(json.dumps(TRAINERS[who](config, folder)))


def adapter_of(who: str, folder: Path, step: int) -> Path:
    """Where the adapter of a step is."""
    return folder / f"checkpoints/step-{step:06d}/adapter" if who == "qerl" else folder / f"checkpoint-{step}"


def score(who: str, config: RunConfig, adapter: Path, limit: int, *, tag_free: bool) -> dict[str, Any]:
    """Accuracy on held-out problems, greedy and of 4 samples, over the base that the adapter was trained on."""
    model = config.model if who == "qerl" else config.model.model_copy(update={"format": "bf16"})
    rollout = RolloutConfig(max_completion_length=config.rollout.max_completion_length)
    (policy,) = evaluate(
        Settings(model=model, task=config.task, rollout=rollout, adapter=adapter, num_samples=4, limit=limit)
    )["policies"]
    return {mode: policy[mode]["tag_free" if tag_free else "tagged"]["pass@1"] for mode in ("greedy", "sampled")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE, as qerl train takes them")
    parser.add_argument("--who", nargs="+", choices=WHO, default=WHO)
    parser.add_argument("--every", type=int, default=10, help="steps between adapters")
    parser.add_argument("--limit", type=int, default=300, help="held-out problems")
    parser.add_argument("--tag-free", action="store_true", help="an answer counts wherever it stands, as in qerl eval")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--out", default="-", help="file to append to, - to print")
    args = parser.parse_intermixed_args()
    settings = [*args.settings, f"save_every={args.every}", "keep_checkpoints=1000", "eval.num_problems=0"]
    config = load_config(args.recipe, settings)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    versions = harness.versions(transformers="transformers", peft="peft", trl="trl")
    records = []
    with TemporaryDirectory() as scratch:
        for who in args.who:
            folder, result = Path(scratch) / who, Path(scratch) / f"{who}.json"
            process = multiprocessing.get_context("spawn").Process(
                target=_train, args=(who, args.recipe, settings, folder, result)
            )
            process.start(), process.join()
            if process.exitcode:
                sys.exit(f"{who} failed")
            seconds = {int(step): s for step, s in json.loads(result.read_text()).items()}
            for step in (s for s in seconds if s % args.every == 0):
                scores = score(who, config, adapter_of(who, folder, step), args.limit, tag_free=args.tag_free)
                records.append(
                    {"bench": "time_to_score", "who": who, "recipe": args.recipe.name, "settings": args.settings,
                     "step": step, "seconds": round(seconds[step], 2), **scores,
                     "grading": "tag_free" if args.tag_free else "tagged", "run": args.run,
                     "commit": harness.commit(), "device": device, "versions": versions}
                )  # fmt: skip
    harness.write(records, args.out, device)
    print("\n".join(table(records)))


def table(records: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = ["| | step | s | greedy | Pass@1 |", "|---|---|---|---|---|"]
    for r in records:
        greedy, sampled = (
            f"{100 * r[mode]['value']:.1f} [{100 * r[mode]['low']:.1f}, {100 * r[mode]['high']:.1f}]"
            for mode in ("greedy", "sampled")
        )
        lines.append(f"| {r['who']} | {r['step']} | {r['seconds']:.0f} | {greedy} | {sampled} |")
    return lines


if __name__ == "__main__":
    main()
