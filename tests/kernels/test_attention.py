"""Decode attention: the reference against a plain softmax in fp64; the Triton kernel against both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

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

from qerl.kernels.announcement import Announcement
from qerl.kernels.attention import decode_attention
from qerl.kernels.attention.reference import decode_attention_reference
from qerl.kernels.e4m3 import decode, encode
from qerl.kernels.rope import Destination, HeadNorms, Rotation, rotate_and_store_
from qerl.kernels.rope.reference import rotate_and_store_reference_
from qerl.kernels.slots import locate

PAGE = 16
RAGGED = [1, PAGE - 1, PAGE, PAGE + 1, 64, 127, 128, 129, 257, 700, 2200]
"""Around ends of pages, of splits (128) and of what is joined at once (2 to 16 splits)."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""bf16: each of both sides is rounded once, and weights once on their way into a product."""


class Problem:
    """The last tokens of sequences whose pages lie in any order, q, k and v as views of one product's output."""

    def __init__(
        self,
        lengths: list[int],
        *,
        tokens: int = 1,
        group: int,
        head_dim: int = 64,
        kv_heads: int = 2,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        coded: bool = False,
        norms: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths) + group)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        counts = [-(-n // PAGE) for n in lengths]
        order = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())  # page 0 is nobody's
        table = torch.tensor([[next(order) for _ in range(n)] + [0] * (max(counts) - n) for n in counts])
        heads = kv_heads * group
        self.sizes, self.d = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], head_dim
        self.tokens = tokens
        product = random(len(lengths) * tokens, sum(self.sizes))
        product[:, : heads * head_dim] *= 3
        self.product = product.to(device, dtype)
        angles = 100 * random(len(lengths) * tokens, head_dim // 2)
        q_gain, k_gain = (1 + 0.1 * random(head_dim).to(device) for _ in range(2))
        cos, sin = (x.to(device, dtype) for x in (angles.cos(), angles.sin()))
        self.rotation = Rotation(cos, sin, HeadNorms(q_gain, k_gain, 1e-6) if norms else None)
        pages = random(2, sum(counts) + 1, PAGE, kv_heads, head_dim)
        self.pages, self.scales = pages.to(device, dtype), None
        if coded:
            pages *= torch.rand(pages.shape[:-1], generator=generator)[..., None]  # scales that differ
            self.pages, scales = encode(pages.to(device))
            self.scales = scales.transpose(2, 3).contiguous()
        ends = torch.tensor(lengths)[:, None] + torch.arange(1 - tokens, 1)
        self.table, self.lengths = table.to(device), ends.flatten().to(device)  # a query's, its own token included

    def run(
        self, attend: Callable[..., torch.Tensor], sequences: slice = slice(None), table: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(y, the pages, the scales) afterwards."""
        pages, scales = self.pages.clone(), None if self.scales is None else self.scales.clone()
        first, last, _ = sequences.indices(len(self.table))
        queries = slice(first * self.tokens, last * self.tokens)
        q, k, v = (x.unflatten(1, (-1, self.d)) for x in self.product[queries].clone().split(self.sizes, dim=1))
        rotation = self.rotation._replace(cos=self.rotation.cos[queries], sin=self.rotation.sin[queries])
        rows, _ = locate(self.table[sequences], self.lengths[queries] - 1, PAGE)
        lengths = self.lengths[queries]  # not locate's, since attention reads them ahead of its wait
        to = Destination(pages, rows, scales)
        return attend(q, k, v, rotation, to, self.table[sequences] if table is None else table, lengths), pages, scales

    def exact(self) -> torch.Tensor:
        """By the equation, in fp64, from queries, keys and values as kernels/rope leaves them."""
        outputs = []

        def attend(q, k, v, rotation, to, table, lengths):
            rotate_and_store_reference_(q, k, v, rotation, to)
            pages = to.pages if to.scales is None else decode(to.pages, to.scales.transpose(2, 3), torch.float32)
            columns_of = table.repeat_interleave(self.tokens, 0)
            for query, columns, length in zip(q.double(), columns_of, lengths, strict=True):
                rows = pages[:, columns].flatten(1, 2)[:, :length].double()
                keys, values = rows.repeat_interleave(q.shape[1] // pages.shape[3], 2)
                scores = torch.einsum("hd,thd->ht", query, keys) / math.sqrt(self.d)
                outputs.append(torch.einsum("ht,thd->hd", scores.softmax(1), values))
            return torch.stack(outputs)

        return self.run(attend)[0]

    def poison(self) -> None:
        """NaN in every row that no earlier token of a sequence holds, so that reading one shows."""
        nan = torch.nan if self.scales is None else 0x7F
        self.pages[:, 0] = nan
        for table, length in zip(self.table, self.lengths[:: self.tokens], strict=True):
            page, first = table[(length - 1) // PAGE], (length - 1) % PAGE
            later = table[(length - 1) // PAGE + 1 :]
            self.pages[:, page, first:] = self.pages[:, later] = nan
            if self.scales is not None:
                self.scales[:, page, :, first:] = self.scales[:, later] = torch.nan


def behind(rotate: Callable[..., None], attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What a decode step does: rotation, new keys and values into their rows, attention over the pages."""

    def both(q, k, v, rotation, to, table, lengths) -> torch.Tensor:
        rotate(q, k, v, rotation, to)
        return attend(q, to.pages, table, lengths, to.scales)

    return both


def paged() -> Callable[..., torch.Tensor]:
    """The kernels; their modules can be read where Triton is."""
    from qerl.kernels.rope.rotate import rotate_and_store_bf16_

    return behind(rotate_and_store_bf16_, decode_attention_kernel())


def decode_attention_kernel() -> Callable[..., torch.Tensor]:
    """Attention alone."""
    from qerl.kernels.attention.paged import paged_attention

    return paged_attention


attend_by_reference = behind(rotate_and_store_reference_, decode_attention_reference)
dispatched = behind(rotate_and_store_, decode_attention)


def check_stores(problem: Problem, results: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> None:
    """The new tokens' keys and values, or codes and scales, are the reference's to the bit; all else is untouched."""
    for written, expected in zip(results[1:], problem.run(attend_by_reference)[1:], strict=True):
        assert (written is None) == (expected is None)
        if written is not None and expected is not None:
            assert torch.equal(written.nan_to_num(7.0), expected.nan_to_num(7.0))


def close(y: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_off_the_gpu_it_is_a_softmax_over_a_sequences_own_rows(group, coded):
    problem = Problem(RAGGED, group=group, coded=coded)
    close(problem.run(dispatched)[0], problem.exact(), torch.float32)


def test_the_reference_copies_some_sequences_at_a_time(monkeypatch):
    problem = Problem(RAGGED, group=4)
    whole, *_ = problem.run(attend_by_reference)
    monkeypatch.setattr("qerl.kernels.attention.reference._COPY_BYTES", 1)
    torch.testing.assert_close(problem.run(attend_by_reference)[0], whole, rtol=0, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group, head_dim", [(1, 64), (4, 128), (7, 128), (8, 64), (20, 16)])
def test_the_kernel_equals_the_reference_at_ragged_lengths(group, head_dim, device):
    """In bf16; in the interpreter, where products do not become TF32, also tightly in fp32."""
    dtype = torch.float32 if device == "cpu" and (group, head_dim) == (4, 128) else torch.bfloat16
    problem = Problem(RAGGED, group=group, head_dim=head_dim, device=device, dtype=dtype)
    exact = problem.exact()
    problem.poison()
    results = problem.run(paged())
    assert results[0].dtype == dtype
    close(results[0], exact, dtype)
    check_stores(problem, results)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group, head_dim", [(7, 128), (4, 64)])
def test_the_kernel_reads_and_writes_codes(group, head_dim, device):
    """As exactly as it reads bf16; in the interpreter with fp32 queries also tightly. Scales differ by token."""
    dtype = torch.float32 if device == "cpu" and head_dim == 64 else torch.bfloat16
    problem = Problem(RAGGED, group=group, head_dim=head_dim, device=device, dtype=dtype, coded=True)
    problem.product[3, -5:] = 1e4  # the rest of a value becomes zeros and subnormal codes
    exact = problem.exact()
    problem.poison()
    results = problem.run(paged())
    close(results[0], exact, dtype)
    check_stores(problem, results)


SEVERAL = [8, PAGE + 3, 127, 128, 130, 135, 136, 257, 261, 700]
"""Lengths around those ends for the last 8 tokens: some of them, all, or none see a split."""


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("tokens", [2, 8])
def test_several_tokens_see_their_own_past_off_the_gpu(tokens, coded):
    problem = Problem(SEVERAL, tokens=tokens, group=4, coded=coded)
    close(problem.run(dispatched)[0], problem.exact(), torch.float32)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize(
    "tokens, group, head_dim, coded", [(2, 7, 128, False), (8, 7, 64, False), (8, 5, 128, False), (4, 1, 64, True)]
)
def test_the_kernel_takes_several_tokens_of_a_sequence(tokens, group, head_dim, coded, turns, device, monkeypatch):
    """Together, or each alone: then with the bits that it has as its sequence's only query."""
    monkeypatch.setattr("qerl.kernels.attention.paged.turns_of", lambda *_: turns)
    dtype = torch.float32 if device == "cpu" and group == 1 else torch.bfloat16
    lengths = SEVERAL if device == "cuda" else [8, 130, 135, 261]  # the interpreter is slow
    problem = Problem(lengths, tokens=tokens, group=group, head_dim=head_dim, coded=coded, dtype=dtype, device=device)
    exact = problem.exact()
    problem.poison()
    results = problem.run(paged())
    close(results[0], exact, dtype)
    check_stores(problem, results)

    def alone(q, k, v, rotation, to, table, lengths):
        rotate_and_store_reference_(q, k, v, rotation, to)
        return decode_attention_kernel()(q, to.pages, table, lengths, to.scales, alone=True)

    def one_by_one(q, k, v, rotation, to, table, lengths):
        rotate_and_store_reference_(q, k, v, rotation, to)
        table = table.repeat_interleave(tokens, 0)
        return decode_attention_kernel()(q, to.pages, table, lengths, to.scales)

    y, *_ = problem.run(alone)
    close(y, exact, dtype)
    assert torch.equal(y, problem.run(one_by_one)[0])


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_norms_heads(device):
    """A mean is summed in another order than the reference's: now and then a number is rounded to its neighbour."""
    problem = Problem(RAGGED, group=4, device=device, dtype=torch.bfloat16, norms=True)
    y, pages, _ = problem.run(paged())
    torch.testing.assert_close(y.double(), problem.exact(), rtol=2**-6, atol=2**-6)
    expected = problem.run(attend_by_reference)[1]
    torch.testing.assert_close(pages, expected, rtol=2**-7, atol=2**-7)
    stored = expected != problem.pages
    assert stored.any() and (pages != expected)[stored].float().mean() < 0.01


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_gives_a_sequence_the_same_bits_in_any_company(device):
    """Alone, in a batch, behind a wider table, and again: all equal."""
    lengths = [1, 128, 129, 257, 700]
    problem = Problem(lengths, group=7, device=device, dtype=torch.bfloat16)
    y, *_ = problem.run(paged())
    assert torch.equal(y, problem.run(paged())[0])
    assert torch.equal(y, problem.run(paged(), table=torch.nn.functional.pad(problem.table, (0, 9)))[0])
    for i, length in enumerate(lengths):
        one = slice(i, i + 1)
        alone, *_ = problem.run(paged(), one, problem.table[one, : -(-length // PAGE)])
        assert torch.equal(alone[0], y[i])


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group, head_dim, coded", [(7, 64, False), (7, 64, True), (5, 128, False), (7, 128, False)])
def test_programs_that_take_several_splits_give_the_same_bits(device, group, head_dim, coded, monkeypatch):
    """Sequences that end in a program's first split, within its turns, and with them; on a GPU many, as sums that
    are added in another order differ in a few numbers of a hundred thousand."""
    lengths = [1, 128, 129, 257, 512, 700] * (8 if device == "cuda" else 1)
    problem = Problem(lengths, group=group, head_dim=head_dim, coded=coded, device=device, dtype=torch.bfloat16)
    problem.poison()
    y, *_ = problem.run(paged())
    for turns in (2, 4):
        monkeypatch.setattr("qerl.kernels.attention.paged.turns_of", lambda *_, turns=turns: turns)
        results = problem.run(paged())
        assert torch.equal(results[0], y)
        check_stores(problem, results)


@pytest.mark.gpu
def test_a_large_batch_has_programs_of_several_splits():
    from qerl.kernels.attention.paged import turns_of

    assert [turns_of(n, torch.device("cuda")) for n in (1, 100, 10**6)] == [1, 1, 2]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_reads_shared_pages_and_padding_slots(device):
    """Sequences 0 and 1 share a prompt's pages; the others are padding: a table full of one spare page, length 1."""
    problem = Problem([300, 290, 1, 1], group=4, device=device, dtype=torch.bfloat16)
    problem.table[1, :18] = problem.table[0, :18]
    problem.table[2:] = 0
    exact = problem.exact()
    y, *_ = problem.run(paged())
    close(y[:2], exact[:2], torch.bfloat16)
    values = problem.product[2:, -problem.sizes[2] :].unflatten(1, (2, -1)).repeat_interleave(4, 1)
    assert ((y[2:] == values[:1]) | (y[2:] == values[1:])).all()  # one token's value, of whoever wrote to the row


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_takes_a_table_that_is_a_view(device):
    """The table is some columns of the slots' own."""
    problem = Problem([5, 600, 33], group=4, device=device, dtype=torch.bfloat16)
    y, *_ = problem.run(paged())
    table = torch.cat([problem.table, problem.table], dim=1)[:, : problem.table.shape[1]]
    assert not table.is_contiguous()
    assert torch.equal(problem.run(paged(), table=table)[0], y)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_survives_large_scores(device):
    """Scores of several thousand, the largest in the first split, in between, or in the last: the new token's."""
    problem = Problem([700, 700, 700], group=4, device=device, dtype=torch.bfloat16)
    problem.product[:, : problem.sizes[0]] *= 50
    for sequence, token in enumerate((3, 400)):
        problem.pages[0, problem.table[sequence, token // PAGE], token % PAGE] *= 40
    problem.product[2, problem.sizes[0] : -problem.sizes[2]] *= 40
    close(problem.run(paged())[0], problem.exact(), torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths, counts", [([300, 40], True), ([30, 40], False)])
def test_who_joins_the_splits_announces_the_result(lengths, counts, device):
    """Sequences of one split, too, as their results are there when the others' are joined; but not where all are."""
    problem = Problem(lengths, group=7, head_dim=64, device=device, dtype=torch.bfloat16)
    announcement = Announcement(torch.zeros(2, dtype=torch.int32, device=device))
    expected = problem.run(paged())[0]

    def attend(q, k, v, rotation, to, table, lengths):
        rotate_and_store_reference_(q, k, v, rotation, to)
        return decode_attention_kernel()(q, to.pages, table, lengths, to.scales, announcement)

    y = problem.run(attend)[0]
    torch.testing.assert_close(y, expected)
    programs = len(lengths) * 2 * 7 if counts else 0  # a query head of a sequence
    assert announcement.publishers == programs and announcement.counter.tolist() == [programs, 0]


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "tokens, group, head_dim, coded", [(1, 7, 128, False), (1, 5, 128, True), (1, 4, 64, True), (8, 5, 128, False)]
)
def test_products_are_summed_in_one_order_whatever_the_turns(tokens, group, head_dim, coded, capability, monkeypatch):
    """Triton permutes K of operands by the size of what it thinks they were loaded as (kWidth)."""
    layouts: list[set[str]] = []
    problem = Problem([700], tokens=tokens, group=group, head_dim=head_dim, dtype=torch.bfloat16, coded=coded)
    for turns in (1, 2):
        monkeypatch.setattr("qerl.kernels.attention.paged.turns_of", lambda *_, turns=turns: turns)
        _, split, _ = compile_launches(
            capability, monkeypatch, lambda: problem.run(paged()), reads_ahead=["_split_kernel"]
        )
        layouts.append(set(re.findall(r"opIdx = \d, parent = #mma\w*, kWidth = \d", split.asm["ttgir"])))
    assert layouts[0] and layouts[0] == layouts[1]


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("group, head_dim, coded", [(7, 128, False), (7, 64, False), (5, 128, True)])
@pytest.mark.parametrize("turns", [1, 2])
def test_the_kernels_compile(group, head_dim, coded, turns, capability, monkeypatch):
    monkeypatch.setattr("qerl.kernels.attention.paged.turns_of", lambda *_: turns)
    problem = Problem([700], group=group, head_dim=head_dim, dtype=torch.bfloat16, coded=coded)
    _, split, join = compile_launches(
        capability, monkeypatch, lambda: problem.run(paged()), reads_ahead=["_split_kernel"]
    )
    assert max(split.metadata.shared, join.metadata.shared) <= SHARED_MEMORY
    assert "mma" in split.asm["ptx"]
    assert ("e4m3x2" in split.asm["ptx"]) == (coded and capability >= 89)
    if turns > 1 and capability >= 90:
        assert split.asm["sass"].partition("ACQBULK")[0].count("LDG") == 1  # of the length


@pytest.mark.parametrize("device", [GPU])
def test_a_graph_serves_other_lengths(device):
    problem = Problem(RAGGED, group=7, head_dim=128, device=device, dtype=torch.bfloat16)
    problem.run(dispatched)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, *_ = problem.run(dispatched)
    problem.lengths.copy_(problem.lengths.clamp(max=100))
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, problem.run(dispatched)[0])
    close(y, problem.exact(), torch.bfloat16)
