"""Experiment trackers get a run's metrics, by TRL's names, and never break it.

TensorBoard and trackio are the real ones; so are W&B (offline) and MLflow (a local store) where they are installed, and
what is called of those two is also held against recorders with the signatures that their manuals give.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import qerl
from qerl.metrics import METRICS
from qerl.nn import load
from qerl.rl import trackers
from qerl.rl.trackers import Trackers, check_installed, tracker_name

ROOT = Path(__file__).parents[3]
LINES = [
    {"step": 0, "eval/accuracy": 0.25},
    {"step": 1, "reward": 0.5, "rewards/mine/mean": 1.0, "loss": math.nan, "noise/sigma": 0.0},
    {"step": 2, "reward": 0.75, "rewards/mine/mean": 2.0, "loss": -0.5, "noise/sigma": 1e-2},
    {"step": 3, "reward": 1.0, "rewards/mine/mean": 3.0, "loss": -0.25, "noise/sigma": 5e-3},
]
REWARDS = [(1, 0.5), (2, 0.75), (3, 1.0)]


def config(folder: Path, *names: str, **settings) -> qerl.Config:
    return qerl.Config(output_dir=str(folder), report_to=list(names), **settings)


def write(folder: Path, name: str, lines: list[dict], *, resume: bool = False, warn=pytest.fail) -> None:
    folder.mkdir(exist_ok=True)
    with Trackers(config(folder, name), first_step=lines[0]["step"], resume=resume, warn=warn) as open_trackers:
        for line in lines:
            open_trackers.write(line)


def killed_and_resumed(folder: Path, name: str) -> str:
    """Three steps are written, of which the last is lost and written again; the run's name."""
    write(folder, name, LINES[:3])
    write(folder, name, LINES[2:], resume=True)
    return json.loads((folder / "trackers.json").read_text())["name"]


# ------------------------------------------------------------------ the real ones


def test_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed_and_resumed(tmp_path / "run", "tensorboard")
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == REWARDS
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(0, 0.25)]
    assert [e.step for e in events.Scalars("train/loss")] == [2, 3]  # a NaN is no point
    assert {"train/rewards/mine/mean", "train/noise/sigma"} <= set(events.Tags()["scalars"])
    assert "sigma_start" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_a_loop_that_is_stopped_and_entered_again_goes_on_in_the_same_run(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers, names = Trackers(config(tmp_path, "tensorboard"), first_step=0, resume=False, warn=pytest.fail), set()
    for lines in (LINES[:2], LINES[2:]):
        with trackers:
            for line in lines:
                trackers.write(line)
        names.add((tmp_path / "trackers.json").read_text())
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == REWARDS
    assert len(names) == 1


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    folder = tmp_path / "store"
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its variables when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    monkeypatch.setenv("TRACKIO_PROJECT", "tests")
    name = killed_and_resumed(tmp_path / "run", "trackio")
    with sqlite3.connect(folder / "tests.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    found = {(run, step): json.loads(metrics) for run, step, metrics in rows}
    assert {run for run, _ in found} == {name}
    assert [(step, found[name, step]["train/reward"]) for step in (1, 2, 3)] == REWARDS
    assert found[name, 0]["eval/accuracy"] == 0.25
    assert "train/loss" not in found[name, 1]


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of W&B's offline file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB.

    github.com/google/leveldb/blob/main/doc/log_format.md: checksum 4, length 2, type 1 (full, first, middle, last).
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path / "run", "wandb", LINES)
    proto, rows = import_module("wandb.proto.wandb_internal_pb2"), []
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    for data in leveldb_log(path.read_bytes()):
        record = proto.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            assert record.run.project == "qerl" and record.run.run_id.startswith("run-")
        if record.WhichOneof("record_type") == "history":
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    assert [(row["_step"], row["train/reward"]) for row in rows if "train/reward" in row] == REWARDS
    assert [row["train/global_step"] for row in rows] == [0, 1, 2, 3]


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    name = killed_and_resumed(tmp_path / "run", "mlflow")
    (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("tests").experiment_id])
    assert (run.info.run_name, run.info.status) == (name, "FINISHED")
    assert run.data.params["noise.sigma_start"] == "0.01" and run.data.params["steps"] == "100"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/reward")
    assert sorted({(point.step, point.value) for point in history}) == REWARDS


# ------------------------------------------------------------------ recorders in the place of W&B and MLflow

RECORDERS = {
    # docs.wandb.ai/ref/python: init(project, dir, id, name, config, resume, ...) -> Run: log, define_metric, finish
    "wandb": """
calls = []
class Run:
    def log(self, data, step=None, commit=None): calls.append(("log", data, step))
    def define_metric(self, name, step_metric=None, step_sync=None): calls.append(("define_metric", name, step_metric))
    def finish(self, exit_code=None): calls.append(("finish", exit_code))
def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None, resume=None):
    calls.append(("init", project, id, name, resume))
    return Run()
""",
    # mlflow.org/docs/latest/python_api/mlflow.html
    "mlflow": """
from types import SimpleNamespace
calls = []
def set_experiment(experiment_name=None, experiment_id=None): calls.append(("set_experiment", experiment_name))
def start_run(run_id=None, experiment_id=None, run_name=None, nested=False):
    calls.append(("start_run", run_id, run_name))
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "given-by-mlflow"))
def log_params(params, synchronous=None): assert 0 < len(params) <= 100; calls.append(("log_params", params))
def log_metrics(metrics, step=None, synchronous=None): calls.append(("log", metrics, step))
def end_run(status="FINISHED"): calls.append(("end_run", status))
""",
}


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """Put a recorder where `import NAME` finds it; returns its calls."""

    def install(name: str) -> list[tuple]:
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / f"{name}.py").write_text(RECORDERS[name])
        monkeypatch.syspath_prepend(tmp_path / "packages")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return import_module(name).calls

    yield install
    for name in RECORDERS:
        sys.modules.pop(name, None)  # the real one comes back with monkeypatch's own undoing


def test_what_is_called_of_wandb(tmp_path, recorder, monkeypatch):
    calls = recorder("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    name = killed_and_resumed(tmp_path / "run", "wandb")
    assert [call for call in calls if call[0] == "init"] == 2 * [("init", "mine", name, name, "allow")]
    assert ("log", {"eval/accuracy": 0.25, "train/global_step": 0}, 0) in calls
    assert [(step, row["train/reward"]) for kind, row, step in filter(is_log, calls) if step == 3] == REWARDS[2:]
    assert calls[-1] == ("finish", 0)


def test_what_is_called_of_mlflow(tmp_path, recorder):
    calls = recorder("mlflow")
    name = killed_and_resumed(tmp_path / "run", "mlflow")
    starts = [call for call in calls if call[0] == "start_run"]
    assert starts == [("start_run", None, name), ("start_run", "given-by-mlflow", None)]
    assert ("set_experiment", "qerl") in calls
    write(tmp_path / "other", "mlflow", [{"step": 1, "rewards/my: reward/mean": 2.0}])
    assert [call for call in calls if is_log(call)][-1] == ("log", {"train/rewards/my_ reward/mean": 2.0}, 1)
    assert calls[-1] == ("end_run", "FINISHED")


def is_log(call: tuple) -> bool:
    return call[0] == "log"


def test_an_exception_ends_the_run_as_failed(tmp_path, recorder):
    calls = recorder("mlflow")
    (tmp_path / "run").mkdir()
    run = Trackers(config(tmp_path / "run", "mlflow"), first_step=0, resume=False, warn=pytest.fail)
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    assert calls[-1] == ("end_run", "FAILED")


def test_a_tracker_that_fails_is_given_up_and_the_others_go_on(tmp_path, monkeypatch):
    written: list[tuple[str, int]] = []

    def tracker(name: str):
        class Broken:
            def __init__(self, run):
                pass

            def write(self, step, values):
                if name == "wandb" and step == 2:
                    raise ConnectionError("no network")
                written.append((name, step))

            def close(self, failed):
                assert name != "wandb", "what was given up is not touched again"
                raise OSError("full")

        return Broken

    monkeypatch.setattr(trackers, "TRACKERS", {name: tracker(name) for name in ("wandb", "trackio")})
    warnings: list[str] = []
    (tmp_path / "run").mkdir()
    run = config(tmp_path / "run", "wandb", "trackio", "wandb")
    with Trackers(run, first_step=0, resume=False, warn=warnings.append) as open_trackers:
        for line in LINES:
            open_trackers.write(line)
    assert [step for name, step in written if name == "wandb"] == [0, 1]
    assert [step for name, step in written if name == "trackio"] == [0, 1, 2, 3]
    assert "wandb failed, and gets nothing more of this run: ConnectionError: no network" in warnings[0]
    assert "trackio failed at the end of the run: OSError: full" in warnings[1]


def test_one_that_cannot_start_ends_the_others(tmp_path, monkeypatch, recorder):
    calls = recorder("mlflow")

    def no_login(run):
        raise RuntimeError("log in first")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", no_login)
    (tmp_path / "run").mkdir()
    run = Trackers(config(tmp_path / "run", "mlflow", "wandb"), first_step=0, resume=False, warn=pytest.fail)
    with pytest.raises(ValueError, match="report_to: wandb did not start: RuntimeError: log in first"), run:
        pass
    assert calls[-1] == ("end_run", "FAILED")


# ------------------------------------------------------------------ in a run

ROWS = [{"prompt": f"{n}+{n}=?"} for n in range(10, 18)]
TINY = {
    "steps": 2,
    "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 6},
    "lora": {"r": 2},
}


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def test_a_run_reports_what_it_writes(tmp_path, recorder):
    calls = recorder("mlflow")
    args = config(tmp_path / "run", "mlflow", save_every=1, **TINY)
    lines = qerl.Trainer("embedded", length, args, ROWS).train()
    reported = {step: row for _, row, step in filter(is_log, calls)}
    assert reported[2] == {
        tracker_name(name): value for name, value in lines[1].items() if value is not None and name != "step"
    }
    # Other trackers do not make it another run: it can be resumed with them.
    qerl.Trainer("embedded", length, config(tmp_path / "run", save_every=1, **TINY), ROWS, resume=True)


@pytest.mark.parametrize("left_behind", [False, True], ids=["nothing", "a folder of its name"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, left_behind):
    if left_behind:
        (tmp_path / "mlflow").mkdir()
    spec = PathFinder.find_spec("mlflow", [str(tmp_path)])  # what is found where it is not installed
    assert (spec is not None) == left_behind
    monkeypatch.setattr(trackers, "find_spec", lambda name: spec)
    monkeypatch.setattr(load, "Checkpoint", None)
    with pytest.raises(ValueError, match=r'mlflow is not installed: pip install "qerl\[mlflow\]"'):
        qerl.Trainer("embedded", length, config(tmp_path / "run", "mlflow", **TINY), ROWS)


def test_every_tracker_is_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert trackers.TRACKERS.keys() <= extras.keys()
    check_installed([])


# ------------------------------------------------------------------ names


def test_the_page_lists_the_names_that_are_trls():
    page, _, _ = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8").partition("| TRL's name |")
    rows = [line for line in page.splitlines() if line.startswith("| `train/")]
    meanings = {m.name: m.meaning.rstrip(".").replace("|", r"\|") for m in METRICS}
    assert rows == [f"| `{tracker_name(m.name)}` | {m.unit} | {meanings[m.name]} |" for m in METRICS if m.trl]
