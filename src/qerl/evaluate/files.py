"""Results as Parquet: one row a problem and mode, with its completions as lists; and back.

    mode            "greedy" or "sampled"
    problem         number among the task's held-out problems
    prompt          chat messages [{role, content}]
    columns         the data set's other columns, as JSON (what JSON lacks, such as a date, as its text)
    texts           one completion a sample; the lists below run beside it
    tagged, tag_free                  grades: true, false, or null where it could not be graded
    lengths, finish_reasons, seeds    tokens with EOS; "stop" or "length"; sampling keys

The file's metadata `qerl` is a JSON object that says how it came to be: enough to grade the completions again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qerl.evaluate.sampling import Attempt, Evaluation, ProblemResult
from qerl.types import Example

METADATA_KEY = b"qerl"

SCHEMA = pa.schema(
    {
        "mode": pa.string(),
        "problem": pa.int32(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "columns": pa.string(),
        "texts": pa.list_(pa.string()),
        "tagged": pa.list_(pa.bool_()),
        "tag_free": pa.list_(pa.bool_()),
        "lengths": pa.list_(pa.int32()),
        "finish_reasons": pa.list_(pa.string()),
        "seeds": pa.list_(pa.int64()),
    }
)


def write_results(path: Path, evaluations: Mapping[str, Evaluation], settings: dict[str, Any]) -> None:
    """Write the evaluations by mode, whole or not at all; `settings` goes into the metadata."""
    rows = [
        {
            "mode": mode,
            "problem": problem.index,
            "prompt": problem.example.prompt,
            "columns": json.dumps(problem.example.columns, ensure_ascii=False, default=str),
            "texts": [a.text for a in problem.attempts],
            "tagged": [a.tagged for a in problem.attempts],
            "tag_free": [a.tag_free for a in problem.attempts],
            "lengths": [a.num_tokens for a in problem.attempts],
            "finish_reasons": [a.finish_reason for a in problem.attempts],
            "seeds": [a.seed for a in problem.attempts],
        }
        for mode, evaluation in evaluations.items()
        for problem in evaluation.problems
    ]
    schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(settings)})
    staging = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), staging, compression="zstd")
    staging.replace(path)


def read_settings(path: Path) -> dict[str, Any]:
    """What the metadata says; ValueError for a file that `write_results` did not write."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None
    metadata = (schema.metadata or {}).get(METADATA_KEY)
    if metadata is None or not schema.equals(SCHEMA):
        raise ValueError(f"{path} holds no results of an evaluation: name the results.parquet of its --output folder")
    return json.loads(metadata)


def read_results(path: Path) -> tuple[dict[str, Evaluation], dict[str, Any]]:
    """The evaluations by mode, and the settings; ValueError as `read_settings`."""
    settings = read_settings(path)
    modes: dict[str, list[ProblemResult]] = {}
    for row in pq.read_table(path).to_pylist():
        lists = (row[name] for name in ("texts", "lengths", "finish_reasons", "seeds", "tagged", "tag_free"))
        attempts = [Attempt(*values) for values in zip(*lists, strict=True)]
        example = Example(row["prompt"], json.loads(row["columns"]))
        modes.setdefault(row["mode"], []).append(ProblemResult(row["problem"], example, attempts))
    return {mode: Evaluation(problems) for mode, problems in modes.items()}, settings
