"""sample: the Triton kernels against the reference, on a GPU, and in Triton's interpreter on a CPU."""

from __future__ import annotations

import math
import re
import struct

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, outer_run, run_interpreted

from qerl import philox
from qerl.kernels.sample import Sampled, sample
from qerl.kernels.sample.reference import sample_reference

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from qerl.kernels.sample.fused import random_integers, sample_fused  # noqa: E402

TIE = 1e-5
"""Scores closer than this may change places: one is a sum of logarithms, the other the logarithm of a ratio."""
CLOSE = dict(rtol=2e-6, atol=2e-5)

SEEDS = torch.tensor([0, -1, philox.fold(3), 1 << 32, -(2**63), 17])
COUNTS = torch.tensor([0, 5, (1 << 32) + 2, 1, 2**40, 4095])
TEMPERATURES = torch.tensor([1.0, 0.6, 1.0, 2.5, 0.3, 1.3])


def random_logits(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One row a seed, spread as a model's are."""
    return (4 * torch.randn(len(SEEDS), size, generator=torch.Generator().manual_seed(size))).to(dtype)


def both(
    logits: torch.Tensor, device: str, *, greedy: bool = False, kept: torch.Tensor | None = None, chunk: int = 64
) -> tuple[Sampled, Sampled]:
    """(kernel's, reference's), after a check that they agree: tokens but for ties, sums but for rounding."""
    rows = [t.to(device) for t in (TEMPERATURES, SEEDS, COUNTS)]
    there = None if kept is None else kept.to(device)
    fused = Sampled(*(t.cpu() for t in sample_fused(logits.to(device), *rows, greedy=greedy, kept=there, chunk=chunk)))
    expected = sample_reference(logits, TEMPERATURES, SEEDS, COUNTS, greedy=greedy, kept=kept)
    assert [t.dtype for t in fused] == [t.dtype for t in expected]
    x = logits.float() / TEMPERATURES[:, None]
    scores = x if greedy else x + philox.gumbel(SEEDS, COUNTS, logits.shape[1])
    scores = scores if kept is None else scores.masked_fill(~kept, -torch.inf)
    won = scores.gather(1, fused.tokens[:, None])[:, 0]
    assert ((fused.tokens == expected.tokens) | (won > scores.amax(1) - TIE)).all()
    logprobs = x.double().log_softmax(-1)
    torch.testing.assert_close(fused.logprobs.double(), logprobs.gather(1, fused.tokens[:, None])[:, 0], **CLOSE)
    entropies = torch.special.entr(logprobs.exp()).sum(1)
    torch.testing.assert_close(fused.entropies.double(), entropies, **CLOSE)
    return fused, expected


@triton.jit
def _store_integers(seeds_ptr, counts_ptr, out_ptr, first, SIZE: tl.constexpr):
    row = tl.program_id(0)
    words = random_integers(tl.load(seeds_ptr + row), tl.load(counts_ptr + row), first, SIZE)
    tl.store(out_ptr + row * SIZE + tl.arange(0, SIZE), words.to(tl.int64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 64, 151_872])
def test_the_kernels_integers_are_philoxs(first: int, device: str) -> None:
    out = torch.empty(len(SEEDS), 64, dtype=torch.int64, device=device)
    _store_integers[(len(SEEDS),)](SEEDS.to(device), COUNTS.to(device), out, first, SIZE=64)
    lanes = philox._bits(SEEDS, COUNTS, first + 64, 0)
    assert torch.equal(out.cpu(), torch.stack(lanes, dim=-1).flatten(1)[:, first:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 63, 64, 257, 1000])
def test_the_kernel_equals_the_reference(size: int, dtype: torch.dtype, device: str) -> None:
    fused, expected = both(random_logits(size, dtype), device)
    assert torch.equal(fused.tokens, expected.tokens)  # no ties among these


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_has_the_gumbel_numbers(device: str) -> None:
    """Of equal logits the winner has the largest Gumbel number, which most often comes from a small v."""
    logits, rows = torch.zeros(60, 1000), torch.arange(60)
    ones = torch.ones(60)
    fused = sample_fused(*(t.to(device) for t in (logits, ones, rows, rows)), greedy=False, kept=None, chunk=256)
    expected = sample_reference(logits, ones, rows, rows, greedy=False, kept=None)
    assert torch.equal(fused.tokens.cpu(), expected.tokens)
    assert fused.tokens.unique().numel() > 50


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_draws_from_what_is_kept(device: str) -> None:
    logits = random_logits(300)
    kept = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)) < 0.05
    kept[:, 128:192] = False  # a chunk of which nothing is left
    kept.scatter_(1, logits.argmax(1, keepdim=True), True)
    fused, expected = both(logits, device, kept=kept)
    assert torch.equal(fused.tokens, expected.tokens) and kept.gather(1, fused.tokens[:, None]).all()
    one = torch.zeros_like(kept).scatter_(1, logits.argmax(1, keepdim=True), True)
    assert torch.equal(both(logits, device, kept=one)[0].tokens, logits.argmax(1))


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_is_greedy_to_the_last_bit_and_gives_ties_to_the_lower_entry(device: str) -> None:
    logits = random_logits(300)
    assert torch.equal(both(logits, device, greedy=True)[0].tokens, logits.argmax(1))
    flat = torch.full((6, 300), 1e-6)
    flat[:, 70], flat[:, 250] = 1.0000001e-6, 1.0000001e-6
    flat[0, 299] = 1.0000002e-6
    assert both(flat, device, greedy=True)[0].tokens.tolist() == [299, *[70] * 5]


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_takes_extreme_logits(device: str) -> None:
    """Chunks of nothing but -inf, differences beyond float32's range of exponents, a row that one entry owns."""
    logits = random_logits(300)
    logits[0, 64:192] = -math.inf
    logits[1, :299] = -math.inf
    logits[2, :64] = torch.finfo(torch.float32).min
    logits[3] *= 1e30
    logits[4, 5] = 1e4
    logits[5, 100:200] = -1e38
    both(logits, device)
    both(logits, device, greedy=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("greedy", [False, True])
def test_the_kernel_shows_nan_and_stays_in_the_vocabulary(greedy: bool, device: str) -> None:
    logits = random_logits(300)
    logits[0, :: 1 if device == "cuda" else 2] = math.nan  # the interpreter cannot take the best of nothing but NaN
    logits[1, 299] = math.nan
    rows = [t.to(device) for t in (TEMPERATURES, SEEDS, COUNTS)]
    tokens, logprobs, entropies = sample_fused(logits.to(device), *rows, greedy=greedy, kept=None, chunk=64)
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert logprobs.isnan().tolist() == entropies.isnan().tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_reads_strided_rows_and_depends_on_no_other(device: str) -> None:
    logits = random_logits(300)
    together, _ = both(logits, device)
    wide = torch.full((6, 2, 301), math.nan)
    wide[:, 1, :300] = logits
    assert all(torch.equal(a, b) for a, b in zip(both(wide[:, 1, :300], device)[0], together, strict=True))
    for i in (0, 5):
        row = [t[i : i + 1].to(device) for t in (logits, TEMPERATURES, SEEDS, COUNTS)]
        alone = sample_fused(*row, greedy=False, kept=None, chunk=64)
        assert all(torch.equal(a.cpu(), b[i : i + 1]) for a, b in zip(alone, together, strict=True))


@outer_run
def test_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_both_kernels_compile_and_subtract_the_maximum_from_a_rounded_product(capability, monkeypatch) -> None:
    """-1e38 / 1.3 * 2^-24 is 4e30: fused into one step, the largest entry's weight would be e^4e30 or 0."""
    logits = random_logits(300)
    chunk, join = compile_launches(
        capability,
        monkeypatch,
        lambda: sample_fused(logits, TEMPERATURES, SEEDS, COUNTS, greedy=False, kept=None, chunk=64),
    )
    addends = re.findall(r"fma\.rn\.f32 .*, 0f(\w+);", chunk.asm["ptx"])
    assert [struct.unpack(">f", bytes.fromhex(a))[0] for a in addends] == pytest.approx([1 / 5, 1 / 4, 1 / 3, 1 / 2, 1])
    assert [kernel.asm["ptx"].count("fma.rn.f32") for kernel in (chunk, join)] == [len(addends), 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_vocabulary_on_a_gpu(dtype: torch.dtype) -> None:
    logits = random_logits(151_936, dtype)
    both(logits, "cuda", chunk=2048)
    rows = [t.cuda() for t in (logits, TEMPERATURES, SEEDS, COUNTS)]
    first, second = sample(*rows), sample(*rows)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_graph_reads_seeds_counts_and_temperatures_from_the_device() -> None:
    logits, temperatures, seeds, counts = (
        t.cuda() for t in (random_logits(5000, torch.bfloat16), TEMPERATURES, SEEDS, COUNTS)
    )
    before = sample(logits, temperatures, seeds, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, temperatures, seeds, counts)
    for tensor, change in ((counts, 1), (seeds, 7), (temperatures, 0.5)):
        tensor += change
        graph.replay()
        expected = sample(logits, temperatures, seeds, counts)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        assert not torch.equal(captured.logprobs, before.logprobs)
        before = expected
