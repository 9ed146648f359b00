"""Experiment trackers: TensorBoard, W&B, trackio, MLflow, named in `report_to`; a run's files are written in any case.

    step's metrics -> finite values, "train/" or "eval/" before the name -> each tracker, at x = step

The names are those of metrics.jsonl under the prefixes that transformers' Trainer gives its own, so that curves of a
qerl run lie over those of a TRL run: `reward` is `train/reward`, `eval/accuracy` stays what it is.

A tracker that is not installed is refused before the model is loaded (`check_installed`), and one that cannot start
(no login) when training begins. One that fails later is given up with a warning: the run is worth more than its curves.
A resumed run goes on in the same run of each tracker, by the ids in trackers.json. Projects, servers and offline modes
are set by each library's own environment variables, see docs/logging.md. Called by rl/trainer.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from qerl.config import RunConfig, TrackerName

PROJECT = "qerl"
"""Where runs go unless the library's environment variable says otherwise."""


class Tracker(Protocol):
    """One place where curves are drawn."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The finite metrics of a step."""
        ...

    def close(self, failed: bool) -> None:
        """The run has ended: well, or by an exception."""
        ...


@dataclass(slots=True)
class Run:
    """What a tracker is told when a run begins or goes on."""

    output_dir: Path
    name: str
    """Unique, and the same after a resume."""
    config: dict[str, Any]
    first_step: int
    """The first that will be written; what a killed run wrote from there on is written again."""
    ids: dict[str, str]
    """What trackers.json keeps: the name, and ids that a tracker gave the run."""


class TensorBoard:
    """Event files in <output_dir>/tensorboard."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run.output_dir / "tensorboard"), purge_step=run.first_step)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar a metric, on disk at once."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases; WANDB_PROJECT, WANDB_MODE=offline, ..."""

    def __init__(self, run: Run) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.name,
            name=run.name,
            dir=str(run.output_dir),
            config=run.config,
            resume="allow",
        )
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; after a kill, W&B keeps the rows that it has: the resumed run's are the same."""
        self._run.log({**values, "train/global_step": step}, step=step)

    def close(self, failed: bool) -> None:
        """Wait until all is sent or written."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, in its local store or a Space; TRACKIO_PROJECT, TRACKIO_SPACE_ID, TRACKIO_DIR."""

    def __init__(self, run: Run) -> None:
        trackio: Any = import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(project=project, name=run.name, config=run.config, resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({**values, "train/global_step": step}, step=step)

    def close(self, failed: bool) -> None:
        """Wait until all is stored."""
        self._run.finish()


class MLflow:
    """A run of MLflow; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: Run) -> None:
        self._mlflow: Any = import_module("mlflow")
        if "mlflow" in run.ids:
            self._mlflow.start_run(run_id=run.ids["mlflow"])
            return
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        run.ids["mlflow"] = self._mlflow.start_run(run_name=run.name).info.run_id
        flat = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
        self._mlflow.log_params(flat)
        for section in run.config.keys() - flat.keys():  # one call a section: MLflow takes 100 a call
            self._mlflow.log_params({f"{section}.{key}": value for key, value in run.config[section].items()})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One batch; MLflow takes letters, digits and few signs in a name."""
        self._mlflow.log_metrics({re.sub(r"[^\w\-. /]", "_", name): v for name, v in values.items()}, step=step)

    def close(self, failed: bool) -> None:
        """End the run with its status."""
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


TRACKERS: dict[TrackerName, Callable[[Run], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def check_installed(names: Iterable[TrackerName]) -> None:
    """ValueError, with the command that installs it, for the first tracker that is not there."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder ./wandb, as that library leaves one, is no package
            raise ValueError(f'report_to: {name} is not installed: pip install "qerl[{name}]", or take it out')


class Trackers:
    """All trackers of a run; a context manager around its loop. `warn` is told of what was given up."""

    def __init__(self, config: RunConfig, *, first_step: int, resume: bool, warn: Callable[[str], None]) -> None:
        self.names = list(dict.fromkeys(config.report_to))
        self._ids_path = Path(config.output_dir) / "trackers.json"
        self._config, self._first_step, self._resume, self._warn = config, first_step, resume, warn
        self._open: dict[str, Tracker] = {}

    def __enter__(self) -> Trackers:
        if not self.names:
            return self
        ids = json.loads(self._ids_path.read_text()) if self._resume and self._ids_path.exists() else {}
        output_dir = Path(self._config.output_dir)
        name = ids.setdefault("name", f"{output_dir.name}-{uuid.uuid4().hex[:8]}")
        run = Run(output_dir, name, self._config.model_dump(mode="json"), self._first_step, ids)
        try:
            for tracker in self.names:
                try:
                    self._open[tracker] = TRACKERS[tracker](run)
                except Exception as error:  # no login, no server: whatever it is, it is told with its place
                    raise ValueError(
                        f"report_to: {tracker} did not start: {type(error).__name__}: {error}\n"
                        "mend that, or take it out"
                    ) from error
        except BaseException:
            self._close(failed=True)
            raise
        self._ids_path.write_text(json.dumps(ids))
        self._resume = True  # a loop that is stopped and entered again goes on in the same runs
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Hand a step's metrics (metrics.py's names, `step` among them) to every tracker."""
        values = tracker_values(metrics)
        self._first_step = metrics["step"] + 1
        for name, tracker in list(self._open.items()):
            try:
                tracker.write(metrics["step"], values)
            except Exception as error:  # a network, a full disk: whatever it is, the run goes on
                del self._open[name]
                self._warn(f"{name} failed, and gets nothing more of this run: {type(error).__name__}: {error}")

    def _close(self, failed: bool) -> None:
        for name, tracker in self._open.items():
            try:
                tracker.close(failed)
            except Exception as error:
                self._warn(f"{name} failed at the end of the run: {type(error).__name__}: {error}")
        self._open.clear()


def tracker_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite metrics under the names that trackers get; `step` is the x axis and no metric."""
    return {tracker_name(name): value for name, value in metrics.items() if name != "step" and math.isfinite(value)}


def tracker_name(name: str) -> str:
    """`reward` -> `train/reward`; `eval/accuracy` -> `eval/accuracy`: as transformers' callbacks name them."""
    return name if name.startswith("eval/") else f"train/{name}"
