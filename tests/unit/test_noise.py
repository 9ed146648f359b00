"""AQN: sigma at every stage, Z's distribution and addresses, which norms it reaches and that it leaves no trace."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from qerl.config import NoiseConfig
from qerl.noise import (
    MAX_OVER_START,
    ROLLOUT_STREAM,
    FeedbackController,
    NoiseDraw,
    NoiseMonitor,
    NoiseRows,
    NoiseSchedule,
    Observation,
    applied,
    build_controller,
    completion_stream,
    noise_sites,
    prompt_stream,
    relative_noise,
    site_rows,
)


class Norm(nn.Module):
    """The contract of a noise site, as plainly as possible."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, size))
        self.noise: NoiseRows | None = None

    def forward(self, x):
        weight = self.weight
        if self.noise is not None:
            rows = self.noise.rows
            weight = weight + (rows[0] if self.noise.index is None else rows[self.noise.index].view_as(x))
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def tiny_model(num_layers: int = 2) -> Qwen3ForCausalLM:
    """Qwen3, which has q_norm and k_norm as well."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = Qwen3ForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = Norm(16), Norm(16)
        layer.self_attn.q_norm, layer.self_attn.k_norm = Norm(8), Norm(8)
    model.model.norm = Norm(16)
    return model


TOKENS = torch.arange(12).view(1, 12)
NOISY = NoiseDraw(seed=1, step=3, sigma=0.1)


# ------------------------------------------------------------------------------------------------------- schedules


def sigmas(kind, *, start=1e-2, end=5e-4, num_stages=10, total=600, paper_exponent=False):
    schedule = NoiseSchedule(kind, start, end, num_stages, total, paper_exponent)
    return [schedule.sigma(r) for r in range(total)]


def by_hand(kind, k):
    """K = 10, 1e-2 -> 5e-4, worked out on paper: 8 intervals from stage 1 to stage 9."""
    drop = 1e-2 - 5e-4
    return {
        "exponential": 1e-2 / 20 ** ((k - 1) / 8),
        "linear": 1e-2 - drop * (k - 1) / 8,
        "cosine": 5e-4 + drop * (1 + math.cos(math.pi * (k - 1) / 8)) / 2,
        "logarithmic": 1e-2 - drop * math.log(k) / math.log(9),
    }[kind]


@pytest.mark.parametrize("kind", ["exponential", "linear", "cosine", "logarithmic"])
def test_every_stage_by_hand(kind):
    values = sigmas(kind)
    assert values[:60] == [0.0] * 60
    for k in range(1, 10):
        assert values[60 * k : 60 * (k + 1)] == [pytest.approx(by_hand(kind, k), rel=1e-12)] * 60
    assert values[60] == pytest.approx(1e-2)
    assert values[-1] == pytest.approx(5e-4)
    assert all(a >= b for a, b in itertools.pairwise(values[60:]))
    assert len(set(values)) == 10


def test_figures_of_the_exponential_schedule():
    values = sigmas("exponential")[60::60]
    expected = [1.0e-2, 6.877e-3, 4.729e-3, 3.252e-3, 2.236e-3, 1.538e-3, 1.057e-3, 7.271e-4, 5.0e-4]
    assert values == pytest.approx(expected, rel=1e-3)


def test_the_papers_exponent_stops_above_the_end():
    values = sigmas("exponential", paper_exponent=True)
    assert values[60] == 1e-2
    assert values[-1] == pytest.approx(1e-2 / 20 ** (8 / 9), rel=1e-12)  # 6.97e-4, not 5e-4
    assert values[-1] > 6.9e-4


@pytest.mark.parametrize("kind", ["exponential", "linear", "cosine", "logarithmic"])
@pytest.mark.parametrize("paper_exponent", [False, True])
def test_two_stages_have_one_sigma(kind, paper_exponent):
    assert sigmas(kind, num_stages=2, total=4, paper_exponent=paper_exponent) == [0, 0, 1e-2, 1e-2]


@pytest.mark.parametrize("kind", ["exponential", "linear", "cosine", "logarithmic"])
def test_three_stages_are_zero_start_and_end(kind):
    assert sigmas(kind, num_stages=3, total=3) == pytest.approx([0, 1e-2, 5e-4])


def test_equal_ends_are_constant_noise():
    for kind in ("exponential", "linear", "cosine", "logarithmic"):
        assert sigmas(kind, end=1e-2, num_stages=4, total=4) == [0, 1e-2, 1e-2, 1e-2]


def test_one_stage_is_refused():
    with pytest.raises(ValueError, match="num_stages"):
        NoiseSchedule("linear", 1e-2, 1e-3, 1, 100)
    with pytest.raises(ValueError, match="rollout"):
        NoiseSchedule("linear", 1e-2, 1e-3, 10, 0)


def test_lengths_that_do_not_divide():
    schedule = NoiseSchedule("linear", 1.0, 0.5, 4, 10)
    assert [schedule.stage(r) for r in range(12)] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    short = NoiseSchedule("linear", 1.0, 0.5, 10, 3)  # fewer rollouts than stages
    assert [short.stage(r) for r in range(3)] == [0, 3, 6]


# ----------------------------------------------------------------------------------------------------- controllers


def seen(**values):
    return Observation(**{"mismatch_kl": math.nan, "entropy": math.nan, "reward_std": math.nan} | values)


@pytest.mark.parametrize(
    ("quantity", "field"), [("divergence", "mismatch_kl"), ("entropy", "entropy"), ("reward_variance", "reward_std")]
)
def test_feedback_moves_sigma_towards_the_target(quantity, field):
    config = NoiseConfig(controller=quantity, sigma_start=1e-2, sigma_end=1e-3, target=0.5, factor=1.1)
    controller = build_controller(config, total_rollouts=100)
    assert controller.sigma(0) == 1e-2
    controller.observe(seen(**{field: 0.4}))
    assert controller.sigma(1) == pytest.approx(1.1e-2)
    controller.observe(seen(**{field: 0.5}))
    assert controller.sigma(2) == pytest.approx(1e-2)
    controller.observe(seen())
    assert controller.sigma(3) == pytest.approx(1e-2)


def test_feedback_stays_between_its_bounds():
    controller = FeedbackController("divergence", start=1e-2, smallest=1e-3, target=0.5, factor=1.5)
    for _ in range(50):
        controller.observe(seen(mismatch_kl=9.0))
    assert controller.sigma(0) == 1e-3
    for _ in range(50):
        controller.observe(seen(mismatch_kl=0.0))
    assert controller.sigma(0) == pytest.approx(MAX_OVER_START * 1e-2)


@pytest.mark.parametrize(
    "config",
    [
        NoiseConfig(schedule="cosine"),
        NoiseConfig(controller="divergence", target=0.02),
        NoiseConfig(controller="entropy", target=0.5),
        NoiseConfig(controller="reward_variance", target=0.3),
    ],
)
def test_a_resumed_run_has_the_sigmas_of_an_unbroken_one(config):
    def run(controller, rollouts):
        for r in rollouts:
            yield controller.sigma(r)
            controller.observe(Observation(0.03 * math.sin(r), math.cos(r), 0.3 + 0.1 * math.sin(3 * r)))

    unbroken = list(run(build_controller(config, 30), range(30)))
    first = build_controller(config, 30)
    begun = list(run(first, range(13)))
    resumed = build_controller(config, 30)
    resumed.load_state_dict(first.state_dict())
    assert begun + list(run(resumed, range(13, 30))) == unbroken


def test_the_state_of_another_controller_is_refused():
    schedule = build_controller(NoiseConfig(), 10)
    feedback = build_controller(NoiseConfig(controller="entropy", target=0.5), 10)
    with pytest.raises(ValueError, match=r"noise\.controller"):
        schedule.load_state_dict(feedback.state_dict())
    with pytest.raises(ValueError, match=r"noise\.controller"):
        feedback.load_state_dict(schedule.state_dict())


def test_disabled_noise_has_sigma_zero_for_ever():
    controller = build_controller(NoiseConfig(enabled=False, controller="divergence"), 20)
    assert [controller.sigma(r) for r in range(20)] == [0.0] * 20


# ----------------------------------------------------------------------------------------------------------- draws


def test_z_is_normal_with_the_asked_sigma():
    z = NoiseDraw(0, 0, 0.05).rows(0, torch.arange(64), 4096).double().flatten() / 0.05
    n = z.numel()
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.std() - 1) < 5 / math.sqrt(2 * n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)


def test_draws_of_other_seeds_steps_sites_and_streams_are_independent():
    def row(seed=0, step=0, site=0, stream=0):
        return NoiseDraw(seed, step, 1.0).rows(site, torch.tensor([stream]), 4096)[0].double()

    rows = [row(), row(seed=1), row(step=1), row(site=1), row(stream=1), row(stream=prompt_stream(0)), row(1, 1)]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows))
    assert correlation.abs().max() < 5 / math.sqrt(4096)


def test_one_call_equals_row_by_row():
    streams = torch.tensor([ROLLOUT_STREAM, prompt_stream(5), completion_stream(5, 0), completion_stream(70_000, 255)])
    together = NOISY.rows(3, streams, 36)
    for i in range(len(streams)):
        assert torch.equal(NOISY.rows(3, streams[i : i + 1], 36)[0], together[i])
    assert together.dtype == torch.float32


@pytest.mark.parametrize("num_streams", [1, 3, 100, 300])
def test_all_sites_at_once_have_what_each_has_alone(num_streams):
    """However many fit into one turn; a folded weight takes its share."""
    draw, streams = NoiseDraw(1, 2, sigma=0.5, per="completion"), torch.arange(num_streams) * 7
    sites = [Norm(26) for _ in range(5)]
    sites[3].fold = torch.linspace(0.5, 4.0, 26)
    alone = [draw.rows(i, streams, 26) for i in range(5)]
    alone[3] = alone[3] / sites[3].fold
    assert torch.equal(site_rows(draw, sites, streams), torch.stack(alone))


def test_sigma_only_scales():
    streams = torch.tensor([7])
    assert torch.equal(NoiseDraw(0, 0, 0.5).rows(0, streams, 64), 0.5 * NoiseDraw(0, 0, 1.0).rows(0, streams, 64))


def test_sigma_zero_draws_nothing(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("drew a number")

    monkeypatch.setattr("qerl.philox.normal", fail)
    quiet = NoiseDraw(0, 0, 0.0)
    assert torch.equal(quiet.rows(0, torch.arange(2), 8), torch.zeros(2, 8))
    model = tiny_model()
    with applied(model, quiet):
        assert all(site.noise is None for site in noise_sites(model))
    assert relative_noise(model, quiet) == 0.0


@pytest.mark.parametrize("sigma", [-1e-3, math.nan, math.inf])
def test_a_sigma_that_is_no_deviation_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma"):
        NoiseDraw(0, 0, sigma)


def test_streams_by_mode():
    assert NoiseDraw(0, 0, 1.0, "rollout").stream(4, 2) == NoiseDraw(0, 0, 1.0, "rollout").stream(5) == ROLLOUT_STREAM
    assert NoiseDraw(0, 0, 1.0, "prompt").stream(4, 2) == NoiseDraw(0, 0, 1.0, "prompt").stream(4) == prompt_stream(4)
    assert NoiseDraw(0, 0, 1.0, "completion").stream(4) == prompt_stream(4)
    assert NoiseDraw(0, 0, 1.0, "completion").stream(4, 2) == completion_stream(4, 2)


def test_streams_are_distinct():
    prompts = [prompt_stream(p) for p in range(50)]
    completions = [completion_stream(p, s) for p in range(50) for s in range(20)]
    assert len({ROLLOUT_STREAM, *prompts, *completions}) == 1 + 50 + 1000


# ----------------------------------------------------------------------------------------------------------- sites


def expected_sites(layers):
    return [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]


def same(sites, expected):
    return len(sites) == len(expected) and all(a is b for a, b in zip(sites, expected, strict=True))


def test_the_sites_are_two_norms_a_layer_and_no_others():
    model = tiny_model(12)  # more than ten layers: an order by name would put 10 before 2
    assert same(noise_sites(model), expected_sites(model.model.layers))
    assert same(noise_sites(model.model), expected_sites(model.model.layers))


def test_peft_models_have_the_same_sites():
    model = tiny_model()
    norms = expected_sites(model.model.layers)
    assert same(noise_sites(get_peft_model(model, PeftLoraConfig(target_modules=["q_proj"]))), norms)


def test_a_trained_norm_is_noised_in_the_copy_that_runs():
    config = PeftLoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm", "post_attention_layernorm"])
    model = get_peft_model(tiny_model(), config)
    layers = model.get_base_model().model.layers
    wrappers = expected_sites(layers)
    assert same(noise_sites(model), [w.modules_to_save["default"] for w in wrappers])
    clean = model(TOKENS).logits
    with applied(model, NOISY):
        assert not torch.allclose(model(TOKENS).logits, clean)
        with model.disable_adapter():
            assert torch.equal(model(TOKENS).logits, clean)  # the reference runs the original norms
    with model.disable_adapter():
        assert same(noise_sites(model), [w.original_module for w in wrappers])


def test_matching_nothing_is_an_error_that_says_what_was_looked_for():
    with pytest.raises(ValueError, match=r"Sequential has no decoder.*input_layernorm and post_attention_layernorm"):
        noise_sites(nn.Sequential(nn.Linear(2, 2)))


def test_a_layer_without_one_of_the_norms_is_an_error():
    model = tiny_model()
    del model.model.layers[1].post_attention_layernorm
    with pytest.raises(ValueError, match=r"layers\.1 has no post_attention_layernorm"):
        noise_sites(model)


def test_a_norm_without_a_slot_is_an_error():
    model = tiny_model()
    model.model.layers[1].input_layernorm = nn.RMSNorm(16)
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm is a RMSNorm without a `\.noise` slot"):
        noise_sites(model)


def test_norms_in_another_order_are_refused():
    model = tiny_model()
    model.model.layers[0].pre_feedforward_layernorm = Norm(16)
    with pytest.raises(ValueError, match="pre_feedforward_layernorm"):
        noise_sites(model)


# ----------------------------------------------------------------------------------------------------- application


def test_noise_changes_the_logits_and_leaves_no_trace():
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    clean = model(TOKENS).logits
    with applied(model, NOISY):
        assert (model(TOKENS).logits - clean).abs().max() > 1e-3
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(model(TOKENS).logits, clean)


def test_each_norm_adds_its_own_z():
    model = tiny_model()
    with applied(model, NOISY):
        for number, site in enumerate(noise_sites(model)):
            assert torch.equal(site.noise.rows, NOISY.rows(number, torch.tensor([ROLLOUT_STREAM]), 16))
            assert site.noise.index is None


def test_norm_noise_equals_scaled_input_channels():
    """Z on the norm before q, k, v and gate, up is the same as columns of those weights scaled by 1 + Z/w."""
    model = tiny_model()
    with applied(model, NOISY):
        noisy = model(TOKENS).logits
        rows = [site.noise.rows[0] for site in noise_sites(model)]
    for i, layer in enumerate(model.model.layers):
        first, second = (
            1 + row / norm.weight
            for row, norm in zip(
                rows[2 * i : 2 * i + 2], (layer.input_layernorm, layer.post_attention_layernorm), strict=True
            )
        )
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight.data *= first
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.data *= second
    torch.testing.assert_close(model(TOKENS).logits, noisy, rtol=1e-5, atol=1e-6)


def test_an_index_gives_each_token_its_stream():
    model = tiny_model(1)
    streams, index = [prompt_stream(0), completion_stream(0, 0)], torch.tensor([0] * 5 + [1] * 7)
    with applied(model, NOISY, streams, index):
        mixed = model(TOKENS).logits
    with applied(model, NOISY, streams[:1]):
        prompt = model(TOKENS).logits
    assert torch.equal(mixed[0, :5], prompt[0, :5])
    assert not torch.isclose(mixed[0, 5:], prompt[0, 5:]).all(-1).any()


def test_several_streams_need_an_index():
    model = tiny_model(1)
    with pytest.raises(ValueError, match="index"), applied(model, NOISY, [1, 2]):
        pass


def test_noise_is_cleared_after_an_exception_inside():
    model = tiny_model()
    with pytest.raises(KeyError), applied(model, NOISY):
        raise KeyError
    assert all(site.noise is None for site in noise_sites(model))


def test_norms_are_clean_when_drawing_fails():
    model = tiny_model()

    class Failing(NoiseDraw):
        def rows(self, site, streams, size):
            raise MemoryError

    with pytest.raises(MemoryError), applied(model, Failing(0, 0, 0.1)):
        pass
    assert all(site.noise is None for site in noise_sites(model))


def test_nesting_is_refused_and_keeps_the_outer_noise():
    model = tiny_model()
    with applied(model, NOISY):
        outer = [site.noise for site in noise_sites(model)]
        with pytest.raises(ValueError, match="applied already"), applied(model, NOISY):
            pass
        assert all(site.noise is row for site, row in zip(noise_sites(model), outer, strict=True))


def test_no_draw_is_a_clean_pass_of_any_model():
    with applied(nn.Linear(2, 2), None):
        pass


@pytest.mark.parametrize("held", [True, False])
def test_the_context_has_to_span_the_backward_pass(held):
    """Activation checkpointing runs the forward again: only within the context does it see the same Z."""

    def gradient(model, *, held):
        draw = applied(model, NOISY)
        draw.__enter__()
        loss = model(TOKENS).logits.square().mean()
        if held:
            loss.backward()
            draw.__exit__(None, None, None)
        else:
            draw.__exit__(None, None, None)
            loss.backward()
        return model.model.layers[0].self_attn.v_proj.weight.grad

    expected = gradient(tiny_model(), held=True)
    recomputing = tiny_model().train()
    recomputing.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(gradient(recomputing, held=held), expected) == held


# --------------------------------------------------------------------------------------------------------- monitor


def test_relative_noise_is_the_length_of_z_over_that_of_w():
    model = tiny_model()
    model.model.layers[0].input_layernorm.weight.data.fill_(4.0)  # sites differ
    squares = []
    for number, site in enumerate(noise_sites(model)):
        z = NOISY.rows(number, torch.tensor([ROLLOUT_STREAM]), 16)[0].tolist()
        squares.append(sum(x * x for x in z) / sum(w * w for w in site.weight.tolist()))
    assert relative_noise(model, NOISY) == pytest.approx(math.sqrt(sum(squares) / 4), rel=1e-5)


def test_relative_noise_is_not_ruled_by_channels_near_zero():
    model = tiny_model()
    before = relative_noise(model, NOISY)
    model.model.layers[0].input_layernorm.weight.data[3] = 1e-9
    assert relative_noise(model, NOISY) == pytest.approx(before, rel=0.05)


def build_monitor(action):
    return NoiseMonitor(NoiseConfig(on_divergence=action, divergence_limit=0.5))


@pytest.mark.parametrize("action", ["off", "warn", "disable_noise", "cut_lr", "rollback"])
def test_the_monitor_does_nothing_up_to_its_limit(action):
    monitor = build_monitor(action)
    assert [monitor.judge(kl) for kl in (-0.1, 0.0, 0.5)] == ["none"] * 3
    assert not monitor.noise_disabled


@pytest.mark.parametrize("kl", [0.51, math.inf, math.nan])
@pytest.mark.parametrize(
    ("action", "first", "second", "disabled"),
    [
        ("off", "none", "none", False),
        ("warn", "warn", "warn", False),
        ("cut_lr", "cut_lr", "cut_lr", False),
        ("disable_noise", "disable_noise", "warn", True),
        ("rollback", "rollback", "warn", True),
    ],
)
def test_what_the_monitor_does_above_its_limit(action, kl, first, second, disabled):
    monitor = build_monitor(action)
    assert monitor.judge(kl) == first
    resumed = build_monitor(action)
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.judge(kl) == second
    assert resumed.noise_disabled is disabled


# ------------------------------------------------------------------------------------------------------------ docs


def test_the_table_of_schedules_in_the_docs_is_what_the_code_computes():
    text = (Path(__file__).parents[2] / "docs" / "noise.md").read_text()
    for row in ("exponential", "paper_exponent", "linear", "cosine", "logarithmic"):
        (cells,) = re.findall(rf"^\| {row} \| (0 .*) \|$", text, re.MULTILINE)
        kind = "exponential" if row == "paper_exponent" else row
        values = sigmas(kind, total=10, paper_exponent=row == "paper_exponent")
        assert [float(cell) for cell in cells.split("|")] == pytest.approx([1e3 * v for v in values], abs=0.0051)
