from __future__ import annotations

import json

import peft
import pytest
import torch
from tiny_models import quantized_pair, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from qerl.config import LoraConfig
from qerl.formats.codes import NF4, NVFP4
from qerl.kernels.room import empty_with_room
from qerl.nn import mlp, recompute, rmsnorm, self_attention
from qerl.nn.attention import packed_forward
from qerl.nn.linear import PackedLinear, frozen_weights
from qerl.nn.lora import (
    LoraFactors,
    LoraLinear,
    adapted_product,
    adapters_disabled,
    attach_lora,
    attach_saved_adapter,
    load_adapter_weights,
    lora_factors,
)
from qerl.nn.recompute import recompute_layers
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import decoder_layers
from qerl.noise import NoiseDraw, applied, noise_sites

IDS, ENDS = torch.arange(3, 33), torch.tensor([0, 11, 30])
NEOX_TARGETS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
PHI3_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def config(family="qwen2", **options):
    targets = {"gpt_neox": NEOX_TARGETS, "phi3": PHI3_TARGETS}.get(family)
    return LoraConfig(**({"r": 4, "alpha": 8} | ({"target_modules": targets} if targets else {}) | options))


def adapted_model(family="qwen2", *, trained=True, **options):
    """A packed model with adapters; B is random where `trained`, so that they do something."""
    base = quantized_pair(family)[0]
    for layer in decoder_layers(base):  # as nn/load.py has it
        layer.mlp = mlp.gated_mlp(layer.mlp) or layer.mlp
        self_attention.fuse(getattr(layer, "self_attn", nn.Module()))
    model = attach_lora(base, config(family, **options), seed=7)
    if trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trainable(model).values():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def hidden(model):
    return packed_forward(model, IDS, ENDS)


def gradients(model):
    hidden(model).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in trainable(model).items()}


def test_only_factors_are_trained_in_fp32(tmp_path):
    model = adapted_model(trained=False)
    parameters = trainable(model)
    assert len(parameters) == 2 * 7 * 2  # A and B of seven linears in two layers
    assert all("lora_" in name and parameter.dtype == torch.float32 for name, parameter in parameters.items())


def test_masters_of_a_bf16_base_are_fp32_and_unrounded():
    """PEFT would have rounded A to the base's dtype first."""
    dense = attach_lora(tiny_model("qwen2").bfloat16(), config(), seed=7)
    packed = trainable(adapted_model(trained=False))
    for name, parameter in trainable(dense).items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, packed[name])


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gpt_neox"])
def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does(family):
    base = hidden(quantized_pair(family)[0])
    assert torch.equal(hidden(adapted_model(family, trained=False)), base)
    model = adapted_model(family)
    assert (hidden(model) - base).norm() > 1e-2 * base.norm()
    with adapters_disabled(model):
        assert torch.equal(hidden(model), base)
    assert not torch.equal(hidden(model), base)


def test_initialisation_is_a_function_of_seed_and_name():
    def a_of(model):
        return {name: p.detach() for name, p in model.named_parameters() if "lora_A" in name}

    first = a_of(adapted_model(trained=False))
    generator_state = torch.get_rng_state()
    few = a_of(adapted_model(trained=False, target_modules=["down_proj"]))
    assert few and all(torch.equal(first[name], a) for name, a in few.items())
    other = a_of(attach_lora(quantized_pair("qwen2")[0], config(), seed=8))
    assert not any(torch.equal(first[name], a) for name, a in other.items())
    assert len({tuple(a.flatten()[:4].tolist()) for a in first.values()}) == len(first)
    for a in first.values():
        bound = a.shape[1] ** -0.5
        assert a.abs().max() <= bound and a.std() == pytest.approx(bound / 3**0.5, rel=0.15)
    torch.manual_seed(0)  # tiny_model's own; attach_lora itself must not move the global generator
    torch.set_rng_state(generator_state)
    base = tiny_model("qwen2")
    state = torch.get_rng_state()
    attach_lora(base, config(), seed=7)
    assert torch.equal(torch.get_rng_state(), state)


def test_rank_alpha_and_rslora():
    model = adapted_model(
        use_rslora=True, rank_pattern={"down_proj": 2, r".*layers\.1\..*q_proj": 8}, alpha_pattern={"v_proj": 3}
    )
    layers = decoder_layers(model)
    found = {
        (index, name): lora_factors(layer.get_submodule(name))
        for index, layer in enumerate(layers)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    assert {key: (f.a.shape[0], round(f.scaling, 6)) for key, f in found.items()} == {
        (0, "self_attn.q_proj"): (4, 8 / 2),
        (1, "self_attn.q_proj"): (8, round(8 / 8**0.5, 6)),
        **{(i, "self_attn.v_proj"): (4, 3 / 2) for i in range(2)},
        **{(i, "mlp.down_proj"): (2, round(8 / 2**0.5, 6)) for i in range(2)},
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["q_porj"]}, "did you mean q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, "an adapter on lm_head"),
        ({"target_modules": ["self_attn"]}, "self_attn|Attention"),
        ({"rank_pattern": {"layers.7.*": 2}}, "rank_pattern"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 2}}, "alpha_pattern"),
    ],
)
def test_what_matches_nothing_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        attach_lora(tiny_model("qwen2"), config(**options), seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_the_equation_with_rounded_factors(dtype):
    layer = decoder_layers(adapted_model())[0].mlp.up_proj
    factors = lora_factors(layer)
    x = torch.randn(5, 64).to(dtype)
    u = x @ factors.a.to(dtype).T
    base = layer.base_layer(x.float()).double()  # not rounded to bf16
    part = factors.scaling * u.double() @ factors.b.to(dtype).double().T
    half_step = torch.finfo(dtype).eps / 2  # one of the adapter's part, one of the sum
    bound = 1.01 * half_step * ((base + part).abs() + part.abs()) + 1e-6
    assert ((layer(x).double() - base - part).abs() < bound).all()


def test_a_young_adapter_counts_before_the_rounding():
    """bf16 over packed weights. What is less than half a step of x W^T would be lost behind that one's own rounding."""
    generator = torch.Generator().manual_seed(0)
    base = PackedLinear(frozen_weights([NVFP4().quantize(torch.randn(128, 64, generator=generator))])[0])
    x = torch.randn(4096, 64, generator=generator).bfloat16()
    x[:, 0] = 1
    a, b = torch.zeros(4, 64), torch.zeros(128, 4)
    a[0, 0], b[:, 0] = 1, 2**-8  # the adapter adds 1 / 256 to all; half a step is 1 / 64 for numbers from 4 to 8
    change = adapted_product(x, base, LoraFactors(a, b, 1.0)).double() - base.product(x).double()
    assert abs(change.mean() - 2**-8) < 2**-8 / 20


def packed_linear():
    """[128, 64] with a bias, and an adapter for it."""
    generator = torch.Generator().manual_seed(0)
    codes = NVFP4().quantize(torch.randn(128, 64, generator=generator))
    a, b = (torch.randn(size, generator=generator, requires_grad=True) for size in ((4, 64), (128, 4)))
    return PackedLinear(frozen_weights([codes])[0], torch.randn(128, generator=generator)), LoraFactors(a, b, 0.7)


def roomy(kernel):
    """A kernel's reference, with room behind its rows as on a GPU."""

    def run(*args, room, **options):
        y = kernel(*args, **options)
        return empty_with_room(y, *y.shape, room).copy_(y)

    return run


@pytest.mark.parametrize(
    "options, room", [({}, 8), ({"r": 65}, None), ({"train_norms": True, "rank_pattern": {"up_proj": 17}}, 24)]
)
def test_adapters_may_write_behind_what_norms_and_swiglu_make(options, room, monkeypatch):
    expected, rooms, product = gradients(adapted_model(**options)), {}, PackedLinear.adapted_product

    def writing(self, x, a, b, scaling, room):
        rooms[id(self)] = room
        if room:
            x.data.as_strided((*x.shape[:-1], x.shape[-1] + room), x.stride())[..., x.shape[-1] :] = torch.nan
        return product(self, x, a, b, scaling, room)

    monkeypatch.setattr("qerl.nn.rmsnorm.add_rms_norm_", roomy(rmsnorm.add_rms_norm_))
    monkeypatch.setattr("qerl.nn.mlp.swiglu", roomy(mlp.swiglu))
    monkeypatch.setattr(PackedLinear, "adapted_product", writing)
    model = adapted_model(**options)
    found = gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    linears = [(name.split(".")[-2], m) for name, m in model.named_modules() if isinstance(m, PackedLinear)]
    wanted = {} if room is None else {id(m): 0 if name == "o_proj" else room for name, m in linears}
    assert len(linears) == 14 and rooms == wanted


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_tokens_are_no_output(shape):
    base, factors = packed_linear()
    y = adapted_product(torch.zeros(shape, requires_grad=True), base, factors)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 128) and not factors.a.grad.any()


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_the_output_may_be_added_to_in_place(shape):
    base, factors = packed_linear()
    y = adapted_product(torch.ones(shape), base, factors)
    y += 1
    y.sum().backward()
    assert factors.b.grad.any()


def test_a_compiler_sees_a_packed_product_as_one_operator():
    base, factors = packed_linear()
    names: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        graphs = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        names.update(str(node.target) for one in graphs for node in one.graph.nodes)
        return graph

    x = torch.randn(5, 64, requires_grad=True)
    y = torch.compile(lambda x: adapted_product(x, base, factors), backend=backend, fullgraph=True)(x)
    assert "qerl.w4a16" in names
    torch.testing.assert_close(y, adapted_product(x, base, factors))


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "bf16"])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_gradients_are_autograds_of_the_equation(format, shape):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(128, 64, generator=generator)
    base, weight = nn.Linear(64, 128), dense
    if format != "bf16":
        codes = (NVFP4() if format == "nvfp4" else NF4()).quantize(dense)
        base = PackedLinear(frozen_weights([codes])[0], torch.randn(128, generator=generator))
        weight = base.product(torch.eye(64)).T - base.bias[:, None]
    else:
        base.weight = nn.Parameter(dense, requires_grad=False)
    base.bias.requires_grad_()
    a, b = (torch.randn(size, generator=generator, requires_grad=True) for size in ((4, 64), (128, 4)))
    x = torch.randn(shape, generator=generator, requires_grad=True)
    grad = torch.randn(*shape[:-1], 128, generator=generator)
    inputs = [x, base.bias, a, b]
    expected = x @ weight.detach().T + base.bias + 0.7 * (x @ a.T) @ b.T
    y = adapted_product(x, base, LoraFactors(a, b, 0.7))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(y, inputs, grad)
    for one, other in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert torch.autograd.grad(adapted_product(x.detach(), base, LoraFactors(a, b, 0.7)).sum(), [b])[0].norm() > 0


def test_factors_are_the_masters_and_go_with_the_switch():
    model = adapted_model()
    layer = decoder_layers(model)[0].self_attn.q_proj
    assert isinstance(layer, LoraLinear) and isinstance(layer.base_layer, PackedLinear)
    assert lora_factors(layer).a.data_ptr() == layer.lora_A["default"].weight.data_ptr()
    with adapters_disabled(model):
        assert lora_factors(layer) is None
    assert lora_factors(layer.base_layer) is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "phi3", "gpt_neox"])
def test_adapter_gives_the_same_logits_in_plain_transformers_and_peft(family, tmp_path):
    model = adapted_model(family, use_rslora=True, train_norms=family == "qwen3")
    model.save_pretrained(tmp_path / "adapter")
    quantized_pair(family)[1].save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = IDS[None, :15]
    with torch.no_grad():
        expected, without = plain(input_ids=ids).logits, plain.get_base_model()
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=2e-4, rtol=2e-4)
        with plain.disable_adapter():
            assert (without(input_ids=ids).logits - expected).abs().max() > 1e-2


def test_saved_config_is_what_other_readers_expect(tmp_path):
    adapted_model().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["r"] == 4 and isinstance(saved["lora_alpha"], int) and saved["peft_type"] == "LORA"
    assert sorted(saved["target_modules"]) == sorted(config().target_modules) and saved["bias"] == "none"


@pytest.mark.parametrize("train_norms", [False, True])
def test_saved_weights_come_back_bit_for_bit(tmp_path, train_norms):
    model = adapted_model(train_norms=train_norms)
    model.save_pretrained(tmp_path)
    fresh = adapted_model(trained=False, train_norms=train_norms)
    before = trainable(fresh)
    load_adapter_weights(fresh, tmp_path)
    for name, parameter in trainable(fresh).items():
        assert parameter is before[name] and torch.equal(parameter, trainable(model)[name])
    assert torch.equal(hidden(fresh), hidden(model))


@pytest.mark.parametrize("options", [{"r": 8}, {"target_modules": ["q_proj"]}, {"train_norms": True}])
def test_weights_of_another_adapter_are_refused(tmp_path, options):
    adapted_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not fit"):
        load_adapter_weights(adapted_model(**options), tmp_path)
    with pytest.raises(ValueError, match="no adapter"):
        load_adapter_weights(adapted_model(), tmp_path / "nowhere")
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        load_adapter_weights(adapted_model(), tmp_path)


@pytest.mark.parametrize("train_norms", [False, True])
def test_a_saved_adapter_can_be_attached_anew(tmp_path, train_norms):
    model = adapted_model(train_norms=train_norms, rank_pattern={"down_proj": 2}, use_rslora=True)
    model.save_pretrained(tmp_path)
    attached = attach_saved_adapter(quantized_pair("qwen2")[0], tmp_path)
    assert torch.equal(hidden(attached), hidden(model)) and not trainable(attached)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "of linears .use_dora"),
        ({"lora_bias": True}, "of linears .lora_bias"),
        ({"target_modules": ["q_proj", "lm_head"]}, "an adapter on lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "an adapter on model.embed_tokens"),
        ({"modules_to_save": ["lm_head"]}, "a trained lm_head"),
    ],
)
def test_adapters_that_would_be_applied_in_part_are_refused(tmp_path, options, message):
    config = peft.LoraConfig(**({"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options))
    peft.get_peft_model(quantized_pair("qwen2")[1], config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        attach_saved_adapter(quantized_pair("qwen2")[0], tmp_path)


def test_a_folder_without_a_lora_adapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no adapter"):
        attach_saved_adapter(quantized_pair("qwen2")[0], tmp_path)
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only LoRA"):
        attach_saved_adapter(quantized_pair("qwen2")[0], tmp_path)


def test_merging_into_codes_is_refused():
    with pytest.raises(ValueError, match="packed"):
        adapted_model().merge_and_unload()


# ---------------------------------------------------------------------------------------------------- norms and noise


def test_trained_norms_are_copies_that_noise_reaches():
    model = adapted_model(trained=False, train_norms=True)
    norms = {name: p for name, p in trainable(model).items() if "norm" in name}
    assert len(norms) == 5 and all(p.dtype == torch.float32 for p in norms.values())
    clean = hidden(model)
    draw = NoiseDraw(seed=0, step=0, sigma=0.05)
    with applied(model, draw):
        noisy = hidden(model)
        grads = torch.autograd.grad(noisy.square().sum(), list(norms.values()))
    assert (noisy - clean).norm() > 1e-3 * clean.norm() and all(grad.abs().sum() > 0 for grad in grads)
    assert torch.equal(hidden(model), clean)
    plain = adapted_model(trained=False)
    with applied(plain, draw):
        torch.testing.assert_close(hidden(plain), noisy)
    assert len(noise_sites(model)) == 4 and all(isinstance(site, RMSNorm) for site in noise_sites(model))


def test_disabling_adapters_brings_the_original_norms_back():
    model = adapted_model(train_norms=True)
    base = hidden(quantized_pair("qwen2")[0])
    assert (hidden(model) - base).norm() > 1e-2 * base.norm()
    with adapters_disabled(model):
        assert torch.equal(hidden(model), base)
        with applied(model, NoiseDraw(seed=0, step=0, sigma=0.05)):
            assert not torch.equal(hidden(model), base)
    assert len(trainable(model)) == 2 * 7 * 2 + 5  # PEFT switches gradients off and on again with the adapters


def test_norms_of_another_kind_cannot_be_trained():
    with pytest.raises(ValueError, match="train_norms"):
        attach_lora(quantized_pair("gpt_neox")[0], config("gpt_neox", train_norms=True), seed=0)


# ------------------------------------------------------------------------------------------------------- recomputation


def saved_bytes(model):
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
    ):
        output = hidden(model)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()), output


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_recomputation_reaches_every_adapter_and_changes_no_gradient(family):
    kept, recomputed = adapted_model(family), adapted_model(family)
    recompute_layers(recomputed)
    expected, actual = gradients(kept), gradients(recomputed)
    assert expected.keys() == actual.keys() == trainable(kept).keys()
    for name in expected:
        assert expected[name].abs().sum() > 0 and torch.equal(expected[name], actual[name])


def test_recomputation_keeps_less():
    kept, recomputed = adapted_model(), adapted_model()
    recompute_layers(recomputed)
    assert saved_bytes(recomputed)[0] < 0.25 * saved_bytes(kept)[0]


def test_the_first_layers_recompute_and_the_number_can_change():
    model = adapted_model()
    everything, sizes = saved_bytes(model)[0], {}
    for count in (1, None, 0, 2, 1):
        recompute_layers(model, count)
        size = saved_bytes(model)[0]
        assert sizes.setdefault(count, size) == size  # whatever it was before
    assert sizes[0] == everything and sizes[None] == sizes[2] < sizes[1] < everything
    first, last = decoder_layers(model)
    assert "forward" in vars(first) and "forward" not in vars(last)
    expected = gradients(adapted_model())
    assert all(torch.equal(expected[name], gradient) for name, gradient in gradients(model).items())


def test_offloading_moves_every_layers_input_and_nothing_else(monkeypatch):
    moved = []
    to_host = recompute._to_host
    monkeypatch.setattr(recompute, "_to_host", lambda tensor: (moved.append(tensor.shape), to_host(tensor))[1])
    model = adapted_model()
    recompute_layers(model, offload=True)
    gradients(model)
    assert moved == [(1, len(IDS), 64)] * 2


def test_recomputation_under_noise_gives_the_same_gradient():
    kept, recomputed = adapted_model(), adapted_model()
    recompute_layers(recomputed)
    results = []
    for model in (kept, recomputed):
        index = torch.tensor([0] * 11 + [1] * 19)
        with applied(model, NoiseDraw(0, 0, 0.05, "prompt"), [1 << 32, 2 << 32], index):
            results.append(gradients(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    name = next(name for name in results[0] if "layers.0.mlp.up_proj.lora_B" in name)
    assert not torch.equal(gradients(adapted_model())[name], results[0][name])
