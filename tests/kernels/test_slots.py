"""The sequences' small state: the Triton kernels against torch's operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.slots import Progress
from qerl.kernels.slots.reference import advance_reference_, locate_reference


def test_the_reference_by_hand():
    table = torch.tensor([[7, 8, 9], [3, 4, 5]])
    rows, lengths = locate_reference(table, torch.tensor([17, 0]), 16)
    assert rows.tolist() == [8 * 16 + 1, 3 * 16] and lengths.tolist() == [18, 1]
    state = progress([1, 2, 0, 1], limits=[2, 3, 9, 9], ended=[False, False, False, True])
    advance_reference_(state, torch.tensor([5, 6, 42, 42]), *torch.rand(2, 4), torch.tensor([41, 42]))
    assert state.counts.tolist() == [2, 3, 1, 1]  # the last had ended, the others go on
    assert state.finished.tolist() == [True, True, True, True]  # by length, by length, by EOS, before
    assert [row[c] for row, c in zip(state.drawn_tokens.tolist(), [1, 2, 0, 1], strict=True)] == [5, 6, 42, 42]


def progress(counts, *, limits, ended, columns=12, device="cpu"):
    b = len(counts)
    wide = torch.zeros(b, columns + 3, dtype=torch.int64)
    return Progress(
        torch.zeros(b, dtype=torch.int64, device=device),
        torch.tensor(counts, device=device) + 100,
        torch.tensor(counts, device=device),
        torch.tensor(limits, device=device),
        torch.tensor(ended, device=device),
        *(wide.to(dtype).to(device)[:, :columns] for dtype in (torch.int64, torch.float32, torch.float32)),
    )


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("b", [1, 32, 77])
@pytest.mark.parametrize("eos", [[], [3], [3, 9, 11]])
def test_the_kernels_are_the_reference(b, eos, device):
    from qerl.kernels.slots.fused import advance_fused_, locate_fused

    generator = torch.Generator().manual_seed(b)
    counts = torch.randint(0, 8, (b,), generator=generator)
    limits = (counts + torch.randint(1, 3, (b,), generator=generator)).tolist()
    ended = (torch.rand(b, generator=generator) < 0.3).tolist()
    states = [progress(counts.tolist(), limits=limits, ended=ended, device=device) for _ in range(2)]
    tokens = torch.randint(0, 12, (b,), generator=generator).to(device)
    drawn = (tokens, *torch.rand(2, b, generator=generator).to(device))
    ids = torch.tensor(eos, dtype=torch.int64, device=device)
    advance_reference_(states[0], *drawn, ids)
    advance_fused_(states[1], *drawn, ids)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))

    table = torch.randint(0, 1000, (b, 20), generator=generator).to(device)[:, :9]
    positions = torch.randint(0, 9 * 16, (b,), generator=generator).to(device)
    found = locate_fused(table, positions, 16)
    assert all(torch.equal(a, b) for a, b in zip(found, locate_reference(table, positions, 16), strict=True))


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_compile(capability, monkeypatch):
    from qerl.kernels.slots.fused import advance_fused_, locate_fused

    state = progress([1] * 40, limits=[5] * 40, ended=[False] * 40)
    drawn = (torch.zeros(40, dtype=torch.int64), *torch.rand(2, 40))

    def launches() -> None:
        locate_fused(torch.zeros(40, 9, dtype=torch.int64), state.positions, 16)
        advance_fused_(state, *drawn, torch.tensor([3, 9]))

    assert len(compile_launches(capability, monkeypatch, launches)) == 2
