"""Bytes of a run by part, and the peak of each phase.

    load         model + one product while it is quantised
    rollout      model + training state + engine: KV cache, slots, prefill, decode step
    evaluation   the same, for the held-out problems
    update       model + training state + gradients + activations + the larger of (one layer's backward pass, logits);
                 on a GPU the rollout's slots, and what its CUDA graphs keep for themselves: a decode step's memory

    model           base, head and embedding, norms and biases, dequantisation scratch, workspaces
    training state  adapters (fp32), the engine's copies of them, AdamW's two moments

What is counted to the byte, and what to within some percent, is said in docs/memory.md; tests/unit/plan counts the
same on loaded models. update.py has the update's activations.

Leaves out: the CUDA context, what the allocator cannot use (fit.py has a reserve for them), and CUDA graphs' own nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from qerl.config import RunConfig
from qerl.engine.blocks import BLOCK
from qerl.engine.budget import num_pool_pages
from qerl.engine.graphs import bucket_slots, num_splits
from qerl.engine.kv_cache import PAGE_SIZE, num_pages, token_bytes
from qerl.engine.model import TABLE_STEP
from qerl.engine.speculation import tokens_with_guesses
from qerl.formats import nf4
from qerl.formats.codes import INT4, NF4, NVFP4
from qerl.kernels.adapter import MAX_RANK, RANK_STEP
from qerl.kernels.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS
from qerl.kernels.lora import TILE
from qerl.kernels.room import room_for
from qerl.kernels.w4a16 import MAX_FUSED_TOKENS
from qerl.plan.shapes import Linear, ModelShape, NotPlanned, Product, adapter_ranks
from qerl.plan.target import Target
from qerl.plan.update import choose_passes, kept_by_layers, micro_batch, update_parts

_CUBLAS_WORKSPACE = 32 << 20  # torch's for a stream on Hopper, 8 MiB on other chips
_STREAMS = 2  # the usual one, and that of CUDA graphs
_SHARED_SUMS = 33 << 20  # kernels/w4a16: 132 blocks x 2 tiles of 256 rows x 128 tokens in fp32, at the most
_QUANTISE_PIECE = 10 * 4 << 23  # formats/nvfp4: ten float32 temporaries of 2^23 weights, on a GPU
_DEQUANTISE_PIECE = 6 << 23  # formats/int4, nf4: two codes as an int32 and as two float32, of 2^23 weights, on a GPU
_FP32 = 4
_LEAST_IN_8_BITS, _BLOCK_IN_8_BITS = 4096, 256  # of bitsandbytes' 8-bit optimizers: numbers of a tensor, of a scale
# kept_tokens of engine/sampler.py: logits 2, logprobs 4, sorted 4, order 8, a mask 1, probs, sums, differences 4 each
_TRUNCATION_BYTES = 31


@dataclass(frozen=True)
class Sampling:
    """A call of the engine: prompts, completions of each, what sampling needs beside logits."""

    num_prompts: int
    num_generations: int
    truncates: bool
    noise_per_slot: bool

    @property
    def num_completions(self) -> int:
        """Of all prompts."""
        return self.num_prompts * self.num_generations


@dataclass(frozen=True)
class Memory:
    """The result: bytes of every part of every phase."""

    phases: Mapping[str, Mapping[str, int]]
    """By phase, then by part."""
    prompt_tokens: int
    """Of the longest prompt."""
    completion_tokens: int
    """Of the longest completion."""
    micro_batch_tokens: int
    """Of the longest micro-batch."""
    micro_batch_limit: int
    """Most tokens that one may have, unless a single sequence has more."""
    recomputed_layers: int
    """Decoder layers, the first ones, that recompute their activations in the backward pass."""
    kv_pages: int
    """Pages of the rollout's KV cache."""
    sequences_at_a_time: int
    """Completions of full length that decode together in the rollout."""

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak(self) -> int:
        """The largest of them."""
        return max(self.peaks.values())

    @property
    def parts(self) -> dict[str, int]:
        """Every part at its largest, in the order of the phases."""
        largest: dict[str, int] = {}
        for parts in self.phases.values():
            for name, size in parts.items():
                largest[name] = max(size, largest.get(name, 0))
        return largest


def plan_memory(shape: ModelShape, config: RunConfig, target: Target) -> Memory:
    """Bytes of a run.

    NotPlanned: it samples through transformers or vLLM. ValueError: no room for a prompt in the context, a share of
    memory that is not known, or layers that are not there.
    """
    if config.rollout.engine == "hf":
        raise NotPlanned('rollout.engine = "hf" is not planned for: only qerl\'s own engine is')
    if config.rollout.engine == "vllm":
        raise NotPlanned(
            'rollout.engine = "vllm" is not planned for: vLLM holds a second copy of the base, its KV cache and '
            "activations of its own, which are not counted here"
        )
    prompt, new = _longest(shape, config)
    ranks = adapter_ranks(shape, config.lora)
    model = model_parts(shape, target)
    trained = sum(r * (li.rows + li.columns) for li in _linears(shape) if (r := ranks.get(li.name, 0)))
    trained += shape.num_norm_weights if config.lora.train_norms else 0
    state = {
        "adapters": _FP32 * trained,
        "engine's copies": engine_copies(shape, ranks, target, prompt + new),
        "optimizer states": optimizer_states(shape, config, ranks),
    }

    rollout, evaluation = config.rollout, config.eval
    truncates = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    noisy = config.noise.enabled and config.noise.per != "rollout"
    calls = {"rollout": Sampling(rollout.prompts_per_step, rollout.num_generations, truncates, noisy)}
    if evaluation.num_problems:
        calls["evaluation"] = Sampling(
            evaluation.num_problems, evaluation.num_samples, evaluation.top_p < 1, noise_per_slot=False
        )
    if rollout.head_format == "nvfp4":
        state["engine's packed head"] = product_bytes(_head(shape), target.activation_bytes)
    slots = max(_slots(config, call) for call in calls.values())  # the engine keeps the largest cache it needed
    pages = kv_pages(shape, config, target, slots, prompt, new)
    prefill = max(_prefill_tokens(config, call, prompt, new) for call in calls.values())
    scratch = dequantisation_scratch(shape, target, ranks, prefill)
    if rollout.head_format == "nvfp4" and not target.on_gpu:
        rows, columns = padded_shape(_head(shape))
        scratch = max(scratch, rows * columns * _FP32)
    always = model | state | {"dequantisation scratch": scratch}
    if target.on_gpu:
        always["product workspaces"] = _STREAMS * _CUBLAS_WORKSPACE
        always["product workspaces"] += _SHARED_SUMS if any(product.packed for product in shape.products) else 0
        always["product workspaces"] += _DEQUANTISE_PIECE if any(product.coded for product in shape.products) else 0
    phases = {"load": model | {"loading": _loading(shape, target)}}
    for name, call in calls.items():
        phases[name] = always | {"KV cache": kv_pool_bytes(shape, config, target, pages)}
        phases[name] |= _sampling_parts(shape, config, target, ranks, call, slots, prompt, new)
    stays = ("slots",) if target.on_gpu else ()  # engine/mapped.py: `sleep` leaves what holds the cache's address
    stays += ("decode step", "truncation") if target.on_gpu and rollout.cuda_graphs else ()
    kept = {name: size for name, size in phases["rollout"].items() if name in stays}
    room = max(sum(parts.values()) for parts in phases.values())
    if target.free_bytes is not None:
        room = min(max(room, target.free_bytes * 3 // 4), target.free_bytes * 9 // 10)
    always |= kept | {"gradients": _FP32 * trained}
    taken, layer_bytes = sum(always.values()), kept_by_layers(shape, ranks, target)
    rooms = room - taken, (room if target.free_bytes is None else target.free_bytes) - taken
    most, recomputed = choose_passes(shape, config, target, layer_bytes, prompt, new, rooms)
    tokens, completion_tokens = micro_batch(config, prompt, new, most)
    phases["update"] = always | update_parts(shape, config, target, layer_bytes, tokens, completion_tokens, recomputed)
    return Memory(
        phases=phases,
        prompt_tokens=prompt,
        completion_tokens=new,
        micro_batch_tokens=tokens,
        micro_batch_limit=most,
        recomputed_layers=recomputed,
        kv_pages=pages,
        sequences_at_a_time=_sequences_at_a_time(config, calls["rollout"], prompt, new, pages),
    )


# ------------------------------------------------------------------------------------------------- the model


def model_parts(shape: ModelShape, target: Target) -> dict[str, int]:
    """What is there from the load to the end."""
    b = target.activation_bytes
    packed = sum(product_bytes(p, b) for p in shape.products if p.packed)
    coded = sum(product_bytes(p, b) for p in shape.products if p.coded)
    dense = sum(product_bytes(p, b) for p in shape.products if not (p.packed or p.coded))
    biases = sum(linear.rows for linear in _linears(shape) if linear.has_bias)
    parts = {
        "packed base": packed,
        "coded base": coded,
        "dense base": dense,
        "head and embedding": shape.vocabulary * shape.hidden * b * (1 if shape.tied else 2),
        "norms and biases": _FP32 * shape.num_norm_weights + b * biases,
    }
    return {name: size for name, size in parts.items() if size}


def product_bytes(product: Product, activation_bytes: int) -> int:
    """A product's storage: tiles and a float32 scale a row, what NF4 or INT4 store, or one dense tensor."""
    if isinstance(product.format, NF4 | INT4):
        return sum(coded_bytes(product.format, rows, product.columns) for rows in product.rows)
    if not product.packed:
        return sum(product.rows) * product.columns * activation_bytes
    rows, columns = padded_shape(product)
    return rows // TILE_ROWS * (columns // TILE_COLUMNS) * TILE_BYTES + 4 * rows


def coded_bytes(format: NF4 | INT4, rows: int, columns: int) -> int:
    """Codes of two weights a byte, and the scales of a matrix."""
    codes = rows * columns // 2
    if isinstance(format, INT4):
        return codes + rows * (columns // format.group) * (2 if format.symmetric else 2 + 1)
    blocks = rows * columns // nf4.BLOCK
    if not format.double_quant:
        return codes + _FP32 * blocks
    return codes + blocks + _FP32 * (-(-blocks // nf4.ABSMAX_GROUP) + 1)


def padded_shape(product: Product) -> tuple[int, int]:
    """Rows and columns of a packed product's tiles: every part starts on a tile."""
    return sum(_round_up(rows, TILE_ROWS) for rows in product.rows), _round_up(product.columns, TILE_COLUMNS)


def dequantisation_scratch(shape: ModelShape, target: Target, ranks: Mapping[str, int], prefill_tokens: int) -> int:
    """The one buffer: of the largest linear, as training takes them, or product, where the engine makes it dense.

    On a GPU an adapter's B is behind it (kernels/w4a16/dense.py).
    """
    sizes = [0, *(sum(product.rows) * product.columns for product in shape.products if product.coded)]
    ranks = ranks if target.on_gpu else {}
    for layer in shape.layers:
        room = room_for(min(max(ranks.get(linear.name, 0) for linear in layer.linears), MAX_RANK))
        for product in (p for p in layer.products if p.packed):
            rows, columns = padded_shape(product)
            sizes += [_round_up(n, TILE_ROWS) * (columns + room) for n in product.rows]
            if prefill_tokens > MAX_FUSED_TOKENS or not target.on_gpu:  # else products read the packed codes
                of = [ranks.get(linear.name, 0) for linear in product.linears]
                within = len(of) * _round_up(max(of), RANK_STEP) if max(of) <= MAX_RANK else 0
                sizes.append(rows * (columns + within))
    return max(sizes) * target.activation_bytes


def engine_copies(shape: ModelShape, ranks: Mapping[str, int], target: Target, longest: int) -> int:
    """Adapters in the activations' dtype, biases of fused products side by side, three copies of the norms, angles.

    longest: tokens of the longest sequence.
    """
    b, total = target.activation_bytes, 0
    for product in shape.products:
        of = [ranks.get(linear.name, 0) for linear in product.linears]
        if product.packed and 0 < max(of) <= MAX_RANK:
            rank, (rows, columns) = _round_up(max(of), RANK_STEP), padded_shape(product)
            total += b * rank * (len(of) * columns + rows) + _FP32 * len(of)
        elif any(of):  # engine/projection.py: A side by side, B with the columns of the largest, tables (kernels/lora)
            total += b * (sum(of) * product.columns + max(of) * sum(product.rows)) + _FP32 * len(of)
            total += 4 * 4 * sum(-(-li.rows // TILE) for r, li in zip(of, product.linears, strict=True) if r)
        if all(linear.has_bias for linear in product.linears):
            total += b * sum(product.rows)
    sites = len(shape.layers) * 2 * shape.hidden
    reached = (num_pages(longest) + 1) * PAGE_SIZE
    angles = _round_up(reached, TABLE_STEP) * shape.head_dim  # cosines and sines of half a head
    return total + _FP32 * (shape.num_norm_weights + sites) + b * angles


def _head(shape: ModelShape) -> Product:
    return Product((Linear("lm_head", shape.vocabulary, shape.hidden, has_bias=False),), NVFP4())


def optimizer_states(shape: ModelShape, config: RunConfig, ranks: Mapping[str, int]) -> int:
    """AdamW's two moments of every factor (and trained norm): in fp32, or in 8 bits with a scale for a block."""
    sizes = [r * width for li in _linears(shape) if (r := ranks.get(li.name, 0)) for width in (li.rows, li.columns)]
    if config.lora.train_norms:
        heads = [shape.head_dim] * 2 if shape.has_head_norms else []
        sizes += [shape.hidden, shape.hidden, *heads] * len(shape.layers) + [shape.hidden]
    if config.optimizer.type == "adamw":
        return 2 * _FP32 * sum(sizes)
    large = [size for size in sizes if size >= _LEAST_IN_8_BITS]
    blocks = sum(-(-size // _BLOCK_IN_8_BITS) for size in large)
    maps = 2 * 256 * _FP32 if large else 0  # what the codes mean, once for all
    return 2 * (sum(large) + _FP32 * blocks + _FP32 * (sum(sizes) - sum(large))) + maps


def _loading(shape: ModelShape, target: Target) -> int:
    """One product's bf16 weights, its codes in the file's order, and a piece of it in float32."""
    largest = max((sum(p.rows) * p.columns for p in shape.products if p.packed or p.coded), default=0)
    piece = _QUANTISE_PIECE if target.on_gpu else 0
    return largest * 2 + largest * 9 // 16 + piece if largest else 0


# ------------------------------------------------------------------------------------------------- sampling


def kv_pages(shape: ModelShape, config: RunConfig, target: Target, slots: int, prompt: int, new: int) -> int:
    """Pages of the pool (engine/budget.py)."""
    total = target.total_bytes
    if total is None and "%" in (config.rollout.kv_cache_memory or ""):
        raise ValueError("rollout.kv_cache_memory is a share of a GPU's memory: name a GPU, such as --gpu 24GB")
    page_bytes = PAGE_SIZE * _kv_bytes(shape, config, target) * len(shape.layers)
    return num_pool_pages(config.rollout, page_bytes, total or 0, slots=slots, pages_per_slot=num_pages(prompt + new))


def kv_pool_bytes(shape: ModelShape, config: RunConfig, target: Target, pages: int) -> int:
    """The pool, with the spare page."""
    return (pages + 1) * PAGE_SIZE * _kv_bytes(shape, config, target) * len(shape.layers)


def _kv_bytes(shape: ModelShape, config: RunConfig, target: Target) -> int:
    """Keys and values of one token in one layer."""
    fp8 = config.rollout.kv_cache_dtype == "fp8"
    return token_bytes(shape.kv_heads, shape.head_dim, target.activation_bytes, fp8=fp8)


def _sampling_parts(
    shape: ModelShape,
    config: RunConfig,
    target: Target,
    ranks: Mapping[str, int],
    call: Sampling,
    max_slots: int,
    prompt: int,
    new: int,
) -> dict[str, int]:
    """max_slots: of the largest call, which all have."""
    b, slots = target.activation_bytes, _slots(config, call)
    slot_pages = num_pages(prompt + new)
    state = 6 * 8 + 1 + 8 * (slot_pages + 1) + (4 + 4) * new  # _Slots of engine/runner.py
    state += (2 if config.rollout.speculation else 1) * (3 * 8 + 4 * slot_pages * PAGE_SIZE)  # lines of engine/texts.py
    state += _FP32 * len(shape.layers) * 2 * shape.hidden if call.noise_per_slot else 0
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Within SwiGLU: gate, up and its result; x, the norm's output and the last block's; q, k, v live on as locals.
    width = 3 * shape.intermediate + 3 * shape.hidden + q + 2 * kv
    # One row a group, then one a completion.
    prompt_logits = (slots + min(call.num_prompts, slots)) * shape.vocabulary
    # A step of fewer slots may feed more tokens.
    decoded = max(_step_tokens(config, n, max_slots, target) for n in range(1, slots + 1))
    rows = _round_up(decoded, BLOCK) if config.rollout.batch_invariant else decoded
    # Decode attention's splits leave a sum each, its weight and largest score (kernels/attention), where they run.
    splits = decoded * shape.heads * num_splits(slot_pages + 1) * (shape.head_dim + 2) * _FP32 if target.on_gpu else 0
    prefill, within = _prefill_tokens(config, call, prompt, new), _within_products(shape, ranks, target)
    return {
        "slots": max_slots * state,
        "prefill": (prefill * width + min(prefill, MAX_FUSED_TOKENS) * within + prompt_logits) * b,
        "decode step": rows * (width + within + shape.vocabulary) * b + splits,
    } | ({"truncation": decoded * shape.vocabulary * _TRUNCATION_BYTES} if call.truncates else {})


def _step_tokens(config: RunConfig, num_sequences: int, max_slots: int, target: Target) -> int:
    """Of a decode step, with guesses where there can be any."""
    rollout = config.rollout
    each = tokens_with_guesses(num_sequences, batch_invariant=rollout.batch_invariant) if rollout.speculation else 1
    return each * (bucket_slots(num_sequences, max_slots, each) if target.on_gpu else num_sequences)


def _within_products(shape: ModelShape, ranks: Mapping[str, int], target: Target) -> int:
    """Numbers a token while a product runs: x A^T of all its adapters; x again, in tiles (kernels/w4a16/hopper.py)."""
    inner, tiles = 0, 0
    for product in shape.products:
        of = [ranks.get(linear.name, 0) for linear in product.linears]
        fused = product.packed and max(of) <= MAX_RANK
        inner = max(inner, len(of) * _round_up(max(of), RANK_STEP) if fused else sum(of))
        if product.packed and target.on_gpu:
            tiles = max(tiles, _round_up(product.columns, 2 * TILE_COLUMNS))
    return inner + tiles


def _prefill_tokens(config: RunConfig, call: Sampling, prompt: int, new: int) -> int:
    """Of the largest prefill (engine/scheduler.py): with less memory than all need, completions come back in it."""
    rollout = config.rollout
    is_limited = rollout.kv_cache_tokens is not None or rollout.kv_cache_memory is not None
    tokens = call.num_prompts * prompt + (call.num_completions * new if is_limited else 0)
    return min(tokens, rollout.prefill_tokens)


def _slots(config: RunConfig, call: Sampling) -> int:
    return min(call.num_completions, config.rollout.max_batch_size)


def _sequences_at_a_time(config: RunConfig, call: Sampling, prompt: int, new: int, pages: int) -> int:
    """Completions of full length whose pages fit; a group shares its prompt's full pages (engine/scheduler.py)."""
    shared = prompt // PAGE_SIZE
    own = num_pages(prompt + new) - shared
    group = num_pages(prompt) + call.num_generations * own
    whole, rest = divmod(pages, group)
    in_part = max(0, rest - num_pages(prompt)) // own
    return min(_slots(config, call), whole * call.num_generations + min(in_part, call.num_generations - 1))


def _linears(shape: ModelShape) -> list[Linear]:
    return [linear for layer in shape.layers for linear in layer.linears]


def _longest(shape: ModelShape, config: RunConfig) -> tuple[int, int]:
    """Tokens of the longest prompt and completion; the trainer leaves out prompts that the context has no room for."""
    prompt, new = config.task.max_prompt_length, config.rollout.max_completion_length
    if shape.context is None:
        return prompt, new
    if new >= shape.context:
        raise ValueError(
            f"rollout.max_completion_length is {new}, and the model's context {shape.context} tokens, prompt "
            "included: lower it"
        )
    return min(prompt, shape.context - new), new


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
