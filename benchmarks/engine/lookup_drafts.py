"""Tokens that a decode step would give if it also checked drafts that are looked up: would speculation pay?

    python benchmarks/engine/lookup_drafts.py MODEL_FOLDER GSM8K_FOLDER [--prompts 6] [--group 8] [--new 256] [--k 3 7]

A draft is what followed the last N tokens where they stand elsewhere: earlier in the prompt and the completion itself
("own"), also in the group's other completions as far as they are at that step ("siblings"), or in all of them ("whole
siblings": as if they had been sampled in an earlier epoch). The longest N that is found counts, from 4 down to
`--shortest`, at the latest place. Of K draft tokens a step would keep those that the completion really has, and draw
one more. A token is a function of logits, seed and count (docs/engine.md), so a draft is right or wrong, and what is
sampled stays the same.

Samples completions by qerl's engine, at temperature 1, on a CPU too (6 x 8 x 256 tokens of 0.5B: some minutes). One
record for each source and K is appended to benchmarks/results/lookup-drafts.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import harness

from qerl.config import load_config
from qerl.engine.engine import build_engine
from qerl.nn.load import eos_token_ids, load_model
from qerl.tasks import load_task
from qerl.types import Request, SamplingParams

LONGEST = 4
SOURCES = "own", "siblings", "whole siblings"
Tokens = list[int]


def draft(own: Tokens, others: Sequence[Tokens], k: int, shortest: int) -> Tokens:
    """Up to k tokens that may follow `own`."""
    for n in range(min(LONGEST, len(own)), shortest - 1, -1):
        suffix = own[-n:]
        for context in (own, *others):
            for start in range(len(context) - n - 1, -1, -1):
                if context[start : start + n] == suffix:
                    return context[start + n : start + n + k]
    return []


def steps_of(prompt: Tokens, group: Sequence[Tokens], index: int, source: str, k: int, shortest: int) -> int:
    """Decode steps of one completion; without drafts it has one a token but the first."""
    completion, position, steps = group[index], 1, 0
    siblings = [tokens for i, tokens in enumerate(group) if i != index]
    while position < len(completion):
        until = {"own": 0, "siblings": position, "whole siblings": None}[source]
        seen = [prompt + tokens[:until] for tokens in siblings] if until != 0 else []
        guess = draft(prompt + completion[:position], seen, k, shortest)
        pairs = zip(guess, completion[position:], strict=False)
        position += 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        steps += 1
    return steps


def sampled(args: argparse.Namespace) -> Iterator[tuple[Tokens, list[Tokens]]]:
    """Prompts and their groups."""
    settings = [f"model.path={args.model}", f"model.format={args.format}", "task.name=gsm8k", f"task.path={args.task}",
                f"rollout.max_completion_length={args.new}"]  # fmt: skip
    config = load_config(None, settings)
    task = load_task(config.task, config.seed)
    model, tokenizer = load_model(config.model)
    prompts = [
        tokenizer.apply_chat_template(task.train_example(i).prompt, add_generation_prompt=True, return_dict=False)
        for i in range(args.prompts)
    ]
    asked = [Request(ids, [100 * i + j for j in range(args.group)], args.new, i) for i, ids in enumerate(prompts)]
    engine = build_engine(model, eos_ids=eos_token_ids(model), config=config.rollout)
    for ids, group in zip(prompts, engine.generate(asked, SamplingParams(temperature=1.0)), strict=True):
        yield ids, [completion.token_ids for completion in group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--k", nargs="+", type=int, default=[1, 3, 7])
    parser.add_argument("--shortest", type=int, default=1)
    parser.add_argument("--out", default=str(Path(__file__).parents[1] / "results" / "lookup-drafts.jsonl"))
    args = parser.parse_args()
    groups = list(sampled(args))
    tokens = sum(len(completion) - 1 for _, group in groups for completion in group)
    print(f"{tokens} tokens")
    records: list[dict[str, Any]] = []
    for source in SOURCES:
        for k in args.k:
            steps = sum(
                steps_of(prompt, group, i, source, k, args.shortest)
                for prompt, group in groups
                for i in range(len(group))
            )
            print(f"{source}, {k} tokens: {tokens / steps:.2f} tokens a step", flush=True)
            records.append(
                {"bench": "lookup_drafts", "model": Path(args.model).name, "format": args.format, "task": "gsm8k",
                 "prompts": args.prompts, "group": args.group, "new": args.new, "source": source, "k": k,
                 "shortest": args.shortest, "tokens": tokens, "tokens_a_step": round(tokens / steps, 3),
                 "commit": harness.commit()}
            )  # fmt: skip
    harness.write(records, args.out, "")


if __name__ == "__main__":
    main()
