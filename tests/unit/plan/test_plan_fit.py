"""What fits a card, what would, what is refused, and the rates: shapes alone, no weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config import load_config
from qerl.plan import Target, check_fits, plan_memory, read_shape
from qerl.plan.fit import SLACK_BYTES, budget_of, describe, find_limits, nearest_settings, parse_card, with_settings
from qerl.plan.rates import RATES, step_seconds
from qerl.plan.show import as_json, make_plan

ROOT = Path(__file__).parents[3]
SHAPES = {  # Qwen2.5: hidden, intermediate, layers, heads, kv heads, tied, vocabulary
    "0.5B": (896, 4864, 24, 14, 2, True, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, True, 151936),
    "3B": (2048, 11008, 36, 16, 2, True, 151936),
    "7B": (3584, 18944, 28, 28, 4, False, 152064),
    "14B": (5120, 13824, 48, 40, 8, False, 152064),
    "32B": (5120, 27648, 64, 40, 8, False, 152064),
    "72B": (8192, 29568, 80, 64, 8, False, 152064),
}
RECIPES = {
    "3B": "gsm8k-3b-7b/3b.toml",
    "7B": "gsm8k-3b-7b/7b.toml",
    "14B": "bigmath-14b-32b/14b.toml",
    "32B": "bigmath-14b-32b/32b.toml",
}
ONE_GROUP = ["rollout.prompts_per_step=1", "rollout.num_generations=16", "task.max_prompt_length=256",
             "eval.num_problems=0"]  # fmt: skip


DOCUMENTATION = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("models")
    for name, (hidden, intermediate, layers, heads, kv_heads, tied, vocabulary) in SHAPES.items():
        (folder / name).mkdir()
        config = dict(
            model_type="qwen2",
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            vocab_size=vocabulary,
            max_position_embeddings=32768,
        )
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def planned(models: Path, name: str, *settings: str, recipe: str | None = None):
    path = None if recipe is None else ROOT / "examples" / recipe
    config = load_config(path, [f"model.path={models / name}", *settings])
    shape, target = read_shape(config.model), Target.of(config)
    return shape, config, target, plan_memory(shape, config, target)


def test_figures_worked_out_by_hand(models):
    """Qwen2.5-7B: 6.53 G weights at 4608 bytes for 8192 and a scale of 4 bytes a row; 56 KiB of KV a token."""
    shape, _, _, memory = planned(models, "7B", "rollout.kv_cache_tokens=16000", "lora.r=16")
    assert shape.num_weights == 28 * (3584 * (3584 * 2 + 1024) + 3 * 3584 * 18944)
    rows = 28 * (3584 * 3 + 1024 + 2 * 18944)
    assert memory.parts["packed base"] == shape.num_weights * 4608 // 8192 + 4 * rows
    assert memory.parts["head and embedding"] == 2 * 152064 * 3584 * 2
    assert memory.parts["KV cache"] == (16000 + 16) * 56 * 1024
    assert memory.parts["adapters"] == 4 * 16 * 28 * ((3584 + 3584) * 2 + (3584 + 512) * 2 + (3584 + 18944) * 3)
    assert memory.parts["layer inputs"] == 28 * 16384 * 3584 * 2
    assert memory.parts["dequantisation scratch"] == 2 * 18944 * (3584 + 2 * 32) * 2  # B of gate and up, in ranks of 32


@pytest.mark.parametrize("name, recipe", RECIPES.items())
def test_the_recipes_fit_the_card_they_are_for(models, name, recipe):
    """Their READMEs ask for a GPU of 80 GB or more."""
    *_, memory = planned(models, name, recipe=recipe)
    assert memory.peak <= budget_of(80_000_000_000)
    assert memory.peaks["load"] < memory.peak
    assert memory.sequences_at_a_time == {"3B": 128, "7B": 128, "14B": 23, "32B": 15}[name]


@pytest.mark.parametrize(
    "name, card, rank, new, micro_batch",
    [
        ("72B", 80, 16, 4096, 13056),
        ("32B", 40, 32, 2048, 8192),
        ("14B", 24, 32, 2048, 8192),
        ("7B", 12, 32, 2048, 4096),
    ],
)
def test_large_models_on_small_cards(models, name, card, rank, new, micro_batch):
    """16 completions of 256 prompt and `new` tokens; with micro-batches of this size, and not with twice it."""
    settings = [*ONE_GROUP, f"lora.r={rank}", f"rollout.max_completion_length={new}"]
    *_, memory = planned(models, name, *settings, f"optimizer.micro_batch_tokens={micro_batch}")
    assert memory.peak <= budget_of(card * 10**9)
    peaks = " | ".join(f"{memory.peaks[phase] / 1e9:.1f}" for phase in ("load", "rollout", "update"))
    row = f"| {name}, r {rank}, new {new:,}, micro-batches of {micro_batch:,} | {card} GB | {peaks} |"
    assert row in DOCUMENTATION
    *_, memory = planned(models, name, *settings, f"optimizer.micro_batch_tokens={2 * micro_batch}")
    assert memory.peak > budget_of(card * 10**9)


SMALL_ROLLOUT = "rollout.num_generations=32", "rollout.kv_cache_tokens=32768", "eval.num_problems=0"


@pytest.mark.parametrize(
    "name, card, times",
    [("0.5B", 80, 4), ("0.5B", 11, 4), ("0.5B", 8, 2), ("0.5B", 5, 1), ("1.5B", 24, 2), ("3B", 80, 1), ("32B", 80, 1)],
)
def test_micro_batches_of_small_models_are_larger_where_there_is_room(models, name, card, times):
    """A host launches a small model's passes more slowly than a GPU computes them; three quarters of the memory do."""
    shape, config, target, memory = planned(models, name, *SMALL_ROLLOUT, "optimizer.gradient_checkpointing=true")
    assert memory.micro_batch_limit % 16_384 == 0  # without a card: within what the rollout takes
    assert memory.micro_batch_limit == 16_384 or memory.peaks["update"] <= memory.peaks["rollout"]
    free = replace(target, free_bytes=card * 10**9)
    on_card = plan_memory(shape, config, free)
    assert on_card.micro_batch_limit == on_card.micro_batch_tokens == 16_384 * times
    assert times == 1 or on_card.peaks["update"] <= max(card * 10**9 * 3 // 4, on_card.peaks["rollout"])
    on_cpu = plan_memory(shape, config, replace(free, on_gpu=False))
    asked = plan_memory(shape, with_settings(config, {"optimizer.micro_batch_tokens": 4096}), free)
    assert (on_cpu.micro_batch_limit, asked.micro_batch_limit) == (16_384, 4096)


@pytest.mark.parametrize(
    "name, card, limit, recomputed",
    [
        ("0.5B", 24, 32_768, 13), ("0.5B", 141, 65_536, 0), ("3B", 24, 16_384, 29), ("3B", 80, 16_384, 0),
        ("7B", 16, 8_192, 27), ("7B", 40, 8_192, 13), ("7B", 80, 8_192, 0), ("7B", 141, 16_384, 0),
        ("32B", 80, 4_096, 31),
    ],
)  # fmt: skip
def test_as_few_layers_recompute_as_memory_asks_for(models, name, card, limit, recomputed):
    """Of all that fits three quarters of the card, what takes the least time, by a sum over every choice."""
    shape, config, target, _ = planned(models, name, *SMALL_ROLLOUT, "rollout.max_completion_length=512")
    free, num_layers = card * 10**9, len(shape.layers)
    memory = plan_memory(shape, config, replace(target, free_bytes=free))
    assert (memory.micro_batch_limit, memory.recomputed_layers) == (limit, recomputed)
    room = max(free * 3 // 4, memory.peaks["rollout"])

    def time_and_peak(tokens: int, count: int) -> tuple[float, int]:
        settings = {"optimizer.micro_batch_tokens": tokens, "optimizer.gradient_checkpointing": count}
        of = plan_memory(shape, with_settings(config, settings), target)
        assert of.recomputed_layers == count
        layer, passes, tokens = shape.num_weights / num_layers, 2 + count / num_layers, of.micro_batch_tokens
        return passes * max(1 + 250 / tokens, 1.5e12 / (layer + 3e7) / tokens), of.peaks["update"]

    mine, peak = time_and_peak(limit, recomputed)
    assert peak == memory.peaks["update"] <= room
    longer = (65_536, 49_152, 32_768) if name == "0.5B" else ()
    for tokens in (*longer, 16_384, 8_192, 4_096, 2_048):
        for count in range(0, num_layers + 1, 3):
            time, size = time_and_peak(tokens, count)
            assert time >= mine * 0.999 or size > room, (tokens, count)


@pytest.mark.parametrize(
    "uneven",
    [
        'lora.target_modules=["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]',
        'lora.rank_pattern={"layers.0.mlp.gate_proj" = 512, "layers.20.mlp.up_proj" = 256}',
        "optimizer.logprob_chunk=1",
    ],
)
def test_more_recomputed_layers_never_take_more(models, uneven):
    """Bisection stands on it, also where layers are not alike: one of them runs again beside the inputs of others."""
    shape, config, target, _ = planned(models, "7B", "optimizer.micro_batch_tokens=8192", uneven)
    for offload in (False, True):
        sizes = [
            plan_memory(
                shape,
                with_settings(
                    config, {"optimizer.gradient_checkpointing": n, "optimizer.offload_activations": offload}
                ),
                target,
            ).peaks["update"]
            for n in range(1, 29)
        ]
        assert sizes == sorted(sizes, reverse=True)


def test_recomputation_is_what_was_asked_for_or_what_memory_asks_for(models):
    shape, config, target, memory = planned(models, "7B", *SMALL_ROLLOUT)
    # No card: no phase grows.
    assert memory.peaks["update"] <= memory.peaks["rollout"] or memory.recomputed_layers == 28
    large = replace(target, free_bytes=10**12)

    def count(setting: object, target: Target = large, **more: object) -> int:
        settings = {"optimizer.gradient_checkpointing": setting} | {f"optimizer.{k}": v for k, v in more.items()}
        return plan_memory(shape, with_settings(config, settings), target).recomputed_layers

    assert [count(setting) for setting in ("auto", True, False, 0, 1, 20, 99)] == [0, 28, 0, 0, 1, 20, 28]
    assert count("auto", offload_activations=True) == 28  # moves what they start from
    assert count("auto", replace(large, on_gpu=False)) == 28
    sizes = [
        plan_memory(shape, with_settings(config, {"optimizer.gradient_checkpointing": n}), target).peaks["update"]
        for n in range(29)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[-1]


def test_the_limit_is_not_the_longest_micro_batch(models):
    """Scoring passes go over all parts of a rollout, and one sequence may have more tokens than the limit."""
    *_, memory = planned(models, "7B", "loss.updates_per_rollout=32")
    assert (memory.micro_batch_limit, memory.micro_batch_tokens) == (16_384, 4 * (1024 + 512))
    *_, memory = planned(models, "7B", "rollout.max_completion_length=24000", "rollout.kv_cache_tokens=200000")
    assert (memory.micro_batch_limit, memory.micro_batch_tokens) == (16_384, 1024 + 24_000)


@pytest.mark.parametrize("card", ["2.2GB", "2.4GB", "2.8GB", "3GB", "6GB"])
def test_a_faster_update_makes_no_run_not_fit(models, card):
    """Where all that is left open is set to what takes the least memory, no more fits."""
    settings = [f"model.path={models / '0.5B'}", "rollout.kv_cache_tokens=4096", "eval.num_problems=0"]
    least = ["optimizer.micro_batch_tokens=2048", "optimizer.gradient_checkpointing=true"]
    left_open, set_to_least = (
        make_plan(load_config(None, [*settings, *more]), parse_card(card)).card for more in ([], least)
    )
    assert left_open is not None and left_open == set_to_least


def test_a_larger_micro_batch_refuses_no_run(models, monkeypatch):
    """Most of the memory is somebody else's: it takes what it took before, or what is in between."""
    settings = "rollout.num_generations=32", "rollout.kv_cache_tokens=32768", "eval.num_problems=0"
    config = load_config(None, [f"model.path={models / '0.5B'}", *settings])
    for free, tokens, recomputed in ((24, 32_768, 13), (9, 32_768, 22), (5, 16_384, 23), (4, 8_192, 22)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * 10**9, 24 * 10**9))
        memory = check_fits(config, torch.device("cuda"))
        assert memory is not None and (memory.micro_batch_limit, memory.recomputed_layers) == (tokens, recomputed)
        assert memory.peak <= free * 10**9 - SLACK_BYTES


@pytest.mark.parametrize(
    "key, values",
    [
        ("rollout.max_completion_length", (1, 100, 512, 4000)),
        ("task.max_prompt_length", (1, 100, 1024, 9000)),
        ("rollout.num_generations", (2, 8, 16)),
        ("rollout.max_batch_size", (1, 16, 256)),
        ("rollout.kv_cache_tokens", (64, 4096, 100_000)),
        ("rollout.kv_cache_memory", ("1MB", "1GB", "80GB")),
        ("rollout.prefill_tokens", (16, 1024, 8192)),
        ("optimizer.micro_batch_tokens", (16, 4096, 16384)),
        ("optimizer.logprob_chunk", (1, 512, 100_000)),
        ("lora.r", (1, 16, 64, 65, 256)),
    ],
)
def test_more_is_never_less(models, key, values):
    """Bisection stands on it. With recomputation and without; the sizes of a phase, not only the largest."""
    for recompute in (True, False):
        shape, config, target, _ = planned(models, "3B", f"optimizer.gradient_checkpointing={str(recompute).lower()}")
        peaks = [plan_memory(shape, with_settings(config, {key: v}), target).peaks for v in values]
        for phase in peaks[0]:
            sizes = [peak[phase] for peak in peaks]
            assert sizes == sorted(sizes), (phase, sizes)
        assert peaks[0] != peaks[-1]


def test_limits_are_the_last_that_fit(models):
    shape, config, target, _ = planned(models, "7B")
    budget = budget_of(24_000_000_000)
    limits = find_limits(shape, config, target, budget)
    assert limits.longest_context > 8192
    group = {"rollout.prompts_per_step": 1, "eval.num_problems": 0}

    def peak(size: int) -> int:
        both = {"rollout.num_generations": size, "rollout.max_batch_size": size}
        return plan_memory(shape, with_settings(config, group | both), target).peak

    assert peak(limits.largest_group) <= budget < peak(limits.largest_group + 1)
    smaller = find_limits(shape, config, target, budget_of(12_000_000_000))
    assert smaller.longest_context < limits.longest_context
    assert smaller.largest_group < limits.largest_group
    assert find_limits(shape, config, target, 5_000_000_000) == type(limits)(0, 0)


@pytest.mark.parametrize(
    "settings, expected",
    [
        (["rollout.max_completion_length=8192"], {"rollout.kv_cache_tokens"}),
        (["optimizer.micro_batch_tokens=65536", "rollout.prompts_per_step=64", *ONE_GROUP[2:]],
         {"optimizer.micro_batch_tokens"}),
        (["optimizer.gradient_checkpointing=false", *ONE_GROUP[2:]], {"optimizer.gradient_checkpointing"}),
        (["optimizer.logprob_chunk=65536", "rollout.max_completion_length=30000", "rollout.kv_cache_tokens=34000"],
         {"optimizer.logprob_chunk"}),
    ],
)  # fmt: skip
def test_the_nearest_settings_fit_and_change_what_is_too_large(models, settings, expected):
    shape, config, target, memory = planned(models, "7B", *settings)
    budget = budget_of(24_000_000_000)
    assert memory.peak > budget
    found = nearest_settings(shape, config, target, budget)
    assert found is not None and expected <= set(found)
    fixed = load_config(None, [f"model.path={models / '7B'}", *settings, *describe(found).split()])
    assert plan_memory(shape, fixed, target).peak <= budget


def test_shorter_prefills_make_a_small_card_do(models):
    """Its 8,192 tokens at a time take 1 GB of 7B, whatever the KV cache."""
    shape, config, target, _ = planned(models, "7B", recipe=RECIPES["7B"])
    budget = budget_of(10_000_000_000)
    found = nearest_settings(shape, config, target, budget)
    assert found is not None and 256 <= found["rollout.prefill_tokens"] < config.rollout.prefill_tokens
    assert plan_memory(shape, with_settings(config, found), target).peak <= budget


def test_what_graphs_keep_for_themselves_is_there_in_the_update(models):
    """On a GPU: slots of the largest call, and a decode step of the rollout's largest bucket; without graphs, slots."""
    settings = ["rollout.prompts_per_step=5", "rollout.num_generations=8", "rollout.max_completion_length=2000",
                "task.max_prompt_length=256", "eval.num_problems=50", "rollout.top_p=0.9", "noise.per=completion",
                "loss.importance_sampling=false"]  # fmt: skip
    shape, config, target, memory = planned(models, "7B", *settings)
    rollout, evaluation, update = (memory.phases[name] for name in ("rollout", "evaluation", "update"))
    for part in ("slots", "decode step", "truncation"):
        assert update[part] == rollout[part] > 0
    assert rollout["slots"] > evaluation["slots"]  # both of 50 slots, the rollout's with gains
    # 40 completions run in all 50 slots, as 64 there are not: 28 heads, 18 splits of 2,256 tokens, 128 + 2 numbers.
    step = rollout["decode step"] - 50 * 28 * 18 * 130 * 4
    assert step % (50 * 2) == 0 and 50 * 2 * 152064 < step < 50 * 2 * 350_000
    assert rollout["truncation"] == 50 * 152064 * 31
    eager = with_settings(config, {"rollout.cuda_graphs": False})
    update = plan_memory(shape, eager, target).phases["update"]
    assert "slots" in update and update.keys().isdisjoint({"decode step", "truncation", "KV cache"})
    on_cpu = plan_memory(shape, config, replace(target, on_gpu=False)).phases["update"]
    assert on_cpu.keys().isdisjoint({"slots", "decode step", "truncation", "KV cache"})


def test_shorter_completions_are_the_last_resort(models):
    settings = [*ONE_GROUP, "rollout.max_completion_length=30000"]
    shape, config, target, _ = planned(models, "7B", *settings)
    budget = budget_of(12_000_000_000)
    found = nearest_settings(shape, config, target, budget)
    assert found is not None and 1000 < found["rollout.max_completion_length"] < 30000
    assert nearest_settings(shape, config, target, 4_000_000_000) is None


def test_training_refuses_what_cannot_fit(models, monkeypatch):
    config = load_config(None, [f"model.path={models / '32B'}", "eval.num_problems=100"])
    free = 0

    def memory_of(device: torch.device) -> tuple[int, int]:
        return free, 80_000_000_000

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory_of)
    free = 30_000_000_000
    with pytest.raises(ValueError, match=r"up to .* GB in its evaluation, and the GPU has 30\.0 GB free") as error:
        check_fits(config, torch.device("cuda"))
    message = str(error.value)
    assert f"qerl: {message}\n" in DOCUMENTATION
    assert "KV cache 52.08 GB" in message and "packed base 17.57 GB" in message
    settings = message.partition("it fits with ")[2].partition(". `qerl plan`")[0].split()
    fixed = load_config(None, [f"model.path={models / '32B'}", "eval.num_problems=100", *settings])
    target = Target.of(fixed, free_bytes=free - SLACK_BYTES)
    assert plan_memory(read_shape(fixed.model), fixed, target).peak <= free - SLACK_BYTES
    check_fits(fixed, torch.device("cuda"))

    free = 15_000_000_000
    with pytest.raises(ValueError, match="no lengths, batches and recomputation make it fit: take a smaller model"):
        check_fits(config, torch.device("cuda"))
    check_fits(config, torch.device("cpu"))
    free = 139_000_000_000
    check_fits(config, torch.device("cuda"))


def test_the_trainer_asks_before_it_loads(models, monkeypatch, tmp_path):
    """The folder has no weights: what is refused first is the memory."""
    from qerl.rl import trainer

    monkeypatch.setattr(trainer, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000_000_000, 8_000_000_000))
    config = load_config(None, [f"model.path={models / '7B'}", f"output_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="this run needs up to"):
        trainer.Trainer(config)


def test_what_is_not_planned_for_is_said(tmp_path, caplog, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    config = load_config(None, [f"model.path={tmp_path}"])
    with pytest.raises(ValueError, match="is a gpt_neox model: plans know"):
        read_shape(config.model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    check_fits(config, torch.device("cuda"))
    assert "whether the run fits the GPU is not checked" in caplog.text
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_shape(load_config(None, [f"model.path={tmp_path / 'none'}"]).model)


@pytest.mark.parametrize("name, value", [("num_hidden_layers", 0), ("hidden_size", -64), ("vocab_size", 0)])
def test_sizes_that_no_model_has_are_refused(tmp_path, name, value):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", name: value}))
    with pytest.raises(ValueError, match=rf"{name} is {value}: wants a positive whole number"):
        read_shape(load_config(None, [f"model.path={tmp_path}"]).model)


@pytest.mark.parametrize("value", ["text", None, 1.5, [1]])
def test_what_is_no_size_is_told_with_its_file(tmp_path, value):
    """transformers raises an error of its own for these; a run would end with the same words."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": value}))
    with pytest.raises(
        ValueError, match=r"config\.json: Validation error for field 'hidden_size': TypeError: .* got \w+ "
    ):
        read_shape(load_config(None, [f"model.path={tmp_path}"]).model)


def test_a_target_that_is_no_layer_is_refused(models):
    with pytest.raises(ValueError, match=r"lora\.target_modules: no layer is called 'nope'; there are q_proj, k_proj"):
        planned(models, "7B", 'lora.target_modules=["q_proj", "nope"]')


@pytest.mark.parametrize(
    "setting, told",
    [
        (
            "lora.rank_pattern={nope=8}",
            r"lora\.rank_pattern: 'nope' matches none of the adapted layers, such as model",
        ),
        ("lora.alpha_pattern={k_proj=8}", r"lora\.alpha_pattern: 'k_proj' matches none of the adapted layers"),
        (
            'model.keep=["*.nope"]',
            r"model\.keep: '\*\.nope' matches no linear layer; names look like model\.layers\.0\.",
        ),
        ('lora.target_modules=["nope"]', r"lora\.target_modules: no layer is called 'nope'"),
    ],
)
def test_layers_that_are_not_there_are_told_before_anything_loads(models, setting, told, monkeypatch):
    """By `qerl plan`, and by a run on a GPU, where what cannot be planned is otherwise a warning."""
    settings = [f"model.path={models / '7B'}", 'lora.target_modules=["q_proj", "v_proj"]', setting]
    with pytest.raises(ValueError, match=told):
        planned(models, "7B", *settings[1:])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * 10**9, 80 * 10**9))
    with pytest.raises(ValueError, match=told):
        check_fits(load_config(None, settings), torch.device("cuda"))
    planned(models, "7B", 'model.keep=["lm_head", "*.down_proj"]', 'lora.rank_pattern={"layers.1.*q_proj"=8}')


# ------------------------------------------------------------------ rates


def records() -> list[dict]:
    lines = (ROOT / "benchmarks" / "results" / "nvidia-h200.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r.get("format") == "nvfp4" and not r.get("error")]


def us_a_token(record: dict, part: str) -> float:
    tokens = record["completions"] * (record["prompt_tokens"] + record["new_tokens"])
    return round(1e6 * record[part] / tokens, 1)


def keeps_all(record: dict) -> bool:
    return "checkpointing=false" in record["settings"] or record.get("recomputed_layers") == 0


def test_the_rates_are_the_newest_records():
    decode = [r for r in records() if r["bench"] == "decode" and r.get("steps") == 96 and r["lora_rank"] == 32]
    steps = [r for r in records() if r["bench"] == "step" and r["new_tokens"] in (2048, 4096)]
    for rate, model in zip(RATES, ("7B", "14B", "32B", "72B"), strict=True):
        of_model = {r["batch"]: r for r in decode if r["model"] == model}
        assert rate.decode == {batch: r["step_ms"] for batch, r in of_model.items()}
        if of_model:
            assert rate.prefill == round(8 * 711 / of_model[64]["prefill_s"])  # 8 prompts up to the steps in the middle
        kept, again = (
            [r for r in steps if r["model"] == f"Qwen2.5-{model}" and keeps_all(r) == keeps] for keeps in (True, False)
        )
        assert rate.update == (us_a_token(kept[-1], "update_s") if kept else 0)
        assert rate.recomputing == us_a_token(again[-1], "update_s")
        assert rate.forward == us_a_token(again[-1], "forward_s")
        assert {r["gpu"] for r in [*of_model.values(), *again]} == {rate.gpu}


@pytest.mark.parametrize("model, completions, new", [
    ("7B", 8, 2048), ("14B", 8, 2048), ("32B", 8, 2048), ("7B", 32, 1024), ("14B", 32, 1024), ("32B", 32, 1024),
    ("32B", 32, 8192), ("72B", 16, 4096),
])  # fmt: skip
def test_seconds_are_those_of_measured_steps(models, model, completions, new):
    """The newest of each, by its own settings. Some are of slower kernels."""
    same = (f"Qwen2.5-{model}", completions, new)
    (*_, record) = [
        r for r in records() if r["bench"] == "step" and (r["model"], r["completions"], r["new_tokens"]) == same
    ]
    settings = [*ONE_GROUP[:1], f"rollout.num_generations={completions}", *ONE_GROUP[2:],
                f"lora.r={record['rank']}", f"rollout.max_completion_length={new}"]  # fmt: skip
    recomputed = f"optimizer.gradient_checkpointing={record.get('recomputed_layers', 'true')}"
    shape, config, _, memory = planned(models, model, *settings, recomputed, *record["settings"].split())
    (seconds,) = step_seconds(shape, config, memory)
    assert seconds.update == pytest.approx(record["update_s"], rel=0.2)
    if model == "72B":
        assert seconds.rollout is None
    else:
        assert 0.85 * record["rollout_s"] < seconds.rollout < 1.05 * record["rollout_s"]


def test_seconds_by_hand(models):
    """7B, 16 completions of 256 + 1,000 tokens, four at a time: 4 waves; 20,096 tokens, once forward alone."""
    settings = [*ONE_GROUP, "rollout.max_completion_length=1000", "rollout.max_batch_size=4", "loss.beta=0.1",
                "optimizer.gradient_checkpointing=true"]  # fmt: skip
    shape, config, _, memory = planned(models, "7B", *settings)
    (seconds,) = step_seconds(shape, config, memory)
    step = (2.2007 * 4 + 2.3997 * 3) / 7 / 1e3 + 4 * (256 + 500 - 768) * 57344 / 4.2e12  # between 1 and 8 sequences
    assert seconds.rollout == pytest.approx(256 / 40658 + 4 * 1000 * step)
    assert seconds.update == pytest.approx(20096 * (98.2 + 27.7) / 1e6)
    fewer = with_settings(config, {"rollout.kv_cache_dtype": "fp8"})
    assert step_seconds(shape, fewer, memory)[0].rollout < seconds.rollout


@pytest.mark.parametrize("name, settings", [
    ("3B", []), ("7B", ["model.format=bf16"]), ("7B", ["model.format=mxfp4"]), ("7B", ["model.dtype=float32"]),
    ("7B", ["lora.r=128"]), ("7B", ["rollout.batch_invariant=true"]), ("7B", ["optimizer.offload_activations=true"]),
])  # fmt: skip
def test_no_seconds_where_nothing_was_measured(models, name, settings):
    shape, config, _, memory = planned(models, name, *settings)
    assert step_seconds(shape, config, memory) == []


def test_no_decoding_rate_beyond_the_measured_sequences():
    assert RATES[0].decode_ms(2000) is None
    assert RATES[0].decode_ms(8) == RATES[0].decode[8]
    assert RATES[0].decode[8] < RATES[0].decode_ms(10) < RATES[0].decode[32]


# ------------------------------------------------------------------ the command


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_the_command_prints_tables(models):
    result = run(f"model.path={models / '7B'}", "rollout.max_completion_length=16384", "--gpu", "24GB")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception  # it does not fit
    for text in ("packed base", "3.676", "does not fit a card of 24 GB", "would fit: ", "a step on NVIDIA H200"):
        assert text in result.output


def test_a_cache_that_holds_no_completion_is_no_plan(models):
    """The run would refuse to start, and with the same words."""
    result = run(f"model.path={models / '7B'}", "rollout.kv_cache_tokens=100", "--gpu", "80GB")
    assert re.search(r"rollout.kv_cache_tokens = 100 holds 96: set it to \d+ at least", str(result.exception))


def test_the_command_prints_json(models):
    arguments = [str(ROOT / "examples" / RECIPES["32B"]), f"model.path={models / '32B'}"]
    result = run(*arguments, "--gpu", "80GB", "--json")
    assert result.exit_code == 0, result.exception
    printed = json.loads(result.output)
    config = load_config(arguments[0], arguments[1:])
    assert printed == json.loads(json.dumps(as_json(make_plan(config, 80_000_000_000))))
    assert printed["card"]["fits"] is True
    assert printed["peaks"]["rollout"] == sum(printed["phases"]["rollout"].values())


@pytest.mark.parametrize(
    "text, size", [("24GB", 24e9), ("24", 24e9), ("79.5 gb", 79.5e9), ("80G", 80e9), ("24GiB", 24 * 2**30)]
)
def test_a_cards_memory(text, size):
    assert parse_card(text) == size


@pytest.mark.parametrize("text", ["", "0GB", "24MiB", "H100", "-1", "4090"])
def test_what_is_no_memory(text):
    with pytest.raises(ValueError, match="give the card's memory, such as 24GB"):
        parse_card(text)
