"""A rollout with completions of long-tailed lengths, beside the sum of its steps' steady times.

    python benchmarks/engine/bench_rollout.py [--models 7B] [--format nvfp4] [--longest 2048]

16 prompts x 8 completions; lengths are drawn from a log-normal distribution with the median at an eighth of the longest,
cut there. As completions end, fewer sequences decode: step s has as many as are longer than s. Its steady time is what
bench_decode's method gives for so many sequences that all go on, at the context of that moment, between measured sizes
the next larger one's (a step runs in buckets). Efficiency is the sum of these over the measured time of the rollout,
prefill and all looks of the host included.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels"), str(Path(__file__).parent)]
import harness
from bench_decode import timed
from random_model import SHAPES, random_model

from qerl.config import RolloutConfig
from qerl.engine.engine import PagedEngine
from qerl.types import Request, SamplingParams

PROMPTS, GROUP = 16, 8


def lengths(longest: int) -> list[int]:
    """Of the completions, longest first."""
    drawn = torch.randn(PROMPTS * GROUP, generator=torch.Generator().manual_seed(0)).exp() * longest / 8
    return sorted(drawn.long().clamp(16, longest).tolist(), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["7B"])
    parser.add_argument("--format", choices=("nvfp4", "mxfp4", "bf16"), default="nvfp4")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters; 0: none")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--commit", default=None, help="in every record; default: what git says")
    parser.add_argument("--out", default=None, help="file to append to, - to print; default: by the GPU's name")
    args = parser.parse_args()
    gpu, sampling = torch.cuda.get_device_name(), SamplingParams(temperature=1.0)
    for size in args.models:
        vocabulary = SHAPES[size].vocabulary
        model = random_model(size, args.format, torch.device("cuda"), rank=args.rank)
        engine = PagedEngine(model, eos_ids=[vocabulary], config=RolloutConfig(max_completion_length=args.longest))
        wanted = lengths(args.longest)
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(0, vocabulary, (args.prompt,), generator=generator).tolist() for _ in range(PROMPTS)]
        order = torch.randperm(len(wanted), generator=generator).tolist()
        asked = [Request(prompts[i % PROMPTS], [i], wanted[j], prompt_index=i) for i, j in enumerate(order)]
        seconds = []
        for _ in range(2):  # the first compiles and captures
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.generate(asked, sampling)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)

        def steady(active: int, context: int) -> float:
            """Seconds of a step of so many sequences that hold so many tokens."""
            short, long = (timed(engine, active, context, new, vocabulary, sampling) for new in (9, 73))
            return (long - short) / 64

        # Sizes at which steps are timed: each at the context that the rollout has when so many are left.
        ends = sorted(set(wanted))
        active_at = [sum(length > step for length in wanted) for step in range(max(wanted))]
        table: dict[int, float] = {}
        for n in sorted({1 << (a - 1).bit_length() for a in active_at}):
            steps = [s for s, a in enumerate(active_at) if n // 2 < a <= n]
            table[n] = steady(min(n, len(wanted)), args.prompt + sum(steps) // len(steps))
        ideal = sum(table[1 << (a - 1).bit_length()] for a in active_at)
        record = {
            "bench": "rollout", "model": size, "format": args.format, "rank": args.rank, "prompts": PROMPTS,
            "group": GROUP, "longest": args.longest, "tokens": sum(wanted), "distinct_lengths": len(ends),
            "seconds": round(seconds[1], 3), "first_s": round(seconds[0], 3), "steps_s": round(ideal, 3),
            "efficiency": round(ideal / seconds[1], 4),
            "step_ms": {n: round(t * 1e3, 3) for n, t in table.items()},
            "run": args.run, "commit": args.commit or harness.commit(), "gpu": gpu,
        }  # fmt: skip
        print(f"{size} {args.format}: {seconds[1]:.2f} s (first {seconds[0]:.2f}), steps alone {ideal:.2f} s, "
              f"efficiency {ideal / seconds[1]:.3f}; {record['step_ms']}", flush=True)  # fmt: skip
        harness.write([record], args.out, gpu)


if __name__ == "__main__":
    main()
