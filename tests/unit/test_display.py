"""The display: what it shows, that text cannot steer the terminal, and that it never breaks a run."""

from __future__ import annotations

import io
import logging
import math
import time

import pytest
from rich.console import Console

from qerl.display import ByteProgress, Column, Display, step_line
from qerl.live import LiveView, clock, printable, sparkline

METRICS = {
    "step": 3,
    "reward": 1.25,
    "accuracy": 0.5,
    "entropy": 0.4,
    "noise/sigma": 1e-2,
    "mismatch_kl": 2.5e-4,
    "frac_reward_zero_std": 0.25,
    "completions/clipped_ratio": 0.125,
    "completions/mean_length": 187.0,
    "clip_ratio/region_mean": 0.002,
    "tokens_per_second": 4664.0,
    "memory/rss": 1.5e9,
    "learning_rate": 3e-5,
    "time/step": 6.5,
}
RECORD = {
    "step": 3,
    "prompt": "What is 2 + 2?",
    "completion": "It is [bold]4[/bold].",
    "reward": 1.5,
    "rewards": {"format": 1.0, "correctness": None},
    "tokens": 7,
    "finish_reason": "stop",
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def size(monkeypatch):
    """Sets the terminal's size."""

    def set_size(width: int, height: int) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", str(height))

    monkeypatch.setenv("TERM", "xterm-256color")
    set_size(100, 40)
    return set_size


def panel(view: LiveView, width: int, height: int) -> list[str]:
    """The panel as lines of plain text."""
    view.console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    view.console.print(view._panel())
    return view.console.file.getvalue().splitlines()


# ---------------------------------------------------------------- plain lines


def test_without_a_terminal_there_is_one_line_a_step():
    stream = io.StringIO()
    with Display(10, stream=stream) as display:
        display.message("resumed")
        display.phase("rollout", 1, 2)
        display.completion(RECORD)
        display.step(METRICS)
        display.step(METRICS | {"step": 4})
    resumed, *legend, third, fourth = stream.getvalue().splitlines()
    assert resumed == "resumed"
    assert [line.split(":")[0].strip() for line in legend] == ["acc", "entropy", "sigma", "mismatch", "same", "cut"]
    assert third == (
        "step  3/10  reward 1.250  acc 50%  entropy 0.4  sigma 0.01  mismatch 2.5e-04  same 25%  cut 12%  6.5 s"
    )
    assert fourth.startswith("step  4/10")  # the legend is not repeated


def test_a_line_fits_120_columns():
    assert len(step_line(METRICS | {"step": 99, "entropy": 0.237, "noise/sigma": 0.0047}, 100, left=3599)) <= 120


def test_metrics_that_a_step_lacks_are_left_out():
    stream = io.StringIO()
    with Display(10, stream=stream) as display:
        display.step({"step": 1, "reward": math.nan, "accuracy": None, "eval/accuracy": 0.25})
    assert stream.getvalue().splitlines()[-1] == "step  1/10  eval 25.0%"


def test_quiet_prints_warnings_and_the_last_step():
    stream = io.StringIO()
    with Display(4, quiet=True, stream=stream) as display:
        display.message("resumed")
        display.step({"step": 3, "reward": 0.5})
        display.warning("the gradient is not finite")
        display.step({"step": 4, "reward": 0.75})
    assert stream.getvalue() == "the gradient is not finite\nstep 4/4  reward 0.750\n"


def test_time_left_follows_the_pace_of_the_steps_seen(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    display = Display(10, stream=io.StringIO())
    display.step({"step": 4})  # the first one after a resume: no pace yet
    assert display._left() is None
    now += 20
    display.step({"step": 6})
    assert display._left() == 40  # 4 steps of 10 s
    now += 3
    assert display._left() == 37


def test_a_slow_first_step_is_not_in_the_pace(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    display = Display(10, stream=io.StringIO())
    display.step({"step": 0})  # the evaluation before training
    for step, seconds in ((1, 60), (2, 2), (3, 2)):
        now += seconds
        display.step({"step": step})
    assert display._left() == 14  # 7 steps of 2 s


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (89.6, "1:30"), (3599, "59:59"), (7509, "2:05:09")])
def test_clock(seconds, text):
    assert clock(seconds) == text


# ---------------------------------------------------------------- it never breaks a run


class Failing:
    """A view of which every method raises."""

    def __getattr__(self, name):
        raise ZeroDivisionError("in the view")


def test_a_view_that_fails_is_told_once_and_plain_lines_go_on(capsys):
    stream = io.StringIO()
    display = Display(10, stream=stream)
    display._view = Failing()
    with display:
        display.step({"step": 1, "reward": 0.5})
        display.step({"step": 2, "reward": 0.5})
    assert stream.getvalue() == "step  1/10  reward 0.500\nstep  2/10  reward 0.500\n"
    assert capsys.readouterr().err == (
        "the display failed (ZeroDivisionError: in the view); plain lines from here on\n"
    )


def test_a_stream_that_fails_ends_in_silence(capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with Display(10, stream=Closed()) as display:
        display.step(METRICS)
        display.warning("lost")
    assert capsys.readouterr().err.count("no more output from here on") == 1


def test_a_broken_panel_gives_the_terminal_back(size, monkeypatch):
    stream = Terminal()
    with Display(10, stream=stream) as display:
        display.step(METRICS)
        monkeypatch.setattr(LiveView, "_figures", lambda *_: 1 / 0)
        display.step(METRICS | {"step": 4})
        display.message("still here")
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")  # the cursor is shown again
    assert stream.getvalue().endswith("still here\n")
    assert "step  4/10  reward 1.250" in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(size, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Display(10, stream=stream) as display:
        display.step({"step": 1, "reward": 0.5})
    assert stream.getvalue() == "step  1/10  reward 0.500\n"


# ---------------------------------------------------------------- the panel


def test_the_panel_shows_what_a_step_has(size):
    view = LiveView(10, "runs/demo", Terminal())
    view.step({"step": 0, "eval/accuracy": 0.1, "eval/accuracy_greedy": 0.2}, None)
    view.completion(RECORD)
    view.step(METRICS | {"eval/accuracy": 0.3}, 70.0)
    view.phase("rollout", 96, 128, 70.0)
    view.warning("look out\nsecond line")
    text = "\n".join(panel(view, 100, 40))
    for shown in (
        *("qerl · runs/demo", "step 3/10", "1:10 left", "rollout", "96/128", "1.250", "50.0%", "0.400", "1.0e-02"),
        *("2.5e-04", "25% of groups", "12.5%", "187 tokens", "4,664 tok/s", "1.50 GB", "3.0e-05", "0.20%"),
        *("10.0% → 30.0% @ 3", "20.0% @ 0", "What is 2 + 2?", "It is [bold]4[/bold].", "! look out"),
        "completion, step 3 · reward 1.50 (format 1, correctness none) · 7 tokens",
    ):
        assert shown in text


def test_another_phase_is_drawn_at_once(size, monkeypatch):
    """Rewards may take minutes, in which nothing else is told."""
    view = LiveView(10, "runs/demo", Terminal())
    drawn = []
    monkeypatch.setattr(view.live, "refresh", lambda: drawn.append(view.now))
    view.drawn = time.monotonic() + 1000  # a moment ago
    view.phase("rollout", 1, 8, None)
    view.phase("rollout", 8, 8, None)
    view.phase("rewards", 0, 8, None)
    assert drawn[-1] == ("rewards", 0, 8) and ("rollout", 8, 8) not in drawn


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 60), (20, 5), (80, 10)])
def test_the_panel_keeps_to_the_terminal(size, width, height):
    size(width, height)
    view = LiveView(10, "a run with a long name " * 9, Terminal())
    view.completion(RECORD | {"prompt": "word " * 5000, "completion": "日本語 " * 20000})
    view.step(METRICS, None)
    view.warning("a long warning " * 30)
    lines = panel(view, width, height)
    assert max(map(len, lines)) <= width
    if height >= 24:
        assert len(lines) < height


def test_a_long_completion_shows_its_head_and_its_end(size):
    view = LiveView(10, "", Terminal())
    view.completion(RECORD | {"completion": "\n".join(f"line {i}" for i in range(5000)), "finish_reason": "length"})
    text = "\n".join(panel(view, 80, 30))
    assert "line 0 " in text and "line 4999 " in text and "[…]" in text and "cut off" in text


def test_text_cannot_steer_the_terminal(size):
    size(80, 40)
    stream = Terminal()
    evil = "\x1b]0;title\x07\x1b[2J\x9b2Jred \u202eabc\x00\ud800 [link=http://x]y[/link]"
    with Display(2, title=evil, stream=stream) as display:
        display.completion(RECORD | {"prompt": evil, "completion": evil, "rewards": {evil: 1.0}})
        display.step({"step": 1})
        display.message(evil)
        display.warning(evil)
    shown = stream.getvalue()
    assert not any(sign in shown for sign in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x00", "\x07", "\ud800"))
    assert "[link=http://x]y[/link]" in shown


def test_printable_keeps_line_breaks_and_letters():
    assert printable("a\tb\nü 日本\u00a0€\r\x1b[1m") == "a   b\nü 日本 € \ufffd[1m"


def test_sparkline():
    assert sparkline([], 10) == sparkline([1.0], 10) == sparkline([1.0, 2.0], 0) == ""
    assert sparkline([1.0, 1.0, 1.0], 10) == "▁▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 10) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 8, 8], 2) == "▁█"


def test_warnings_of_the_package_go_to_the_panel_while_it_is_up(size, capsys):
    stream, logger = Terminal(), logging.getLogger("qerl.tasks.rewards")
    with Display(2, stream=stream) as display:
        logger.warning("reward %s failed", "mine")
        display.step({"step": 1})
    assert "reward mine failed" in stream.getvalue()
    assert capsys.readouterr().err == ""
    assert logging.getLogger("qerl").propagate and not logging.getLogger("qerl").handlers


def test_an_error_in_the_run_passes_through_and_closes_the_panel(size):
    stream = Terminal()
    with pytest.raises(KeyError), Display(2, stream=stream):
        raise KeyError
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")


def test_a_column_formats_or_is_left_out():
    column = Column("reward", "reward", "{:.1f}")
    assert column.text({"reward": 1}) == "1.0"
    assert column.text({}) is column.text({"reward": None}) is column.text({"reward": math.nan}) is None


@pytest.mark.parametrize(("total", "unit"), [(4_000_000_000, "GB"), (4_000_000, "MB")])
def test_progress_by_bytes(monkeypatch, total, unit):
    """A resumed run begins in the middle: its rate is that of what it does itself."""
    times = iter([100.0, 101.0, 110.0, 114.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    stream = io.StringIO()
    progress = ByteProgress(stream)
    for share in (0.5, 0.55, 0.75, 1.0):
        progress(int(share * total), total)
    assert stream.getvalue().splitlines() == [  # the second came too soon
        f"2.00 of 4.00 {unit}",
        f"3.00 of 4.00 {unit}, 0.10 {unit}/s, 0:10 left",
        f"4.00 of 4.00 {unit}, 0.14 {unit}/s, 0:00 left",
    ]
