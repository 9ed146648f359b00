"""The run config: what is read, and that every mistake is refused with its place and its fix."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from qerl.config import LORA_TARGETS, ConfigError, RunConfig, Section, load_config, parse_memory, validate


def sections() -> dict[str, type[Section]]:
    """Every section's class by its dotted prefix."""
    found: dict[str, type[Section]] = {"": RunConfig}
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[f"{name}."] = field.annotation
    return found


# ---------------------------------------------------------------- reading


def test_the_defaults_are_a_valid_run():
    assert load_config(None) == RunConfig() == validate({})


def test_values_come_from_the_file_and_overrides_win(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'steps = 7\n[noise]\nschedule = "linear"\nsigma_start = 0.02\n[lora]\nrank_pattern = {q_proj = 8}\n'
    )
    config = load_config(path, ["noise.sigma_start = 0.03", "steps=9", "lora.alpha_pattern.k_proj=4"])
    assert (config.steps, config.noise.schedule, config.noise.sigma_start) == (9, "linear", 0.03)
    assert (config.lora.rank_pattern, config.lora.alpha_pattern) == ({"q_proj": 8}, {"k_proj": 4.0})


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("model.path=some/folder", "model", "path", "some/folder"),
        ('model.path="some folder"', "model", "path", "some folder"),
        ("model.path=2026-01-01", "model", "path", "2026-01-01"),  # TOML would make it a date
        ("model.path=a=b", "model", "path", "a=b"),
        ("model.path=", "model", "path", ""),
        ('model.keep=["model.layers.0.*"]', "model", "keep", ["model.layers.0.*"]),
        ("optimizer.learning_rate=3e-5", "optimizer", "learning_rate", 3e-5),
        ("noise.enabled=false", "noise", "enabled", False),
        ("noise.enabled=True", "noise", "enabled", True),
        ("rollout.kv_cache_tokens=128", "rollout", "kv_cache_tokens", 128),
        ("rollout.kv_cache_memory=40%", "rollout", "kv_cache_memory", "40%"),
        ("rewards.weights=[1, -0.5]", "rewards", "weights", [1.0, -0.5]),
    ],
)
def test_overrides_are_toml_values_or_bare_words(override, section, key, value):
    assert getattr(getattr(load_config(None, [override]), section), key) == value


def test_an_override_sets_one_key():
    with pytest.raises(ConfigError, match="seed: "):
        load_config(None, ["seed=1\nsteps=2"])


def test_configs_share_no_section():
    first, second = RunConfig(), RunConfig()
    first.noise.sigma_start = 0.5
    first.lora.target_modules.append("lm_head")
    assert second.noise.sigma_start == 0.01
    assert second.lora.target_modules == list(LORA_TARGETS)


def test_a_written_config_reads_back_the_same():
    config = load_config(None, ["noise.per=completion", "lora.target_modules=['q_proj']"])
    assert validate(config.model_dump()) == config


# ---------------------------------------------------------------- the file


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")


def test_a_folder_is_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", [b"steps = ", b"steps 3", b"[noise\n", b"a = 1\na = 2", b"\xff\xfe"])
def test_a_broken_file_says_where(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML: "):
        load_config(path)


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=1", "sed: unknown key; did you mean 'seed'?"),
        ("noise.sigma_strat=1", "noise.sigma_strat: unknown key; did you mean 'sigma_start'?"),
        ("optimiser.learning_rate=1", "optimiser: unknown key; did you mean 'optimizer'?"),
        ("eval.xyz=1", "eval.xyz: unknown key; known keys: every, num_problems,"),
        ("learning_rate=1", "learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("temperature=1", "temperature: unknown key; did you mean rollout.temperature or eval.temperature?"),
        ("optimizer.steps=1", "optimizer.steps: unknown key; did you mean steps?"),
        ("self=1", "self: unknown key; "),
        ("=1", "config: unknown key; known keys: output_dir,"),
        ("noise..per=prompt", "noise.: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(override, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load_config(None, [override])


def test_settings_from_python_are_refused_in_the_same_words():
    for settings in ({"max_steps": 3}, {"lora": {"lora_alpha": 3}, "report_to": "wandb"}):
        with pytest.raises(ConfigError) as one:
            RunConfig(**settings)
        with pytest.raises(ConfigError) as other:
            validate(settings)
        assert str(one.value) == str(other.value)
        assert re.search("did you mean '(steps|alpha)'", str(one.value))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps' is not of the form section.key=value"),
        ("steps.more=1", "steps.more: steps is a value, not a section"),
        ("noise=3", "noise: Input should be a valid dictionary"),
    ],
)
def test_a_malformed_override_is_refused(tmp_path, override, message):
    path = tmp_path / "run.toml"
    path.write_text("steps = 3\n")
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load_config(path, [override])


def test_every_mistake_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["steps=0", "noise.num_stages=1", "los.beta=1", "loss.type=ppo"])
    places = {line.split(":")[0] for line in str(caught.value).splitlines()}
    assert places == {"steps", "noise.num_stages", "los", "loss.type"}


# ---------------------------------------------------------------- values


# One value outside of each bound that a field has; a new bound fails `test_every_bound_is_tried` until it is listed.
OUT_OF_BOUNDS = [
    ("steps", 0),
    ("seed", -1),
    ("seed", 2**63),
    ("save_every", 0),
    ("keep_checkpoints", 0),
    ("log_completions", -1),
    ("lora.r", 0),
    ("lora.r", 4097),
    ("lora.alpha", 0.0),
    ("lora.rank_pattern", {"q_proj": 0}),
    ("lora.alpha_pattern", {"q_proj": -1.0}),
    ("task.difficulty", 0),
    ("task.difficulty", 6),
    ("task.max_prompt_length", 0),
    ("task.held_out_share", -0.1),
    ("task.held_out_share", 1.0),
    ("rewards.timeout_s", 0.0),
    ("rollout.prompts_per_step", 0),
    ("rollout.num_generations", 1),
    ("rollout.max_completion_length", 0),
    ("rollout.temperature", 0.0),
    ("rollout.top_p", 0.0),
    ("rollout.top_p", 1.1),
    ("rollout.top_k", -1),
    ("rollout.min_p", -0.1),
    ("rollout.min_p", 1.1),
    ("rollout.max_batch_size", 0),
    ("rollout.kv_cache_tokens", 63),
    ("rollout.prefill_tokens", 15),
    ("loss.epsilon", 0.0),
    ("loss.epsilon", 1.0),
    ("loss.epsilon_high", 0.0),
    ("loss.beta", -1e-3),
    ("loss.importance_sampling_cap", 0.0),
    ("loss.num_iterations", 0),
    ("loss.updates_per_rollout", 0),
    ("loss.max_resamples", 0),
    ("loss.overlong_buffer", -1),
    ("loss.overlong_penalty", -1.0),
    ("loss.zero_variance_tolerance", -1.0),
    ("noise.sigma_start", -1.0),
    ("noise.sigma_start", 1.1),
    ("noise.sigma_end", -1.0),
    ("noise.sigma_end", 1.1),
    ("noise.num_stages", 1),
    ("noise.target", 0.0),
    ("noise.factor", 1.0),
    ("noise.divergence_limit", 0.0),
    ("optimizer.learning_rate", 0.0),
    ("optimizer.learning_rate", 1.1),
    ("optimizer.beta1", -0.1),
    ("optimizer.beta1", 1.0),
    ("optimizer.beta2", -0.1),
    ("optimizer.beta2", 1.0),
    ("optimizer.weight_decay", -1.0),
    ("optimizer.max_grad_norm", 0.0),
    ("optimizer.warmup_ratio", -0.1),
    ("optimizer.warmup_ratio", 1.0),
    ("optimizer.micro_batch_tokens", 15),
    ("optimizer.logprob_chunk", 0),
    ("eval.every", -1),
    ("eval.num_problems", -1),
    ("eval.num_samples", 0),
    ("eval.temperature", 0.0),
    ("eval.top_p", 0.0),
    ("eval.top_p", 1.1),
]


def test_null_opens_a_setting_that_the_file_has_set(tmp_path):
    (tmp_path / "run.toml").write_text("[optimizer]\nmicro_batch_tokens = 64\n[lora]\nstart_from = 'a'\n")
    config = load_config(tmp_path / "run.toml", ["optimizer.micro_batch_tokens=null", "lora.start_from=null"])
    assert config.optimizer.micro_batch_tokens is None and config.lora.start_from is None
    assert load_config(tmp_path / "run.toml", ["lora.start_from=nullify"]).lora.start_from == "nullify"
    with pytest.raises(ConfigError, match=r"^steps: Input should be a valid integer \(got None\)"):
        load_config(None, ["steps=null"])


@pytest.mark.parametrize("section", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_is_a_regular_expression(section):
    for pattern in ("q_proj(", "(?i)q_proj"):  # the second is one by itself, but not where PEFT puts it
        told = re.escape(f"lora.{section}: {pattern!r} is no regular expression: ")
        with pytest.raises(ConfigError, match=f"^{told}"):
            validate({"lora": {section: {pattern: 8}}})
    assert getattr(validate({"lora": {section: {"(q|k)_proj": 8}}}).lora, section) == {"(q|k)_proj": 8}


@pytest.mark.parametrize("value", ["0GiB", "64", "110%", "-1GiB", "4 tokens", "much"])
def test_an_amount_of_memory_has_a_unit(value):
    with pytest.raises(ConfigError, match=rf'^rollout.kv_cache_memory = "{value}": give an amount, such as "24GiB"'):
        validate({"rollout": {"kv_cache_memory": value}})


def test_amounts_of_memory_in_bytes():
    amounts = {"24GiB": 24 << 30, "1.5 GB": 1_500_000_000, "10KiB": 10_240, "40%": 400, "100%": 1000}
    assert {text: parse_memory(text, total_bytes=1000) for text in amounts} == amounts


def nested(place: str, value) -> dict:
    *parents, last = place.split(".")
    data = {last: value}
    for parent in reversed(parents):
        data = {parent: data}
    return data


@pytest.mark.parametrize(("place", "value"), OUT_OF_BOUNDS)
def test_a_number_out_of_bounds_is_refused(place, value):
    with pytest.raises(ConfigError, match=rf"^{re.escape(place)}[.\w]*: Input should be .*\(got "):
        validate(nested(place, value))


def test_every_bound_is_tried():
    tried = [place for place, _ in OUT_OF_BOUNDS]
    for prefix, section in sections().items():
        for name, field in section.model_fields.items():
            bounds = sum(type(constraint).__name__ in ("Ge", "Gt", "Le", "Lt") for constraint in field.metadata)
            assert tried.count(prefix + name) >= bounds, prefix + name


@pytest.mark.parametrize("place", ["optimizer.learning_rate", "loss.beta", "noise.target", "rewards.weights"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(place, value):
    value = f"[{value}]" if place == "rewards.weights" else value
    with pytest.raises(ConfigError, match="finite number"):
        load_config(None, [f"{place}={value}"])


@pytest.mark.parametrize(
    ("override", "choices"),
    [
        ("model.format=int3", "'nvfp4', 'mxfp4', 'nf4', 'int4' or 'bf16'"),
        ("model.group_size=16", "32, 64 or 128"),
        ("model.scale=max", "'sweep' or 'amax'"),
        ("model.dtype=float16", "'auto', 'bfloat16' or 'float32'"),
        ("rollout.engine=sglang", "'auto', 'qerl', 'hf' or 'vllm'"),
        ("loss.type=ppo", "'grpo', 'dapo', 'dr_grpo', 'gspo' or 'cispo'"),
        ("loss.scale_rewards=yes", "'group', 'batch' or 'none'"),
        ("noise.controller=kl", "'schedule', 'divergence', 'entropy' or 'reward_variance'"),
        ("noise.schedule=step", "'exponential', 'linear', 'cosine' or 'logarithmic'"),
        ("noise.per=token", "'rollout', 'prompt' or 'completion'"),
        ("noise.on_divergence=stop", "'off', 'warn', 'disable_noise', 'cut_lr' or 'rollback'"),
        ("optimizer.lr_scheduler=step", "'cosine', 'linear' or 'constant'"),
    ],
)
def test_a_wrong_choice_names_the_right_ones(override, choices):
    with pytest.raises(ConfigError, match=re.escape(f"{override.split('=')[0]}: Input should be {choices} (got ")):
        load_config(None, [override])


@pytest.mark.parametrize("controller", ["entropy", "reward_variance"])
def test_a_controller_whose_quantity_has_no_usual_value_wants_a_target(controller):
    with pytest.raises(ConfigError, match=r"set noise\.target"):
        load_config(None, [f"noise.controller={controller}"])
    assert load_config(None, [f"noise.controller={controller}", "noise.target=0.01"]).noise.target == 0.01
    load_config(None, [f"noise.controller={controller}", "noise.enabled=false"])


@pytest.mark.parametrize(
    "override",
    [
        "steps=true",
        "steps='3'",
        "steps=2.0",
        "lora.alpha=true",
        "lora.alpha='32'",
        "noise.enabled=1",
        "noise.enabled='yes'",
    ],
)
def test_no_type_stands_for_another(override):
    with pytest.raises(ConfigError, match=rf"^{re.escape(override.split('=')[0])}: Input should be a valid"):
        load_config(None, [override])


def test_integers_stand_for_floats():
    config = load_config(None, ["lora.alpha=16", "task.solve_rate=[0, 1]", "rewards.weights=[1, 2]"])
    assert (config.lora.alpha, config.task.solve_rate, config.rewards.weights) == (16.0, (0.0, 1.0), [1.0, 2.0])


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "run.toml").write_text("steps = 7\n", encoding="utf-8-sig")
    assert load_config(tmp_path / "run.toml").steps == 7


@pytest.mark.parametrize("override", ["steps=many", "steps=1.5", "task.path=3"])
def test_a_wrong_type_is_refused(override):
    with pytest.raises(ConfigError, match=rf"^{re.escape(override.split('=')[0])}: Input should be a valid"):
        load_config(None, [override])


@pytest.mark.parametrize("value", ["AUTO", "-1", "2.5", '"3"', "null", "[]"])
def test_what_recomputes_is_refused_in_one_line(value):
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"optimizer.gradient_checkpointing={value}"])
    shown = '"AUTO"' if value == "AUTO" else value
    assert str(error.value) == (
        f'optimizer.gradient_checkpointing is {shown}: set true, false, the number of layers that recompute, or "auto"'
    )


# ---------------------------------------------------------------- rules across fields


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rewards.functions=['m:f']", "rewards.weights=[1, 2]"],
            "rewards.weights has 2 numbers for 1 functions: give one weight a function",
        ),
        (["lora.target_modules=[]"], "lora.target_modules is empty: name at least one kind of layer"),
        (["lora.target_modules=[]", "lora.train_norms=true"], "lora.target_modules is empty"),
        (
            ["model.format=bf16", "model.keep=['*.o_proj']"],
            "model.keep says how layers are quantised, and model.format",
        ),
        (["model.format=bf16", "model.scale=amax"], "model.scale says how layers are quantised, and model.format"),
        (["model.format=nf4", "model.scale=amax"], "model.scale is a setting of nvfp4 and mxfp4 and int4, and"),
        (["model.double_quant=false"], 'model.double_quant is a setting of nf4, and model.format = "nvfp4" has none'),
        (["model.format=mxfp4", "model.group_size=64"], "model.group_size is a setting of int4, and model.format"),
        (["model.format=nf4", "model.symmetric=true"], "model.symmetric is a setting of int4, and model.format"),
        (
            ["rewards.arguments.f={prompts = 1}"],
            "rewards.arguments.f: 'prompts' is what every reward function is given",
        ),
        (["noise.sigma_start=1e-4"], "noise.sigma_end (0.0005) is above noise.sigma_start (0.0001): swap them"),
        (["noise.sigma_end=0"], "an exponential schedule cannot reach or leave 0"),
        (
            ["noise.controller=entropy", "noise.sigma_start=0", "noise.sigma_end=0"],
            "a controller multiplies sigma, so noise.sigma_start must be above 0",
        ),
        (
            ["noise.controller=divergence", "noise.same_noise_in_training=true"],
            'noise.controller = "divergence" measures the noisy against the clean policy',
        ),
        (["noise.target=0.1"], 'noise.target = 0.1 has no effect: noise.controller = "schedule" follows no'),
        (["noise.factor=1.1"], "noise.factor = 1.1 has no effect"),
        (["noise.schedule=cosine", "noise.paper_exponent=true"], "noise.paper_exponent = True has no effect"),
        (["noise.on_divergence=off", "noise.divergence_limit=1"], "noise.divergence_limit = 1.0 has no effect"),
        (["rollout.top_p=0.9"], "rollout.top_p, top_k or min_p cut the distribution"),
        (["rollout.top_k=5"], "rollout.top_p, top_k or min_p cut the distribution"),
        (["rollout.min_p=0.1"], "rollout.top_p, top_k or min_p cut the distribution"),
        (
            ["rollout.prompts_per_step=3", "loss.updates_per_rollout=5"],
            "loss.updates_per_rollout (5) must divide the 24 completions of a step",
        ),
        (
            ["loss.overlong_buffer=64", "rollout.max_completion_length=64"],
            "loss.overlong_buffer (64) must be below rollout.max_completion_length (64)",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load_config(None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rewards.weights=[0, 1]"],  # of the task's own functions: checked where the task is known
        ["model.format=bf16", "model.scale=sweep"],
        ["model.format=mxfp4", "model.scale=amax", "model.keep=['*.o_proj']"],
        ["model.format=nf4", "model.double_quant=false"],
        ["model.format=int4", "model.group_size=64", "model.symmetric=true", "model.scale=amax"],
        ["rewards.arguments.f={max_length = 1}"],
        ["noise.enabled=false", "noise.sigma_start=0"],
        ["noise.enabled=false", "noise.controller=divergence", "noise.same_noise_in_training=true"],
        ["noise.enabled=false", "noise.target=0.1", "noise.schedule=cosine", "noise.paper_exponent=true"],
        ["noise.controller=divergence", "noise.num_stages=5", "noise.target=0.1", "noise.factor=1.1"],
        ["noise.sigma_start=0", "noise.sigma_end=0"],
        ["noise.schedule=linear", "noise.sigma_end=0"],
        ["noise.sigma_start=0.01", "noise.sigma_end=0.01"],
        ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05", "loss.importance_sampling=false"],
        ["rollout.prompts_per_step=3", "loss.updates_per_rollout=24"],
        ["loss.overlong_buffer=63", "rollout.max_completion_length=64"],
    ],
)
def test_the_edges_of_those_rules_are_allowed(overrides):
    load_config(None, overrides)


def test_an_assignment_is_checked_as_well():
    config = RunConfig()
    with pytest.raises(ValidationError, match="greater than 0"):
        config.optimizer.learning_rate = -1.0
    with pytest.raises(ValidationError, match="swap them"):
        config.noise.sigma_end = 1.0


# ---------------------------------------------------------------- the reference


def test_every_key_has_a_help_text_and_a_default():
    for prefix, section in sections().items():
        for name, field in section.model_fields.items():
            if prefix + name + "." in sections():
                continue
            assert field.description, f"{prefix}{name} has no docstring"
            assert field.default is not PydanticUndefined, f"{prefix}{name} has no default"


def test_the_config_needs_no_torch():
    code = "import sys, qerl.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_defaults_are_those_of_the_paper_or_its_scripts():
    # arXiv 2510.11696, hyperparameters; batch 128 = 16 prompts x 8.
    config = RunConfig()
    assert config.rollout.prompts_per_step * config.rollout.num_generations == 128
    assert (config.lora.r, config.optimizer.learning_rate, config.optimizer.max_grad_norm) == (32, 1e-5, 0.2)
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.weight_decay) == (0.9, 0.99, 0.1)
    assert (config.loss.epsilon, config.loss.epsilon_high, config.loss.beta) == (0.2, 0.28, 0.0)
    assert (config.noise.sigma_start, config.noise.sigma_end, config.noise.num_stages) == (1e-2, 5e-4, 10)
    assert config.rollout.temperature == config.rollout.top_p == 1.0


def test_what_wants_a_list_shows_one():
    with pytest.raises(ConfigError, match=r'a list is expected, such as rewards\.functions=\["mine\.py:good"\]$'):
        load_config(None, ["rewards.functions=mine.py:good"])


def test_a_run_goes_somewhere():
    with pytest.raises(ConfigError, match=r"^output_dir: .*at least 1 character"):
        load_config(None, ["output_dir="])
