"""A rollout with completions of long-tailed lengths, beside the sum of its steps' steady times.

    python benchmarks/engine/bench_rollout.py [--models 7B] [--format nvfp4] [--longest 2048]

16 prompts x 8 completions. So many tokens of the vocabulary end a completion that lengths are geometric, a fifth of the
longest on average, and about one of the 128 reaches it; the engine does not know before. As completions end, fewer
sequences decode: step s has as many as are longer than s. Its steady time is what bench_decode's method gives for so
many sequences that all go on, at the context of that moment, between measured sizes the next larger one's (a step runs
in buckets). Efficiency is the sum of these over the measured time of the rollout, prefill and all looks of the host
included.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).parents[1] / "kernels"), str(Path(__file__).parent)]
import harness
from bench_decode import SHORT, policy, requests, timed

from qerl.bench.models import SIZES
from qerl.config import RolloutConfig
from qerl.engine.engine import PagedEngine
from qerl.types import Request, SamplingParams

PROMPTS, GROUP = 16, 8
MEAN_SHARE = 5  # the mean length is a fifth of the longest


def bench(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """The record of one model."""
    sampling, vocabulary = SamplingParams(temperature=1.0), SIZES[size].vocabulary
    model = policy(size, args.format, args.rank)
    config = RolloutConfig(max_completion_length=args.longest, speculation=False)
    generator = torch.Generator().manual_seed(1)
    ends = torch.randperm(vocabulary, generator=generator)[: MEAN_SHARE * vocabulary // args.longest].tolist()
    engine = PagedEngine(model, eos_ids=ends, config=config)
    asked = [
        Request(
            torch.randint(0, vocabulary, (args.prompt,), generator=generator).tolist(),
            seeds=[GROUP * i + j for j in range(GROUP)],
            max_new_tokens=args.longest,
            prompt_index=i,
        )
        for i in range(PROMPTS)
    ]
    seconds, lengths = [], []
    for _ in range(2):  # the first compiles and captures
        torch.cuda.synchronize()
        start = time.perf_counter()
        done = engine.generate(asked, sampling)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        lengths = [len(completion.token_ids) for group in done for completion in group]
    del engine
    endless = PagedEngine(model, eos_ids=[vocabulary], config=config)

    def steady(active: int, context: int) -> float:
        """Seconds of a step of so many sequences that hold so many tokens."""
        short_call, long_call = (requests(active, context, new, vocabulary) for new in (SHORT, SHORT + 64))
        timed(endless, long_call, sampling)
        long, short = timed(endless, long_call, sampling), timed(endless, short_call, sampling)
        return (long - short) / 64

    # A step runs in the next power of two; each is timed at the context that the rollout has in such steps.
    active_at = [sum(length > step for length in lengths) for step in range(max(lengths))]
    table: dict[int, float] = {}
    for n in sorted({_bucket(active) for active in active_at}):
        steps = [step for step, active in enumerate(active_at) if _bucket(active) == n]
        table[n] = steady(min(n, len(lengths)), args.prompt + sum(steps) // len(steps))
    ideal = sum(table[_bucket(active)] for active in active_at)
    step_ms = {n: round(t * 1e3, 3) for n, t in table.items()}
    print(
        f"{size} {args.format}: {seconds[1]:.2f} s (first {seconds[0]:.2f}), steps alone {ideal:.2f} s, "
        f"efficiency {ideal / seconds[1]:.3f}; {step_ms}",
        flush=True,
    )
    return {
        "bench": "rollout", "model": size, "format": args.format, "lora_rank": args.rank, "prompts": PROMPTS,
        "group": GROUP, "longest": args.longest, "tokens": sum(lengths), "seconds": round(seconds[1], 3),
        "first_s": round(seconds[0], 3), "steps_s": round(ideal, 3), "efficiency": round(ideal / seconds[1], 4),
        "step_ms": step_ms, "run": args.run, "commit": args.commit or harness.commit(),
        "gpu": torch.cuda.get_device_name(), "versions": harness.versions(),
    }  # fmt: skip


def _bucket(active: int) -> int:
    return 1 << (active - 1).bit_length()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["7B"])
    parser.add_argument("--format", choices=("nvfp4", "mxfp4", "bf16"), default="nvfp4")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters; 0: none")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--commit", default=None, help="in every record; default: what git says")
    parser.add_argument("--out", default=None, help="file to append to, - to print; default: by the GPU's name")
    args = parser.parse_args()
    for size in args.models:
        harness.write([bench(size, args)], args.out, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
