"""`rollout.batch_invariant`: a completion's tokens, logprobs and entropies are the same to the bit in any company."""

from __future__ import annotations

import pytest
import torch
from tiny_policies import gap, policy, requests

from qerl.config import RolloutConfig
from qerl.engine.blocks import BLOCK, in_blocks
from qerl.engine.engine import _check_attention, build_engine
from qerl.engine.scheduler import Scheduler
from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams

SAMPLING = SamplingParams()


def generated(
    model: torch.nn.Module, asked: list[Request], sampling: SamplingParams = SAMPLING, per: str = "completion", **config
) -> list[list[Completion]]:
    engine = build_engine(model, eos_ids=range(2), config=RolloutConfig(**config))
    engine.sync(NoiseDraw(seed=3, step=2, sigma=5e-2, per=per))
    return engine.generate(asked, sampling)


@pytest.mark.parametrize(
    "family, dtype, sampling",
    [
        ("qwen2", torch.bfloat16, SAMPLING),
        ("qwen3", torch.float32, SamplingParams(temperature=1.2, top_k=30, top_p=0.9, min_p=0.01)),
    ],
)
def test_the_same_bits_in_any_company(
    family: str, dtype: torch.dtype, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a crowd, in another order, in fewer slots, with little memory, behind prompts that fill the budget."""
    monkeypatch.setattr(Scheduler, "suspend", lambda *_: pytest.fail("a completion was interrupted"))
    model = policy(family, dtype=dtype)
    asked = requests(5, 33, 70, 2, 16, samples=3, max_new_tokens=70)

    def run(some: list[Request], **config: object) -> list[list[Completion]]:
        return generated(model, some, sampling, batch_invariant=True, prefill_tokens=48, **config)

    together = run(asked)
    assert [run([request])[0] for request in asked] == together
    assert run(asked[::-1], max_batch_size=7)[::-1] == together
    assert run(asked, kv_cache_tokens=256) == together


@pytest.mark.parametrize("prefill_tokens", [48, 8192])
def test_without_it_bits_depend_on_the_company(prefill_tokens: int) -> None:
    """On where prompts are cut, and on the number of rows of a product."""
    model = policy("qwen2")
    asked = requests(5, 33, 70, 2, 16, samples=3, max_new_tokens=70)
    together = generated(model, asked, prefill_tokens=prefill_tokens)
    assert [generated(model, [request], prefill_tokens=prefill_tokens)[0] for request in asked] != together


def test_it_samples_from_the_same_policy() -> None:
    """Its logprobs are transformers' up to rounding, in many blocks as in one."""
    model = policy("llama")
    asked = requests(5, 130, samples=40, max_new_tokens=4)
    results = generated(model, asked, per="prompt", batch_invariant=True)
    assert gap(model, asked, results, NoiseDraw(seed=3, step=2, sigma=5e-2, per="prompt")) <= 1e-4


@pytest.mark.parametrize("rows", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocks_have_one_size_and_keep_the_rows(rows: int) -> None:
    sizes = []

    def function(block: torch.Tensor) -> list[torch.Tensor]:
        sizes.append(len(block))
        return [2 * block, block[:, :1] > 0]

    x = torch.randn(rows, 3)
    double, positive = in_blocks(function, x)
    assert torch.equal(double, 2 * x) and torch.equal(positive, x[:, :1] > 0)
    assert sizes == [BLOCK] * -(-rows // BLOCK)


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 128), (torch.bfloat16, 96)])
def test_attention_without_a_kernel_is_told_and_refused(dtype: torch.dtype, head_dim: int, caplog) -> None:
    """Of a GPU: torch's attention sums in an order that depends on the batch, and is slow."""
    _check_attention(torch.bfloat16, 128, batch_invariant=True)
    assert not caplog.messages
    _check_attention(dtype, head_dim, batch_invariant=False)
    assert caplog.messages == [
        f"decode attention has no kernel for {dtype} and heads of {head_dim}: it copies the pages that it reads, slowly"
    ]
    with pytest.raises(ValueError, match=rf"needs bfloat16 .* {dtype} and heads of {head_dim}: set model\.dtype"):
        _check_attention(dtype, head_dim, batch_invariant=True)


def test_the_slow_engine_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"rollout\.batch_invariant is of qerl's own engine.*hf"):
        build_engine(policy("qwen2"), eos_ids=(), config=RolloutConfig(engine="hf", batch_invariant=True))
