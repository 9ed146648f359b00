"""Whether two LaTeX answers are equal, asked of `math_worker.py`: in batches, within a time, from any thread.

    (answer, reference) pairs -> those not asked before -> the worker process -> True, False, or None: it could not tell

None stands for a comparison that ran out of time or memory, for a reference that is no mathematics, or for a worker
that died. Each is counted in `failures` by its reason. Verdicts are kept, failures too: the same answer of other
completions, or of the accuracy after the reward, is not compared again. The worker starts at the first use and ends
with this process; no signal handler is installed and nothing is forked from here, so CUDA and threads are safe.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

WORKER = Path(__file__).with_name("math_worker.py")
TIMEOUT_S = 2.0  # CPU time of one comparison; nearly all take 0.02 to 0.15 s
BUDGET_S = (4.0, 0.015)  # time of a batch: fixed, and for each pair; one that hangs not takes 0.007 of a core
START_S = 60.0  # for the worker to import sympy on a busy machine, and to answer after its budget
MAX_KEPT = 16384  # verdicts

Pair = tuple[str, str]
UNKNOWN = ("time", "memory", "reference", "died")

logger = logging.getLogger(__name__)


class MathPool:
    """The worker process and what it said. `workers`: comparisons at a time, by default one a core, at most 8."""

    def __init__(self, *, workers: int | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.workers = workers or min(len(os.sched_getaffinity(0)), 8)
        self.timeout_s = timeout_s
        self.failures: Counter[str] = Counter()
        """Comparisons without a verdict, by reason: time, memory, reference, died."""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._kept: OrderedDict[Pair, str] = OrderedDict()
        self._lock = threading.Lock()

    def compare(self, pairs: Sequence[Pair]) -> list[bool | None]:
        """Return the verdict of each (answer, reference) pair."""
        with self._lock:
            known = {pair: self._kept[pair] for pair in pairs if pair in self._kept}
            new = [pair for pair in dict.fromkeys(pairs) if pair not in known]
            if new:
                known |= self._ask(new)
                _warn(new, known)
            for pair in known:
                self._kept[pair] = known[pair]
                self._kept.move_to_end(pair)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        outcomes = [known[pair] for pair in pairs]
        self.failures.update(outcome for outcome in outcomes if outcome in UNKNOWN)
        return [None if outcome in UNKNOWN else outcome == "equal" for outcome in outcomes]

    def close(self) -> None:
        """End the worker; the next use starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _ask(self, pairs: list[Pair]) -> dict[Pair, str]:
        fixed, each = BUDGET_S
        budget_s = fixed + each * len(pairs)
        request = {"pairs": pairs, "timeout_s": self.timeout_s, "budget_s": budget_s, "workers": self.workers}
        reply = self._exchange(json.dumps(request).encode() + b"\n", budget_s + START_S)
        if reply is None:
            self.close()
            return dict.fromkeys(pairs, "died")
        return dict(zip(pairs, json.loads(reply), strict=True))

    def _exchange(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send one line and return the line that comes back; None when the worker died or overran its time."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + timeout_s
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
            while not reply.endswith(b"\n"):
                if not select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                    return None
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    return None
                reply += part
        return reply or None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        # -P: the folder of this file holds a module called `numbers`, which must not hide Python's own.
        # A session of its own: Ctrl-C reaches the trainer alone, which then saves and ends.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._owner = os.getpid()
        return self._process


def _warn(pairs: Sequence[Pair], outcomes: dict[Pair, str]) -> None:
    """Show that some comparisons failed, why, and one of them."""
    failed = [pair for pair in pairs if outcomes[pair] in UNKNOWN]
    if failed:
        reasons = Counter(outcomes[pair] for pair in failed)
        logger.warning(
            "the math grader could not compare %d of %d answers (%s), such as %.200r with %.100r",
            *(len(failed), len(pairs), ", ".join(f"{reason}: {n}" for reason, n in reasons.items()), *failed[0]),
        )


@functools.cache
def shared_pool() -> MathPool:
    """Return the pool that all math graders of this process use."""
    pool = MathPool()
    atexit.register(pool.close)
    return pool
