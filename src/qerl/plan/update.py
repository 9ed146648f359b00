"""The update: what its activations take, and how it is cut so that it is fast within the memory that there is.

    choose_passes     tokens of a micro-batch, layers that recompute: of all that has room, what takes the least time
    update_parts      bytes of the longest micro-batch at the worst moment

T is the tokens of the longest micro-batch, b the bytes of an activation.

A layer keeps for its backward pass, in numbers a token (H hidden, I intermediate, Q and KV the widths of q and of k):

    norms             2 H
    what LoRA reads   H (q, k, v), H (gate, up); those of o and down are kept by their neighbours or I; the ranks;
                      on a GPU, over a packed base, the largest rank three times more: room behind rows
    attention         q, k, v, its output: 2 Q + 2 KV, and 4 bytes a head (log of the softmax's sum)
    SwiGLU            gate, up: 2 I

and its backward pass makes up to 2 I + 2 H more. Layers that recompute have H each, but for the one whose turn it is:
they are the first, so that by then what the others kept is gone.

Called by memory.py. docs/memory.md has the measurements behind the choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from qerl.config import RunConfig
from qerl.kernels.adapter import MAX_RANK
from qerl.kernels.room import room_for
from qerl.nn.attention import VARLEN_HAS_GQA
from qerl.plan.shapes import Layer, ModelShape
from qerl.plan.target import Target

_FP32 = 4
MICRO_BATCH_TOKENS = 16_384
"""Of a run that is not planned; of a large model the longest that is looked at."""
_MOST_TIMES, _WIDE = 4, 3584  # of others so many times, for a hidden size of so much less than this (Qwen2.5-7B's)
_LEAST_MICRO_BATCH_TOKENS = 2048
_LAUNCHES, _BESIDE_PRODUCTS, _DEQUANTISATION = 1.5e12, 3e7, 250
"""Of a layer's pass, fitted to updates of 0.5B, 7B and 32B on an H200 (docs/memory.md): the host launches it while the
GPU computes so many weights x tokens; what is not products counts as so many weights, dequantisation as so many
tokens."""
_INPUTS_ON_THEIR_WAY = 2  # nn/recompute.py: the layer's own, and the last one's, which may still be copied


def choose_passes(
    shape: ModelShape,
    config: RunConfig,
    target: Target,
    layer_bytes: Sequence[int],
    prompt: int,
    new: int,
    rooms: tuple[int, int],
) -> tuple[int, int]:
    """Most tokens of a micro-batch, and how many layers recompute: of what has room, what takes the least time.

    rooms: bytes for what only makes the update faster, and all that there are: where nothing has the first, what takes
    the least memory of layers and has the second, or else the least of all.
    """
    num_layers = len(layer_bytes)
    asked = config.optimizer.recomputed_layers(num_layers)
    if asked is None and not target.on_gpu:
        asked = num_layers  # nobody knows how much memory is free
    counts = range(num_layers + 1) if asked is None else range(asked, asked + 1)
    limits = _micro_batches(shape, config, target)

    def fewest(most: int, allowed: range, room: int) -> int | None:
        tokens, completion_tokens = micro_batch(config, prompt, new, most)

        def size(recomputed: int) -> int:
            return sum(update_parts(shape, config, target, layer_bytes, tokens, completion_tokens, recomputed).values())

        found = bisect_left(allowed, -room, key=lambda recomputed: -size(recomputed))  # more recomputed take less
        return allowed[found] if found < len(allowed) else None

    def time(choice: tuple[int, int]) -> float:
        most, recomputed = choice
        passes = 2 + recomputed / num_layers  # forward, backward, and forward again
        return passes * pass_time(shape, micro_batch(config, prompt, new, most)[0])

    for room, allowed in zip(rooms, (counts, counts[-1:]), strict=True):
        fitting = [(most, n) for most in limits if (n := fewest(most, allowed, room)) is not None]
        if fitting:
            return min(fitting, key=time)
    return limits[-1], counts[-1]


def pass_time(shape: ModelShape, tokens: int) -> float:
    """A token's share of a pass over a micro-batch of so many, by what its products take a GPU alone."""
    weights = shape.num_weights / len(shape.layers) + _BESIDE_PRODUCTS
    return max(1 + _DEQUANTISATION / tokens, _LAUNCHES / (weights * tokens))


def _micro_batches(shape: ModelShape, config: RunConfig, target: Target) -> list[int]:
    """Most tokens of a micro-batch to choose from, the longest first; short ones where it is known what is free.

    A micro-batch of a small model takes the host longer to launch than a GPU to compute: 0.5 s and 0.13 s for 16,384
    tokens of 24 layers of Qwen2.5-0.5B beside an H200. Four times as many take no more memory than a larger model's.
    """
    if config.optimizer.micro_batch_tokens is not None:
        return [config.optimizer.micro_batch_tokens]
    most = min(_MOST_TIMES, _WIDE // shape.hidden) if target.on_gpu else 1
    limits = [MICRO_BATCH_TOKENS * times for times in range(max(1, most), 0, -1)]
    while target.free_bytes is not None and limits[-1] > _LEAST_MICRO_BATCH_TOKENS:
        limits.append(limits[-1] // 2)
    return limits


def micro_batch(config: RunConfig, prompt: int, new: int, most: int) -> tuple[int, int]:
    """Tokens of the longest micro-batch, and the completion tokens among them; most: that it may have."""
    rollout = config.rollout
    sequences = rollout.prompts_per_step * rollout.num_generations // config.loss.updates_per_rollout
    tokens = max(prompt + new, min(most, sequences * (prompt + new)))
    # Short prompts leave the most room for completions; a prompt has at least one token.
    return tokens, min(tokens - tokens // (prompt + new), sequences * new)


def update_parts(
    shape: ModelShape,
    config: RunConfig,
    target: Target,
    layer_bytes: Sequence[int],
    tokens: int,
    completion_tokens: int,
    recomputed: int,
) -> dict[str, int]:
    """Activations of the longest micro-batch at the worst moment: within a layer's backward pass, or in the head's.

    layer_bytes: what `kept_by_layers` gives; recomputed: of the layers, so many, the first ones.
    """
    b, hidden = target.activation_bytes, shape.hidden
    before = min(recomputed, _INPUTS_ON_THEIR_WAY) if config.optimizer.offload_activations else recomputed
    inputs, kept = before * hidden * b, sum(layer_bytes[recomputed:])
    # A layer that runs again has all that it keeps, beside the inputs of those before it.
    again = max((min(i, before) * hidden * b + layer_bytes[i] for i in range(recomputed)), default=0)
    one_layer = b * (2 * shape.intermediate + 2 * hidden) + max(0, again - inputs - kept)
    # One [chunk, V] in the head's dtype and, where that is not all (kernels/logprobs), two in float32, of which the
    # first may be the same; the last norm's input and output, and the states that predict a token, with their gradient.
    score = b if target.on_gpu and b == 2 else 2 * _FP32 + b * (b != _FP32)
    logits = min(config.optimizer.logprob_chunk, completion_tokens) * shape.vocabulary * score
    logits += b * 2 * (tokens + completion_tokens) * hidden
    one_layer *= tokens
    parts = {
        "layer inputs": tokens * inputs,
        "activations": tokens * kept,
        "rotary angles": 2 * tokens * shape.head_dim * b,
    } | ({"one layer, backward": one_layer} if one_layer > logits else {"logits": logits})
    return {name: size for name, size in parts.items() if size}


def kept_by_layers(shape: ModelShape, ranks: Mapping[str, int], target: Target) -> list[int]:
    """Bytes a token that each layer keeps for its backward pass; the module's text has the list."""
    return [_kept(shape, layer, ranks, target) for layer in shape.layers]


def _kept(shape: ModelShape, layer: Layer, ranks: Mapping[str, int], target: Target) -> int:
    b, hidden, intermediate = target.activation_bytes, shape.hidden, shape.intermediate
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    adapted = [linear for linear in layer.linears if ranks.get(linear.name, 0)]
    names = {linear.name.rpartition(".")[2] for linear in adapted}
    numbers = 2 * hidden + 2 * intermediate + sum(ranks[linear.name] for linear in adapted)
    numbers += hidden * (not names.isdisjoint({"q_proj", "k_proj", "v_proj"}))
    numbers += hidden * (not names.isdisjoint({"gate_proj", "up_proj"}))
    numbers += intermediate * ("down_proj" in names)
    if target.on_gpu and target.activation_bytes == 2:  # kernels/room.py: behind both norms' results and SwiGLU's
        within = [ranks.get(linear.name, 0) for p in layer.products if p.packed for linear in p.linears]
        # Above rank 64 there is none; it is counted as 64, so that a plan for a higher rank is never less.
        numbers += 3 * room_for(min(max(within, default=0), MAX_RANK))
    repeated = target.on_gpu and target.activation_bytes == 2 and not VARLEN_HAS_GQA  # k and v for every head of q
    numbers += 2 * q + 2 * (q if repeated else kv)
    if not (target.on_gpu and target.activation_bytes == 2) and "o_proj" in names:
        numbers += q  # attention's outputs, sequence by sequence and side by side
    if shape.has_head_norms:
        numbers += q + kv
    return numbers * b + shape.heads * _FP32
