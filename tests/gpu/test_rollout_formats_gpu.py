"""FP8 keys and values and an NVFP4 head on a GPU: as close to fp32 as transformers, and the same bits from graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engine"))
from tiny_policies import assert_as_exact_as_transformers, policy, requests

from qerl.config import RolloutConfig
from qerl.engine.engine import build_engine
from qerl.engine.mapped import mapped_bytes
from qerl.noise import NoiseDraw
from qerl.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SETTINGS = [
    {"kv_cache_dtype": "fp8"},
    {"head_format": "nvfp4"},
    {"kv_cache_dtype": "fp8", "head_format": "nvfp4"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_bf16_is_as_exact_as_transformers(settings: dict[str, str]) -> None:
    assert_as_exact_as_transformers("qwen3", "completion", "cuda", **settings)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_graphs_give_the_bits_of_eager_steps(settings: dict[str, str], batch_invariant: bool) -> None:
    """With prompts in chunks and, unless batch-invariant, completions that are interrupted."""
    model = policy("qwen2", dtype=torch.bfloat16, device="cuda")
    asked = requests(5, 33, 17, 2, 130, samples=7, max_new_tokens=150)
    budget = {"max_batch_size": 20, "prefill_tokens": 96, "kv_cache_tokens": 1600, "batch_invariant": batch_invariant}
    graphs, eager = (
        build_engine(
            model, eos_ids=range(2), config=RolloutConfig.model_validate({**settings, **budget, "cuda_graphs": on})
        )
        for on in (True, False)
    )
    for engine in (graphs, eager):
        engine.sync(NoiseDraw(seed=1, step=2, sigma=1e-2, per="completion"))
    assert graphs.generate(asked, SamplingParams()) == eager.generate(asked, SamplingParams())


def test_fp8_pages_take_half_the_memory() -> None:
    engines = [
        build_engine(
            policy("qwen3", dtype=torch.bfloat16, device="cuda"),
            eos_ids=(),
            config=RolloutConfig.model_validate({"kv_cache_dtype": dtype}),
        )
        for dtype in ("auto", "fp8")
    ]
    sizes = []
    for engine in engines:
        engine.generate(requests(100, samples=256, max_new_tokens=200), SamplingParams())
        sizes.append(mapped_bytes(torch.device("cuda")))
        engine.sleep()
    assert 0.55 < sizes[1] / sizes[0] < 0.575  # heads of 32: 36 bytes instead of 64
