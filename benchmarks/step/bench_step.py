"""Whole steps under a card's memory, and beside other bases; many steps of a small model.

    python benchmarks/step/bench_step.py [fit] [speed] [mfu] [endurance] [--models 7B 32B] [--time-limit 540]

    fit        models that have to fit a card: every part's peak beside its plan (`below_cap`, `parts`)
    speed      seconds of a step over NVFP4, bf16 and NF4 bases, 8 completions x 2,048 tokens and 32 x 1,024. Nothing is
               recomputed, since a large card has the memory (--set changes that), and micro-batches of 32B are as few
               as 141 GB allow beside the base. Over NF4, the slow one, completions end after 256 tokens (`new_tokens`
               of the record)
    mfu        the update of 2 x 16k tokens: its share of the card's measured bf16 rate
    endurance  300 steps of varying lengths: whether memory stays flat

A record is appended as soon as its case has ended, to benchmarks/results/<gpu>.jsonl or --out. A case that fails has
one too, with `error`, and so has what the time limit cuts off; the others go on. A case of `fit` has a process of its
own; those of a model in `speed` and `mfu` share one, which saves half of the time. src/qerl/bench/ has the work.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from qerl.bench.endurance import run_endurance  # noqa: E402
from qerl.bench.step import Case, dry_run, run_step, show  # noqa: E402

FORMATS = ("nvfp4", "bf16", "nf4")
GB = 1_000_000_000
ENDURANCE_SECONDS = 150.0


def _tokens(count: int) -> tuple[str, ...]:
    return (f"optimizer.micro_batch_tokens={count}",)


CASES: dict[str, tuple[Case, ...]] = {
    "fit": (
        Case("7B", cap_bytes=12 * GB, overrides=_tokens(4608)),
        Case("14B", cap_bytes=24 * GB, overrides=_tokens(9216)),
        Case("32B", cap_bytes=40 * GB, overrides=_tokens(9216)),
        Case("72B", cap_bytes=80 * GB, rank=16, new_tokens=4096, overrides=_tokens(8704)),
        Case("32B", cap_bytes=80 * GB, completions=32, new_tokens=8192, overrides=_tokens(16896)),
    ),
    "speed": tuple(
        Case(
            model,
            format,
            completions=completions,
            new_tokens=new,
            stop_after=256 if format == "nf4" else None,
            overrides=("optimizer.gradient_checkpointing=false", *_tokens(sequences * (256 + new))),
        )
        for model, completions, new, beside_4_bits, beside_bf16 in (
            ("7B", 8, 2048, 4, 4),
            ("7B", 32, 1024, 8, 8),
            ("14B", 8, 2048, 4, 4),
            ("14B", 32, 1024, 8, 8),
            ("32B", 8, 2048, 3, 1),
            ("32B", 32, 1024, 5, 3),
        )
        for format, sequences in zip(FORMATS, (beside_4_bits, beside_bf16, beside_4_bits), strict=True)
    ),
    # 7 sequences of 2,304 are 16,128 tokens.
    "mfu": tuple(Case(model, completions=14, group=7) for model in ("7B", "32B")),
}


class Job(NamedTuple):
    """What one process runs: cases one after the other, or (none) the endurance run."""

    cases: tuple[Case, ...]

    @property
    def size(self) -> int:
        """Records that it writes."""
        return len(self.cases) or 1


def name_of(case: Case) -> str:
    """As it is printed."""
    cap = "" if case.cap_bytes is None else f" in {case.cap_bytes // GB} GB"
    cut = "" if case.stop_after is None else f", to {case.stop_after}"
    return f"{case.model} {case.format} {case.completions} x {case.new_tokens}{cut}{cap}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*CASES, "endurance"]
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of cases: {', '.join(kinds)}; default: all")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="these models alone")
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help="these formats alone")
    parser.add_argument("--completions", nargs="+", type=int, metavar="N", help="cases of so many completions alone")
    parser.add_argument("--stop-after", type=int, metavar="TOKENS", help="end all completions after so many tokens")
    parser.add_argument("--set", nargs="+", default=(), metavar="KEY=VALUE", help="further settings of all runs")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="of all cases")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>.jsonl")
    parser.add_argument("--run", default="", help="a name for the records")
    parser.add_argument("--commit", help="for the records; default: the working tree's")
    parser.add_argument("--dry-run", action="store_true", help="only say what is planned")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(kinds):
        parser.error(f"no such cases: {', '.join(sorted(unknown))}; choose from {', '.join(kinds)}")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `qerl` sets it
    jobs = [job for kind in options.kinds or kinds for job in jobs_of(kind, options)]
    if options.dry_run:
        for case in (case for job in jobs for case in job.cases):
            print(f"=== {name_of(case)}\n{json.dumps(dry_run(case))}", flush=True)
        return 0
    out = options.out or ROOT / "benchmarks" / "results" / f"{_gpu()}.jsonl"
    ends = time.monotonic() + options.time_limit
    return min(1, sum(run(job, out, options.run, options.commit, ends) for job in jobs))


def jobs_of(kind: str, options: argparse.Namespace) -> list[Job]:
    """The processes for a kind of cases, as far as the options want them."""
    if kind == "endurance":
        return [Job(())]
    cases = [
        case
        for case in CASES[kind]
        if (options.models is None or case.model in options.models)
        and (options.completions is None or case.completions in options.completions)
        and case.format in options.formats
    ]
    if importlib.util.find_spec("bitsandbytes") is None and any(case.format == "nf4" for case in cases):
        print("left out: NF4, since bitsandbytes is not installed (pip install qerl[bitsandbytes])", flush=True)
        cases = [case for case in cases if case.format != "nf4"]
    if options.stop_after is not None:
        cases = [replace(case, stop_after=min(options.stop_after, case.drawn_tokens)) for case in cases]
    cases = [replace(case, overrides=(*case.overrides, *options.set)) for case in cases]
    if kind == "fit":
        return [Job((case,)) for case in cases]
    return [Job(tuple(of_model)) for _, of_model in groupby(cases, key=lambda case: case.model)]


def run(job: Job, out: Path, name: str, commit: str | None, ends: float) -> int:
    """Run a job until its end or `ends` (time.monotonic); the number of records with an error."""
    context = multiprocessing.get_context("spawn")
    reports: Any = context.SimpleQueue()
    process = context.Process(target=work, args=(job, out, name, commit, reports))
    left = ends - time.monotonic()
    if left > 30:
        process.start()
        process.join(None if left == float("inf") else left)
        if process.is_alive():
            process.kill()
            process.join()
    done = []
    while not reports.empty():
        done.append(reports.get())
    why = "the time limit" if process.exitcode is None or time.monotonic() >= ends else f"exit code {process.exitcode}"
    for case in job.cases[len(done) :]:
        print(f"{name_of(case)}: ended by {why}", flush=True)
        append(out, {"bench": "step", "run": name, "case": asdict(case), "error": why})
    if not job.cases and not done:
        append(out, {"bench": "endurance", "run": name, "error": why})
    return job.size - sum(done)


def work(job: Job, out: Path, name: str, commit: str | None, reports: Any) -> None:
    """In a process of its own: run, print, append; reports for each case whether it went well."""
    for case in job.cases:
        print(f"\n=== {name_of(case)}", flush=True)
        try:
            record = run_step(case, run=name, commit=commit)
            print(*show(record), sep="\n", flush=True)
        except ValueError as error:  # it does not fit
            record = {"bench": "step", "run": name, "case": asdict(case), "error": str(error)}
            print(error, flush=True)
        append(out, record)
        reports.put("error" not in record)
        gc.collect()  # a recomputed layer and its forward function hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not job.cases:
        print("\n=== endurance", flush=True)
        record = run_endurance(max_seconds=ENDURANCE_SECONDS, run=name, commit=commit)
        print(json.dumps(record, indent=1), flush=True)
        append(out, record)
        reports.put(record["flat"])


def append(out: Path, record: dict[str, Any]) -> None:
    """A line of JSON."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _gpu() -> str:
    return "-".join(torch.cuda.get_device_name().lower().split())


if __name__ == "__main__":
    raise SystemExit(main())
