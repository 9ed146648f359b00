"""The math worker: hostile answers neither hang nor fill it, and each failure is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qerl.tasks.math_pool import WORKER, MathPool

SLOW = [
    *(rf"{i}^{{9^{{9^{{9^{{9}}}}}}}}" for i in range(2, 52)),
    *(rf"\sum_{{k=1}}^{{10^{{10}}}} \frac{{1}}{{k^{{{i}}}}}" for i in range(2, 52)),
    *(rf"(x+{i})^{{100000}}(y+1)^{{9999}}" for i in range(1, 51)),
    *(rf"\int_0^1 \frac{{\sin(x^{{{i}}})e^{{x^x}}}}{{\ln(x+{i})}}dx" for i in range(1, 51)),
]


@pytest.fixture
def pool():
    pool = MathPool(workers=2)
    yield pool
    pool.close()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_batch_of_answers_that_hang_ends_within_ten_seconds_and_is_counted(pool, caplog):
    assert len(set(SLOW)) == 200
    start = time.monotonic()
    verdicts = pool.compare([(answer, "2x") for answer in SLOW])
    assert time.monotonic() - start < 10
    assert verdicts == [None] * 200
    assert sum(pool.failures.values()) == 200
    assert "could not compare 200 of 200 answers (time: 200), such as" in caplog.text
    assert pool.compare([(r"2\sqrt{3}", r"\sqrt{12}")]) == [True]  # and it goes on


def test_a_few_that_hang_cost_the_others_nothing(pool):
    pairs = [(f"{i}x+x^2", f"x^2+{i}x") for i in range(40)]
    pairs[::4] = [(answer, "2x") for answer in SLOW[::20]]
    assert pool.compare(pairs) == [None, True, True, True] * 10


@pytest.mark.slow
def test_a_thousand_hostile_answers_leave_memory_flat(pool):
    nested = [("(" * n + "x" + ")" * n, "2x") for n in range(100, 500)]
    large = [(rf"10^{{{n}}}!", "2x") for n in range(8, 208)]
    garbage = [(rf"\frac{{{i}}}{{\begin{{matrix}} \\ & {{", "2x") for i in range(200)]
    pool.compare([("x", "2x")])
    before = resident_bytes(pool._process.pid)
    worker = pool._process.pid
    for batch in (nested, large, garbage, [(answer, "3x") for answer in SLOW]):
        pool.compare(batch)
        assert resident_bytes(worker) < before + 20e6
    assert pool._process.pid == worker
    assert not Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    assert pool.compare([("x+x", "2x"), ("x", "2x")]) == [True, False]


@pytest.mark.slow
def test_memory_is_limited():
    # 2^(10^10) has 1.25e9 bytes; a child may have 1.07e9
    code = (
        "import resource, sys; sys.path.append(sys.argv[1]); import math_worker;"
        "math_worker.judge([('2^{10^{10}}-x', '2x')], timeout_s=20, budget_s=20, workers=1);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(WORKER.parent)], capture_output=True, check=True, text=True)
    assert 2**27 < int(done.stdout) < 2**30


def test_nothing_is_run_as_python(pool, tmp_path):
    target = tmp_path / "made"
    attack = f"__import__('os').system('touch {target}')"
    assert pool.compare([(attack, "2")])[0] in (False, None)
    assert not target.exists()


def test_a_verdict_is_kept_and_a_failure_too(pool):
    pairs = [(SLOW[0], "2x"), ("x+x", "2x")]
    assert pool.compare(pairs) == [None, True]
    start = time.monotonic()
    assert pool.compare(pairs * 50) == [None, True] * 50
    assert time.monotonic() - start < 0.1
    assert sum(pool.failures.values()) == 51


def test_a_worker_that_dies_is_replaced_and_counted(pool):
    assert pool.compare([("x+x", "2x")]) == [True]
    os.kill(pool._process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (pool._process.pid, signal.SIGKILL))
    killer.start()
    assert pool.compare([("x+x+x", "3x")]) == [None]
    killer.join()
    assert pool.failures == {"died": 1}
    assert pool.compare([("x+x+x+x", "4x")]) == [True]


def test_it_works_off_the_main_thread_and_from_several(pool):
    results = {}

    def ask(i):
        results[i] = pool.compare([(f"{i}x+x", f"{i + 1}x"), (f"{i}x+x", f"{i}x")])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [True, False] for i in range(2, 6)}


def test_the_worker_ends_when_its_owner_does(pool):
    pool.compare([("x", "2x")])
    process = pool._process
    process.stdin.close()
    assert process.wait(timeout=10) == 0
