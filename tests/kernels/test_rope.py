"""Rotation and storing of keys and values: the reference against transformers, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.e4m3 import encode
from qerl.kernels.rope import Destination, HeadNorms, Rotation
from qerl.kernels.rope.reference import rotate_and_store_reference_

PAGE = 16


class Problem:
    """q, k and v as views of one product's output, angles as views of whole ones, and pages at random."""

    def __init__(
        self,
        tokens: int,
        heads: int,
        kv_heads: int,
        d: int,
        *,
        norms: bool = False,
        coded: bool = False,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.product = random(tokens, (heads + 2 * kv_heads) * d)
        self.sizes = [heads * d, kv_heads * d, kv_heads * d]
        self.d = d
        angles = 100 * random(tokens, d // 2, dtype=torch.float32)
        self.cos, self.sin = (torch.cat([a, a], dim=1).bfloat16() for a in (angles.cos(), angles.sin()))
        rows = torch.randperm((tokens // PAGE + 2) * PAGE, generator=generator)[:tokens].to(device)
        pages, scales = random(2, tokens // PAGE + 2, PAGE, kv_heads, d), None
        if coded:
            codes, scales = encode(pages)
            pages, scales = codes, scales.transpose(2, 3).contiguous()
        self.destination = Destination(pages, rows, scales)
        gains = (random(d, dtype=torch.float32) for _ in range(2))
        self.norms = HeadNorms(*gains, 1e-6) if norms else None

    def run(self, rotate_and_store_, store: bool = True) -> tuple[torch.Tensor, ...]:
        """(the product's output, the pages, the scales) afterwards."""
        product, pages = self.product.clone(), self.destination.pages.clone()
        scales = None if self.destination.scales is None else self.destination.scales.clone()
        q, k, v = (x.unflatten(1, (-1, self.d)) for x in product.split(self.sizes, dim=1))
        cos, sin = self.cos[:, : self.d // 2], self.sin[:, : self.d // 2]
        destination = Destination(pages, self.destination.rows, scales) if store else None
        rotate_and_store_(q, k, v, Rotation(cos, sin, self.norms), destination)
        return (product, pages) if scales is None else (product, pages, scales)


def test_the_reference_is_transformers_rotation_to_the_bit():
    problem = Problem(tokens=33, heads=6, kv_heads=2, d=32)
    product, pages = problem.run(rotate_and_store_reference_)
    q, k, v = (x.unflatten(1, (-1, 32)).transpose(0, 1)[None] for x in problem.product.split(problem.sizes, dim=1))
    q, k = apply_rotary_pos_emb(q, k, problem.cos[None], problem.sin[None])
    expected = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k, v)], dim=1)
    assert torch.equal(product, expected)
    for page, x in zip(pages, (k, v), strict=True):
        assert torch.equal(page.flatten(0, 1)[problem.destination.rows], x[0].transpose(0, 1))
    untouched = torch.ones(len(pages[0]) * PAGE, dtype=torch.bool)
    untouched[problem.destination.rows] = False
    assert torch.equal(pages.flatten(1, 2)[:, untouched], problem.destination.pages.flatten(1, 2)[:, untouched])


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(
    "tokens, heads, kv_heads, d", [(1, 14, 2, 64), (37, 7, 1, 128), (5, 8, 8, 16), (18, 16, 2, 32)]
)
def test_the_kernel_is_the_reference_to_the_bit(tokens, heads, kv_heads, d, store, device):
    from qerl.kernels.rope.rotate import rotate_and_store_bf16_

    problem = Problem(tokens, heads, kv_heads, d, device=device)
    product, pages = problem.run(rotate_and_store_bf16_, store)
    expected_product, expected_pages = problem.run(rotate_and_store_reference_, store)
    assert torch.equal(product, expected_product) and torch.equal(pages, expected_pages)
    assert torch.equal(pages, problem.destination.pages) != store


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, heads, kv_heads, d", [(37, 7, 1, 128), (18, 16, 2, 32)])
def test_the_kernels_codes_and_scales_are_the_references_to_the_bit(tokens, heads, kv_heads, d, device):
    """A head of zeros and one with a number far above the others, whose codes are zeros and subnormals, among them."""
    from qerl.kernels.rope.rotate import rotate_and_store_bf16_

    problem = Problem(tokens, heads, kv_heads, d, coded=True, device=device)
    problem.product[3] = 0
    problem.product[4:12, -1] = 1e4
    problem.product[4:8, heads * d] = 1e5
    results, expected = problem.run(rotate_and_store_bf16_), problem.run(rotate_and_store_reference_)
    assert all(torch.equal(y, of_reference) for y, of_reference in zip(results, expected, strict=True))
    assert not torch.equal(results[1], problem.destination.pages)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_with_head_norms_is_the_reference_but_for_rounding(device):
    """A norm's mean is summed in another order, so that now and then a number is rounded to its neighbour."""
    from qerl.kernels.rope.rotate import rotate_and_store_bf16_

    problem = Problem(tokens=20, heads=12, kv_heads=2, d=64, norms=True, device=device)
    product, pages = problem.run(rotate_and_store_bf16_)
    expected_product, expected_pages = problem.run(rotate_and_store_reference_)
    for y, expected in ((product, expected_product), (pages, expected_pages)):
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
        assert (y != expected).float().mean() < 0.01


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("norms, coded", [(True, False), (False, False), (False, True)])
def test_the_kernel_compiles(norms, coded, capability, monkeypatch):
    from qerl.kernels.rope.rotate import rotate_and_store_bf16_

    problem = Problem(tokens=8, heads=28, kv_heads=4, d=128, norms=norms, coded=coded)
    (compiled,) = compile_launches(capability, monkeypatch, lambda: problem.run(rotate_and_store_bf16_))
    assert coded or "st.global.v4" in compiled.asm["ptx"]
    if capability >= 90:  # sm_80 adds bf16 numbers as fma(1, a, b)
        assert "fma" not in compiled.asm["ptx"]  # it would round once where the reference rounds twice
