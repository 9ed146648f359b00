"""Planned bytes against what PyTorch really holds, for tiny models on a CPU."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from qerl.config import EMBEDDED, RunConfig, load_config
from qerl.engine import build_engine
from qerl.engine.engine import PagedEngine
from qerl.engine.kv_cache import KVCache
from qerl.engine.scheduler import Scheduler
from qerl.formats.writing import quantize_checkpoint
from qerl.kernels.coded import CodedWeight
from qerl.kernels.layout import PackedWeight
from qerl.nn.attention import packed_forward
from qerl.nn.head import token_logprobs
from qerl.nn.linear import PackedLinear
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora
from qerl.nn.recompute import recompute_layers
from qerl.nn.structure import decoder_layers, head
from qerl.plan.memory import model_parts, plan_memory
from qerl.plan.shapes import adapter_ranks, read_shape
from qerl.plan.target import Target
from qerl.plan.update import kept_by_layers, update_parts
from qerl.rl.optimizer import build_optimizer
from qerl.types import Request, SamplingParams

CPU = Target(on_gpu=False, activation_bytes=4)
# Nothing is a multiple of a tile (128 x 64) or of another size here.
SIZES = dict(
    vocab_size=300,
    hidden_size=80,
    intermediate_size=176,
    num_hidden_layers=3,
    num_attention_heads=5,
    num_key_value_heads=1,
    max_position_embeddings=1024,
    eos_token_id=2,
)
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, head_dim=32, sliding_window=None),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, target)
    return target


def config_of(folder: Path | str, *settings: str) -> RunConfig:
    return load_config(None, [f"model.path={folder}", "model.device=cpu", "lora.r=8", *settings])


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of the memory under these tensors, counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def packed_tensors(model: torch.nn.Module) -> list[Tensor]:
    weights = [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
    packed = [weight.storage for weight in weights if isinstance(weight, PackedWeight)]
    return [tensor for storage in packed for tensor in (storage.tiles, storage.global_scale)]


def coded_tensors(model: torch.nn.Module) -> list[Tensor | None]:
    weights = [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
    return [tensor for weight in weights if isinstance(weight, CodedWeight) for tensor in weight.codes]


@pytest.mark.parametrize(
    "settings",
    [[], ["model.format=bf16"], ["model.keep=['model.layers.1.*']"], ["model.format=nf4"],
     ["model.format=nf4", "model.double_quant=false", "model.keep=['*.down_proj']"]],
    ids=["nvfp4", "bf16", "keep", "nf4", "nf4, keep"],
)  # fmt: skip
def test_the_model_to_the_byte(folder, settings):
    check_model(config_of(folder, *settings))


@pytest.mark.parametrize("settings", [[], ["model.group_size=32", "model.symmetric=true"]], ids=["int4", "symmetric"])
def test_a_model_in_int4_to_the_byte(settings):
    check_model(config_of("embedded", "model.format=int4", *settings))


def check_model(config: RunConfig) -> None:
    model, _ = load_model(config.model)
    parts = model_parts(read_shape(config.model), CPU)
    linears = [m for m in decoder_layers(model).modules() if isinstance(m, torch.nn.Linear)]
    dense = [m.weight for m in linears if not isinstance(m, PackedLinear)]
    edges = [model.get_input_embeddings().weight, head(model).weight]
    assert parts.pop("packed base", 0) == storage_bytes(packed_tensors(model))
    assert parts.pop("coded base", 0) == storage_bytes(coded_tensors(model))
    assert parts.pop("dense base", 0) == storage_bytes(dense)
    assert parts.pop("head and embedding") == storage_bytes(edges)
    counted = {id(p) for p in (*dense, *edges)}
    assert parts.pop("norms and biases") == storage_bytes(p for p in model.parameters() if id(p) not in counted)
    assert parts == {}


def test_a_packed_folder_is_planned_from_its_headers(folder, tmp_path):
    packed = tmp_path / "packed"
    quantize_checkpoint(folder, packed, keep=["model.layers.1.*"])
    here = read_shape(config_of(packed).model)
    assert here.products == read_shape(config_of(folder, "model.keep=['model.layers.1.*']").model).products
    assert 0 < sum(product.packed for product in here.products) < len(here.products)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["lora.target_modules=['q_proj', 'down_proj']", "lora.train_norms=true"],
        ["lora.rank_pattern={'layers.1.self_attn.k_proj' = 40, o_proj = 65}"],
        ["model.format=bf16", "rollout.head_format=nvfp4"],
        ["lora.r=64", "lora.train_norms=true", "optimizer.type=adamw_8bit"],
        ["model.format=nf4"],
    ],
    ids=["all", "some", "patterns", "bf16, packed head", "8 bits", "nf4"],
)
def test_adapters_their_copies_and_the_optimizer_to_the_byte(folder, settings):
    config = config_of(folder, *settings)
    base, _ = load_model(config.model)
    model = attach_lora(base, config.lora, seed=0)
    engine = build_engine(model, eos_ids=[2], config=config.rollout)
    optimizer = build_optimizer(model, config.optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    parts = plan_memory(read_shape(config.model), config, CPU).phases["update"]
    assert parts["adapters"] == parts["gradients"] == storage_bytes(trained)
    moments = [part for state in optimizer.state.values() for name, part in state.items() if name != "step"]
    assert parts["optimizer states"] == storage_bytes(moments)
    assert isinstance(engine, PagedEngine)
    assert parts["engine's copies"] == storage_bytes(tensors_of_copies(engine))
    packed_head = engine._decoder._packed_head
    of_head = [] if packed_head is None else [packed_head.storage.tiles, packed_head.storage.global_scale]
    assert parts.get("engine's packed head", 0) == storage_bytes(of_head)
    assert bool(of_head) == (config.rollout.head_format == "nvfp4")


def test_the_scratch_of_coded_products_to_the_byte(folder, monkeypatch):
    buffers: dict[object, Tensor] = {}
    monkeypatch.setattr("qerl.kernels.dequant._buffers", buffers)
    config = config_of(folder, "model.format=nf4")
    model = attach_lora(load_model(config.model)[0], config.lora, seed=0)
    build_engine(model, eos_ids=[2], config=config.rollout)  # its probe runs the model
    planned = plan_memory(read_shape(config.model), config, CPU).parts["dequantisation scratch"]
    assert planned == storage_bytes(buffers.values())


def tensors_of_copies(engine: PagedEngine) -> list[Tensor]:
    decoder = engine._decoder
    tensors = [decoder.norms.clean, decoder.norms.shared, *decoder.norms.others, decoder._angles]
    for projection in decoder.projections:
        if projection._within is not None:
            tensors += projection._within
        if projection._beside is not None:
            expansion = projection._beside._expansion
            tensors += [projection._beside._a, expansion.b, expansion.scaling, expansion.tiles]
        own = {base.bias.data_ptr() for base in projection._bases if base.bias is not None}
        tensors += [b for _, b in projection._products if b is not None and b.data_ptr() not in own]
    return tensors


@pytest.mark.parametrize(
    ("cache", "together"),
    [
        ([], 5),
        (["rollout.kv_cache_tokens=176"], 3),
        (["rollout.kv_cache_memory=80KiB"], None),
        (["rollout.kv_cache_memory=40KiB", "rollout.kv_cache_dtype=fp8"], None),
    ],
    ids=["by need", "tokens", "memory", "fp8"],
)
def test_the_kv_cache_to_the_byte(folder, cache, together, monkeypatch):
    """Prompts of the longest length, completions that reach theirs: 5 slots for 2 groups of 4."""
    pools: list[KVCache] = []
    initialise = KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, **sizes: (initialise(self, **sizes), pools.append(self))[0])
    running: list[int] = []
    admit = Scheduler.admit
    monkeypatch.setattr(Scheduler, "admit", lambda self: (admit(self), running.append(len(self.running)))[0])
    config = config_of(
        folder, "task.max_prompt_length=21", "rollout.max_completion_length=30", "rollout.prompts_per_step=2",
        "rollout.num_generations=4", "rollout.max_batch_size=5", *cache,
    )  # fmt: skip
    model, _ = load_model(config.model)
    engine = build_engine(model, eos_ids=[2], config=config.rollout, max_prompt_length=21)
    engine.generate([Request([3] * 21, [i, i + 1, i + 2, i + 3], 30, i) for i in range(2)], SamplingParams())
    plan = plan_memory(read_shape(config.model), config, CPU)
    (pool,) = pools
    assert plan.phases["rollout"]["KV cache"] == storage_bytes([pool.pool, pool.scales])
    assert plan.sequences_at_a_time == max(running)
    assert together in (None, max(running))


def test_a_share_of_memory_needs_to_know_of_what(folder):
    config = config_of(folder, "rollout.kv_cache_memory=1%")
    shape = read_shape(config.model)
    with pytest.raises(ValueError, match="share of a GPU's memory: name a GPU"):
        plan_memory(shape, config, CPU)
    pool = plan_memory(shape, config, replace(CPU, total_bytes=10**8)).phases["rollout"]["KV cache"]
    assert 0.9e6 < pool <= 1e6


@pytest.mark.parametrize("recompute", [0, 1, 3], ids=["kept", "one", "recomputed"])
@pytest.mark.parametrize("targets", [None, ["v_proj", "gate_proj"]], ids=["all", "some"])
def test_activations_within_a_tenth_of_the_saved_tensors(folder, recompute, targets):
    settings = [f"optimizer.gradient_checkpointing={recompute}"]
    config = config_of(folder, *settings, *([f"lora.target_modules={targets}"] if targets else []))
    base, _ = load_model(config.model)
    model = attach_lora(base, config.lora, seed=0)
    recompute_layers(model, recompute)
    tokens, saved = 480, {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *packed_tensors(model))}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = packed_forward(model, torch.full((tokens,), 3), torch.tensor([0, 200, tokens]))
    measured = sum(size for address, size in saved.items() if address not in weights)
    shape = read_shape(config.model)
    layers = kept_by_layers(shape, adapter_ranks(shape, config.lora), CPU)
    parts = update_parts(shape, config, CPU, layers, tokens, tokens // 2, recompute)
    assert len(shape.layers) == 3
    kept = parts.get("layer inputs", 0) + parts.get("activations", 0)
    kept += parts["rotary angles"] if recompute < 3 else 0
    last_norm = CPU.activation_bytes * tokens * shape.hidden
    assert kept + last_norm == pytest.approx(measured, rel=0.1)
    assert hidden.requires_grad


def peak_bytes(function) -> int:
    """The most that the CPU's allocator holds at a time beyond what it held before."""
    gc.collect()  # else an earlier test's models may go meanwhile
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = sorted(
        (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_the_logits_of_a_chunk_within_a_tenth():
    """A head so wide that nothing else counts."""
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(20_000, 8)
    targets = torch.arange(64)
    measured = peak_bytes(lambda: token_logprobs(hidden, weight, targets, chunk=16)[0].sum().backward())
    assert measured == pytest.approx(16 * 20_000 * 8, rel=0.1)


@pytest.mark.parametrize("recompute", [0, 1, 3], ids=["kept", "one", "recomputed"])
def test_the_peak_of_a_micro_batch_within_a_tenth(folder, recompute):
    """Forward and backward pass over a dense base, whose products need no memory beside their results."""
    settings = ["model.format=bf16", "optimizer.logprob_chunk=32"]
    config = config_of(folder, *settings, f"optimizer.gradient_checkpointing={recompute}")
    base, _ = load_model(config.model)
    model = attach_lora(base, config.lora, seed=0)
    recompute_layers(model, recompute)
    tokens = 900
    predictors = torch.arange(450)

    def logprobs() -> Tensor:
        hidden = packed_forward(model, torch.full((tokens,), 3), torch.tensor([0, 200, tokens]))
        return token_logprobs(hidden[predictors], head(model).weight, predictors % 300, chunk=32)[0]

    def micro_batch() -> None:
        logprobs().sum().backward()

    micro_batch()  # gradients are there from now on
    shape = read_shape(config.model)
    layers = kept_by_layers(shape, adapter_ranks(shape, config.lora), CPU)
    parts = update_parts(shape, config, CPU, layers, tokens, len(predictors), recompute)
    assert sum(parts.values()) == pytest.approx(peak_bytes(micro_batch), rel=0.1)


@pytest.mark.parametrize("recompute", [0, 1, 3], ids=["kept", "one", "recomputed"])
def test_the_peak_of_a_micro_batch_with_kernels_within_a_tenth(folder, recompute, monkeypatch):
    """As on a GPU: in 16 bits, and the kernels between the products make their results alone."""
    settings = ["model.format=bf16", "model.dtype=bfloat16", "optimizer.logprob_chunk=32"]
    config = config_of(folder, *settings, f"optimizer.gradient_checkpointing={recompute}")
    base, _ = load_model(config.model)
    model = attach_lora(base, config.lora, seed=0)
    recompute_layers(model, recompute)
    monkeypatch.setattr("qerl.nn.rmsnorm.add_rms_norm_", lambda x, *_, **__: x * 1)
    monkeypatch.setattr("qerl.nn.rmsnorm.rms_norm_grad", lambda dy, *_: dy * 1)
    monkeypatch.setattr("qerl.nn.mlp.swiglu", lambda gate, up, room: gate * up)
    monkeypatch.setattr("qerl.nn.mlp.swiglu_grad", lambda dy, gate, up: (dy * up, dy * gate))
    monkeypatch.setattr("qerl.nn.self_attention.rotate_and_store_", lambda *_: None)
    monkeypatch.setattr("qerl.nn.head.token_statistics", lambda scores, *_: [scores[:, 0].float() for _ in range(3)])
    monkeypatch.setattr("qerl.nn.head.logprob_grad_", lambda *_: None)
    tokens, predictors = 900, torch.arange(450)

    def micro_batch() -> None:
        hidden = packed_forward(model, torch.full((tokens,), 3), torch.tensor([0, 200, tokens]))
        weight = head(model).weight
        token_logprobs(hidden[predictors], weight, predictors % 300, chunk=32)[0].sum().backward()

    micro_batch()
    shape = read_shape(config.model)
    target = Target(on_gpu=True, activation_bytes=2)
    layers = kept_by_layers(shape, adapter_ranks(shape, config.lora), target)
    parts = update_parts(shape, config, target, layers, tokens, len(predictors), recompute)
    assert sum(parts.values()) == pytest.approx(peak_bytes(micro_batch), rel=0.1)
