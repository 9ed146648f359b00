"""Rollouts of a real model with and without guesses (`rollout.speculation`): seconds, steps, tokens a step.

    python benchmarks/engine/bench_speculation.py MODEL_FOLDER GSM8K_FOLDER [--rollouts 1x1 1x8 16x8] [--new 1024]
                                                  [--format nvfp4] [--temperature 1] [--repeats 3]

A rollout is so many prompts x completions each, sampled until they end, `--repeats` times under other seeds, with and
without guesses in turn; all of it runs twice before, to compile and to capture graphs, as the first steps of a run do.
Random weights would not do: what they sample never repeats itself. How many completions are the same with and without
is told, too: all but those where rounding decides between two tokens.

Records are appended to benchmarks/results/<gpu>.jsonl, or to --out FILE ("-" prints them).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import harness

from qerl.config import load_config
from qerl.engine.api import Engine
from qerl.engine.engine import build_engine
from qerl.engine.graphs import Step, StepRunner
from qerl.nn.load import eos_token_ids, load_model
from qerl.tasks import load_task
from qerl.types import Request, SamplingParams

Prompts = list[list[int]]


@dataclass
class Totals:
    """Of some rollouts."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    steps_of_sequences: int = 0

    def count(self, num_sequences: int) -> None:
        self.steps += 1
        self.steps_of_sequences += num_sequences


def rolled_out(engine: Engine, prompts: Prompts, group: int, seed: int, args: argparse.Namespace) -> list[list[int]]:
    """Completions."""
    asked = [
        Request(ids, [10**6 * seed + 1000 * i + j for j in range(group)], args.new, i) for i, ids in enumerate(prompts)
    ]
    groups = engine.generate(asked, SamplingParams(temperature=args.temperature))
    return [completion.token_ids for of_prompt in groups for completion in of_prompt]


def measured(engine: Engine, prompts: Prompts, group: int, seed: int, totals: Totals, args: Any) -> list[list[int]]:
    """The same, added to the totals."""
    run = StepRunner.run

    def counted(steps: StepRunner, step: Step, num_slots: int, pages: int, tokens: int) -> None:
        totals.count(num_slots)
        run(steps, step, num_slots, pages, tokens)

    StepRunner.run = counted
    start = time.perf_counter()
    completions = rolled_out(engine, prompts, group, seed, args)  # its last look waits for the device
    totals.seconds += time.perf_counter() - start
    StepRunner.run = run
    totals.tokens += sum(map(len, completions))
    return completions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("--rollouts", nargs="+", default=["1x1", "1x8", "16x8"])
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--commit", default=None, help="in every record; default: what git says")
    parser.add_argument("--out", default=None, help="file to append to, - to print; default: by the GPU's name")
    args = parser.parse_args()
    settings = [f"model.path={args.model}", f"model.format={args.format}", "task.name=gsm8k", f"task.path={args.task}",
                f"rollout.max_completion_length={args.new}"]  # fmt: skip
    config = load_config(None, settings)
    task = load_task(config.task, config.seed)
    model, tokenizer = load_model(config.model)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for rollout in args.rollouts:
        num_prompts, group = map(int, rollout.split("x"))
        prompts: Prompts = [
            tokenizer.apply_chat_template(task.train_example(i).prompt, add_generation_prompt=True, return_dict=False)
            for i in range(num_prompts)
        ]
        engines, totals = [], [Totals(), Totals()]
        for speculates in (False, True):
            of_rollout = config.rollout.model_copy(update={"speculation": speculates})
            engines.append(build_engine(model, eos_ids=eos_token_ids(model), config=of_rollout))
            for seed in 2 * list(range(args.repeats)):  # every size of a step compiles and runs, then it is captured
                rolled_out(engines[-1], prompts, group, seed, args)
        same = completions = 0
        for seed in range(args.repeats):
            both = [
                measured(engine, prompts, group, seed, of_engine, args)
                for engine, of_engine in zip(engines, totals, strict=True)
            ]
            same += sum(a == b for a, b in zip(*both, strict=True))
            completions += len(both[0])
        print(f"{rollout}: {same} of {completions} completions are the same with and without")
        for speculates, t in zip((False, True), totals, strict=True):
            record: dict[str, Any] = {
                "bench": "speculation", "model": Path(args.model).name, "format": args.format, "task": "gsm8k",
                "rollout": rollout, "new": args.new, "temperature": args.temperature, "repeats": args.repeats,
                "speculation": speculates, "seconds": round(t.seconds, 3), "tokens": t.tokens, "steps": t.steps,
                "tokens_per_s": round(t.tokens / t.seconds, 1),
                "tokens_a_step": round(t.tokens / t.steps_of_sequences, 3), "same": same, "completions": completions,
                "run": args.run, "commit": args.commit or harness.commit(), "gpu": gpu, "versions": harness.versions(),
            }  # fmt: skip
            print(*(f"{key} {record[key]}" for key in ("speculation", "seconds", "tokens", "steps", "tokens_a_step")))
            harness.write([record], args.out, gpu)


if __name__ == "__main__":
    main()
