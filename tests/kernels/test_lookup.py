"""Guesses that are looked up: the reference against plain Python, the Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.lookup import Texts, look_up
from qerl.kernels.lookup.reference import look_up_reference


def texts_of(lines, *, starts=None, groups=None, columns=None) -> Texts:
    """Lines of Python as Texts; what is behind a line's end looks like a match, and belongs to nobody."""
    columns = columns or max(map(len, lines))
    rows = [list(line) + [line[-1] if line else 7] * (columns - len(line)) for line in lines]
    zeros = [0] * len(lines)
    return Texts(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor([len(line) for line in lines]),
        torch.tensor(starts or zeros),
        torch.tensor(groups or zeros),
    )


def in_python(texts: Texts, line: int, num_tokens: int) -> list[int]:
    """One row, from the words of the contract: all candidates in a list, sorted."""
    if line < 0:
        return [0] * num_tokens
    columns = texts.tokens.tolist()
    known = [columns[j][:n] for j, n in enumerate(texts.lengths.tolist())]
    starts, groups = texts.starts.tolist(), texts.groups.tolist()
    own, candidates = known[line], []
    for j, text in enumerate(known):
        if groups[line] < 0 or groups[j] != groups[line]:
            continue
        for e in range(0 if j == line else max(0, starts[j] - 1), len(text) - 1):
            m = 0
            while m < 4 and m <= e and m < len(own) and text[e - m] == own[len(own) - 1 - m]:
                m += 1
            if m:
                candidates.append((-m, j != line, -e, j))
    if not candidates:
        return [own[-1]] * num_tokens
    *_, e, j = min(candidates)
    follows = known[j][1 - e :]
    while len(follows) < num_tokens - 1:
        follows += follows
    return [own[-1], *follows[: num_tokens - 1]]


def random_texts(seed, lines, columns, *, alphabet, groups, device="cpu") -> tuple[Texts, torch.Tensor]:
    """Texts in which much matches, some of them empty, and lines: each that has a token, and slots without one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    lengths = draw(0, columns + 1, lines)
    lengths[draw(0, 4, lines) == 0] = 1
    starts = (lengths * torch.rand(lines, generator=generator)).long()
    wide = draw(0, alphabet, lines, columns + 3).int().to(device)
    texts = Texts(wide[:, :columns], *(x.to(device) for x in (lengths, starts, draw(-1, groups, lines))))
    rows = [j for j in range(lines) if lengths[j] > 0]
    return texts, torch.tensor([-1, *rows, -3], device=device)


def test_by_hand():
    def guesses(*lines, row=0, num_tokens=8, **kwargs):
        return look_up(texts_of(lines, **kwargs), torch.tensor([row]), num_tokens)[0].tolist()

    assert guesses([1, 2, 3, 4, 9, 2, 3], num_tokens=4) == [3, 4, 9, 2]
    assert guesses([5, 1, 6, 1, 7, 1], num_tokens=2) == [1, 7]  # the latest of equals
    assert guesses([2, 1, 8, 1, 7, 2, 1], num_tokens=2) == [1, 8]  # the longer of matches
    assert guesses([1, 2, 1, 2]) == [2, 1, 2, 1, 2, 1, 2, 1]  # goes on with the period
    assert guesses([4, 4]) == [4] * 8
    assert guesses([1, 2, 3]) == [3] * 8  # nothing to be found
    assert guesses([9]) == [9] * 8 and guesses([9], [9, 8], num_tokens=4) == [9, 8, 8, 8]
    assert guesses([3, 5, 0, 5], [1, 5, 8, 5, 6], num_tokens=2) == [5, 0]  # the own line before others
    assert guesses([3, 5, 0, 3, 5], [7, 3, 5, 8], num_tokens=2) == [5, 0]
    assert guesses([3, 5, 0, 2, 5], [2, 5, 8], num_tokens=2) == [5, 8]  # but not before a longer match
    assert guesses([6, 5], [5, 1, 5, 2], [5, 1, 5, 3], num_tokens=2) == [5, 2]  # the first of equal lines
    assert guesses([6, 5], [5, 1, 4, 2], [5, 1, 5, 3], num_tokens=2) == [5, 3]  # but the latest place
    assert guesses([6, 5], [5, 1, 4, 2], groups=[0, 1]) == guesses([6, 5], [5, 1], groups=[-1, -1]) == [5] * 8
    assert guesses([6, 5], [5, 1], row=-1) == [0] * 8


def test_of_other_lines_prompts_only_the_end_is_a_place():
    """Their prompt is the own one; a match may reach into it."""
    prompt = [1, 2, 3, 1, 2]
    texts = texts_of([[*prompt, 9, 1, 2], [*prompt, 6, 5], [*prompt, 8]], starts=[5, 5, 5])
    rows = torch.tensor([0, 1])
    assert look_up(texts, rows, 4).tolist() == [[2, 9, 1, 2], [5, 5, 5, 5]]
    first = texts._replace(lengths=torch.tensor([5, 7, 6]))  # the first has drawn nothing yet
    assert look_up(first, rows[:1], 4).tolist() == [[2, 6, 5, 6]]  # m = 4, of two lines' the lower
    for start, guess in ((0, 1), (1, 1), (2, 5), (3, 5)):
        assert look_up(texts_of([[6, 5], [5, 1, 2]], starts=[0, start]), rows[:1], 2).tolist() == [[5, guess]]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_tokens", [2, 4, 16])
def test_the_reference_is_the_contract(seed, num_tokens):
    lines, columns = 1 + seed % 7, 1 + seed * 5 % 23
    texts, rows = random_texts(seed, lines, columns, alphabet=2 + seed % 3, groups=1 + seed % 2)
    found = look_up(texts, rows, num_tokens)
    assert found.dtype == torch.int64
    assert found.tolist() == [in_python(texts, line, num_tokens) for line in rows.tolist()]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "lines, columns, alphabet, num_tokens, places",
    [
        (1, 1, 2, 2, 16),
        (6, 4, 2, 4, 16),  # much stands at a line's beginning, or is all that there is
        (5, 15, 2, 16, 16),
        (9, 33, 3, 4, 16),
        (37, 70, 3, 8, 16),  # more lines than ways
        (70, 150, 12, 2, 16),  # and more blocks than parts
        (3, 2500, 30, 16, 1024),
    ],
)
def test_the_kernels_are_the_reference(lines, columns, alphabet, num_tokens, places, device):
    from qerl.kernels.lookup.fused import look_up_fused

    for seed in range(20 if columns < 9 else 5 if lines < 30 else 1):
        texts, rows = random_texts(seed, lines, columns, alphabet=alphabet, groups=1 + lines // 8, device=device)
        rows = rows[:: 1 + len(rows) // 8].contiguous()
        found = look_up_fused(texts, rows, num_tokens, places=places)
        assert torch.equal(found, look_up_reference(texts, rows, num_tokens))


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_find_a_match_at_either_end_and_across_blocks(device):
    from qerl.kernels.lookup.fused import look_up_fused

    for place in (0, 1, 3, 15, 16, 17, 18, 63, 64, 97):  # of the match's last token; blocks have 16 places
        text = torch.arange(10, 110)
        text[-4:] = torch.arange(4)
        text[max(0, place - 3) : place + 1] = torch.arange(4)[-place - 1 :]
        lines = [text.tolist() if place < 96 else [*text.tolist()[:96], 3, 3], [8, 8, 3]]
        texts = Texts(*(x.to(device) for x in texts_of(lines)))
        rows = torch.tensor([0, 1], device=device)
        found = look_up_fused(texts, rows, 4, places=16)
        assert torch.equal(found, look_up_reference(texts, rows, 4))
        if place < 96:
            assert found[0].tolist() == [3, *lines[0][place + 1 : place + 4]]


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("lines, columns", [(512, 8192), (1, 1)])  # an argument of 1 is a constant to Triton
def test_the_kernels_compile(lines, columns, capability, monkeypatch):
    from qerl.kernels.lookup.fused import look_up_fused

    texts, rows = random_texts(0, lines, columns, alphabet=5, groups=3)
    assert len(compile_launches(capability, monkeypatch, lambda: look_up_fused(texts, rows, 8))) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_graph_reads_texts_and_lines_from_the_device():
    """At the size of a rollout's end; lengths, groups and lines change between replays."""
    texts, rows = random_texts(1, 512, 8192, alphabet=50, groups=40, device="cuda")
    rows = rows[:16].clone()
    look_up(texts, rows, 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = look_up(texts, rows, 8)
    for _ in range(3):
        texts.lengths.sub_(1).clamp_(min=1)
        texts.groups.copy_(texts.groups.roll(7))
        rows.copy_(rows.roll(1).add_(1).clamp_(max=511))
        graph.replay()
        assert torch.equal(captured, look_up_reference(texts, rows, 8))
