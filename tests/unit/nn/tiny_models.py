"""Tiny random models of several families, made in memory or saved as folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from qerl.formats.nvfp4 import dequantize, quantize
from qerl.kernels.w4a16 import pack
from qerl.nn.attention import ATTENTION
from qerl.nn.linear import PackedLinear
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import decoder_layers

VOCABULARY = 97
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
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
    "mistral": lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=8),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=None),
    "gpt_neox": lambda: GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
}


def tiny_model(family: str, *, seed: int = 0, attention: str = ATTENTION) -> PreTrainedModel:
    """A small fp32 model with random weights, biases and norms, in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[family](), attn_implementation=attention, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)  # initialisation is so small that logits hardly depend on anything
    return model


def quantized_pair(family: str, *, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model twice: packed as load_model makes it, and dense, in plain transformers, with the same weights."""
    packed, dense = tiny_model(family, seed=seed), tiny_model(family, seed=seed, attention="sdpa")
    for name, linear in list(decoder_layers(dense).named_modules()):
        if isinstance(linear, nn.Linear):
            codes = quantize(linear.weight.detach())
            linear.weight.data.copy_(dequantize(codes))
            bias = None if linear.bias is None else linear.bias.detach().clone()
            decoder_layers(packed).set_submodule(name, PackedLinear(pack([codes]), bias))
    for name, norm in list(packed.named_modules()):
        if type(norm).__name__.endswith("RMSNorm"):
            packed.set_submodule(name, RMSNorm(norm.weight, norm.variance_epsilon))
    packed.requires_grad_(False)
    return packed, dense


def save_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model and a word-level tokenizer; returns the folder."""
    model.to(dtype).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder
