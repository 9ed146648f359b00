"""One self-contained page of one or several runs: `qerl report RUN [RUN ...]`.

    metrics.jsonl, completions.jsonl, run.json -> Run (runs.py) -> panels as data + tables -> page.html filled in

plotly.js is copied into the page, and its content security policy lets it load nothing: it opens offline and sends
nothing. Curves travel as JSON; the page's script draws them in the colours of the reader's scheme, light or dark.
Texts of models and data sets are escaped here, or set as text by the script; they are never markup.

With one run, a panel's colours tell its curves apart; with several, colours are runs and dashes are curves. Of many
completions every n-th is taken, so that the page stays small enough to open; completions.parquet has all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import metadata, resources
from math import ceil
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from qerl.config import RunConfig
from qerl.report.panels import PALETTE, PANELS, Panel, expand, running_mean
from qerl.report.runs import Headline, Run, read_runs
from qerl.rl.log import read_completions, write_completions_parquet

MAX_COMPLETIONS = 1000  # in a page, of each run
MAX_CHARACTERS = 4_000_000  # of their prompts and completions together


def write_report(folders: Sequence[Path], target: Path | None = None) -> Path:
    """Write the page (default: report.html in the first folder) and each run's completions.parquet; returns its path.

    ValueError for a folder that holds no run.
    """
    runs = read_runs(folders)
    for run in runs:
        write_completions_parquet(run.folder)
    target = target or folders[0] / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(runs), encoding="utf-8")
    return target


def render(runs: Sequence[Run]) -> str:
    """The page as one string."""
    names = ", ".join(run.name for run in runs)
    completions = [_completions(run) for run in runs]
    data = {
        "runs": [run.name for run in runs],
        "palette": PALETTE,
        "panels": _panels(runs),
        "completions": [{"run": i, **record} for i, (chosen, _) in enumerate(completions) for record in chosen],
    }
    shown, total = len(data["completions"]), sum(count for _, count in completions)
    parts = {
        "TITLE": escape(f"qerl: {names}"),
        "HEADING": escape(names),
        "STATE": "".join(_state(run, named=len(runs) > 1) for run in runs),
        "HEADLINE": _headline(runs),
        "CONFIG": _config(runs),
        "VERSIONS": _versions(runs),
        "COMPLETIONS_NOTE": escape(_note(shown, total)),
        "PLOTLY": get_plotlyjs(),
        # "<" as an escape: a text that holds "</script>" cannot end the element
        "DATA": json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c"),
    }
    template = resources.files("qerl.report").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub("%%([A-Z_]+)%%", lambda match: parts[match.group(1)], template)


# ---------------------------------------------------------------- curves


def _panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The panels that some run has a curve for, as the page's script reads them."""
    panels = []
    for panel in PANELS:
        curves = expand(panel.curves, set().union(*(run.metrics for run in runs)))
        traces = []
        for number, curve in enumerate(curves):
            for i, run in enumerate(runs):
                if curve.metric not in run.metrics or (panel.counts and not any(run.values(curve.metric))):
                    continue
                steps, values = run.series(curve.metric, panel.scale)
                trace: dict[str, Any] = {
                    "run": i,
                    "curve": number,
                    "label": curve.label,
                    "points": curve.points,
                    "dashed": curve.dashed,
                    "x": steps,
                    "y": [_short(value) for value in values],
                }
                if panel.smooth and not curve.points and (means := running_mean(values)):
                    trace["mean"] = [_short(value) for value in means]
                if curve.low in run.metrics and curve.high in run.metrics:
                    trace["low"], trace["high"] = (run.series(end, panel.scale)[1] for end in (curve.low, curve.high))
                traces.append(trace)
        if traces:
            panels.append(
                {
                    "title": panel.title,
                    "unit": panel.unit,
                    "log": panel.logarithmic,
                    "percent": panel.percent,
                    "stacked": panel.stacked,
                    "counts": panel.counts,
                    "top": _top(panel, runs) if panel.slow_start else None,
                    "curves": len(curves),
                    "traces": traces,
                }
            )
    return panels


def _top(panel: Panel, runs: Sequence[Run]) -> float | None:
    """Where the axis ends, if the start would leave all other steps no height; None: behind the highest."""
    rows = [row for run in runs for row in run.rows]
    sums = [(row["step"], sum(row.get(curve.metric) or 0 for curve in panel.curves)) for row in rows]
    highest = max((value for _, value in sums), default=0)
    later = max((value for step, value in sums if step > 1), default=highest)
    return 1.05 * later if highest > 2 * later else None


def _short(value: float | None) -> float | None:
    """Six significant digits: more cannot be seen, and the page is half as long."""
    return None if value is None else float(f"{value:.6g}")


# ---------------------------------------------------------------- completions


def _completions(run: Run) -> tuple[list[dict[str, Any]], int]:
    """Every n-th completion of a run, with n as small as the page's limits allow, and how many there are."""
    count = characters = 0
    for record in read_completions(run.folder):
        count += 1
        characters += len(record["prompt"]) + len(record["completion"])
    stride = max(1, ceil(count / MAX_COMPLETIONS), ceil(characters / MAX_CHARACTERS))
    return [record for i, record in enumerate(read_completions(run.folder)) if i % stride == 0], count


def _note(shown: int, total: int) -> str:
    if total == 0:
        return "None were logged (log_completions)."
    if shown < total:
        return f"{shown:,} of {total:,} logged completions, evenly spaced; completions.parquet has all of them."
    return f"All {total:,} logged completions; they are in completions.parquet too."


# ---------------------------------------------------------------- tables


def _state(run: Run, *, named: bool) -> str:
    what = []
    if run.num_steps is None:
        what.append(f"step {run.step}; there is no run.json, so the config is not known")
    elif run.finished:
        what.append(f"finished, {run.step} steps")
    else:
        what.append(f"unfinished: step {run.step} of {run.num_steps}")
    if run.config:
        what += [
            run.config["task"]["name"],
            f"{Path(run.config['model']['path']).name} ({run.config['model']['format']})",
        ]
    if run.device:
        what.append(run.device)
    swatch = '<i class="swatch"></i>' if named else ""
    lines = [f"{swatch}{f'<b>{escape(run.name)}</b> · ' if named else ''}{escape(' · '.join(what))}"]
    return "".join(f"<li>{line}</li>" for line in lines + [f"<b>note</b> {escape(note)}" for note in run.notes()])


def _headline(runs: Sequence[Run]) -> str:
    """Cards for one run; for several, a table with a column each."""
    if len(runs) == 1:
        cards = "".join(
            f'<div class="card"><span>{escape(figure.label)}</span>{_figure(figure)}</div>'
            for figure in runs[0].headline()
        )
        return f'<div class="cards">{cards}</div>'
    by_run = [{figure.label: figure for figure in run.headline()} for run in runs]
    labels = dict.fromkeys(label for figures in by_run for label in figures)
    rows = [[escape(label), *(_figure(figures.get(label)) for figures in by_run)] for label in labels]
    return _table(["", *(run.name for run in runs)], [(row, "") for row in rows])


def _figure(figure: Headline | None) -> str:
    return f"<b>{escape(figure.value)}</b><small>{escape(figure.detail)}</small>" if figure else "-"


def _config(runs: Sequence[Run]) -> str:
    """All settings; rows that differ from the default, or between runs, are marked."""
    flat = [_flatten(run.config) for run in runs]
    if not any(flat):
        return "<p>There is no run.json in the folder: the config is not known.</p>"
    defaults = _flatten(RunConfig().model_dump(mode="json"))
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key) for settings in flat]
        known = [value for value, settings in zip(values, flat, strict=True) if settings]
        marked = any(v != known[0] for v in known) if len(runs) > 1 else known[0] != defaults.get(key)
        rows.append(([f"<code>{escape(key)}</code>", *(_value(value) for value in values)], "marked" if marked else ""))
    what = "what the runs differ in" if len(runs) > 1 else "what differs from the defaults"
    switch = f'<label class="switch"><input type="checkbox" id="only-marked" checked> only {what}</label>'
    head = ["setting", *(run.name for run in runs)] if len(runs) > 1 else ["setting", "value"]
    return switch + _table(head, rows, identifier="config")


def _versions(runs: Sequence[Run]) -> str:
    versions = [{**run.versions, **({"device": run.device} if run.device else {})} for run in runs]
    rows = [
        ([escape(name), *(escape(v.get(name, "-")) for v in versions)], "")
        for name in dict.fromkeys(name for v in versions for name in v)
    ]
    drawn = f"<p>Drawn by qerl {metadata.version('qerl')} with plotly {metadata.version('plotly')}.</p>"
    return (_table(["", *(run.name for run in runs)], rows) if rows else "") + drawn


def _table(head: Sequence[str], rows: Sequence[tuple[list[str], str]], *, identifier: str = "") -> str:
    """`head` is escaped here, cells are HTML already; each row comes with its class."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for cells, kind in rows
    )
    return (
        f'<div class="scroll"><table id="{identifier}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"noise": {"per": x}}` as `{"noise.per": x}`; what is a value in RunConfig stays one."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and not prefix:
            flat |= _flatten(value, f"{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _value(value: Any) -> str:
    return "-" if value is None else f"<code>{escape(json.dumps(value, ensure_ascii=False))}</code>"
