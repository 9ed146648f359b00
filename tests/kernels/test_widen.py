"""widen: the Triton kernel on a GPU, and in Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "m, k, columns, room", [(1, 64, 64, 32), (70, 80, 128, 8), (3, 4100, 4160, 192), (0, 64, 64, 8)]
)
def test_a_copy_with_more_columns(m, k, columns, room, device):
    from qerl.kernels.w4a16.widen import widened

    x = torch.randn(m, k + 16, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)[:, :k]
    both = widened(x, columns, room)
    assert both.shape == (m, columns + room) and both.is_contiguous()
    assert torch.equal(both[:, :k], x) and not both[:, k:columns].any()


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_for(capability, monkeypatch):
    from qerl.kernels.w4a16.widen import widened

    x = torch.zeros(100, 256, dtype=torch.bfloat16)
    assert len(compile_launches(capability, monkeypatch, lambda: widened(x, 256, 32))) == 1
