"""Qwen2.5's shapes with random weights: made on the device, tensor by tensor, in the format asked for.

    write_folder(size) -> config.json, tokenizer      what qerl.plan and nn/load.py read of a model's folder
    RandomWeights      -> nn/load.py's `weights`      in place of the folder's safetensors

NVFP4 and MXFP4 linears come as random codes and scales, as a packed folder would hold them; of other formats as one
bf16 matrix at a time, which nn/load.py quantises (or keeps). So no bf16 copy of a model ever exists, and 72B take
seconds. Scales are such that every product of activations of size 1 has size 1, as in a trained model.

The end-of-text token is one that the vocabulary does not have, so that completions always reach their full length; or
every n-th token is one, and lengths are n on average with a long tail, since all tokens are about as likely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.qwen2 import Qwen2Config

from qerl.config import ModelConfig
from qerl.formats import mxfp4, nvfp4
from qerl.formats.checkpoint import Quantization
from qerl.formats.codes import PackedCodes, PackedFormat
from qerl.formats.mxfp4 import MXFP4Tensor
from qerl.formats.nvfp4 import E2M1_VALUES, NVFP4Tensor

_E4M3_BYTES = (0x28, 0x48)  # block scales of 0.25 .. 4
_E8M0_RANGE = (-2, 1)  # octaves around the middle
_WORDS = 1000  # of the tokenizer: prompts are made of them


class Size(NamedTuple):
    """A Qwen2.5 model's numbers."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool


SIZES: Mapping[str, Size] = {
    "tiny": Size(128, 256, 2, 4, 2, 2048, True),  # no Qwen2.5: for a CPU; the others are of Qwen/Qwen2.5-<size>
    "0.5B-2": Size(896, 4864, 2, 14, 2, 151936, True),  # the first two layers of the next one
    "0.5B": Size(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Size(1536, 8960, 28, 12, 2, 151936, True),
    "3B": Size(2048, 11008, 36, 16, 2, 151936, True),
    "7B": Size(3584, 18944, 28, 28, 4, 152064, False),
    "14B": Size(5120, 13824, 48, 40, 8, 152064, False),
    "32B": Size(5120, 27648, 64, 40, 8, 152064, False),
    "72B": Size(8192, 29568, 80, 64, 8, 152064, False),
}


def write_folder(folder: Path, name: str, *, mean_length: int | None = None) -> None:
    """The folder of a model without weights. name: a key of SIZES; mean_length: of completions, which may be longer."""
    qwen2_config(name).save_pretrained(folder)
    vocabulary = SIZES[name].vocabulary
    ends = vocabulary if mean_length is None else list(range(0, vocabulary, mean_length))
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


def qwen2_config(name: str) -> Qwen2Config:
    """What transformers knows of a key of SIZES."""
    size = SIZES[name]
    return Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=size.tied,
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of a thousand words, and chats that are their last message alone.

    Not to be read from a folder: transformers takes Qwen2's own class there, whatever the files say.
    """
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(_WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    return tokenizer


def prompt_text(num_tokens: int, number: int) -> str:
    """A text of so many tokens of the tokenizer; others for other numbers."""
    return " ".join(f"w{(7 * number + 13 * i + i * i) % _WORDS}" for i in range(num_tokens))


class RandomWeights:
    """See nn/load.py's `Weights`. Draws are the same for the same seed, format and kind of device."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        """config.path: a folder of `write_folder`."""
        # How packed folders name the tensors does not matter here: codes are asked for by the linear's name.
        packed: dict[str, PackedFormat] = {"nvfp4": "nvfp4", "mxfp4": "mxfp4"}
        format = packed.get(config.format)
        self.quantization = None if format is None else Quantization("compressed-tensors", format)
        self._generator = torch.Generator(device).manual_seed(seed)
        model_config = Qwen2Config.from_pretrained(config.path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(model_config)
        self._shapes: dict[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in model.state_dict().items()}

    def names(self) -> list[str]:
        """See `Weights`."""
        return list(self._shapes)

    def is_packed(self, module: str) -> bool:
        """See `Weights`."""
        return self.quantization is not None and module.endswith("_proj")

    def codes(self, module: str) -> PackedCodes:
        """See `Weights`."""
        n, k = self._shapes[f"{module}.weight"]
        wanted = 1 / math.sqrt(k)
        codes = self._bytes(n, k // 2, 0, 255)
        e2m1 = _rms(torch.tensor(E2M1_VALUES))
        assert self.quantization is not None
        if self.quantization.format == "mxfp4":
            middle = 127 + round(math.log2(wanted / e2m1))
            first, last = (middle + octave for octave in _E8M0_RANGE)
            return MXFP4Tensor(codes, self._bytes(n, k // mxfp4.BLOCK, first, last))
        scales = self._bytes(n, k // nvfp4.BLOCK, *_E4M3_BYTES).view(torch.float8_e4m3fn)
        every_scale = torch.arange(_E4M3_BYTES[0], _E4M3_BYTES[1] + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return NVFP4Tensor(codes, scales, torch.tensor([wanted / (e2m1 * _rms(every_scale.float()))]))

    def tensor(self, name: str) -> Tensor:
        """See `Weights`: a matrix with outputs of size 1, a norm around 1, a small bias."""
        shape = self._shapes[name]
        draw = torch.randn(shape, dtype=torch.bfloat16, device=self._generator.device, generator=self._generator)
        if name.endswith("norm.weight"):
            return draw.mul_(0.1).add_(1)
        if name.endswith(".bias"):
            return draw.mul_(0.1)
        return draw.mul_(1 / math.sqrt(shape[1]))

    def _bytes(self, n: int, k: int, first: int, last: int) -> Tensor:
        device = self._generator.device
        return torch.randint(first, last + 1, (n, k), dtype=torch.uint8, device=device, generator=self._generator)


def _rms(values: Float[Tensor, " n"]) -> float:
    return values.square().mean().sqrt().item()
