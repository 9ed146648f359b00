"""Many steps of a small model with lengths that vary: does memory grow?

    windows of steps (1-10, 11-150, 151-300) -> the peak of each: in tensors, in torch's allocator, on the device
                                             -> what tensors and allocator hold between two steps, after each window

Prompts have 16 to 256 tokens; completions end at random, after 40 tokens on average and `MAX_NEW` at the most. So every
step packs, decodes and captures other sizes. Trainer, engine and allocator are those of `qerl train`; the weights are
random. `flat` says whether the last window's peak of the device is within 2 % of those before.

That is an answer only if the largest sizes come before the last window. So each has a limit that is met again and
again: a completion reaches `MAX_NEW` in three steps of four; `LIMITS` cut a step into two passes on average, of which
one is full to 99 % in every third step, and the logits that exist at a time fill their chunk in nearly every step. All
prompts have been taken after 128 steps. With a run's defaults a step is one pass, far below the limit of its size: the
largest of 300 steps may well be among the last, and a smaller `MAX_NEW` alone does not change that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qerl.bench.meter import Meter
from qerl.bench.models import prompt_text, write_folder
from qerl.bench.step import Case, commit_here, random_trainer, run_config
from qerl.nn.load import resolve_device

MEAN_LENGTH, MAX_NEW, MAX_PROMPT = 40, 96, 256
PROMPT_TOKENS = [16 + 37 * i % (MAX_PROMPT - 15) for i in range(256)]
LIMITS = ("optimizer.micro_batch_tokens=2048", "optimizer.logprob_chunk=256")
WINDOWS = (10, 150, 300)
TOLERANCE = 0.02


def run_endurance(
    model: str = "0.5B-2",
    *,
    windows: Sequence[int] = WINDOWS,
    max_seconds: float = float("inf"),
    run: str = "",
    commit: str | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """One record; `windows`: the last step of each. A run of more than `max_seconds` ends early: see its `steps`."""
    where = resolve_device(device)
    with tempfile.TemporaryDirectory() as folder, Meter(where) as meter:
        case = Case(model, prompt_tokens=MAX_PROMPT, new_tokens=MAX_NEW, overrides=LIMITS)
        config = run_config(case, Path(folder))
        write_folder(Path(config.model.path), model, mean_length=MEAN_LENGTH)
        prompts = [prompt_text(length, i) for i, length in enumerate(PROMPT_TOKENS)]
        trainer = random_trainer(config, prompts, meter)
        ends, steps, records = time.monotonic() + max_seconds, 0, []
        for last in windows:
            name = f"steps {steps + 1} to {last}"
            peaks = {"allocated": 0.0, "reserved": 0.0}
            with meter(name):
                while steps < last and time.monotonic() < ends:
                    metrics = trainer.train_step()
                    steps += 1
                    peaks = {part: max(size, metrics.get(f"memory/{part}", 0)) for part, size in peaks.items()}
            part = meter.parts[name]
            records.append({"step": steps, "seconds": round(part.seconds, 2), **_now(where)})
            sizes = {"device": part.device_bytes, **peaks}
            records[-1] |= {f"peak_{whose}_gb": round(size / 1e9, 4) for whose, size in sizes.items()}
    most = [window["peak_device_gb"] for window in records]
    return {
        "bench": "endurance",
        "run": run,
        "commit": commit or commit_here(),
        "gpu": torch.cuda.get_device_name(where) if where.type == "cuda" else None,
        "torch": torch.__version__,
        "model": f"Qwen2.5-{model}",
        "completions": case.completions,
        "new_tokens": case.new_tokens,
        "settings": " ".join(case.overrides),
        "steps": steps,
        "windows": records,
        "flat": steps == windows[-1] and most[-1] <= (1 + TOLERANCE) * max(most[:-1]),
    }


def _now(device: torch.device) -> dict[str, float]:
    """What is in tensors, and what the allocator holds, between two steps."""
    if device.type != "cuda":
        return {}
    sizes = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    return {f"{name}_gb": round(size / 1e9, 4) for name, size in sizes.items()}
