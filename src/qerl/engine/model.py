"""The rollout policy: a decoder over the trainer's own tensors, for packed tokens and paged keys and values.

    x = embedding[token]
    per layer   q, k, v = qkv(norm(x));  x += o(attend(rotate(q), rotate(k), v))       norm: noisy (engine/norms.py)
                gate, up = gate_up(norm(x));  x += down(silu(gate) * up)
    logits = head(final_norm(x))                                                      head: as it is, or in NVFP4

Knows Llama, Mistral, Qwen2/2.5 (bias on q, k, v) and Qwen3 (norms on the heads of q and k); `unsupported` says why a
model is none of these. Weights, embedding and head are the model's, read at every call (an NVFP4 head is a copy, made
once: the trainer's is frozen); adapters and norm vectors are copies that `sync` refreshes; rotary angles are a table of
what the model's own module computes, so that scaled positions are right. Rounding follows the trainer's forward pass:
activations in the embedding's dtype, norms in fp32, products as in projection.py. Between two products runs one
operation of kernels/: norm (which also adds what the block before gave), attention (which rotates) or activation.

Called by the runner, with an attention of attention.py, and by the probe. Leaves out sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from qerl.engine.attention import Attention
from qerl.engine.blocks import in_blocks
from qerl.engine.norms import Gains, NormBuffers
from qerl.engine.projection import Projection, base_linear, sync
from qerl.formats.nvfp4 import quantize
from qerl.kernels.activation import swiglu
from qerl.kernels.layout import pack
from qerl.kernels.norm import add_rms_norm_
from qerl.kernels.nvrtc import forget_counters
from qerl.kernels.rope import HeadNorms, Rotation
from qerl.kernels.w4a16 import MAX_FUSED_TOKENS, w4a16
from qerl.nn import structure
from qerl.nn.lora import is_lora
from qerl.noise import SITE_NAMES, NoiseDraw

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Scalings of rotary angles that do not depend on the sequence's length, so that cached keys stay right."""

TABLE_STEP = 4096
"""Positions whose rotary angles are computed at a time: 1 MB of them with heads of 128."""


@dataclass(frozen=True)
class _Layer:
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection


class Decoder:
    """See the module's text. All sizes of the cache are here: num_layers, kv_heads, head_dim, dtype, device."""

    def __init__(self, model: nn.Module, *, batch_invariant: bool = False, packs_head: bool = False) -> None:
        """model: transformers' causal language model, with or without PEFT, that `unsupported` has nothing against.

        batch_invariant: products in blocks (blocks.py), so that a token's bits do not depend on the others;
        packs_head: logits come from a copy of the head in NVFP4.
        """
        self._batch_invariant = batch_invariant
        body, head = structure.decoder(model), structure.head(model)
        embedding, final_norm = cast(nn.Embedding, body.get_input_embeddings()), cast(nn.Module, body.norm)
        layers: list[Any] = list(structure.decoder_layers(model))
        self._embedding: Float[Tensor, "v h"] = embedding.weight.detach()
        self._head, self._head_bias = head.weight.detach(), head.bias
        self._packed_head = pack([quantize(self._head)]) if packs_head else None
        self._rotary = cast(nn.Module, body.rotary_emb)
        self._angles: Float[Tensor, "positions 2 half"] = self._angles_of(0)
        self._eps: float = body.config.rms_norm_eps
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self.vocab_size, self.num_layers = len(self._embedding), len(layers)
        self.head_dim: int = layers[0].self_attn.head_dim
        self.kv_heads = base_linear(layers[0].self_attn.k_proj).out_features // self.head_dim
        self._layers = [
            _Layer(
                self._projection(layer.self_attn, "q_proj", "k_proj", "v_proj"),
                self._projection(layer.self_attn, "o_proj"),
                self._projection(layer.mlp, "gate_proj", "up_proj"),
                self._projection(layer.mlp, "down_proj"),
            )
            for layer in layers
        ]
        heads = [
            getattr(layer.self_attn, name)
            for layer in layers
            for name in ("q_norm", "k_norm")
            if hasattr(layer.self_attn, name)
        ]
        self._has_head_norms = bool(heads)
        self.norms = NormBuffers(
            [getattr(layer, name) for layer in layers for name in SITE_NAMES], [final_norm, *heads]
        )

    def _projection(self, module: nn.Module, *names: str) -> Projection:
        linears = [getattr(module, name) for name in names]
        return Projection(linears, self.dtype, batch_invariant=self._batch_invariant)

    @property
    def projections(self) -> list[Projection]:
        """All products, layer by layer."""
        return [p for layer in self._layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]

    def reach(self, positions: int) -> None:
        """Be ready for tokens at so many positions. What was captured before reads angles where they may be no more.

        A model that knows a million positions would have a table of a quarter of a gigabyte for all of them.
        """
        missing = range(len(self._angles), positions, TABLE_STEP)
        if missing:
            self._angles = torch.cat([self._angles, *map(self._angles_of, missing)])

    def _angles_of(self, first: int) -> Float[Tensor, "positions 2 half"]:
        """Cosines and sines of a step of the table, as the model's own module computes them."""
        positions = torch.arange(first, first + TABLE_STEP, device=self._embedding.device)
        cos, sin = self._rotary(self._embedding[:1], positions[None])
        return torch.stack((cos[0], sin[0]), 1)[:, :, : cos.shape[-1] // 2].clone()

    def sync(self, draw: NoiseDraw | None) -> tuple[Float32[Tensor, " adapters"], int]:
        """Copy adapters and norms from the model; the largest |B| of each adapter, the number of noisy vectors."""
        return sync(self.projections), self.norms.sync(draw)

    def forward(
        self,
        tokens: Int64[Tensor, " t"],
        positions: Int64[Tensor, " t"],
        gains: Gains,
        attend: Attention,
        *,
        adapter_gain: float = 1.0,
    ) -> Float[Tensor, "t h"]:
        """Hidden states after the final norm. `attend` says what each token sees; adapter_gain multiplies adapters."""
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._angles[positions].unbind(1)
        final_norm, *head_gains = self.norms.others
        delta = None  # what the block before adds to x: added by the next norm

        def norm(site: int, then: Projection) -> Sequence[Float[Tensor, "t n"]]:
            ready, gain = then.announcement(len(x)), gains.of_site(site)
            normed = add_rms_norm_(x, delta, gain, self._eps, gains.index, announcement=ready)
            return then(normed, adapter_gain, ready)

        try:
            for i, layer in enumerate(self._layers):
                q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in norm(2 * i, layer.qkv))
                norms = HeadNorms(head_gains[2 * i], head_gains[2 * i + 1], self._eps) if self._has_head_norms else None
                ready = layer.o.announcement(len(x))
                delta = layer.o(attend(i, q, k, v, Rotation(cos, sin, norms), ready), adapter_gain, ready)[0]
                ready = layer.down.announcement(len(x))
                # gate and up get no names: they would hold their memory until the next layer has its own.
                delta = layer.down(swiglu(*norm(2 * i + 1, layer.gate_up), announcement=ready), adapter_gain, ready)[0]
        except BaseException:  # an interrupt, say, between what is announced and who waits for it
            forget_counters()
            raise
        return add_rms_norm_(x, delta, final_norm, self._eps)

    def logits(self, hidden: Float[Tensor, "t h"]) -> Float[Tensor, "t v"]:
        """Scores of the next token: a product in the head's dtype, as in the trainer's (nn/head.py), or packed."""
        if self._batch_invariant:
            return in_blocks(lambda block: [self._scores(block)], hidden)[0]
        if self._packed_head is None or len(hidden) <= MAX_FUSED_TOKENS:
            return self._scores(hidden)
        return torch.cat([self._scores(rows) for rows in hidden.split(MAX_FUSED_TOKENS)])  # more would unpack the head

    def _scores(self, hidden: Float[Tensor, "t h"]) -> Float[Tensor, "t v"]:
        if self._packed_head is None:
            return F.linear(hidden.to(self._head.dtype), self._head, self._head_bias)
        bias = None if self._head_bias is None else self._head_bias.to(hidden.dtype)
        return w4a16(hidden, self._packed_head, bias)


def unsupported(model: nn.Module) -> str | None:
    """Why this engine cannot sample from the model; None if it can."""
    config = structure.decoder(model).config
    if config.model_type not in FAMILIES:
        return f"its architecture is {config.model_type}, not one of {', '.join(FAMILIES)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        return f"its rotary embedding is {rope_type}, not one of {', '.join(ROPE_TYPES)}"
    inside = {id(module) for layer in structure.decoder_layers(model) for module in layer.modules()}
    odd = [
        name
        for name, module in structure.causal_lm(model).named_modules()
        if isinstance(module, BaseTunerLayer) and not (is_lora(module) and id(module) in inside)
    ]
    if odd:
        return f"it has adapters that are not LoRA on a decoder layer's linear, such as {odd[0]}"
    return None


def sliding_window(model: nn.Module) -> int | None:
    """Tokens that a token of some layer can see at most, itself included; None without such a limit."""
    config = structure.decoder(model).config
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        return None
    return getattr(config, "sliding_window", None)
