"""The table of docs/quantisation.md: what each format and each choice of scales does to one model.

    python benchmarks/quantisation.py MODEL --gsm8k FOLDER --out rows.jsonl [--problems 500] [--windows 64]

For every row: SQNR over all linears; on GSM8K's held-out problems with their solutions, perplexity, KL and entropy
against the bf16 model (inspection/text.py); and greedy accuracy on the first of those problems, in the chat format that
a run trains with, graded without its tags (evaluate/). Rows with AWQ or weighted scales are calibrated on GSM8K's
training problems. Folders that have to be written go to --scratch and are removed. One JSON line a row is appended to
--out; rows that are there already are not measured again, so the command can be stopped, and --table prints what is
there. A row that fails is told, and the others go on. --problems 0 leaves accuracy out, which takes longest on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from qerl.bench.step import commit_here
from qerl.calibrate import calibrated_quantize
from qerl.config import ModelConfig, RolloutConfig, TaskConfig
from qerl.evaluate.command import Settings, run
from qerl.formats.codes import format_named
from qerl.inspection.text import compare_text
from qerl.inspection.weights import compare_weights, open_pair

WEIGHTED, AWQ = {"awq": False, "weighted": True}, {"awq": True, "weighted": True}

ROWS: list[tuple[str, dict[str, Any], dict[str, bool] | None]] = [  # label, settings of [model], calibration
    ("bf16", {"format": "bf16"}, None),
    *(
        row
        for format in ("nvfp4", "mxfp4", "int4")
        for row in (
            (f"{format}, amax", {"format": format, "scale": "amax"}, None),
            (f"{format}, sweep", {"format": format}, None),
            (f"{format}, AWQ", {"format": format}, AWQ),
        )
    ),
    ("nf4", {"format": "nf4", "double_quant": False}, None),
    ("nf4, double quantization", {"format": "nf4"}, None),
    ("nvfp4, weighted", {"format": "nvfp4"}, WEIGHTED),
]
"""bf16 has no scales, and NF4 no choice of them: neither `sweep` nor AWQ is for it."""


def as_text(rows: Path, target: Path) -> Path:
    """Problems and solutions, one after the other."""
    problems = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    target.write_text("".join(f"{p['question']}\n{p['answer']}\n\n" for p in problems), encoding="utf-8")
    return target


class Clock:
    """Seconds of each part of a row."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 1), now


def measure(
    settings: dict[str, Any],
    calibration: dict[str, bool] | None,
    options: argparse.Namespace,
    held_out: Path,
    text: Path,
) -> dict[str, Any]:
    """One row's numbers."""
    clock, path, against = Clock(), options.model, None
    if calibration is not None:
        path, against = options.scratch / "packed", options.model
        shutil.rmtree(path, ignore_errors=True)
        calibrated_quantize(
            options.model,
            path,
            text,
            format=format_named(settings["format"], scale=settings.get("scale", "sweep")),
            **calibration,
            length=options.length,
            max_windows=options.calibration_windows,
            device=options.device,
        )
        settings = {"format": settings["format"]}
        clock.lap("calibration")
    config = ModelConfig.model_validate({"path": str(path), "device": options.device, **settings})
    row: dict[str, Any] = {}
    pair = open_pair(config, against)
    weights = compare_weights(*pair)
    sqnr = weights.total.sqnr_db
    row["bits"], row["sqnr_db"] = weights.bits, sqnr if math.isfinite(sqnr) else None  # bf16 has no error
    clock.lap("weights")
    seen = compare_text(*pair, held_out, length=options.length, max_windows=options.windows)
    row |= {"perplexity": math.exp(seen.mean["nll"]), "kl": seen.mean["kl"], "entropy": seen.mean["entropy"]}
    row |= {"agreement": seen.mean["agreement"], "tokens": seen.num_tokens}
    clock.lap("text")
    if options.problems:
        evaluation = Settings(
            model=config,
            task=TaskConfig(name="gsm8k", path=str(options.gsm8k)),
            rollout=RolloutConfig(max_completion_length=options.max_new_tokens, max_batch_size=options.batch_size),
            num_samples=0,
            limit=options.problems,
            tag_free=True,
        )
        with redirect_stdout(StringIO()):
            summary = run(evaluation)
        greedy = summary["policies"][0]["greedy"]
        row["accuracy"], row["problems"] = greedy["tag_free"]["pass@1"], greedy["num_problems"]
        clock.lap("accuracy")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return row | {"seconds": clock.seconds, "device": device, "torch": torch.__version__, "commit": commit_here()}


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| | bits | SQNR dB | perplexity | KL | top-1 | entropy | GSM8K greedy |\n|---|---|---|---|---|---|---|---|")
    labels = [label for label, *_ in ROWS]
    for row in sorted(rows, key=lambda row: labels.index(row["label"])):
        sqnr = "-" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}"
        cells = [f"{row['bits']:.2f}", sqnr, f"{row['perplexity']:.3f}", f"{row['kl']:.4f}"]
        cells += [f"{row['agreement']:.1%}", f"{row['entropy']:.3f}", accuracy(row)]
        print(f"| {row['label']} | {' | '.join(cells)} |")
    print("AWQ: with scales that are weighted by the activations. NF4 has no choice of scales, so no sweep and no AWQ.")


def accuracy(row: dict[str, Any]) -> str:
    """With its 95 % interval."""
    found = row.get("accuracy")
    return "-" if found is None else f"{found['value']:.1%} ({found['low']:.1%} .. {found['high']:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-windows", type=int, default=256)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", nargs="*", help="labels; default: all")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "qerl-quantisation")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    options = parser.parse_args()
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    failed: list[str] = []
    if not options.table:
        options.scratch.mkdir(parents=True, exist_ok=True)
        held_out = as_text(options.gsm8k / "test.jsonl", options.scratch / "held-out.txt")
        training = as_text(options.gsm8k / "train.jsonl", options.scratch / "training.txt")
        for label, settings, calibration in ROWS:
            if label in {row["label"] for row in done} or (options.rows and label not in options.rows):
                continue
            try:
                row = measure(settings, calibration, options, held_out, training)
            except Exception:
                traceback.print_exc()
                failed.append(label)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            done.append({"label": label, **row})
            with options.out.open("a") as file:
                file.write(json.dumps(done[-1], allow_nan=False) + "\n")
            print(label, done[-1], flush=True)
        shutil.rmtree(options.scratch)
    print_table(done)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
