"""append: the Triton kernel on a GPU, and in Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, SHARED_MEMORY, compile_launches, needs_triton, outer_run, run_interpreted


def whole(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers, so that float32 sums of products are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "m, k, columns, parts, rank, room",
    [(1, 64, 64, 1, 32, 32), (70, 80, 128, 1, 5, 8), (33, 320, 320, 3, 64, 192), (0, 64, 64, 1, 8, 8)],
)
def test_x_and_u_side_by_side(m, k, columns, parts, rank, room, device):
    from qerl.kernels.w4a16.append import append_inner

    x = whole(m, k + 16, seed=1).to(device)[:, :k]
    a, scaling = whole(parts * rank, columns, seed=2).to(device), torch.arange(1.0, parts + 1, device=device) / 4
    both = append_inner(x, a, scaling, columns, room)
    u = scaling.repeat_interleave(rank) * (x.double() @ a[:, :k].double().T)
    assert both.shape == (m, columns + room) and both.is_contiguous()
    assert torch.equal(both[:, :k], x) and torch.equal(both[:, columns : columns + parts * rank], u.bfloat16())
    assert not both[:, k:columns].any() and not both[:, columns + parts * rank :].any()


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("room", [32, 192])
def test_it_compiles_for(capability, room, monkeypatch):
    from qerl.kernels.w4a16.append import append_inner

    x, a = torch.zeros(100, 256, dtype=torch.bfloat16), torch.zeros(room, 256, dtype=torch.bfloat16)
    launch = [*compile_launches(capability, monkeypatch, lambda: append_inner(x, a, torch.ones(1), 256, room))]
    assert len(launch) == 1 and launch[0].metadata.shared <= SHARED_MEMORY
