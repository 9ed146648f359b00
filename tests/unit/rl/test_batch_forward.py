"""A packed micro-batch scores each completion as its sampling did: under the same noise, token by token.

The reference runs as an engine does: the prompt first, then one completion token at a time against its KV cache, with
the norms' noise switched in between.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from qerl.nn.attention import ATTENTION, packed_forward
from qerl.nn.head import token_logprobs
from qerl.nn.rmsnorm import RMSNorm
from qerl.noise import NoiseDraw, applied
from qerl.rl.batch import TrainBatch
from qerl.types import Completion, Example, RolloutGroup

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, RMSNorm(0.5 + torch.rand(16), config.rms_norm_eps))
    return model


def make_group(prompt_ids, completions, prompt_index):
    return RolloutGroup(
        example=Example(prompt=[]),
        prompt_ids=prompt_ids,
        prompt_index=prompt_index,
        completions=[Completion(ids, [0.0] * len(ids), [0.0] * len(ids), "stop") for ids in completions],
        texts=[""] * len(completions),
        rewards=[0.0] * len(completions),
    )


BATCH = TrainBatch.from_groups(
    [make_group([3, 1, 4], [[1, 5, 9, 2], [6], []], 0), make_group([5, 3], [[5, 8, 9, 7, 9], [3, 2]], 1)],
    [[0.0] * 3, [0.0] * 2],
)


@torch.no_grad()
def decode_step_by_step(model, draw, member):
    """Log-probability of each completion token, by a cache."""
    cache, logprobs = DynamicCache(config=model.config), []
    steps = [(None, member.prompt_ids), *((member.sample_index, [token]) for token in member.completion_ids[:-1])]
    for (sample, ids), token in zip(steps, member.completion_ids, strict=True):
        with applied(model, draw, [draw.stream(member.prompt_index, sample)]):
            logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append((logits / TEMPERATURE).log_softmax(-1)[token])
    return torch.stack(logprobs)


@torch.no_grad()
def score_packed(model, draw, max_tokens):
    table = torch.full((BATCH.num_completion_tokens,), float("nan"))
    for micro in BATCH.micro_batches(range(len(BATCH.sequences)), max_tokens):
        with applied(model, draw, *micro.noise_streams(draw)):
            hidden = packed_forward(model, micro.input_ids, micro.cu_seqlens)[micro.predictors]
            table[micro.slots], _ = token_logprobs(hidden, model.lm_head.weight, micro.targets, temperature=TEMPERATURE)
    return table


@pytest.mark.parametrize("max_tokens", [1, 9, 100])
@pytest.mark.parametrize("per", ["rollout", "prompt", "completion"])
def test_packed_scores_equal_step_by_step_decoding_under_the_same_noise(model, per, max_tokens):
    draw = NoiseDraw(seed=1, step=2, sigma=0.3, per=per)
    members = [m for m in BATCH.sequences if m.completion_ids]
    expected = torch.cat([decode_step_by_step(model, draw, m) for m in members])
    packed = score_packed(model, draw, max_tokens)
    torch.testing.assert_close(packed, expected, rtol=0, atol=2e-5)
    clean = score_packed(model, NoiseDraw(1, 2, 0.0), max_tokens)
    assert ((packed - clean).abs() > 1e-3).all()
