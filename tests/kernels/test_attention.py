"""Decode attention: the reference against a plain softmax in fp64; the Triton kernels against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from triton_runs import (
    CAPABILITIES,
    DEVICES,
    GPU,
    SHARED_MEMORY,
    compile_launches,
    needs_triton,
    outer_run,
    run_interpreted,
)

from qerl.kernels.attention import decode_attention
from qerl.kernels.attention.reference import decode_attention_reference
from qerl.kernels.e4m3 import decode, encode

PAGE = 16
RAGGED = [1, PAGE - 1, PAGE, PAGE + 1, 64, 127, 128, 129, 257, 700, 2200]
"""Around ends of pages, of splits (128) and of what is joined at once (16 splits)."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""bf16: each of both sides is rounded once, and weights once on their way into a product."""


class Problem:
    """Queries and pages of sequences in any page order; what no sequence holds is NaN for the kernel's eyes."""

    def __init__(
        self,
        lengths: list[int],
        *,
        group: int,
        head_dim: int = 64,
        kv_heads: int = 2,
        columns: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        coded: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths) + group)
        counts = [-(-n // PAGE) for n in lengths]
        columns = columns or max(counts)
        order = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())  # page 0 is nobody's
        table = torch.tensor([[next(order) for _ in range(n)] + [0] * (columns - n) for n in counts])
        pages = torch.randn(2, sum(counts) + 1, PAGE, kv_heads, head_dim, generator=generator)
        q = 3 * torch.randn(len(lengths), kv_heads * group, head_dim, generator=generator)
        self.q, self.pages = q.to(device, dtype), pages.to(device, dtype)
        self.table, self.lengths = table.to(device), torch.tensor(lengths, device=device)
        self.scales = None
        if coded:
            pages *= torch.rand(pages.shape[:-1], generator=generator)[..., None]  # scales that differ
            self.pages, scales = encode(pages.to(device))
            self.scales = scales.transpose(2, 3).contiguous()

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.pages, self.table, self.lengths, *([] if self.scales is None else [self.scales]))

    def rows(self, sequence: int) -> torch.Tensor:
        """[2, length, kv_heads, d]: keys and values of a sequence."""
        pages = self.pages
        if self.scales is not None:
            pages = decode(pages, self.scales.transpose(2, 3), torch.float32)
        return pages[:, self.table[sequence]].flatten(1, 2)[:, : self.lengths[sequence]]

    def exact(self) -> torch.Tensor:
        """By the equation, in fp64."""
        outputs = []
        for i, q in enumerate(self.q.double()):
            keys, values = self.rows(i).double().repeat_interleave(q.shape[0] // self.pages.shape[3], 2)
            scores = torch.einsum("hd,thd->ht", q, keys) / math.sqrt(q.shape[1])
            outputs.append(torch.einsum("ht,thd->hd", scores.softmax(1), values))
        return torch.stack(outputs)

    def poison(self) -> None:
        """NaN in every row that is past its sequence's end, so that reading one shows."""
        coded = self.scales is not None
        nan = 0x7F if coded else torch.nan
        self.pages[:, 0] = nan
        for table, length in zip(self.table, self.lengths, strict=True):
            page, first = table[(length - 1) // PAGE], (length - 1) % PAGE + 1
            self.pages[:, page, first:] = nan
            if coded:
                self.scales[:, page, :, first:] = torch.nan


def close(y: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_the_reference_is_a_softmax_over_a_sequences_own_rows(group):
    problem = Problem(RAGGED, group=group)
    close(decode_attention(*problem.arguments), problem.exact(), torch.float32)


def test_the_reference_copies_some_sequences_at_a_time(monkeypatch):
    problem = Problem(RAGGED, group=4)
    whole = decode_attention_reference(*problem.arguments)
    monkeypatch.setattr("qerl.kernels.attention.reference._COPY_BYTES", 1)
    torch.testing.assert_close(decode_attention_reference(*problem.arguments), whole, rtol=0, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group, head_dim", [(1, 64), (4, 128), (7, 128), (8, 64), (20, 16)])
def test_the_kernel_equals_the_reference_at_ragged_lengths(group, head_dim, device):
    """In bf16; in the interpreter, where products do not become TF32, also tightly in fp32."""
    from qerl.kernels.attention.paged import paged_attention

    dtype = torch.float32 if device == "cpu" and (group, head_dim) == (4, 128) else torch.bfloat16
    problem = Problem(RAGGED, group=group, head_dim=head_dim, device=device, dtype=dtype)
    reference = decode_attention_reference(*problem.arguments)
    exact = problem.exact()
    problem.poison()
    y = paged_attention(*problem.arguments)
    assert y.dtype == dtype and y.shape == problem.q.shape
    close(y, exact, dtype)
    close(y, reference.double(), dtype)


def test_the_reference_reads_codes() -> None:
    problem = Problem(RAGGED, group=4, coded=True)
    close(decode_attention(*problem.arguments), problem.exact(), torch.float32)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group, head_dim", [(7, 128), (4, 64)])
def test_the_kernel_reads_codes(group, head_dim, device):
    """As exactly as it reads bf16; in the interpreter with fp32 queries also tightly. Scales differ by token."""
    from qerl.kernels.attention.paged import paged_attention

    dtype = torch.float32 if device == "cpu" and head_dim == 64 else torch.bfloat16
    problem = Problem(RAGGED, group=group, head_dim=head_dim, device=device, dtype=dtype, coded=True)
    exact = problem.exact()
    problem.poison()
    y = paged_attention(*problem.arguments)
    close(y, exact, dtype)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_gives_a_sequence_the_same_bits_in_any_company(device):
    """Alone, in a batch, behind a wider table, and again: all equal."""
    from qerl.kernels.attention.paged import paged_attention

    problem = Problem(RAGGED, group=7, device=device, dtype=torch.bfloat16)
    y = paged_attention(*problem.arguments)
    assert torch.equal(y, paged_attention(*problem.arguments))
    wide = torch.nn.functional.pad(problem.table, (0, 40))
    assert torch.equal(y, paged_attention(problem.q, problem.pages, wide, problem.lengths))
    for i, length in enumerate(RAGGED):
        own = problem.table[i : i + 1, : -(-length // PAGE)]
        alone = paged_attention(problem.q[i : i + 1], problem.pages, own, problem.lengths[i : i + 1])
        assert torch.equal(alone[0], y[i])


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_reads_shared_pages_and_padding_slots(device):
    """Sequences 0 and 1 share a prompt's pages; the others are padding: a table full of one spare page, length 1."""
    from qerl.kernels.attention.paged import paged_attention

    problem = Problem([300, 290, 1, 1], group=4, device=device, dtype=torch.bfloat16)
    problem.table[1, :18] = problem.table[0, :18]
    problem.table[2:] = 0
    exact = problem.exact()
    y = paged_attention(*problem.arguments)
    close(y, exact, torch.bfloat16)
    values = problem.pages[1, 0, 0].repeat_interleave(4, 0)
    assert torch.equal(y[2], values) and torch.equal(y[3], values)  # one token: its value


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_takes_queries_and_table_as_views(device):
    """q is a part of the q, k, v product, the table some columns of the slots' own."""
    from qerl.kernels.attention.paged import paged_attention

    problem = Problem([5, 600, 33], group=4, device=device, dtype=torch.bfloat16)
    y = paged_attention(*problem.arguments)
    q = torch.cat([problem.q, problem.q], dim=1)[:, :8]
    table = torch.cat([problem.table, problem.table], dim=1)[:, : problem.table.shape[1]]
    assert not q.is_contiguous() and not table.is_contiguous()
    assert torch.equal(paged_attention(q, problem.pages, table, problem.lengths), y)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_survives_large_scores(device):
    """Scores of several thousand, the largest in the first split, the last, or in between."""
    from qerl.kernels.attention.paged import paged_attention

    problem = Problem([700, 700, 700], group=4, device=device, dtype=torch.bfloat16)
    problem.q *= 50
    for sequence, token in enumerate((3, 400, 699)):
        problem.pages[0, problem.table[sequence, token // PAGE], token % PAGE] *= 40
    close(paged_attention(*problem.arguments), problem.exact(), torch.bfloat16)


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("group, head_dim, coded", [(7, 128, False), (7, 64, False), (7, 128, True)])
def test_both_kernels_compile(group, head_dim, coded, capability, monkeypatch):
    from qerl.kernels.attention.paged import paged_attention

    problem = Problem([700], group=group, head_dim=head_dim, dtype=torch.bfloat16, coded=coded)
    split, join = compile_launches(capability, monkeypatch, lambda: paged_attention(*problem.arguments))
    assert split.metadata.shared <= SHARED_MEMORY and join.metadata.shared <= SHARED_MEMORY
    assert "mma" in split.asm["ptx"]
    assert ("e4m3x2" in split.asm["ptx"]) == (coded and capability >= 89)


@pytest.mark.parametrize("device", [GPU])
def test_a_graph_serves_other_lengths(device):
    problem = Problem(RAGGED, group=7, head_dim=128, device=device, dtype=torch.bfloat16)
    decode_attention(*problem.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_attention(*problem.arguments)
    problem.lengths.copy_(problem.lengths.clamp(max=100))
    graph.replay()
    assert torch.equal(y, decode_attention(*problem.arguments))
    close(y, problem.exact(), torch.bfloat16)
