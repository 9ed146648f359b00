"""Triton kernels without a GPU: run in the interpreter, and compiled for GPUs that are not there.

Triton reads TRITON_INTERPRET when a kernel is defined, so interpreted tests run in a pytest of their own: they take
their device from DEVICES, and one test of each file calls `run_interpreted`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
outer_run = pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = [
    GPU,
    pytest.param(
        "cpu", id="interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in test_in_tritons_interpreter")
    ),
]
CAPABILITIES = (80, 90, 120)
_MEMORY = re.compile(r"\b(LDG|STG|LDGSTS|LD|ST|ATOMG?|REDG?|UBLKCP)\b")
SHARED_MEMORY = 99 << 10
"""Bytes that a block can have on the GPUs that have least (8.6, 8.9, 12.0)."""


def run_interpreted(path: str) -> None:
    """All tests of a file that have the device `interpreter`."""
    chosen = ["-k", "interpreter and not tritons", path]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " skipped" not in run.stdout, run.stdout


def compile_launches(
    capability: int, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], *, reads_ahead: Sequence[str] = ()
) -> list[Any]:
    """Compile what `call` launches (on CPU tensors) for a compute capability: the kernels, not run.

    From 9.0 on those of overlap.py are compiled to overlap, and must wait before they touch memory; those of the names
    `reads_ahead` may read before, and must. All of overlap.py are known by the name that they are loaded under.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from qerl.kernels.overlap import _overlapping

    class Absent:
        def get_current_device(self) -> int:
            return capability  # the key of Triton's table of compiled kernels

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    compiled, run = [], JITFunction.run

    def warm_up(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        overlaps = "OVERLAP" in kwargs and capability >= 90
        if overlaps:
            kwargs |= {"OVERLAP": True, "launch_pdl": True}
        compiled.append(run(self, *args, warmup=True, **kwargs))
        assert ("OVERLAP" in kwargs) == (compiled[-1].name in _overlapping)
        if overlaps:
            check_waits_first(compiled[-1].asm["sass"], reads_ahead=self.__name__ in reads_ahead)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_active", Absent())
        patch.setattr(JITFunction, "run", warm_up)
        call()
    return compiled


def check_waits_first(machine_code: str, *, reads_ahead: bool = False) -> None:
    """Before the wait for the kernel before (ACQBULK) nothing is written to memory, nor, unless it may be, read."""
    before, _, after = machine_code.partition("ACQBULK")
    early = set(_MEMORY.findall(before))
    assert _MEMORY.search(after) and early == ({"LDG"} if reads_ahead else set()), machine_code
