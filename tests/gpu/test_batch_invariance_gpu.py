"""Batch invariance on a GPU: rows of a block do not depend on their place, completions not on their company."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engine"))
from tiny_policies import policy, requests

from qerl.config import RolloutConfig
from qerl.engine.blocks import BLOCK, in_blocks
from qerl.engine.engine import build_engine
from qerl.formats.nvfp4 import quantize
from qerl.kernels.adapter import pack_adapter
from qerl.kernels.layout import pack
from qerl.kernels.w4a16 import w4a16
from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def assert_rows_are_on_their_own(product, columns: int) -> None:
    """In another place, alone, and among others: a row keeps its bits."""
    x = torch.randn(3 * BLOCK + 5, columns, device="cuda").bfloat16()
    (y,) = in_blocks(product, x)
    order = torch.randperm(len(x), device="cuda")
    assert torch.equal(in_blocks(product, x[order])[0], y[order])
    for i in (0, 70, len(x) - 1):
        assert torch.equal(in_blocks(product, x[i : i + 1])[0][0], y[i])


@pytest.mark.parametrize("rows, columns", [(1152, 896), (5120, 5120), (27648, 5120), (5120, 27648)])
def test_rows_of_packed_products(rows: int, columns: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = pack([quantize(torch.randn(rows, columns, generator=generator, device="cuda").bfloat16())])
    factors = [torch.randn(*shape, generator=generator, device="cuda") / 50 for shape in ((32, columns), (rows, 32))]
    adapter = pack_adapter(weight, [(factors[0], factors[1], 2.0)], torch.bfloat16)
    assert_rows_are_on_their_own(lambda block: [w4a16(block, weight)], columns)
    assert_rows_are_on_their_own(lambda block: [w4a16(block, weight, None, adapter)], columns)


@pytest.mark.parametrize("rows, columns", [(151_936, 896), (152_064, 5120), (5120, 27648)])
def test_rows_of_dense_products(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, device="cuda").bfloat16()
    assert_rows_are_on_their_own(lambda block: [F.linear(block, weight)], columns)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.2, top_k=40, top_p=0.9)])
def test_the_same_bits_in_any_company(sampling: SamplingParams, packed: bool) -> None:
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda", packed=packed)
    asked = requests(5, 33, 170, 2, 300, samples=18, max_new_tokens=70)

    def run(some: list[Request], **config: object) -> list[list[Completion]]:
        settings = RolloutConfig(batch_invariant=True, prefill_tokens=96, **config)
        engine = build_engine(model, eos_ids=range(2), config=settings)
        engine.sync(NoiseDraw(seed=1, step=2, sigma=1e-2, per="completion"))
        return engine.generate(some, sampling)

    together = run(asked)
    assert [run([request])[0] for request in asked] == together
    assert run(asked[::-1], max_batch_size=9, cuda_graphs=False)[::-1] == together
    assert run(asked, kv_cache_tokens=1024) == together


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.batch_invariant on a GPU needs bfloat16"):
        build_engine(policy("qwen2", device="cuda"), eos_ids=(), config=RolloutConfig(batch_invariant=True))
