"""The paged engine samples from the policy that transformers computes: packed, adapted, noised; and only from it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from tiny_policies import CONFIGS, VOCABULARY, assert_as_exact_as_transformers, gap, policy, requests, scatter_adapters

from qerl.config import RolloutConfig
from qerl.engine.drafts import Chunk
from qerl.engine.engine import PagedEngine, build_engine
from qerl.engine.graphs import IDLE, SPLIT_TOKENS, StepRunner, num_splits
from qerl.engine.model import Decoder
from qerl.engine.projection import Projection
from qerl.engine.runner import Runner
from qerl.kernels.layout import PackedWeight
from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams

TOLERANCE = 1e-4
"""Largest mean |logprob difference| in fp32. Removing noise or adapter must change at least four times as much."""
SAMPLING = SamplingParams()
NOISE = NoiseDraw(seed=3, step=2, sigma=5e-2)


def paged(model: torch.nn.Module, eos_ids: Sequence[int] = (), **config: object) -> PagedEngine:
    engine = build_engine(model, eos_ids=eos_ids, config=RolloutConfig(**config))
    assert isinstance(engine, PagedEngine)
    return engine


def flat(results: list[list[Completion]]) -> list[Completion]:
    return [completion for group in results for completion in group]


def assert_same(a: list[list[Completion]], b: list[list[Completion]], tolerance: float = 1e-5) -> None:
    assert [c.token_ids for c in flat(a)] == [c.token_ids for c in flat(b)]
    for left, right in zip(flat(a), flat(b), strict=True):
        assert left.finish_reason == right.finish_reason
        assert left.logprobs == pytest.approx(right.logprobs, abs=tolerance)
        assert left.entropies == pytest.approx(right.entropies, abs=tolerance)


@pytest.mark.parametrize("per", ["off", "rollout", "prompt", "completion"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_are_those_of_transformers(family: str, per: str) -> None:
    model = policy(family)
    draw = None if per == "off" else NoiseDraw(seed=3, step=2, sigma=5e-2, per=per)
    engine = paged(model)
    engine.sync(draw)
    asked = requests(1, 16, 37, max_new_tokens=40)
    results = engine.generate(asked, SamplingParams(temperature=0.8))
    assert all(len(c.token_ids) == 40 for c in flat(results))
    assert gap(model, asked, results, draw, temperature=0.8) <= TOLERANCE
    with model.disable_adapter():
        assert gap(model, asked, results, draw, temperature=0.8) > 4 * TOLERANCE
    if draw is not None:
        assert gap(model, asked, results, None, temperature=0.8) > 4 * TOLERANCE
        others = {"rollout": "prompt", "prompt": "completion", "completion": "prompt"}
        other = NoiseDraw(seed=3, step=2, sigma=5e-2, per=others[per])
        assert gap(model, asked, results, other, temperature=0.8) > 4 * TOLERANCE


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_formats_without_a_fused_kernel(format: str) -> None:
    model = policy("qwen2", format=format)
    engine = paged(model)
    engine.sync(None)
    asked = requests(9, 20)
    results = engine.generate(asked, SAMPLING)
    assert gap(model, asked, results, None) <= TOLERANCE
    assert gap(policy("qwen2"), asked, results, None) > 4 * TOLERANCE  # another format's codes


@pytest.mark.parametrize("family", CONFIGS)
def test_plain_weights_without_adapters(family: str) -> None:
    model = policy(family, packed=False, lora=False)
    asked = requests(9, 20)
    assert gap(model, asked, paged(model).generate(asked, SAMPLING), None) <= TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
def test_bf16_is_as_exact_as_transformers(family: str) -> None:
    assert_as_exact_as_transformers(family, "completion", "cpu")


def test_base_weights_are_read_in_place_and_fused() -> None:
    model = policy("qwen2")
    decoder = Decoder(model)
    for layer in range(2):
        attention = model.get_base_model().model.layers[layer].self_attn
        qkv, o, gate_up, down = decoder.projections[4 * layer : 4 * layer + 4]
        assert [len(p.weights) for p in (qkv, o, gate_up, down)] == [1, 1, 1, 1]
        (weight,) = qkv.weights
        assert isinstance(weight, PackedWeight)
        assert weight.storage is attention.q_proj.get_base_layer().packed.storage
        assert weight.shape == (64 + 32 + 32, 64)


def test_rows_of_one_dense_tensor_are_one_product() -> None:
    whole = torch.randn(12, 8)
    linears = [torch.nn.Linear(8, n, bias=False) for n in (6, 4, 2)]
    for linear, rows in zip(linears, whole.split([6, 4, 2]), strict=True):
        linear.weight = torch.nn.Parameter(rows)
    x = torch.randn(3, 8)
    fused, reordered = Projection(linears, torch.float32), Projection(linears[::-1], torch.float32)
    assert [w.data_ptr() for w in fused.weights] == [whole.data_ptr()]
    assert len(reordered.weights) == 3
    for got, linear in zip(fused(x), linears, strict=True):
        torch.testing.assert_close(got, linear(x))


def test_sync_takes_over_what_was_trained_since() -> None:
    model = policy("qwen3")
    engine = paged(model)
    asked = requests(7, 20)
    before = engine.generate(asked, SAMPLING)
    scatter_adapters(model)
    assert_same(engine.generate(asked, SAMPLING), before)  # the engine has copies
    report = engine.sync(NOISE)
    after = engine.generate(asked, SAMPLING)
    assert gap(model, asked, after, NOISE) <= TOLERANCE
    assert report.num_adapters == report.num_live_adapters == 14
    assert report.num_noised_vectors == 4
    assert report.adapter_change > 0.1 and report.noise_change > 0.01


def test_noise_leaves_no_trace() -> None:
    model = policy("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = paged(model)
    asked = requests(7)
    clean = engine.generate(asked, SAMPLING)
    for step in range(3):
        engine.sync(NoiseDraw(seed=1, step=step, sigma=0.3, per="completion"))
        assert [c.token_ids for c in flat(engine.generate(asked, SAMPLING))] != [c.token_ids for c in flat(clean)]
    assert engine.sync(None).num_noised_vectors == 0
    again = engine.generate(asked, SAMPLING)
    assert [c.logprobs for c in flat(again)] == [c.logprobs for c in flat(clean)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_trained_norms_reach_the_engine() -> None:
    from qerl.config import LoraConfig
    from qerl.nn.lora import attach_lora

    model = attach_lora(policy("qwen3", lora=False), LoraConfig(r=2, alpha=2, train_norms=True), seed=0)
    engine = paged(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    engine.sync(NOISE)
    asked = requests(11)
    results = engine.generate(asked, SAMPLING)
    assert gap(model, asked, results, NOISE) <= TOLERANCE
    with model.disable_adapter():
        assert gap(model, asked, results, NOISE) > 4 * TOLERANCE


@pytest.mark.parametrize("per", ["rollout", "completion"])
def test_a_completion_does_not_depend_on_its_company(per: str) -> None:
    model = policy("qwen2")
    engine = paged(model, max_batch_size=64)
    engine.sync(NoiseDraw(seed=3, step=2, sigma=5e-2, per=per))
    asked = requests(5, 17, 33, 2, samples=4)
    together = engine.generate(asked, SAMPLING)
    for request, group in zip(asked, together, strict=True):
        assert_same(engine.generate([request], SAMPLING), [group])
    one_slot = paged(model, max_batch_size=1)
    one_slot.sync(NoiseDraw(seed=3, step=2, sigma=5e-2, per=per))
    assert_same(one_slot.generate(asked, SAMPLING), together)


def test_rotary_angles_are_there_for_what_calls_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, short, long = policy("llama"), requests(3, 9), requests(40, max_new_tokens=25)
    expected = [
        build_engine(model, eos_ids=[], config=RolloutConfig()).generate(r, SamplingParams()) for r in (short, long)
    ]
    monkeypatch.setattr("qerl.engine.model.TABLE_STEP", 16)
    engine = build_engine(model, eos_ids=[], config=RolloutConfig())
    assert [engine.generate(r, SamplingParams()) for r in (short, long)] == expected
    assert len(engine._decoder._angles) == 96  # five pages, and one for guesses


def test_same_seed_same_tokens_other_seed_other_tokens() -> None:
    engine = paged(policy("qwen2"))
    (request,) = requests(8, samples=2)
    request.seeds = [2**64 - 1, 17, 17, -1]
    (group,) = engine.generate([request], SAMPLING)
    assert group[1].token_ids == group[2].token_ids != group[0].token_ids
    assert group[0].token_ids == group[3].token_ids  # one 64-bit pattern


def test_more_samples_than_slots_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2")
    asked = requests(5, 40, 12, 70, 3, samples=5)
    for request, limit in zip(asked, (3, 24, 1, 9, 17), strict=True):
        request.max_new_tokens = limit
    roomy = paged(model).generate(asked, SAMPLING)
    prefilled: list[int] = []
    prefill = Runner.prefill

    def counting(runner: Runner, chunks: Sequence[Chunk]) -> None:
        prefilled.extend(chunk.group.index for chunk in chunks)
        prefill(runner, chunks)

    monkeypatch.setattr(Runner, "prefill", counting)
    seen: list[tuple[int, int]] = []
    tight = paged(model, max_batch_size=4, kv_cache_tokens=160)
    results = tight.generate(asked, SAMPLING, lambda done, total: seen.append((done, total)))
    assert_same(results, roomy)
    assert prefilled == [0, 1, 2, 3, 4]  # each prompt once, however many completions
    assert seen == sorted(seen) and seen[-1] == (25, 25)
    assert [len(c.token_ids) for c in flat(results)] == [n for n in (3, 24, 1, 9, 17) for _ in range(5)]


def test_late_looks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host looks every few steps: what is drawn past a completion's end must never show."""
    model = policy("qwen2")
    asked = requests(5, 20, 9, samples=6, max_new_tokens=21)
    every_step = paged(model, eos_ids=range(12), max_batch_size=5).generate(asked, SAMPLING)
    monkeypatch.setattr("qerl.engine.runner.STEPS_PER_LOOK", {"cpu": 7})
    assert_same(paged(model, eos_ids=range(12), max_batch_size=5).generate(asked, SAMPLING), every_step)


def test_slots_that_a_bucket_has_too_many_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's steps run at rounded-up sizes, here without graphs: the rows not in use must touch nothing."""
    model = policy("qwen2")
    asked = requests(5, 20, 9, 33, samples=4, max_new_tokens=21)
    exact = paged(model, eos_ids=range(6), max_batch_size=11)
    exact.sync(NoiseDraw(seed=3, step=2, sigma=5e-2, per="completion"))
    expected = exact.generate(asked, SAMPLING)
    sizes: list[tuple[tuple[int, int], tuple[int, int, int]]] = []
    bucket = StepRunner.bucket

    def rounded_up(steps: StepRunner, num_slots: int, pages: int, tokens: int) -> tuple[int, int, int]:
        steps._bucketed = True
        sizes.append(((num_slots, pages), bucket(steps, num_slots, pages, tokens)))
        return sizes[-1][1]

    monkeypatch.setattr(StepRunner, "bucket", rounded_up)
    assert_same(exact.generate(asked, SAMPLING), expected)
    assert all(wanted[0] <= run[0] <= 11 and wanted[1] <= run[1] for wanted, run in sizes)
    assert any(wanted[0] < run[0] for wanted, run in sizes)


@pytest.mark.parametrize(
    ("num_slots", "max_pages", "kv_heads", "rungs"),
    [
        (8, 144, 4, [144]),  # 18 splits: 576 programs
        (24, 144, 4, [36, 144]),  # 32 slots: 2,304, then 640
        (300, 144, 4, [9, 36, 144]),  # all 300 slots: 21,600, then 6,000, then 2,400
        (1, 2064, 8, [129, 516, 2064]),  # 33,000 tokens: 258 splits, of 8 slots 16,512; 4,160; 1,088
        (1, 2064, None, [9, 33, 129, 516, 2064]),
        (1, 5, None, [5]),
    ],
)
def test_few_buckets_hold_every_step(num_slots: int, max_pages: int, kv_heads: int | None, rungs: list[int]) -> None:
    device = torch.device("cpu")
    steps = StepRunner(max_slots=300, max_pages=max_pages, kv_heads=kv_heads, device=device, graphs=False)
    steps._bucketed = True
    sizes = [steps.bucket(num_slots, pages, 1)[:2] for pages in range(1, max_pages + 1)]
    assert sorted({run for _, run in sizes}) == rungs
    for pages, (slots, run) in enumerate(sizes, 1):
        assert num_slots <= slots <= max(8, 2 * num_slots) and run == min(rung for rung in rungs if rung >= pages)
        assert run <= 4 * max(8, pages) or (kv_heads and slots * kv_heads * num_splits(run) <= IDLE)


def test_a_bucket_runs_once_is_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins for CUDA. A step that fails has warmed nothing up, and a capture that fails is none."""
    events: list[object] = []
    used: list[int] = []

    class Graph:
        def replay(self) -> None:
            events.append(self)

    @contextmanager
    def capture(graph: Graph, pool: object) -> Iterator[None]:
        events.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    steps = StepRunner(max_slots=20, max_pages=9, kv_heads=2, device=torch.device("cuda"), graphs=True)
    fails = True

    def step(slots: int, pages: int, tokens: int) -> None:
        events.append((slots, pages, gc.isenabled()))
        used.append(tokens)
        if fails:
            raise KeyboardInterrupt

    def run(num_slots: int, tokens: int = 1) -> list[object]:
        events.clear()
        with suppress(KeyboardInterrupt):
            steps.run(step, num_slots, 3, tokens)
        return list(events)

    assert run(2) == [(8, 9, True)]
    fails = False
    assert run(2) == [(8, 9, True)]
    fails = True
    assert run(2) == ["capture", (8, 9, False)] and gc.isenabled()
    fails = False
    *captured, graph = run(8)
    assert captured == ["capture", (8, 9, False)] and isinstance(graph, Graph)
    assert run(1) == run(5) == [graph]
    assert run(12) == [(16, 9, True)] and run(17) == [(20, 9, True)]
    *_, other = run(20)
    assert other is not graph and run(18) == [other] and run(8) == [graph]
    assert run(8, 2) == [(8, 9, True)] and run(8, 2)[0] == "capture" and run(8, 2) != [graph] == run(8)
    assert used == [1] * 7 + [2, 2]


@pytest.mark.parametrize("where", ["capture", "replay"])
def test_no_memory_for_a_graph_is_what_no_memory_for_a_tensor_is(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the engine makes room. Other failures of the driver are told as they are."""
    failure: Exception | None = None

    def fail(at: str) -> None:
        if failure is not None and at == where:
            raise failure

    class Graph:
        def replay(self) -> None:
            fail("replay")

    @contextmanager
    def capture(graph: Graph, pool: object) -> Iterator[None]:
        yield
        fail("capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    steps = StepRunner(max_slots=8, max_pages=9, kv_heads=2, device=torch.device("cuda"), graphs=True)
    steps.run(lambda *_: None, 8, 9, 1)
    for failure, told in (
        (RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
    ):
        with pytest.raises(RuntimeError) as caught:
            steps.run(lambda *_: None, 8, 9, 1)
        assert type(caught.value) is told and str(failure) in str(caught.value)
        assert steps._graphs == {(8, 9, 1): None}


def test_a_split_of_decode_attention_is_what_the_kernel_takes() -> None:
    assert pytest.importorskip("qerl.kernels.attention.paged").SPLIT == SPLIT_TOKENS


def test_an_interrupt_between_an_announcement_and_its_product_leaves_no_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The producer has counted, its product does not come: the stream's next product would wait for ever."""
    engine, asked, forgotten = paged(policy("qwen2")), requests(5, 9), []
    expected = engine.generate(asked, SAMPLING)

    def interrupted(*_: object, **__: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("qerl.engine.model.swiglu", interrupted)
        patch.setattr("qerl.engine.model.forget_counters", lambda: forgotten.append(True))
        engine.generate(asked, SAMPLING)
    assert forgotten
    assert_same(engine.generate(asked, SAMPLING), expected)


def test_gate_and_up_are_gone_when_their_layer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill's largest tensors: kept, they would lie beside the next layer's, of which `qerl plan` knows nothing."""
    engine, alive, seen = paged(policy("qwen2")), list[weakref.ref[torch.Tensor]](), []

    def activation(gate: torch.Tensor, up: torch.Tensor, announcement: object) -> torch.Tensor:
        alive.extend(map(weakref.ref, (gate, up)))
        return torch.nn.functional.silu(gate) * up

    def product(self: Projection, *arguments: Any) -> Sequence[torch.Tensor]:
        seen.append(sum(tensor() is not None for tensor in alive))
        return call(self, *arguments)

    call = Projection.__call__
    monkeypatch.setattr("qerl.engine.model.swiglu", activation)
    monkeypatch.setattr(Projection, "__call__", product)
    engine.generate(requests(5, 9), SAMPLING)
    assert alive and not any(seen)


def test_every_eos_id_ends_a_completion() -> None:
    eos_ids = [3, 50, 90]
    engine = paged(policy("mistral"), eos_ids=eos_ids)
    asked = requests(4, samples=60, max_new_tokens=60)
    (group,) = engine.generate(asked, SAMPLING)
    stopped = [c for c in group if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in stopped} == set(eos_ids)
    for completion in group:
        assert not set(completion.token_ids[:-1]) & set(eos_ids)
        assert (completion.token_ids[-1] in eos_ids) == (completion.finish_reason == "stop")
        assert completion.truncated == (completion.finish_reason == "length")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 60
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.entropies)
    assert stopped and len(stopped) < len(group)


def test_greedy_and_truncated_sampling() -> None:
    model = policy("qwen3")
    engine = paged(model)
    asked = requests(6, samples=4)
    (greedy,) = engine.generate(asked, SamplingParams(greedy=True))
    assert all(c.token_ids == greedy[0].token_ids for c in greedy)
    (narrow,) = engine.generate(asked, SamplingParams(top_k=1))
    assert [c.token_ids for c in narrow] == [c.token_ids for c in greedy]
    truncated = engine.generate(asked, SamplingParams(top_p=0.5, temperature=1.3))
    assert gap(model, asked, truncated, None, temperature=1.3) <= TOLERANCE


def test_requests_of_no_length() -> None:
    engine = paged(policy("qwen2"))
    asked = requests(5, 5)
    asked[0].max_new_tokens = 0
    first, second = engine.generate(asked, SAMPLING)
    assert [(c.token_ids, c.logprobs, c.finish_reason) for c in first] == [([], [], "length")] * 3
    assert len(second) == 3 and all(c.token_ids for c in second)
    assert engine.generate([], SAMPLING) == []
    assert engine.generate([Request([1], [], 4)], SAMPLING) == [[]]
    with pytest.raises(ValueError, match="request 1 has no prompt tokens"):
        engine.generate([asked[0], Request([], [1], 4)], SAMPLING)
    with pytest.raises(ValueError, match=f"vocabulary of {VOCABULARY}"):
        engine.generate([Request([VOCABULARY], [1], 4)], SAMPLING)


def test_a_request_that_can_never_fit_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged(policy("qwen2"), kv_cache_tokens=64)
    monkeypatch.setattr(Runner, "prefill", lambda *_: pytest.fail("work was done"))
    message = (
        r"request 1: a prompt of 50 tokens and up to 24 new ones take 96 tokens of KV cache, and "
        r"rollout\.kv_cache_tokens = 64 holds 64: set it to 96 at least"
    )
    with pytest.raises(ValueError, match=message):
        engine.generate(requests(5, 50), SAMPLING)


def test_a_context_beyond_the_sliding_window_is_refused() -> None:
    model = policy("mistral", sliding_window=40)
    engine = paged(model, max_completion_length=20)
    asked = requests(16)
    assert gap(model, asked, engine.generate(asked, SAMPLING), None) <= TOLERANCE
    with pytest.raises(ValueError, match="sliding window of 40"):
        engine.generate(requests(17), SAMPLING)


def test_training_mode_and_modules_stay_as_they_are() -> None:
    model = policy("qwen2").train()
    model.get_base_model().model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    engine = paged(model)
    engine.generate(requests(3), SAMPLING)
    assert [module.training for module in model.modules()] == modes
    loss = model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum()
    loss.backward()  # nothing of the engine's inference mode sticks to the model


def test_dead_adapters_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2")
    call = Projection.__call__
    monkeypatch.setattr(Projection, "__call__", lambda self, x, *_: call(self, x, 0.0))
    with pytest.raises(RuntimeError, match="dead adapters: 14 of 14"):
        paged(model)
    scatter_adapters(model, size=0.0)
    assert paged(model).sync(None).num_live_adapters == 0  # B = 0: nothing to see, nothing wrong


def test_dead_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged(policy("qwen2"))
    with monkeypatch.context() as patch:
        patch.setattr(NoiseDraw, "rows", lambda self, site, streams, size: torch.zeros(len(streams), size))
        with pytest.raises(RuntimeError, match="4 of 4 norms are clean"):
            engine.sync(NOISE)
    clean = engine._decoder.norms.clean
    monkeypatch.setattr("qerl.engine.norms.Gains.of_site", lambda self, site: clean[site])
    with pytest.raises(RuntimeError, match="logits are the same"):
        engine.sync(NOISE)


def test_tiny_adapters_and_noise_are_not_taken_for_dead() -> None:
    model = policy("qwen2", dtype=torch.bfloat16)
    scatter_adapters(model, size=1e-9)
    report = paged(model).sync(NoiseDraw(seed=0, step=0, sigma=1e-7))
    assert report.num_live_adapters == 14
    assert report.num_noised_vectors == 4


def test_broken_weights_are_noticed() -> None:
    model = policy("qwen2")
    engine = paged(model)
    torch.nn.init.constant_(model.get_base_model().model.layers[1].mlp.up_proj.lora_B["default"].weight, torch.nan)
    with pytest.raises(RuntimeError, match="not finite"):
        engine.sync(None)
