"""The process behind the math grader: compares LaTeX by math-verify, and cannot be hung by what it compares.

    stdin:  {"pairs": [[answer, reference], ...], "timeout_s": 2.0, "budget_s": 7.0, "workers": 2}   one line a batch
    stdout: ["equal", "different", "time", ...]                                                      one outcome a pair

Started as a program of its own (`python math_worker.py`), so that it holds neither CUDA nor threads and may fork. It
imports sympy once and forks a child for every MAX_PAIRS_A_CHILD pairs, so that nothing they do is left behind. A child
is killed by the kernel, not by Python: by SIGPROF when the CPU time of a pair is spent, by SIGALRM when too much time
has passed, whatever it is doing; and it cannot take more memory than ADDRESS_SPACE_BYTES. The pairs that it did not
come to go to the next child. What sympy catches itself when memory runs out is not seen here: "different".

Time of a batch is shared out evenly. Each pair gets the same time in a first round, that spends half the budget if all
pairs hang, and what did not end gets more in a second one, at most `timeout_s`. A few answers that hang cost the others
nothing; a batch of nothing else ends when its budget does.

Only LaTeX is parsed (a grammar, no `eval`), so text of a model is never run as Python.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Basic, Float, MatrixBase, Rational

ADDRESS_SPACE_BYTES = 1 << 30  # python with sympy takes a quarter of it
MAX_PAIRS_A_CHILD = 16  # caches of the parser and of sympy warm up within a child: 7 ms a pair, not 20
MIN_SLICE_S = 0.05  # CPU time below which hardly any comparison ends
WALL_PER_CPU = 10.0  # a child that shares its core with others may take this much longer than its CPU time

OUTCOMES = (
    "equal",
    "different",
    "reference",
)  # as a child writes them, one byte each; killed by a timer: "time", else "memory"
NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="last", equations=False
)
# Compared once before the first fork: a child inherits the parser's tables and sympy's caches.
WARM_UP = (
    (r"\frac{\pi}{2}+\sqrt{12}x^2", r"2\sqrt{3}x^2+\frac{\pi}{2}"),
    (r"\left(3,\frac{1}{2}\right)", r"(3, 0.5)"),
    (r"[1,2)\cup(3,\infty)", r"x \le 2"),
    (r"(x+1)(x-1)", r"x^2-1"),
    (r"\cos\frac{\pi}{6}", r"\frac{\sqrt{3}}{2}"),
)


def compare(answer: str, reference: str) -> str:
    """Return an outcome: "equal", "different", or "reference" where the reference cannot be parsed.

    An answer that is no LaTeX, or cannot be compared with the reference, is different. Decimals are exact: 0.333333 is
    not 1/3, and 3.14 is not pi.
    """
    try:
        expected = _parse(reference)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # whatever a parser of arbitrary text raises
        return "reference"
    try:
        return "equal" if verify(expected, _parse(answer), timeout_seconds=None, raise_on_error=True) else "different"
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return "different"


def _parse(text: str) -> Any:
    latex = normalize_latex(text, config=NORMALIZATION)
    expression = latex2sympy(
        latex, is_real=not should_treat_as_complex(latex), convert_degrees=False, normalization_config=None
    )
    if not isinstance(expression, Basic | MatrixBase):
        raise ValueError("not one expression")
    # math-verify rounds where a float is compared; a fraction is compared as it is
    floats = expression.atoms(Float)
    return expression.xreplace({number: Rational(str(number)) for number in floats}) if floats else expression


def judge(pairs: Sequence[tuple[str, str]], *, timeout_s: float, budget_s: float, workers: int) -> list[str]:
    """Return the outcome of each pair; those that the time did not suffice for are "time"."""
    deadline = time.monotonic() + budget_s
    outcomes = ["time"] * len(pairs)
    todo = list(range(len(pairs)))
    given_s = 0.0
    for spend in (0.5, 0.9):
        slice_s = spend * (deadline - time.monotonic()) * workers / max(len(todo), 1)
        slice_s = max(min(slice_s, timeout_s), MIN_SLICE_S)
        if slice_s <= given_s:
            break
        for index, outcome in _round(pairs, todo, slice_s, deadline, workers):
            outcomes[index] = outcome
        todo = [index for index in todo if outcomes[index] == "time"]
        given_s = slice_s
    return outcomes


def _round(
    pairs: Sequence[tuple[str, str]], todo: Sequence[int], slice_s: float, deadline: float, workers: int
) -> list[tuple[int, str]]:
    """Give `slice_s` of CPU time to each pair of `todo`, `workers` at a time, until the deadline."""
    waiting, running, ended = deque(todo), dict[int, tuple[list[int], int]](), list[tuple[int, str]]()
    while True:
        while waiting and len(running) < workers and time.monotonic() < deadline:
            size = min(MAX_PAIRS_A_CHILD, -(-len(waiting) // workers))
            chunk = [waiting.popleft() for _ in range(size)]
            pid, results = _fork([pairs[index] for index in chunk], slice_s, deadline)
            running[pid] = chunk, results
        if not running:
            return ended
        pid, status = os.waitpid(-1, 0)  # ends: every child has a timer
        chunk, results = running.pop(pid)
        done = os.read(results, MAX_PAIRS_A_CHILD)
        os.close(results)
        ended += [(index, OUTCOMES[code]) for index, code in zip(chunk, done, strict=False)]
        left = chunk[len(done) :]
        if left:
            by_timer = os.waitstatus_to_exitcode(status) in (-signal.SIGPROF, -signal.SIGALRM)
            ended.append((left[0], "time" if by_timer else "memory"))
            waiting.extendleft(reversed(left[1:]))


def _fork(pairs: Sequence[tuple[str, str]], slice_s: float, deadline: float) -> tuple[int, int]:
    """Start a child that writes one byte a pair into a pipe; returns its process number and the pipe's end to read."""
    results, end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(end)
        return pid, results
    try:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for pair in pairs:
            # The default action of both signals ends the process, in the midst of a long C call too.
            signal.setitimer(signal.ITIMER_PROF, slice_s)
            wall_s = min(WALL_PER_CPU * slice_s, deadline - time.monotonic())
            signal.setitimer(signal.ITIMER_REAL, max(wall_s, 1e-3))
            os.write(end, bytes([OUTCOMES.index(compare(*pair))]))
    finally:
        os._exit(0)


def main() -> None:
    """Serve batches until stdin ends."""
    logging.disable()
    replies = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for pair in WARM_UP:
        compare(*pair)
    for line in sys.stdin:
        print(json.dumps(judge(**json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
