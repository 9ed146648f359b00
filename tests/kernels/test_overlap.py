"""What Triton kernels that run beside products want, told to the driver as Triton loads them. No GPU needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from triton import knobs

from qerl.kernels import overlap
from qerl.kernels.slots import fused


def test_a_kernel_of_ours_prefers_shared_memory_once_loaded(monkeypatch):
    asked: list[int | None] = []
    monkeypatch.setattr(overlap, "prefer_shared_memory", lambda function, device: asked.append(function.value))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert overlap._prefer_shared_memory in knobs.runtime.kernel_load_end_hook.calls
    for function, name in ((7, fused._locate_kernel.__name__), (8, "_of_another_library")):
        knobs.runtime.kernel_load_end_hook(None, function, name, {}, "")
    assert asked == [7]


@pytest.mark.parametrize("hook", ["None", "print"])
def test_who_has_no_chain_of_hooks_has_the_kernels(hook):
    """A hook that somebody has set in the place of Triton's chain stays theirs."""
    code = f"""
from triton import knobs
knobs.runtime.kernel_load_end_hook = {hook}
import qerl.kernels.overlap
assert knobs.runtime.kernel_load_end_hook is {hook}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
