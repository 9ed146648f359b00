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
    rows, lengths = locate_reference(table, torch.tensor([15, 16, 0, 1]), 16)  # two tokens of each
    assert rows.tolist() == [7 * 16 + 15, 8 * 16, 3 * 16, 3 * 16 + 1] and lengths.tolist() == [16, 17, 1, 2]
    state = progress([1, 2, 0, 1], limits=[2, 3, 9, 9], ended=[False, False, False, True])
    advance_reference_(state, torch.tensor([5, 6, 42, 42]), *torch.rand(2, 4), torch.tensor([41, 42]))
    assert state.counts.tolist() == [2, 3, 1, 1]  # the last had ended, the others go on
    assert state.finished.tolist() == [True, True, True, True]  # by length, by length, by EOS, before
    assert drawn_since(state, [1, 2, 0, 1]) == [[5], [6], [42], []]


def test_guesses_by_hand():
    """Five sequences that are fed a token and three guesses: what is drawn after a wrong guess is worth nothing."""
    fed = torch.tensor([[1, 5, 6, 7], [1, 5, 9, 7], [1, 9, 6, 7], [1, 5, 42, 7], [1, 5, 6, 7]])
    drawn = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 42, 7, 8], [5, 6, 7, 8]])
    state = progress([1, 1, 1, 1, 3], limits=[9, 9, 9, 9, 5], ended=[False] * 5)
    logprobs, entropies = torch.rand(2, 20)
    advance_reference_(state, drawn.flatten(), logprobs, entropies, torch.tensor([42]), fed)
    assert drawn_since(state, [1, 1, 1, 1, 3]) == [[5, 6, 7, 8], [5, 6], [5], [5, 42], [5, 6]]
    assert state.tokens.tolist() == [8, 6, 5, 42, 6]
    assert state.finished.tolist() == [False, False, False, True, True]  # by EOS, by length
    assert torch.equal(state.drawn_logprobs[1, 1:3], logprobs[4:6])
    assert torch.equal(state.drawn_entropies[1, 1:3], entropies[4:6]) and not state.drawn_logprobs[1, 3:].any()


def drawn_since(state, counts):
    """What each sequence's line has gained; its position and the line's length are told as well."""
    assert torch.equal(state.lengths[state.lines], state.positions + 1)
    firsts = (state.positions - state.counts + 1).tolist()
    rows = zip(firsts, counts, state.counts.tolist(), state.lines.tolist(), strict=True)
    return [state.texts[line, first + old : first + new].tolist() for first, old, new, line in rows]


def progress(counts, *, limits, ended, columns=12, device="cpu"):
    """Sequences behind 100 tokens of prompt, with lines in any order."""
    b, generator = len(counts), torch.Generator().manual_seed(len(counts))
    positions, lines = torch.tensor(counts) + 99, torch.randperm(b + 3, generator=generator)[:b]
    lengths = torch.zeros(b + 3, dtype=torch.int64)
    lengths[lines] = positions + 1
    wide = torch.zeros(2, b, columns + 3)
    return Progress(
        torch.zeros(b, dtype=torch.int64, device=device),
        positions.to(device),
        torch.tensor(counts, device=device),
        torch.tensor(limits, device=device),
        lines.to(device),
        torch.tensor(ended, device=device),
        *wide.to(device)[..., :columns],
        torch.zeros(b + 3, 130, dtype=torch.int32, device=device)[:, :120],
        lengths.to(device),
    )


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("b", [1, 32, 77])
@pytest.mark.parametrize("each, eos", [(1, []), (1, [3]), (1, [3, 9, 11]), (2, [3]), (8, [3, 9])])
def test_the_kernels_are_the_reference(b, each, eos, device):
    from qerl.kernels.slots.fused import advance_fused_, locate_fused

    generator = torch.Generator().manual_seed(b)
    counts = torch.randint(0, 4, (b,), generator=generator)
    limits = (counts + torch.randint(1, 9, (b,), generator=generator)).tolist()
    ended = (torch.rand(b, generator=generator) < 0.3).tolist()
    states = [progress(counts.tolist(), limits=limits, ended=ended, device=device) for _ in range(2)]
    tokens = torch.randint(0, 12, (b, each), generator=generator)
    fed = tokens.roll(1, 1)  # guesses that are right, but some
    fed = torch.where(torch.rand(b, each, generator=generator) < 0.2, fed + 1, fed).to(device)
    drawn = (tokens.flatten().to(device), *torch.rand(2, b * each, generator=generator).to(device))
    ids = torch.tensor(eos, dtype=torch.int64, device=device)
    for state, advance in zip(states, (advance_reference_, advance_fused_), strict=True):
        advance(state, *drawn, ids, fed if each > 1 else None)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    gained = states[0].counts - counts.to(device)
    assert int(gained.max()) <= each and (b < 32 or len(gained.unique()) > min(each, 4))

    table = torch.randint(0, 1000, (b, 20), generator=generator).to(device)[:, :9]
    first = torch.randint(0, 9 * 16 - each, (b, 1), generator=generator)
    positions = (first + torch.arange(each)).flatten().to(device)
    found = locate_fused(table, positions, 16)
    assert all(torch.equal(a, b) for a, b in zip(found, locate_reference(table, positions, 16), strict=True))


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("each", [1, 8])
def test_the_kernels_compile(each, capability, monkeypatch):
    from qerl.kernels.slots.fused import advance_fused_, locate_fused

    state = progress([1] * 40, limits=[5] * 40, ended=[False] * 40)
    fed = torch.zeros(40, each, dtype=torch.int64)
    drawn = (fed.flatten(), *torch.rand(2, 40 * each))

    def launches() -> None:
        locate_fused(torch.zeros(40, 9, dtype=torch.int64), fed.flatten(), 16)
        advance_fused_(state, *drawn, torch.tensor([3, 9]), fed)

    assert len(compile_launches(capability, monkeypatch, launches)) == 2
