"""The report: every figure of a run is in it, texts stay texts, and gaps, unfinished and bare runs are no obstacle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib import pyplot
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config import RunConfig
from qerl.report import html
from qerl.report.html import write_report
from qerl.report.panels import PANELS, Curve, expand, running_mean
from qerl.report.plot import plot_run, scale_by_span
from qerl.report.runs import read_runs

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u2028 & 'quotes' \"double\""


def write_run(folder: Path, *, steps: int = 6, asked: int = 6, settings: dict | None = None, info: bool = True) -> Path:
    """A run's files: evaluation at the first and last step, two reward functions, one gap, hostile completions."""
    folder.mkdir(parents=True)
    rows = []
    for step in range(steps + 1):
        row = {"step": step}
        if step:
            row |= {
                "reward": step / 10,
                "rewards/format/mean": 0.5,
                "rewards/mine/mean": step / 20,
                "rewards/mine/failed": int(step == 2),
                "ungraded": 0,
                "accuracy": step / 20,
                "mismatch_kl": None if step == 3 else 1e-4 * step,
                "noise/sigma": 0.0 if step == 1 else 1e-2,
                "memory/rss": 2e9,
                "time/rollout": 2.0,
                "time/update": 1.0,
                "time/step": 3.0,
                "tokens_per_second": 1000.0,
                "completions/new_tokens": 2000,
            }
        if step in (0, asked):
            row |= {"eval/accuracy": 0.1 + step / 20, "eval/accuracy_low": 0.05, "eval/accuracy_high": 0.55}
            row |= {"eval/num_problems": 200, "time/eval": 5.0}
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = [
        {
            "step": step,
            "prompt": f"{HOSTILE} {step}",
            "completion": HOSTILE,
            "reward": None if step == 2 else step / 10,
            "rewards": {"format": 0.5, "mine": None},
            "tokens": 7,
            "finish_reason": "stop",
        }
        for step in range(1, steps + 1)
    ]
    (folder / "completions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if info:
        config = RunConfig.model_validate({"steps": asked, "output_dir": str(folder)} | (settings or {})).model_dump()
        record = {"config": config, "versions": {"torch": "2.99"}, "device": "cpu <b>"}
        (folder / "run.json").write_text(json.dumps(record))
    return folder


class Page(HTMLParser):
    """The elements of a page, the text outside scripts, and the scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    def panel(self, title: str) -> dict:
        return next(panel for panel in self.data["panels"] if panel["title"] == title)


# ---------------------------------------------------------------- the page


def test_the_page_loads_nothing_and_holds_plotly(tmp_path):
    page = Page(write_report([write_run(tmp_path / "run")]))
    assert len(page.scripts) == 3
    assert "plotly.js v" in page.scripts[1][:200]
    assert not [
        tag for tag, attributes in page.tags if {"src", "href"} & attributes.keys() or tag in ("link", "iframe")
    ]
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_texts_of_the_run_are_no_markup(tmp_path):
    folder = write_run(tmp_path / "a <i>run</i>", settings={"task": {"system_prompt": HOSTILE}})
    page = Page(write_report([folder]))
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not any(tag in ("img", "b") and "onerror" in attributes for tag, attributes in page.tags)
    assert page.data["completions"][0]["completion"] == HOSTILE
    assert "a <i>run</i>" in page.text and "cpu <b>" in page.text
    assert json.dumps(HOSTILE, ensure_ascii=False) in page.text  # the setting, as its row shows it


def test_curves_hold_the_metrics(tmp_path):
    page = Page(write_report([write_run(tmp_path / "run")]))
    (reward,) = page.panel("reward")["traces"]
    assert (reward["x"], reward["y"]) == ([1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    parts = page.panel("reward by function")["traces"]
    assert [trace["label"] for trace in parts] == ["format", "mine"]
    held_out = page.panel("accuracy")["traces"][1]
    assert (held_out["x"], held_out["y"], held_out["low"], held_out["high"]) == (
        [0, 6],
        [0.1, 0.4],
        [0.05] * 2,
        [0.55] * 2,
    )
    assert page.panel("mismatch KL")["traces"][0]["y"][2] is None  # a gap
    assert page.panel("memory")["traces"][0]["y"] == [2.0] * 6
    failed = page.panel("what could not be scored or used")["traces"]
    assert [trace["label"] for trace in failed] == ["completions without a value from mine"]  # ungraded is 0 throughout
    assert "KL to the reference" not in [panel["title"] for panel in page.data["panels"]]


def test_headlines_tell_before_and_after(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "run")])
    figures = {figure.label: figure for figure in run.headline()}
    assert figures["held out, sampled"].value == "10.0% → 40.0%"
    assert figures["held out, sampled"].detail == (
        "+30.0 points, steps 0 to 6; 95 % interval 5.0% to 55.0%; 200 problems"
    )
    assert figures["reward"].value == "0.10 → 0.60"
    assert figures["steps"].value == "6 of 6"
    assert figures["steps"].detail == "in 0:28; median step 3.0 s"  # six steps, two evaluations of 5 s
    assert figures["sampling"].detail == "median step; 12,000 tokens sampled"
    assert figures["memory"].value == "2.00 GB"
    assert "held out, greedy" not in figures


def rewritten(folder: Path, change: Callable[[dict], dict]) -> Path:
    """The run with every line of its metrics changed, but for step 0."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [change(row) if row["step"] else row for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_slow_first_step_leaves_the_others_height(tmp_path):
    plain = write_run(tmp_path / "plain")
    slow = rewritten(write_run(tmp_path / "slow"), lambda row: row | {"time/rollout": 90.0 if row["step"] == 1 else 2})
    assert Page(write_report([plain])).panel("time by phase")["top"] is None
    assert Page(write_report([slow])).panel("time by phase")["top"] == pytest.approx(1.05 * 8)  # with the evaluation


@pytest.mark.parametrize(("weights", "named"), [(None, True), ([0.0, 1.0], False), ([1.0, 0.0], True)])
def test_a_reward_function_that_became_constant_is_noted(tmp_path, weights, named):
    settings = {"rewards": {"functions": ["a:format", "a:mine"], "weights": weights}}
    folder = rewritten(
        write_run(tmp_path / "run", steps=30, asked=30, settings=settings),
        lambda row: row | {"rewards/format/std": 0.1 if row["step"] < 5 else 0.0, "rewards/mine/std": 0.1},
    )
    text = Page(write_report([folder])).text
    note = "reward format: since step 5 all completions of a step got the same value, 0.5 in the last one"
    assert (note in text) is named
    assert "reward mine" not in text


def test_a_picture_leaves_out_what_a_run_does_not_have(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("qerl.report.plot._draw", lambda axis, panel, run: drawn.append(panel.title))
    folder = write_run(tmp_path / "run")
    plot_run(folder)
    plot_run(rewritten(folder, lambda row: {name: row[name] for name in row if not name.startswith("noise/")}))
    assert drawn == ["reward", "accuracy", "noise", "mismatch KL", "reward", "accuracy", "mismatch KL"]


def test_an_unfinished_run_is_called_so(tmp_path):
    page = Page(write_report([write_run(tmp_path / "run", steps=4, asked=6)]))
    assert "unfinished: step 4 of 6" in page.text
    assert "step 0 only" in page.text


def test_a_run_with_nothing_but_its_first_evaluation(tmp_path):
    page = Page(write_report([write_run(tmp_path / "run", steps=0)]))
    assert page.data["completions"] == []
    assert "None were logged" in page.text
    assert [panel["title"] for panel in page.data["panels"]] == ["accuracy", "time by phase"]
    assert not (tmp_path / "run" / "completions.parquet").exists()


def test_an_empty_log_and_no_run_json(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    page = Page(write_report([tmp_path]))
    assert page.data["panels"] == []
    assert "there is no run.json" in page.text


def test_several_runs_lie_over_each_other(tmp_path):
    first = write_run(tmp_path / "a" / "run", settings={"noise": {"sigma_start": 0.02}})
    second = write_run(tmp_path / "b" / "run", steps=4)
    third = write_run(tmp_path / "other", info=False)
    target = write_report([first, second, third], tmp_path / "new" / "page.html")
    assert target == tmp_path / "new" / "page.html"
    page = Page(target)
    assert page.data["runs"] == ["a/run", "b/run", "other"]
    assert [trace["run"] for trace in page.panel("reward")["traces"]] == [0, 1, 2]
    assert {record["run"] for record in page.data["completions"]} == {0, 1, 2}
    marked = re.findall(r'<tr class="marked"><td><code>([^<]+)</code>', target.read_text(encoding="utf-8"))
    assert marked == ["output_dir", "noise.sigma_start"]


def test_a_config_row_that_is_not_the_default_is_marked(tmp_path):
    path = write_report([write_run(tmp_path / "run", asked=6, settings={"loss": {"type": "gspo"}})])
    marked = re.findall(r'<tr class="marked"><td><code>([^<]+)</code>', path.read_text(encoding="utf-8"))
    assert marked == ["output_dir", "steps", "loss.type"]


def test_many_completions_are_thinned_evenly(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=10, asked=10)
    monkeypatch.setattr(html, "MAX_COMPLETIONS", 4)
    page = Page(write_report([folder]))
    assert [record["step"] for record in page.data["completions"]] == [1, 4, 7, 10]
    assert "4 of 10 logged completions" in page.text
    monkeypatch.setattr(html, "MAX_CHARACTERS", 300)  # of 1,800 or so
    assert len(Page(write_report([folder])).data["completions"]) == 2


def test_folders_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
        write_report([tmp_path])
    folder = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="named twice"):
        write_report([folder, folder.parent / "." / "run"])


def test_the_command_writes_page_and_parquet(tmp_path):
    folder = write_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(folder / "report.html")
    assert {"report.html", "completions.parquet"} <= {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------- panels and the picture


def test_panels_are_drawn_where_they_belong():
    titles = [panel.title for panel in PANELS]
    assert len(set(titles)) == len(titles)
    assert sum(panel.picture for panel in PANELS) % 3 == 0  # the picture has three columns
    assert not any(panel.stacked and panel.smooth for panel in PANELS)


def test_expand_fills_in_reward_functions():
    curves = (Curve("rewards/{function}/mean", "{function}"), Curve("kl", "KL"), Curve("loss", "loss"))
    names = {"rewards/b: v2/mean", "rewards/a/mean", "rewards/a/std", "loss", "rewards/a/b/mean"}
    assert [(curve.metric, curve.label) for curve in expand(curves, names)] == [
        *(("rewards/a/mean", "a"), ("rewards/b: v2/mean", "b: v2"), ("loss", "loss"))
    ]


def test_running_mean_spans_a_tenth_and_passes_over_gaps():
    assert running_mean([1.0] * 19) is None
    values = [float(i) for i in range(20)]
    values[5] = None
    means = running_mean(values)
    assert means[0] == 0.5 and means[10] == 10.0 and means[19] == 18.5
    assert means[5] == 5.0 and means[4] == 3.5
    assert running_mean([None] * 20) == [None] * 20


@pytest.mark.parametrize(
    ("span", "scale"), [(1.5, "linear"), (9.0, "linear"), (20.0, "log"), (1e4, "log"), (1e12, "log")]
)
def test_labels_of_an_axis_fit_its_span(span, scale):
    figure, axis = pyplot.subplots(figsize=(4, 3))
    axis.plot([0, 1], [2.3e-4, 2.3e-4 * span])
    scale_by_span(axis, span)
    assert axis.get_yscale() == scale
    figure.canvas.draw()
    low, high = axis.get_ylim()
    labels = [t for t in axis.yaxis.get_ticklabels(which="both") if t.get_text() and low <= t.get_position()[1] <= high]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert len(boxes) >= 3 and len({label.get_text() for label in labels}) == len(labels)
    assert all(below.y1 < above.y0 for below, above in pairwise(boxes))
    pyplot.close(figure)


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_a_picture_is_drawn_of_whatever_there_is(tmp_path, steps):
    path = plot_run(write_run(tmp_path / "run", steps=steps, asked=max(steps, 1)))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_empty_log(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run(tmp_path).stat().st_size > 10_000
