"""What the kernel benchmarks share: cold-cache timing of CUDA graphs, the error against float64, result files.

    pass over n copies of the weights -> capture -> check the result -> replay_us / launches

A product is timed over enough copies of its weights (`copies_for`) that none is in the second-level cache when its turn
comes. A graph holds whole passes over the copies, at least MIN_LAUNCHES launches, and its replays are queued one behind
the other with an event between: so neither the host's launch cost nor the gap between graphs is in the figure, for
anybody. The figure is the median over the replays.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

COLD_BYTES = 250e6  # weights cycled through: four times the second-level cache of an H200 (60 MB)
MIN_LAUNCHES = 8
RESULTS = Path(__file__).parents[1] / "results"


class Captured(NamedTuple):
    """A graph and the tensor that its last launch writes."""

    graph: torch.cuda.CUDAGraph
    result: Tensor


def copies_for(weight_bytes: float) -> int:
    """Copies of a weight that together are COLD_BYTES, two at least."""
    return max(2, -int(-COLD_BYTES // weight_bytes))


def passes_for(copies: int) -> int:
    """Passes over the copies in one graph."""
    return -(-MIN_LAUNCHES // copies)


def capture(launch: Callable[[], Tensor]) -> Captured:
    """Run `launch` once (what is compiled at first use is compiled then), and once more into a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its stream current; the outer context does not.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        result = launch()
    return Captured(graph, result)


def poisoned_replay(captured: Captured) -> Tensor:
    """The result of one replay into memory full of NaN: what is not written shows."""
    captured.result.fill_(float("nan"))
    captured.graph.replay()
    torch.cuda.synchronize()
    return captured.result


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Median duration of a replay among replays that follow each other without a pause, in microseconds."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(2):
        graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3


def relative_error(y: Float[Tensor, "m n"], exact: Float64[Tensor, "m n"]) -> float:
    """||y - exact|| / ||exact||; NaN where y has one."""
    return float((y.double() - exact).norm() / exact.norm())


def versions(**packages: str) -> dict[str, str | None]:
    """Of torch, CUDA, the driver and packages (key = distribution); None for what is not there."""
    found: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found["driver"] = next(iter((_output(query) or "").splitlines()), None)
    for key, distribution in packages.items():
        try:
            found[key] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[key] = None
    return found


def commit() -> str | None:
    """The commit of the working tree, "+" behind it where files differ; None outside a repository."""
    root = Path(__file__).parent
    head = _output(["git", "-C", str(root), "rev-parse", "--short", "HEAD"])
    dirty = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return head and head + ("+" if dirty else "")


def results_file(gpu: str) -> Path:
    """benchmarks/results/nvidia-h200.jsonl for "NVIDIA H200"."""
    return RESULTS / f"{'-'.join(gpu.lower().split())}.jsonl"


def write(records: Iterable[dict[str, Any]], out: str | None, gpu: str) -> None:
    """Append one JSON line a record to the file `out`, or to the GPU's where it is None; "-" prints them."""
    lines = [json.dumps(record) for record in records]
    if out == "-":
        print(*lines, sep="\n")
        return
    path = Path(out) if out else results_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    print(f"{len(lines)} records appended to {path}")


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
