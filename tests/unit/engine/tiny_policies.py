"""Tiny policies as the trainer holds them: packed linears, norms that take noise, adapters with B != 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

import qerl.nn.attention
from qerl.config import LoraConfig, RolloutConfig
from qerl.engine.engine import build_engine
from qerl.formats import int4, nf4
from qerl.formats.nvfp4 import dequantize, quantize
from qerl.kernels.coded import CodedWeight
from qerl.kernels.e4m3 import decode, encode
from qerl.kernels.layout import pack
from qerl.nn.attention import ATTENTION
from qerl.nn.linear import PackedLinear
from qerl.nn.lora import LoraLinear, attach_lora
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import decoder_layers, head
from qerl.noise import NoiseDraw, applied
from qerl.types import Completion, Request, SamplingParams

VOCABULARY = 97
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=None,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=None),
}


def policy(
    family: str,
    *,
    packed: bool = True,
    format: str = "nvfp4",
    lora: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **config: object,
) -> nn.Module:
    """A random model of a family. All of its biases, norms and B are away from their starting values.

    Weights are numbers that bf16 holds, so that models of one seed are equal whatever their dtype.
    """
    torch.manual_seed(seed)
    model_config = CONFIGS[family]()
    for name, value in config.items():
        setattr(model_config, name, value)
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation=ATTENTION, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)  # transformers' initialisation is so small that logits depend on little
            parameter.copy_(parameter.bfloat16())
    model.to(dtype)
    for name, module in list(model.named_modules()):
        if hasattr(module, "variance_epsilon"):
            model.set_submodule(name, RMSNorm(module.get_parameter("weight"), module.variance_epsilon))
    if packed:
        pack_linears(model, format)
    model.requires_grad_(False).to(device)
    if not lora:
        return model
    adapted = attach_lora(model, LoraConfig(r=4, alpha=6, rank_pattern={"k_proj": 3}), seed=seed)
    scatter_adapters(adapted)
    return adapted


def pack_linears(model: PreTrainedModel, format: str) -> None:
    for layer in decoder_layers(model):
        for group in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            block = layer.mlp if hasattr(layer.mlp, group[0]) else layer.self_attn
            linears = [getattr(block, name) for name in group]
            weights = [linear.weight.detach() for linear in linears]
            if format == "nvfp4":
                whole = pack([quantize(w) for w in weights])
                parts = [whole.part(i) for i in range(len(group))]
            else:
                parts = [
                    CodedWeight(nf4.quantize(w) if format == "nf4" else int4.quantize(w, group=32)) for w in weights
                ]
            for name, linear, part in zip(group, linears, parts, strict=True):
                setattr(block, name, PackedLinear(part, linear.bias))


def scatter_adapters(model: nn.Module, size: float = 0.3) -> None:
    """Give every B random entries."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            b = module.lora_B["default"].weight
            with torch.no_grad():
                b.copy_(torch.randn(b.shape) * size)  # on the CPU: the same on every device


@torch.no_grad()
def reference_logprobs(
    model: nn.Module,
    request: Request,
    sample: int,
    token_ids: Sequence[int],
    draw: NoiseDraw | None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities of a completion by transformers' forward pass: the prompt's stream, then the completion's."""
    device = next(model.parameters()).device
    ids = torch.tensor([request.prompt_ids + list(token_ids)], device=device)
    streams, index = [0], None
    if draw is not None:
        streams = [draw.stream(request.prompt_index), draw.stream(request.prompt_index, sample)]
        index = (torch.arange(ids.shape[1], device=device) >= len(request.prompt_ids)).long()
    with applied(model, draw, streams, index):
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
    logprobs = (logits.float().cpu() / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


def gap(
    model: nn.Module,
    requests: Sequence[Request],
    results: Sequence[Sequence[Completion]],
    draw: NoiseDraw | None,
    temperature: float = 1.0,
) -> float:
    """Mean |logprob difference| between an engine's completions and `reference_logprobs`."""
    differences = [
        (torch.tensor(c.logprobs) - reference_logprobs(model, request, j, c.token_ids, draw, temperature)).abs()
        for request, group in zip(requests, results, strict=True)
        for j, c in enumerate(group)
    ]
    return float(torch.cat(differences).mean())


@contextmanager
def rounded_keys_and_values() -> Iterator[None]:
    """Transformers' attention sees them as 8-bit pages hold them."""
    attend = qerl.nn.attention.sdpa_attention_forward

    def rounded(module, query, key, value, *args, **kwargs):
        key, value = (decode(*encode(x), x.dtype) for x in (key, value))
        return attend(module, query, key, value, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qerl.nn.attention, "sdpa_attention_forward", rounded)
        yield


@torch.no_grad()
def round_head_(model: nn.Module) -> None:
    """Make a head that is not tied what its copy in NVFP4 is."""
    weight = head(model).weight
    weight.copy_(dequantize(quantize(weight)))


def assert_as_exact_as_transformers(family: str, per: str, device: str, **settings: str) -> None:
    """bf16: at most 1.5 times as far from fp32 as transformers' forward is, and far from what noise or LoRA change.

    All three see the same codes, adapters and noise, and score the tokens that the engine drew. settings: of the
    rollout; transformers' keys, values and head are rounded as they say.
    """
    # Keys and values of 8 bits change a random model's scores by a quarter of what a sigma of 0.05 does.
    draw = NoiseDraw(seed=1, step=1, sigma=1e-1 if "kv_cache_dtype" in settings else 5e-2, per=per)
    model, exact = policy(family, dtype=torch.bfloat16, device=device), policy(family)
    engine = build_engine(model, eos_ids=(), config=RolloutConfig.model_validate({"engine": "qerl", **settings}))
    engine.sync(draw)
    if "head_format" in settings:
        round_head_(model)
        round_head_(exact)
    attention = rounded_keys_and_values if "kv_cache_dtype" in settings else nullcontext
    asked = requests(3, 20, 41, samples=4, max_new_tokens=48)
    results = engine.generate(asked, SamplingParams())

    def difference(a: str, b: str) -> float:
        scores = []
        for name in (a, b):
            for request, group in zip(asked, results, strict=True):
                for j, c in enumerate(group):
                    if name == "engine":
                        scores.append(torch.tensor(c.logprobs))
                        continue
                    scored, noise = model if name == "bf16" else exact, None if name == "no noise" else draw
                    with attention():
                        scores.append(reference_logprobs(scored, request, j, c.token_ids, noise))
        left, right = torch.cat(scores).chunk(2)
        return float((left - right).abs().mean())

    ours, theirs = difference("engine", "fp32"), difference("bf16", "fp32")
    assert 0 < ours <= 1.5 * theirs
    assert ours <= difference("fp32", "no noise") / 4
    with exact.disable_adapter():
        without_adapter = difference("engine", "fp32")
    assert ours <= without_adapter / 4


def requests(*prompt_lengths: int, samples: int = 3, max_new_tokens: int = 24, seed: int = 0) -> list[Request]:
    """Random prompts of these lengths; prompt numbers start at 5, so that none is taken for a place in the list."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            prompt_ids=torch.randint(0, VOCABULARY, (length,), generator=generator).tolist(),
            seeds=[(seed << 40) + 1000 * i + j for j in range(samples)],
            max_new_tokens=max_new_tokens,
            prompt_index=5 + i,
        )
        for i, length in enumerate(prompt_lengths)
    ]
