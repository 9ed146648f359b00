"""Many sequences in one row: the training forward pass of the decoder, without padding.

    tokens      a0 a1 a2 | b0 b1 | c0 c1 c2 c3        input_ids [T]
    position     0  1  2 |  0  1 |  0  1  2  3        restarts with each sequence
    cu_seqlens   0         3       5             9    [number of sequences + 1]

Attention is the only layer in which tokens meet, so it alone must know where sequences end. It is registered with
transformers under the name `ATTENTION`, which load_model puts into the config, and told through a keyword argument
that transformers hands down to it (classes that set `_supports_attention_backend` promise that). The keyword is part
of the call, so a layer that runs again in the backward pass sees it again.

* CUDA, 16-bit: torch.nn.attention.varlen (flash attention over all sequences at once).
* CPU or fp32: scaled_dot_product_attention, sequence by sequence.
* Without the keyword (transformers' generate, padded batches): transformers' own SDPA, with the masks it makes for it.

Sliding windows are honoured in all three. What no path here computes is refused: attention dropout, soft caps, sinks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl.nn.structure import decoder

ATTENTION = "qerl_packed"
"""The name of `packed_attention` among transformers' attention implementations."""

# torch 2.11 has no such argument and wants as many key heads as query heads.
VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a row of T tokens begin and end."""

    cu_seqlens: Int[Tensor, " b1"]
    """int32 on the tokens' device: 0, end of the first sequence, ..., T."""
    lengths: tuple[int, ...]
    """The same as lengths, on the host."""


def packed_forward(
    model: nn.Module, input_ids: Int[Tensor, " t"], cu_seqlens: Int[Tensor, " b1"]
) -> Float[Tensor, "t h"]:
    """Hidden states of packed sequences, after the final norm and before the head.

    `cu_seqlens` holds 0 and the end of each sequence in `input_ids`; a sequence may be empty. None sees another.
    """
    ends = cu_seqlens.tolist()
    lengths = tuple(stop - start for start, stop in pairwise(ends))
    if not ends or ends[0] != 0 or ends[-1] != len(input_ids) or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the {len(input_ids)} tokens of input_ids, got {ends}")
    body = decoder(model)
    if body.config._attn_implementation != ATTENTION:
        raise ValueError(f"the model attends with {body.config._attn_implementation!r}: load it with load_model")
    device = input_ids.device
    if len(input_ids) == 0:
        return body.get_input_embeddings()(input_ids)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    packing = Packing(cu_seqlens.to(device, torch.int32), lengths)
    # transformers hands a 4-D mask through unread; without one it would build [T, T].
    no_mask = torch.empty(1, 1, 0, 0, device=device)
    output = body(
        input_ids=input_ids[None],
        position_ids=positions[None],
        attention_mask=no_mask,
        use_cache=False,
        packing=packing,
    )
    return output.last_hidden_state[0]


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "batch heads t d"],
    key: Float[Tensor, "batch kv_heads s d"],
    value: Float[Tensor, "batch kv_heads s d"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch t heads d"], None]:
    """Causal attention in transformers' calling convention; see the module's text for the three paths."""
    for name in ("softcap", "s_aux", "position_bias"):  # Gemma 2, gpt-oss, ALiBi and T5
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}: not supported")
    if dropout:
        raise ValueError(f"{type(module).__name__} has attention dropout: set it to 0 in the model's config.json")
    if packing is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError(f"{type(module).__name__} is not told where packed sequences end: not supported")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return attend_packed(query[0], key[0], value[0], packing, scaling, sliding_window)[None], None


def attend_packed(
    query: Float[Tensor, "heads t d"],
    key: Float[Tensor, "kv_heads t d"],
    value: Float[Tensor, "kv_heads t d"],
    packing: Packing,
    scaling: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "t heads d"]:
    """Causal attention of each sequence of a row within itself; scaling defaults to 1 / sqrt(d). Also the engine's."""
    attend = _varlen if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else _segments
    return attend(query, key, value, packing, scaling, window)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Float[Tensor, "t heads d"]:
    groups = query.shape[0] // key.shape[0]
    options: dict[str, Any] = {}
    if groups > 1 and VARLEN_HAS_GQA:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    longest = max(packing.lengths)
    output = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        packing.cu_seqlens,
        packing.cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # tokens to the left, besides its own
        **options,
    )
    assert isinstance(output, Tensor)  # a pair only where the log-sum-exp is asked for
    return output


def _segments(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Float[Tensor, "t heads d"]:
    outputs = []
    parts = (tensor.split(packing.lengths, dim=1) for tensor in (query, key, value))
    for q, k, v in zip(*parts, strict=True):
        length = q.shape[1]
        mask = None
        if window is not None and length > window:
            distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
            mask = (distance >= 0) & (distance < window)
        output = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
