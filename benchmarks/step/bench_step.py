"""Whole steps under a card's memory, and beside other bases: `qerl bench step` for each case, one process each.

    python benchmarks/step/bench_step.py [fit] [speed] [mfu] [--only 7B 32B] [--time-limit 540] [--out FILE]

    fit     models that have to fit a card: every part's peak beside its plan (`below_cap`, `parts`)
    speed   seconds of a step over NVFP4, bf16 and NF4 bases, 8 completions x 2,048 tokens and 32 x 1,024
    mfu     the update of 2 x 16k tokens: its share of the card's measured bf16 rate

A record is appended as soon as its case has ended, to benchmarks/results/<gpu>.jsonl or --out. A case that fails has
one too, with `error`; what the time limit cuts off is not begun, or ended with `error`. src/qerl/bench/ has the work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FORMATS = ("nvfp4", "bf16", "nf4")


class Case(NamedTuple):
    """Arguments of `qerl bench step`."""

    model: str
    completions: int
    new: int
    format: str = "nvfp4"
    cap: str | None = None
    rank: int = 32
    group: int = 8
    settings: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"{self.model} {self.format} {self.completions} x {self.new}" + (f" in {self.cap}" if self.cap else "")

    def arguments(self) -> list[str]:
        cap = [] if self.cap is None else ["--cap", self.cap]
        sizes = {"completions": self.completions, "group": self.group, "new": self.new, "rank": self.rank}
        options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        return ["--model", self.model, "--format", self.format, *cap, *options, *self.settings]


CASES = {
    "fit": (
        Case("7B", 16, 2048, cap="12GB", settings=["optimizer.micro_batch_tokens=4608"]),
        Case("14B", 16, 2048, cap="24GB", settings=["optimizer.micro_batch_tokens=9216"]),
        Case("32B", 16, 2048, cap="40GB", settings=["optimizer.micro_batch_tokens=9216"]),
        Case("72B", 16, 4096, cap="80GB", rank=16, settings=["optimizer.micro_batch_tokens=8704"]),
        Case("32B", 32, 8192, cap="80GB"),
    ),
    "speed": tuple(
        Case(model, completions, new, format)
        for model in ("7B", "14B", "32B")
        for completions, new in ((8, 2048), (32, 1024))
        for format in FORMATS
    ),
    "mfu": tuple(Case(model, 14, 2048, group=7) for model in ("7B", "32B")),  # 7 sequences of 2,304 are 16,128 tokens
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of cases: {', '.join(CASES)}; default: all")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="these models alone")
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help="these formats alone")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="of all cases")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>.jsonl")
    parser.add_argument("--run", default="", help="a name for the records")
    parser.add_argument("--commit", help="for the records; default: the working tree's")
    parser.add_argument("--dry-run", action="store_true", help="only say what is planned")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(CASES):
        parser.error(f"no such cases: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    cases = [
        case
        for kind in options.kinds or CASES
        for case in CASES[kind]
        if (options.only is None or case.model in options.only) and case.format in options.formats
    ]
    extra = ["--run", options.run, *(["--commit", options.commit] if options.commit else [])]
    if options.dry_run:
        return max(run(case, [*extra, "--dry-run"], float("inf")) for case in cases)
    out = options.out or ROOT / "benchmarks" / "results" / f"{_gpu()}.jsonl"
    ends, failed = time.monotonic() + options.time_limit, 0
    for case in cases:
        left = ends - time.monotonic()
        if left < 30:
            print(f"not begun: {case.name}", flush=True)
            failed += 1
            continue
        code = run(case, [*extra, "--out", str(out)], left)
        if code is None:
            record = {"bench": "step", "run": options.run, "case": case._asdict(), "error": "the time limit"}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        failed += code != 0
    return min(failed, 1)


def run(case: Case, extra: Sequence[str], seconds: float) -> int | None:
    """The exit status of a case; None where its time was over."""
    print(f"\n=== {case.name}", flush=True)
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "qerl.cli", "bench", "step", *case.arguments(), *extra]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    try:
        return process.wait(None if seconds == float("inf") else seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        print(f"ended by the time limit: {case.name}", flush=True)
        return None


def _gpu() -> str:
    import torch

    return "-".join(torch.cuda.get_device_name().lower().split())


if __name__ == "__main__":
    raise SystemExit(main())
