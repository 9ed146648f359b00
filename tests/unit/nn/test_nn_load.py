from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, SIZES, save_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.diffllama import DiffLlamaConfig
from transformers.models.gemma import GemmaConfig
from transformers.models.granite import GraniteConfig
from transformers.models.qwen2 import Qwen2Config

from qerl.config import ModelConfig
from qerl.formats.codes import format_named
from qerl.formats.nvfp4 import dequantize, quantize, shared_global_scale
from qerl.formats.writing import quantize_checkpoint
from qerl.nn.attention import ATTENTION, packed_forward
from qerl.nn.linear import PackedLinear
from qerl.nn.load import eos_token_ids, load_model, resolve_device
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import decoder_layers, head


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, made once."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = save_model(tiny_model(family), tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture
def copied(folders, tmp_path):
    """A copy of a family's folder that a test may damage."""

    def copy(family="qwen2"):
        return shutil.copytree(folders(family), tmp_path / "copy")

    return copy


def load(folder, **options):
    return load_model(ModelConfig(path=str(folder), **({"device": "cpu"} | options)))[0]


def linears(model):
    return {name: m for name, m in decoder_layers(model).named_modules() if isinstance(m, nn.Linear)}


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


IDS = torch.arange(3, 40)[None]


# -------------------------------------------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_bf16_folder_loads_as_transformers_loads_it(folders, family):
    """Same logits (so: same rotary frequencies, scales, norms, ties), same buffers, nothing left unloaded."""
    model = load(folders(family), format="bf16")
    plain = AutoModelForCausalLM.from_pretrained(
        folders(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=5e-5, rtol=5e-5)
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == ATTENTION and model.name_or_path == str(folders(family))


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_quantised_while_loading_is_the_dequantised_model(folders, family):
    model = load(folders(family))
    plain = AutoModelForCausalLM.from_pretrained(
        folders(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    dense, groups = dict(decoder_layers(plain).named_modules()), {}
    for name, linear in linears(model).items():
        assert isinstance(linear, PackedLinear)
        groups.setdefault(id(linear.packed.storage), []).append(name)
    for names in groups.values():
        shared = shared_global_scale([dense[name].weight.bfloat16() for name in names], names)
        for name in names:
            dense[name].weight.copy_(dequantize(quantize(dense[name].weight.bfloat16(), global_scale=shared)))
    torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=2e-4, rtol=2e-4)


def test_parameters_that_are_not_born_on_meta_are_loaded(tmp_path):
    """torch.normal(0, 1, size=...) makes a real tensor even where the device is meta."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(DiffLlamaConfig(**SIZES))
    folder = save_model(made, tmp_path)
    loaded = load(folder, format="bf16").state_dict()
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded[name], tensor.float())


def test_fused_linears_share_one_storage(folders):
    model = load(folders("qwen2"))
    layer = decoder_layers(model)[0]
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [linear.packed.storage for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert qkv[0] is qkv[1] is qkv[2] is not attention.o_proj.packed.storage
    assert mlp.gate_proj.packed.storage is mlp.up_proj.packed.storage is not mlp.down_proj.packed.storage
    scales = {linear.packed.row_scale[0].item() for linear in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(scales) == 1
    assert attention.q_proj.bias.shape == (64,) and attention.o_proj.bias is None

    model = load(folders("qwen2"), format="bf16")
    attention = decoder_layers(model)[0].self_attn
    fused = [linear.weight for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert len({weight.untyped_storage().data_ptr() for weight in fused}) == 1
    assert [weight.storage_offset() for weight in fused] == [0, 64 * 64, 96 * 64]


def test_rows_for_adapters_are_left_behind_dense_weights(folders):
    config = ModelConfig(path=str(folders("qwen2")), format="bf16", device="cpu")
    model, _ = load_model(config, adapter_rank=5)
    plain, _ = load_model(config)
    layer = decoder_layers(model)[0]
    for *others, last in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.down_proj],
    ):
        assert last.spare_rows.shape == (5 * (len(others) + 1), last.in_features)
        assert last.spare_rows.data_ptr() == last.weight.data_ptr() + last.weight.nbytes
    assert all(torch.equal(w, plain.state_dict()[name]) for name, w in model.state_dict().items())


def test_tied_embedding_is_held_once(folders):
    tied, untied = load(folders("qwen2")), load(folders("qwen3"))
    assert head(tied).weight is tied.get_input_embeddings().weight
    assert head(untied).weight is not untied.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("family", "count"), [("qwen2", 5), ("qwen3", 9), ("llama", 5), ("mistral", 5), ("phi3", 5), ("gpt_neox", 0)]
)
def test_every_rmsnorm_is_ours(folders, family, count):
    norms = [module for module in load(folders(family)).modules() if "Norm" in type(module).__name__]
    ours = [norm for norm in norms if isinstance(norm, RMSNorm)]
    assert len(ours) == count and all(norm.weight.dtype == torch.float32 for norm in ours)
    assert len(norms) == count or family == "gpt_neox"


def test_dtypes(folders):
    model = load(folders("qwen2"), dtype="bfloat16")
    layer = decoder_layers(model)[0]
    assert layer.self_attn.q_proj.bias.dtype == head(model).weight.dtype == torch.bfloat16
    assert layer.input_layernorm.weight.dtype == torch.float32 and layer.mlp.up_proj.weight.dtype == torch.uint8
    assert model(input_ids=IDS).logits.dtype == torch.bfloat16
    tiles = layer.mlp.up_proj.weight.clone()
    assert torch.equal(model.to(torch.float32).get_submodule("model.layers.0.mlp.up_proj").weight, tiles)


def test_kept_layers_are_dense(folders):
    model = load(folders("qwen2"), keep=["model.layers.0.*", "*.down_proj"])
    kept = {name for name, linear in linears(model).items() if not isinstance(linear, PackedLinear)}
    assert kept == {name for name in linears(model) if name.startswith("0.") or name.endswith("down_proj")}


def test_linears_that_blocks_do_not_divide_stay_dense(tmp_path, caplog):
    torch.manual_seed(0)
    config = Qwen2Config(**(SIZES | {"intermediate_size": 100}))
    folder = save_model(AutoModelForCausalLM.from_config(config), tmp_path)
    with caplog.at_level(logging.WARNING, "qerl"):
        model = load(folder)
    dense = {name for name, linear in linears(model).items() if not isinstance(linear, PackedLinear)}
    assert dense == {"0.mlp.down_proj", "1.mlp.down_proj"} and "2 linears stay dense" in caplog.text


def test_scale_option_reaches_the_codes(folders):
    sweep, amax = (
        linears(load(folders("qwen2"), scale=scale))["0.mlp.down_proj"].packed for scale in ("sweep", "amax")
    )
    assert not torch.equal(sweep.tiles, amax.tiles)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_packed_folder_loads_exactly(folders, tmp_path, family, format):
    quantize_checkpoint(folders(family), tmp_path / "packed", format=format_named(format))
    direct, stored = load(folders(family), format=format), load(tmp_path / "packed", format=format)
    for name, linear in linears(direct).items():
        assert torch.equal(linear.packed.tiles, linears(stored)[name].packed.tiles)
        assert torch.equal(linear.packed.global_scale, linears(stored)[name].packed.global_scale)
    assert torch.equal(direct(input_ids=IDS).logits, stored(input_ids=IDS).logits)


@torch.no_grad()
def test_packed_forward_and_generate_run(folders):
    model = load(folders("qwen2"))
    hidden = packed_forward(model, IDS[0], torch.tensor([0, 10, 37]))
    torch.testing.assert_close(head(model)(hidden[:10]), model(input_ids=IDS[:, :10]).logits[0], atol=2e-5, rtol=2e-5)
    assert model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None).shape == (1, 41)


def test_the_embedded_model_is_a_path():
    model, tokenizer = load_model(ModelConfig(device="cpu"))
    assert model.config.model_type == "qwen2" and len(tokenizer) == head(model).out_features
    assert eos_token_ids(model) == [tokenizer.eos_token_id]


def test_tokenizer_and_generation_config(copied):
    folder = copied("llama")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 2, 7], "do_sample": True, "top_k": 3})
    )
    model, tokenizer = load_model(ModelConfig(path=str(folder), device="cpu"))
    assert tokenizer.encode("w5 w90") == [5, 90] and model.generation_config.top_k == 3
    assert eos_token_ids(model) == [2, 7]


def test_eos_falls_back_to_the_config(folders):
    model = load(folders("qwen2"))
    model.generation_config.eos_token_id = None
    assert eos_token_ids(model) == [2]
    model.config.eos_token_id = None
    with pytest.raises(ValueError, match="eos_token_id"):
        eos_token_ids(model)


# -------------------------------------------------------------------------------------------------- what is refused


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path"):
        load(tmp_path / "nowhere")


def test_missing_tensors_are_named(copied):
    folder = copied()
    edit_weights(folder, lambda tensors: tensors.update({"old.name": tensors.pop("model.layers.1.mlp.up_proj.weight")}))
    with pytest.raises(
        ValueError, match=r"lacks 1 tensors of the model: model\.layers\.1\.mlp\.up_proj\.weight; it has old\.name"
    ):
        load(folder)


def test_spare_tensors_are_reported(copied, caplog):
    folder = copied()
    edit_weights(folder, lambda tensors: tensors.update({"mtp.weight": torch.zeros(1)}))
    with caplog.at_level(logging.WARNING, "qerl"):
        load(folder)
    assert "mtp.weight" in caplog.text


def test_wrong_shapes_are_named(copied):
    folder = copied()
    edit_config(folder, intermediate_size=128)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.\w+_proj\.weight is \[96, 64\] .* \[128, 64\]"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "format"),
    [("layers.1.mlp.down_proj", "nvfp4"), ("layers.1.mlp.down_proj", "bf16"), ("embed_tokens", "nvfp4")],
)
def test_nan_weights_are_named(copied, name, format):
    folder = copied()
    edit_weights(folder, lambda tensors: tensors[f"model.{name}.weight"][3].fill_(torch.nan))
    with pytest.raises(ValueError, match=rf"model\.{name}\.weight contains NaN"):
        load(folder, format=format)


def test_a_part_that_a_packed_folder_lacks_is_named(copied, tmp_path):
    folder, name = copied(), "model.layers.0.self_attn.k_proj"
    edit_weights(folder, lambda tensors: tensors.pop(f"{name}.weight"))
    quantize_checkpoint(folder, tmp_path / "packed")
    with pytest.raises(ValueError, match=rf"packed lacks 1 tensors of the model: {name}"):
        load(tmp_path / "packed")


def test_integers_are_no_bias(copied):
    folder, name = copied(), "model.layers.0.self_attn.k_proj.bias"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].int()}))
    with pytest.raises(ValueError, match=rf"{name} is torch\.int32 in the file, where bf16"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ["model.layers.9.*"]}, r"model\.keep: 'model\.layers\.9\.\*' matches no linear layer"),
        ({"keep": ["model.layers.0"]}, r"matches no linear layer; names look like model\.layers\.0\.self_attn\.q_proj"),
        ({"keep": ["*.q_proj"]}, "are one product"),
        ({"keep": ["*"]}, "no layer of .* is packed"),
    ],
)
def test_keep_patterns_that_cannot_be_meant(folders, options, message):
    with pytest.raises(ValueError, match=message):
        load(folders("qwen2"), **options)


def test_packed_folder_contradicts_the_config(folders, tmp_path):
    quantize_checkpoint(folders("qwen2"), tmp_path / "packed")
    for format in ("bf16", "mxfp4"):
        with pytest.raises(ValueError, match=rf"model\.format is {format}, but .* holds nvfp4 weights"):
            load(tmp_path / "packed", format=format)
    with pytest.raises(ValueError, match=r"model\.keep names model\.layers\.0\.self_attn\.o_proj"):
        load(tmp_path / "packed", keep=["*.o_proj"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(folders):
    with pytest.raises(ValueError, match="no CUDA GPU"):
        load(folders("qwen2"), device="cuda")


def test_unknown_architecture(copied):
    folder = copied()
    edit_config(folder, model_type="qwen2_of_tomorrow")
    with pytest.raises(ValueError, match="qwen2_of_tomorrow"):
        load(folder)


@pytest.mark.parametrize("changes", [{"model_type": "t5"}, {"model_type": "llava"}])
def test_models_that_are_no_text_decoder(copied, changes):
    folder = copied()
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match="only text decoders"):
        load(folder)


def test_layers_that_carry_a_state(copied):
    folder = copied()
    edit_config(folder, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="linear_attention"):
        load(folder)


def test_logits_that_are_not_the_heads(tmp_path):
    torch.manual_seed(0)
    folder = save_model(AutoModelForCausalLM.from_config(GraniteConfig(**SIZES, logits_scaling=8.0)), tmp_path)
    with pytest.raises(ValueError, match="changes the logits"):
        load(folder)


def test_one_plus_w_norms_are_left_alone_and_reported(tmp_path, caplog):
    torch.manual_seed(0)
    folder = save_model(AutoModelForCausalLM.from_config(GemmaConfig(**SIZES, head_dim=16)), tmp_path)
    with caplog.at_level(logging.WARNING, "qerl"):
        model = load(folder)
    assert "5 RMSNorms are not w * x / rms(x)" in caplog.text
    assert not any(isinstance(module, RMSNorm) for module in model.modules())


def test_no_tokenizer(copied):
    folder = copied()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="tokenizer"):
        load(folder)


def test_dropout_is_off_after_loading(copied):
    folder = copied()
    edit_config(folder, attention_dropout=0.5)
    model = load(folder)
    assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_model_without_linears_is_refused(tmp_path):
    from transformers import GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    folder = save_model(AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        load(folder)


@pytest.mark.parametrize("name", ["banana", "meta", "cuda:x", ""])
def test_a_device_that_is_none_is_named(name):
    with pytest.raises(ValueError, match=f"model.device is {name!r}: use 'auto', 'cpu', 'cuda' or 'cuda:1'"):
        resolve_device(name)
    assert resolve_device("cpu").type == "cpu"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1").index == 1
    with pytest.raises(ValueError, match=r"model\.device is cuda:2, and the last GPU here is cuda:1"):
        resolve_device("cuda:2")
