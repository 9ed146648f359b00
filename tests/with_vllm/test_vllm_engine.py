"""rollout.engine = "vllm" against vLLM itself: `make test-vllm`. Skipped where it is not installed."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config import EMBEDDED, LoraConfig, ModelConfig, RolloutConfig, load_config
from qerl.display import Display
from qerl.engine import Engine, build_engine
from qerl.engine.vllm.norms import find_norms
from qerl.engine.vllm.worker import PolicyWorker
from qerl.formats.writing import quantize_checkpoint
from qerl.nn.load import load_model
from qerl.nn.lora import LoraLinear, adapters_disabled, attach_lora
from qerl.noise import NoiseDraw, applied, noise_sites
from qerl.rl.trainer import Trainer
from qerl.types import Completion, Request, SamplingParams

pytest.importorskip("vllm")

EOS = [3, 50]
DRAW, OTHER = NoiseDraw(seed=3, step=5, sigma=5e-2), NoiseDraw(seed=3, step=6, sigma=5e-2)
AT_07 = SamplingParams(temperature=0.7)
CONFIG = RolloutConfig(engine="vllm", max_completion_length=24, max_batch_size=6, prompts_per_step=2, num_generations=3)


def write_model(kind: type[PreTrainedConfig], out: Path, **settings: Any) -> Path:
    """A folder with random weights, exact in bf16, of which logits depend on everything."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 160, "vocab_size": 264, "max_position_embeddings": 512} | settings
    config = kind(tie_word_embeddings=False, eos_token_id=EOS, bos_token_id=None, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.mul_(3)
    model.to(torch.bfloat16).save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / file, out / file)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped heads, and a head of its own over the vocabulary."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    return write_model(LlamaConfig, tmp_path_factory.mktemp("llama"), hidden_size=96, num_hidden_layers=3, **heads)


def adapted(folder: Path, dtype: str, **model: Any) -> nn.Module:
    settings = {"dtype": dtype, "device": "cpu", "format": "bf16"} | model
    base, _ = load_model(ModelConfig(path=str(folder), **settings))
    model = attach_lora(base, LoraConfig(r=4, alpha=6, rank_pattern={"k_proj": 3}), seed=0)
    scatter(model, seed=1)
    return model


@torch.no_grad()
def scatter(model: nn.Module, seed: int, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            b = module.lora_B["default"].weight
            b.copy_(size * torch.randn(b.shape, generator=generator))


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    return adapted(folder, "float32")


@pytest.fixture(scope="module")
def engine(model: nn.Module) -> Any:
    return build_engine(model, eos_ids=EOS, config=CONFIG, max_prompt_length=300)


@pytest.fixture(autouse=True)
def the_same_adapters(request: pytest.FixtureRequest) -> None:
    if "model" in request.fixturenames:
        scatter(request.getfixturevalue("model"), seed=1)


def prompts(*lengths: int, samples: int = 3, new: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [
        Request(torch.randint(5, 49, (n,), generator=generator).tolist(), [10 * i + j for j in range(samples)], new, i)
        for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def logprobs_of(
    model: nn.Module,
    requests: list[Request],
    groups: list[list[Completion]],
    draw: NoiseDraw | None,
    temperature: float = 0.7,
) -> torch.Tensor:
    """Log-probabilities of all sampled tokens by transformers' forward pass under a draw."""
    found = []
    with applied(model, draw):
        for request, group in zip(requests, groups, strict=True):
            for c in group:
                ids = torch.tensor([request.prompt_ids + c.token_ids], device=next(model.parameters()).device)
                logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float().cpu() / temperature
                found.append(logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0])
    return torch.cat(found)


def differences(
    model: nn.Module,
    requests: list[Request],
    groups: list[list[Completion]],
    draw: NoiseDraw | None,
    temperature: float,
    *,
    adapters: bool = True,
) -> torch.Tensor:
    """Of each sampled token's log-probability, from `logprobs_of`."""
    with nullcontext() if adapters else adapters_disabled(model):
        expected = logprobs_of(model, requests, groups, draw, temperature)
    return (torch.tensor([x for group in groups for c in group for x in c.logprobs]) - expected).abs()


def norm_weights(engine: Any) -> list[torch.Tensor]:
    (weights,) = engine._llm.collective_rpc(
        lambda worker: [norm.weight.detach().clone() for norm in find_norms(worker.get_model()).values()]
    )
    return weights


def test_logprobs_are_those_of_the_adapted_noisy_model(model: nn.Module, engine: Engine) -> None:
    requests = prompts(5, 1, 40)
    for draw, other in ((None, DRAW), (DRAW, None), (OTHER, DRAW), (None, OTHER)):
        report = engine.sync(draw)
        assert report.num_adapters == report.num_live_adapters == 21
        assert report.adapter_change > 0.01
        assert report.num_noised_vectors == (0 if draw is None else 6)
        assert (report.noise_change > 0.01) == (draw is not None)
        groups = engine.generate(requests, AT_07)
        assert differences(model, requests, groups, draw, 0.7).max() < 1e-4
        assert differences(model, requests, groups, other, 0.7).mean() > 1e-2
        assert differences(model, requests, groups, draw, 1.0).mean() > 1e-2


def test_greedy_tokens_are_those_of_qerls_engine(model: nn.Module, engine: Engine) -> None:
    requests, greedy = prompts(5, 17, 60, samples=1), SamplingParams(greedy=True)
    ours = build_engine(model, eos_ids=EOS, config=RolloutConfig(engine="qerl"))
    for draw in (None, DRAW):
        engine.sync(draw)
        ours.sync(draw)
        groups = engine.generate(requests, greedy)
        assert [[c.token_ids for c in group] for group in groups] == [
            [c.token_ids for c in group] for group in ours.generate(requests, greedy)
        ]
        assert differences(model, requests, groups, draw, 1.0).max() < 1e-4
    scaled = engine.generate(requests, SamplingParams(greedy=True, temperature=0.7))
    assert all(math.isnan(x) for group in scaled for c in group for x in c.logprobs)


def test_an_update_of_the_adapters_arrives(model: nn.Module, engine: Engine) -> None:
    requests = prompts(9)
    before = engine.generate(requests, AT_07)
    scatter(model, seed=2)
    stale = engine.generate(requests, AT_07)
    assert stale == before  # not before the sync
    engine.sync(None)
    after = engine.generate(requests, AT_07)
    assert after != before
    assert differences(model, requests, after, None, 0.7).max() < 1e-4
    scatter(model, seed=2, size=0.0)
    report = engine.sync(None)
    assert (report.num_adapters, report.num_live_adapters, report.adapter_change) == (21, 0, 0.0)
    assert differences(model, requests, engine.generate(requests, AT_07), None, 0.7, adapters=False).max() < 1e-4


def test_norms_come_back_bit_for_bit(model: nn.Module, engine: Any) -> None:
    engine.sync(None)
    clean = norm_weights(engine)
    assert all(torch.equal(w, site.weight) for w, site in zip(clean, noise_sites(model), strict=True))
    for draw in (DRAW, OTHER, DRAW):
        engine.sync(draw)
        noisy = norm_weights(engine)
        with applied(model, draw):
            expected = [site.weight + site.noise.rows[0] for site in noise_sites(model)]
        assert all(torch.equal(w, e) for w, e in zip(noisy, expected, strict=True))
    engine.sync(None)
    assert all(torch.equal(a, b) for a, b in zip(norm_weights(engine), clean, strict=True))


def test_no_prefix_outlives_a_sync(model: nn.Module, engine: Any) -> None:
    requests = prompts(290, samples=1, new=1)  # more than two of vLLM's blocks of 128
    greedy = SamplingParams(greedy=True)
    engine.sync(DRAW)
    engine.generate(requests, greedy)
    engine._llm.collective_rpc(PolicyWorker.qerl_add_noise, args=(OTHER.seed, OTHER.step, OTHER.sigma))
    stale = engine.generate(requests, greedy)  # a cache that nobody has dropped
    assert differences(model, requests, stale, OTHER, 1.0).max() > 1e-3
    engine.sync(OTHER)
    assert differences(model, requests, engine.generate(requests, greedy), OTHER, 1.0).max() < 1e-4
    scatter(model, seed=2)
    engine.sync(OTHER)
    assert differences(model, requests, engine.generate(requests, greedy), OTHER, 1.0).max() < 1e-4


def test_completions_end_where_they_should(engine: Engine) -> None:
    engine.sync(None)
    requests = prompts(5, 8, 6, samples=8, new=24)
    requests[1].max_new_tokens = 0
    requests[2].max_new_tokens = 2
    seen: list[tuple[int, int]] = []
    groups = engine.generate(requests, SamplingParams(temperature=2.0), lambda *at: seen.append(at))
    assert [len(group) for group in groups] == [8, 8, 8]
    assert [c for c in groups[1] if c.token_ids or not c.truncated] == []
    assert seen == [(n, 24) for n in range(9, 25)]
    for request, group in zip(requests, groups, strict=True):
        for c in group:
            assert len(c.token_ids) == len(c.logprobs) <= request.max_new_tokens
            assert not set(c.token_ids[:-1]) & set(EOS)
            assert c.truncated == (not c.token_ids or c.token_ids[-1] not in EOS)
            assert c.entropies is None or not c.token_ids
            assert not c.truncated or len(c.token_ids) == request.max_new_tokens
    assert len({tuple(c.token_ids) for c in groups[0]}) == 8  # seeds differ
    assert engine.generate(requests, SamplingParams(temperature=2.0)) == groups


def test_every_eos_id_ends_a_completion(engine: Engine) -> None:
    engine.sync(None)
    groups = engine.generate(prompts(5, 7, samples=200, new=24), SamplingParams(temperature=2.0))
    assert {c.token_ids[-1] for group in groups for c in group if not c.truncated} == set(EOS)


def test_under_truncation_there_are_no_logprobs(engine: Engine) -> None:
    engine.sync(None)
    requests = prompts(5, samples=20)
    for sampling in (SamplingParams(top_k=2), SamplingParams(top_p=0.2), SamplingParams(min_p=0.9)):
        (group,) = engine.generate(requests, sampling)
        assert all(math.isnan(x) for c in group for x in c.logprobs)
    (group,) = engine.generate(requests, SamplingParams(top_k=1))
    assert len({tuple(c.token_ids) for c in group}) == 1


def test_noise_that_vllm_cannot_tell_apart_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="not one a prompt"):
        engine.sync(NoiseDraw(seed=3, step=5, sigma=5e-2, per="prompt"))


def test_requests_are_refused_before_any_work(engine: Engine) -> None:
    good = prompts(5)
    for request, why in (
        (Request([], [1], 4), "no prompt tokens"),
        (Request([264], [1], 4), "vocabulary of 264"),
        (Request([5] * 310, [1], 20), "context of 324"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.generate([*good, request], AT_07)


def test_an_interrupted_rollout_leaves_nothing_behind(engine: Engine) -> None:
    requests = prompts(5, 9, samples=6)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    expected = engine.generate(requests, AT_07)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests, AT_07, interrupt)
    assert engine.generate(requests, AT_07) == expected
    engine.sync(DRAW)  # resets the prefix cache, which running requests would keep


def test_adapters_that_vllm_cannot_apply_are_refused(folder: Path) -> None:
    base, _ = load_model(ModelConfig(path=str(folder), format="bf16", device="cpu"))
    trained = attach_lora(base, LoraConfig(r=4, train_norms=True), seed=0)
    with pytest.raises(ValueError, match="is trained whole"):
        build_engine(trained, eos_ids=EOS, config=CONFIG)


def test_bf16_differs_by_rounding_alone(folder: Path) -> None:
    model, exact = adapted(folder, "bfloat16"), adapted(folder, "float32")
    engine: Any = build_engine(model, eos_ids=EOS, config=CONFIG, max_prompt_length=64)
    requests, strong = prompts(5, 33, samples=3), NoiseDraw(seed=3, step=5, sigma=0.3)
    for draw in (None, strong):
        engine.sync(draw)
        groups = engine.generate(requests, AT_07)
        gap = differences(exact, requests, groups, draw, 0.7).mean()
        (theirs, ours) = (logprobs_of(m, requests, groups, draw) for m in (model, exact))
        assert gap < 2 * (theirs - ours).abs().mean()  # transformers' own bf16 against fp32
        assert draw is None or gap < differences(exact, requests, groups, None, 0.7).mean() / 4
        assert gap < differences(exact, requests, groups, draw, 0.7, adapters=False).mean() / 4
        clean = [site.weight.float() for site in noise_sites(model)]
        z = [torch.zeros(1)] * len(clean)
        if draw is not None:
            with applied(model, draw):
                z = [site.noise.rows[0] for site in noise_sites(model)]
        expected = [(w + row).bfloat16() for w, row in zip(clean, z, strict=True)]
        assert all(torch.equal(w, e) for w, e in zip(norm_weights(engine), expected, strict=True))


def test_an_architecture_that_only_vllm_knows(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = write_model(
        Phi3Config, tmp_path, hidden_size=128, num_hidden_layers=2, original_max_position_embeddings=512, **heads
    )
    base, _ = load_model(ModelConfig(path=str(path), format="bf16", dtype="float32", device="cpu"))
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]  # fused in transformers as well
    model = attach_lora(base, LoraConfig(r=4, alpha=6, target_modules=targets), seed=0)
    scatter(model, seed=1)
    engine = build_engine(model, eos_ids=EOS, config=CONFIG, max_prompt_length=64)
    requests = prompts(5, 33, samples=3)
    for draw in (None, DRAW):
        engine.sync(draw)
        groups = engine.generate(requests, AT_07)
        assert differences(model, requests, groups, draw, 0.7).max() < 1e-4
        assert differences(model, requests, groups, OTHER, 0.7).mean() > 1e-3
        assert differences(model, requests, groups, draw, 0.7, adapters=False).mean() > 1e-2


def test_a_process_runs_one_at_a_time(folder: Path) -> None:
    first, second = (
        build_engine(adapted(folder, "float32"), eos_ids=EOS, config=CONFIG, max_prompt_length=64) for _ in range(2)
    )
    second.generate(prompts(5), AT_07)
    with pytest.raises(RuntimeError, match="one at a time"):
        first.generate(prompts(5), AT_07)


def test_a_run_end_to_end_and_its_evaluation(tmp_path: Path) -> None:
    settings = {
        "output_dir": str(tmp_path / "run"), "steps": 3, "model.format": "bf16", "model.device": "cpu",
        "rollout.engine": "vllm", "rollout.prompts_per_step": 4, "rollout.num_generations": 4,
        "rollout.max_completion_length": 32, "noise.num_stages": 3, "optimizer.learning_rate": 1e-3,
        "eval.num_problems": 8,
    }  # fmt: skip
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    Trainer(config, display=Display(3, quiet=True)).train()
    before, *steps = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert before["eval/accuracy"] is not None
    assert [step["noise/vectors"] for step in steps] == [0, 8, 8]
    assert [step["rollout_entropy"] for step in steps] == [None] * 3
    assert all(step["entropy"] > 0 for step in steps)
    clean, noisy, _ = [step["sampling/sampling_logp_difference/max"] for step in steps]
    assert clean < 1e-4 < 1e-3 < noisy
    assert [step["mismatch_kl"] < limit for step, limit in zip(steps, (1e-8, 1e-2, 1e-4), strict=True)] == [True] * 3

    command = ["eval", "embedded", "rollout.engine=vllm", "--format", "bf16", "--limit", "4", "--samples", "2"]
    command += ["--max-new-tokens", "32", "--adapter", str(tmp_path / "run" / "adapter"), "--compare", "embedded"]
    ran = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "eval")])
    assert ran.exit_code == 0, ran.output
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert [policy["sampled"]["num_problems"] for policy in summary["policies"]] == [4, 4]


def test_an_nvfp4_folder_is_read_as_the_trainer_reads_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of vLLM's way but the product: Marlin's kernel is CUDA, so vLLM's own dequantisation stands in its place."""
    linear = import_module("vllm.model_executor.kernels.linear")
    utils = import_module("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    asked: list[torch.Size] = []

    def product(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        asked.append(layer.weight.shape)
        scales = (layer.weight_scale.data, layer.weight_global_scale)
        weight = utils.dequantize_to_dtype(layer.weight.data, *scales, x.dtype, 16, swizzle=False)
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(linear.MarlinNvFp4LinearKernel, "is_supported", classmethod(lambda cls, cc=None: (True, None)))
    monkeypatch.setattr(linear.MarlinNvFp4LinearKernel, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(linear.MarlinNvFp4LinearKernel, "apply_weights", product)
    quantize_checkpoint(folder, tmp_path / "packed")
    model, exact = (adapted(tmp_path / "packed", dtype, format="nvfp4") for dtype in ("bfloat16", "float32"))
    unrounded = adapted(folder, "float32")
    engine: Any = build_engine(model, eos_ids=EOS, config=CONFIG, max_prompt_length=64)
    requests, strong = prompts(5, 33, samples=3), NoiseDraw(seed=3, step=5, sigma=0.3)
    for draw in (None, strong):
        report = engine.sync(draw)
        assert report.num_live_adapters == 21 and report.num_noised_vectors == (0 if draw is None else 6)
        groups = engine.generate(requests, AT_07)
        gap = differences(exact, requests, groups, draw, 0.7).mean()
        theirs, ours = (logprobs_of(m, requests, groups, draw) for m in (model, exact))
        assert gap < 2 * (theirs - ours).abs().mean()
        assert gap < differences(unrounded, requests, groups, draw, 0.7).mean() / 4
        assert gap < differences(exact, requests, groups, draw, 0.7, adapters=False).mean() / 4
    assert {shape[0] for shape in asked} == {160, 96, 320}  # q, k, v; o and down; gate, up


@pytest.mark.gpu
def test_marlin_and_sleep_mode(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    bf16 = write_model(LlamaConfig, tmp_path / "bf16", **heads, **sizes)
    quantize_checkpoint(bf16, tmp_path / "packed")
    model, exact = (
        adapted(tmp_path / "packed", dtype, format="nvfp4", device="cuda") for dtype in ("bfloat16", "float32")
    )
    engine = build_engine(model, eos_ids=EOS, config=CONFIG, max_prompt_length=64)
    requests, strong = prompts(5, 33, samples=3), NoiseDraw(seed=3, step=5, sigma=0.3)
    for draw in (None, strong, None):
        engine.wake()
        engine.sync(draw)
        groups = engine.generate(requests, AT_07)
        gap = differences(exact, requests, groups, draw, 0.7).mean()
        theirs, ours = (logprobs_of(m, requests, groups, draw) for m in (model, exact))
        assert gap < 2 * (theirs - ours).abs().mean()
        assert gap < differences(exact, requests, groups, draw, 0.7, adapters=False).mean() / 4
        if draw is not None:
            assert gap < differences(exact, requests, groups, None, 0.7).mean() / 4
        held = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > held
