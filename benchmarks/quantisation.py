"""The table of docs/quantisation.md: what each format and each choice of scales does to one model.

    python benchmarks/quantisation.py MODEL --gsm8k FOLDER [--windows 64] [--length 512] [--problems 1319]

For every row: SQNR over all linears; on GSM8K's held-out problems with their solutions, perplexity, KL and entropy
against the bf16 model (inspection/text.py); and greedy accuracy on those problems, in the chat format that a run trains
with (evaluate/). Rows with AWQ or weighted scales are calibrated on GSM8K's training problems. Folders that have to be
written go to --scratch and are removed. One JSON line a row is appended to --out; rows that are there already are not
measured again, so the command can be stopped. --problems 0 leaves accuracy out, which takes longest on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from qerl.calibrate import calibrated_quantize
from qerl.config import ModelConfig, RolloutConfig, TaskConfig
from qerl.evaluate.command import Settings, run
from qerl.formats.codes import format_named
from qerl.inspection.text import compare_text
from qerl.inspection.weights import compare_weights, open_pair

ROWS: list[tuple[str, dict[str, Any], dict[str, bool] | None]] = [  # label, settings of [model], calibration
    ("bf16", {"format": "bf16"}, None),
    *(
        row
        for format in ("nvfp4", "mxfp4")
        for row in (
            (f"{format}, amax", {"format": format, "scale": "amax"}, None),
            (f"{format}, sweep", {"format": format}, None),
            (f"{format}, weighted", {"format": format}, {"awq": False, "weighted": True}),
            (f"{format}, AWQ, amax", {"format": format, "scale": "amax"}, {"awq": True, "weighted": False}),
            (f"{format}, AWQ, weighted", {"format": format}, {"awq": True, "weighted": True}),
        )
    ),
    ("nf4", {"format": "nf4"}, None),
    ("int4, amax", {"format": "int4", "scale": "amax"}, None),
    ("int4, sweep", {"format": "int4"}, None),
]


def as_text(rows: Path, target: Path) -> Path:
    """Problems and solutions, one after the other."""
    problems = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    target.write_text("".join(f"{p['question']}\n{p['answer']}\n\n" for p in problems), encoding="utf-8")
    return target


def measure(
    settings: dict[str, Any],
    calibration: dict[str, bool] | None,
    options: argparse.Namespace,
    scratch: Path,
    held_out: Path,
    training: Path,
) -> dict[str, Any]:
    """One row's numbers."""
    path, against = options.model, None
    if calibration is not None:
        path, against = scratch / "packed", options.model
        shutil.rmtree(path, ignore_errors=True)
        calibrated_quantize(
            options.model,
            path,
            training,
            format=format_named(settings["format"], scale=settings.get("scale", "sweep")),
            **calibration,
            length=options.length,
            max_windows=options.calibration_windows,
            device=options.device,
        )
        settings = {"format": settings["format"]}
    config = ModelConfig.model_validate({"path": str(path), "device": options.device, **settings})
    row: dict[str, Any] = {}
    pair = open_pair(config, against)
    weights = compare_weights(*pair)
    row["bits"], row["sqnr_db"] = weights.bits, weights.total.sqnr_db
    text = compare_text(*pair, held_out, length=options.length, max_windows=options.windows)
    row |= {"perplexity": math.exp(text.mean["nll"]), "kl": text.mean["kl"], "entropy": text.mean["entropy"]}
    row |= {"agreement": text.mean["agreement"], "tokens": text.num_tokens}
    if options.problems:
        evaluation = Settings(
            model=config,
            task=TaskConfig(name="gsm8k", path=str(options.gsm8k)),
            rollout=RolloutConfig(max_completion_length=options.max_new_tokens),
            num_samples=0,
            limit=options.problems,
            tag_free=True,
        )
        with redirect_stdout(StringIO()):
            summary = run(evaluation)
        row["accuracy"] = summary["policies"][0]["greedy"]["tag_free"]
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| | bits | SQNR dB | perplexity | KL | top-1 | entropy | GSM8K greedy |\n|---|---|---|---|---|---|---|---|")
    for row in rows:
        sqnr = "-" if math.isinf(row["sqnr_db"]) else f"{row['sqnr_db']:.2f}"
        cells = [f"{row['bits']:.2f}", sqnr, f"{row['perplexity']:.3f}", f"{row['kl']:.4f}"]
        cells += [f"{row['agreement']:.1%}", f"{row['entropy']:.3f}", accuracy(row)]
        print(f"| {row['label']} | {' | '.join(cells)} |")


def accuracy(row: dict[str, Any]) -> str:
    """pass@1 with its 95 % interval."""
    found = row.get("accuracy", {}).get("pass@1")
    return "-" if found is None else f"{found['value']:.1%} ({found['low']:.1%} .. {found['high']:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-windows", type=int, default=256)
    parser.add_argument("--problems", type=int, default=1319)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", nargs="*", help="labels; default: all")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "qerl-quantisation")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    held_out = as_text(options.gsm8k / "test.jsonl", options.scratch / "held-out.txt")
    training = as_text(options.gsm8k / "train.jsonl", options.scratch / "training.txt")
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    for label, settings, calibration in ROWS:
        if label in {row["label"] for row in done} or (options.rows and label not in options.rows):
            continue
        start = time.monotonic()
        row = measure(settings, calibration, options, options.scratch, held_out, training)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        done.append({"label": label, **row, "seconds": round(time.monotonic() - start, 1)})
        with options.out.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(label, done[-1], flush=True)
    shutil.rmtree(options.scratch)
    print_table(done)


if __name__ == "__main__":
    main()
