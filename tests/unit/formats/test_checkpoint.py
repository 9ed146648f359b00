import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import qerl.formats.writing as module
from qerl.formats.checkpoint import FUSED_GROUPS, Checkpoint
from qerl.formats.codes import NVFP4
from qerl.formats.nvfp4 import NVFP4Tensor, dequantize, quantize, shared_global_scale
from qerl.formats.writing import quantize_checkpoint
from qerl.kernels.layout import pack

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A two-layer Qwen2 in bf16, one shard, with files beside it."""
    folder = tmp_path_factory.mktemp("qwen") / "bf16"
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=False,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


@pytest.fixture(scope="module")
def packed(qwen) -> Path:
    target = qwen.parent / "nvfp4"
    quantize_checkpoint(qwen, target)
    return target


def write(folder: Path, shards: dict[str, dict[str, torch.Tensor]], config: dict | None = None) -> Path:
    """A folder of the given shards, with an index where they are several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {}))
    for file, tensors in shards.items():
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    if list(shards) != ["model.safetensors"]:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def resharded(source: Path, folder: Path, num_shards: int) -> Path:
    """The same tensors dealt out to shards in turn, so that fused groups lie in different ones."""
    tensors = load_file(source / "model.safetensors")
    shards = {f"model-{i + 1}-of-{num_shards}.safetensors": {} for i in range(num_shards)}
    for i, name in enumerate(sorted(tensors)):
        shards[f"model-{i % num_shards + 1}-of-{num_shards}.safetensors"][name] = tensors[name]
    return write(folder, shards, json.loads((source / "config.json").read_text()))


def layer_weights(k: int = 32, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """One layer's q, k, v, and whatever else is named."""
    torch.manual_seed(0)
    weights = {f"model.layers.0.self_attn.{p}_proj.weight": torch.randn(16, k).bfloat16() for p in "qkv"}
    return weights | others


def same(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


# Writing and reading back


def test_what_is_read_back_is_what_quantize_gives(qwen, packed):
    """Bit for bit: codes, block scales, and the global scale, although the file stores its inverse."""
    dense, checkpoint = load_file(qwen / "model.safetensors"), Checkpoint(packed)
    assert checkpoint.quantization == ("compressed-tensors", "nvfp4")
    for layer in range(2):
        for group in (*FUSED_GROUPS, ("o_proj",), ("down_proj",)):
            names = [f"model.layers.{layer}.{m}" for m in LINEARS if m.split(".")[1] in group]
            weights = [dense[f"{name}.weight"] for name in names]
            shared = shared_global_scale(weights, names)
            for name, weight in zip(names, weights, strict=True):
                assert checkpoint.is_packed(name)
                assert same(checkpoint.codes(name), quantize(weight, global_scale=shared))


def test_everything_else_is_copied(qwen, packed):
    dense, checkpoint = load_file(qwen / "model.safetensors"), Checkpoint(packed)
    linears = {f"model.layers.{layer}.{m}.weight" for layer in range(2) for m in LINEARS}
    others = set(dense) - linears
    assert others == {n for n in checkpoint.names() if ".weight_" not in n}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"} <= others
    for name in others:
        assert torch.equal(checkpoint.tensor(name), dense[name]) and checkpoint.tensor(name).dtype == torch.bfloat16
        assert checkpoint.shape(name) == tuple(dense[name].shape)
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (packed / file).read_bytes() == (qwen / file).read_bytes()
    assert not (packed / "pytorch_model.bin").exists()
    modes = {oct(file.stat().st_mode) for file in packed.iterdir()}
    assert modes == {oct((qwen / "tokenizer.json").stat().st_mode)}  # who may read one may read all


def test_the_file_has_the_documented_tensors(packed):
    stored = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"  # [64, 96]
    assert stored[f"{name}.weight_packed"].dtype == torch.uint8 and stored[f"{name}.weight_packed"].shape == (64, 48)
    assert stored[f"{name}.weight_scale"].dtype == torch.float8_e4m3fn
    assert stored[f"{name}.weight_scale"].shape == (64, 6)
    divisor = stored[f"{name}.weight_global_scale"]
    amax = load_file(packed.parent / "bf16" / "model.safetensors")[f"{name}.weight"].abs().max().float()
    assert divisor.dtype == torch.float32 and divisor.shape == (1,)
    assert divisor.log2().item().is_integer() and divisor <= 448 * 6 / amax < 2 * divisor
    assert f"{name}.weight" not in stored


def test_shards_change_nothing_but_the_files(qwen, packed, tmp_path):
    source = resharded(qwen, tmp_path / "sharded", 5)
    calls = []
    report = quantize_checkpoint(source, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    one, many = Checkpoint(packed), Checkpoint(tmp_path / "out")
    assert many.shards == Checkpoint(source).shards and len(many.shards) == 5
    assert sorted(many.names()) == sorted(one.names())
    for name in one.names():
        a, b = one._read(name), many._read(name)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one.names())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load_file(packed / "model.safetensors").values())
    num_bytes = (qwen / "model.safetensors").stat().st_size
    assert len(calls) == 27 and [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] and 0 < num_bytes - calls[-1][1] < 4000  # all but the header
    assert report["packed_layers"] == 14 and report["kept_layers"] == []
    assert report["target_bytes"] < report["source_bytes"]


def test_memory_holds_one_new_shard_and_one_old_tensor(qwen, tmp_path, monkeypatch):
    source = resharded(qwen, tmp_path / "sharded", 5)
    saved = []
    monkeypatch.setattr(
        module, "save_file", lambda tensors, path, **kw: (saved.append(tensors), save_file(tensors, path, **kw))
    )
    quantize_checkpoint(source, tmp_path / "out")
    assert len(saved) == 5
    for tensors, shard in zip(saved, Checkpoint(source).shards, strict=True):
        assert sum(t.nbytes for t in tensors.values()) < (source / shard).stat().st_size


@pytest.mark.parametrize("scale", ["sweep", "amax"])
def test_the_scale_option_arrives(scale, tmp_path):
    tensors = layer_weights()
    source = write(tmp_path / "in", {"model.safetensors": tensors})
    quantize_checkpoint(source, tmp_path / "out", format=NVFP4(scale))
    shared = shared_global_scale(list(tensors.values()), list(tensors))
    read = Checkpoint(tmp_path / "out").codes("model.layers.0.self_attn.q_proj")
    assert same(read, quantize(next(iter(tensors.values())), scale=scale, global_scale=shared))


def test_an_all_zero_layer_comes_back_as_zeros(tmp_path):
    name = "model.layers.0.mlp.down_proj"
    source = write(tmp_path / "in", {"model.safetensors": {f"{name}.weight": torch.zeros(16, 32)}})
    quantize_checkpoint(source, tmp_path / "out")
    assert torch.equal(dequantize(Checkpoint(tmp_path / "out").codes(name)), torch.zeros(16, 32))


# Other programs


@pytest.mark.usefixtures("compressed_tensors_alone")
def test_transformers_loads_the_folder(packed):
    """Its decompressed weights are ours, bit for bit, in every layer; and so are its logits of the whole model."""
    model = AutoModelForCausalLM.from_pretrained(packed)
    with torch.no_grad():
        logits = model(torch.arange(8)[None]).logits  # the first forward decompresses
    checkpoint = Checkpoint(packed)
    dense = AutoModelForCausalLM.from_pretrained(packed.parent / "bf16")
    for name, parameter in dense.named_parameters():
        linear = name.removesuffix(".weight")
        if checkpoint.is_packed(linear):
            parameter.data.copy_(dequantize(checkpoint.codes(linear), torch.bfloat16))
            assert torch.equal(model.get_parameter(name), parameter), name
        else:
            parameter.data.copy_(checkpoint.tensor(name))
    with torch.no_grad():
        assert torch.equal(dense(torch.arange(8)[None]).logits, logits)


def test_the_config_is_compressed_tensors_preset(packed):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    config = QuantizationConfig.model_validate(json.loads((packed / "config.json").read_text())["quantization_config"])
    (group,) = config.config_groups.values()
    preset = NVFP4A16["weights"]
    for field in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic"):
        assert getattr(group.weights, field) == getattr(preset, field)
    assert group.input_activations is None and group.targets == ["Linear"]
    assert config.format == group.format == "nvfp4-pack-quantized"
    assert config.ignore == ["lm_head", "model.embed_tokens"]
    assert config.quantization_status == "compressed"


# Which layers


@pytest.mark.usefixtures("compressed_tensors_alone")
def test_kept_layers_stay_and_are_ignored_by_readers(qwen, tmp_path):
    keep = ["model.layers.0.self_attn.[qkv]_proj", "*.1.mlp.down_proj"]
    report = quantize_checkpoint(qwen, tmp_path / "out", keep=keep)
    kept = [f"model.layers.0.self_attn.{p}_proj" for p in "kqv"] + ["model.layers.1.mlp.down_proj"]
    checkpoint = Checkpoint(tmp_path / "out")
    assert sorted(report["kept_layers"]) == kept and report["packed_layers"] == 10
    assert set(kept) <= set(checkpoint.config["quantization_config"]["ignore"])
    for name in kept:
        assert not checkpoint.is_packed(name)
        assert torch.equal(checkpoint.tensor(f"{name}.weight"), load_file(qwen / "model.safetensors")[f"{name}.weight"])
    with torch.no_grad():
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(4)[None])


def test_only_matrices_of_decoder_layers_are_packed(tmp_path):
    x = torch.ones(16, 32)
    other = {
        "model.embed_tokens.weight": x,
        "lm_head.weight": x,
        "visual.blocks.0.attn.qkv.weight": x,
        "model.layers.0.input_layernorm.weight": torch.ones(32),
        "model.layers.0.post_norm.weight": x,
        "model.layers.0.mlp.gate.weight": x,
        "model.layers.0.mlp.shared_expert_gate.weight": x,
        "model.layers.0.block.router.weight": x,
        "model.layers.0.mlp.conv.weight": torch.ones(4, 4, 16),
        "model.layers.0.mlp.odd.weight": torch.ones(4, 24),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(16),
    }
    packed = {"model.layers.0.mlp.experts.7.down_proj.weight": x, "layers.11.attention.dense.weight": x}
    source = write(tmp_path / "in", {"model.safetensors": layer_weights(**other, **packed)})
    report = quantize_checkpoint(source, tmp_path / "out")
    names = set(Checkpoint(tmp_path / "out").names())
    assert set(other) <= names
    assert {f"{name}_packed" for name in packed} <= names and not names & set(packed)
    assert report["packed_layers"] == 5


def test_a_keep_pattern_must_match(qwen, tmp_path):
    with pytest.raises(ValueError, match=r"keep: 'model.layer.0.\*' matches no linear layer; names look like model"):
        quantize_checkpoint(qwen, tmp_path / "out", keep=["model.layer.0.*"])


def test_patterns_that_keep_all_are_refused(qwen, tmp_path):
    with pytest.raises(ValueError, match=r"keep: '\*' leave no linear layer to pack"):
        quantize_checkpoint(qwen, tmp_path / "out", keep=["*"])
    assert not list(tmp_path.glob("out*"))


def test_columns_that_are_no_whole_blocks_are_named(tmp_path):
    weights = {"model.layers.0.self_attn.o_proj.weight": torch.ones(64, 72).bfloat16()}
    folder = write(tmp_path / "in", {"model.safetensors": weights}, {})
    with pytest.raises(ValueError, match=r"nvfp4 can hold none of .*: .*o_proj.weight, for one, .* \[64, 72\]"):
        quantize_checkpoint(folder, tmp_path / "out")


def test_a_fused_group_is_kept_whole(qwen, tmp_path):
    with pytest.raises(ValueError, match=r"q_proj, .*k_proj, .*v_proj are one product"):
        quantize_checkpoint(qwen, tmp_path / "out", keep=["*.0.self_attn.k_proj"])


# Folders of other writers


@pytest.mark.parametrize("style", ["config.json", "hf_quant_config.json"])
def test_modelopt(style, tmp_path):
    name = "model.layers.0.mlp.down_proj"
    t = quantize(torch.randn(16, 64), scale="amax")
    tensors = {
        f"{name}.weight": t.packed,
        f"{name}.weight_scale": t.block_scale,
        f"{name}.weight_scale_2": t.global_scale.reshape(()),
        f"{name}.input_scale": torch.tensor(0.5),
        "model.norm.weight": torch.ones(64),
    }
    quantization = {"quant_algo": "NVFP4", "group_size": 16}
    in_config = {"quantization_config": {"quant_method": "modelopt", **quantization}}
    write(tmp_path / "in", {"model.safetensors": tensors}, in_config if style == "config.json" else {})
    if style == "hf_quant_config.json":
        (tmp_path / "in" / style).write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
        )
    checkpoint = Checkpoint(tmp_path / "in")
    assert checkpoint.quantization == ("modelopt", "nvfp4")
    assert checkpoint.is_packed(name) and not checkpoint.is_packed("model.norm")
    assert same(checkpoint.codes(name), t)


def compressed_folder(folder: Path, parts: dict[str, NVFP4Tensor], **changes: torch.Tensor) -> Path:
    tensors = {}
    for name, t in parts.items():
        tensors |= {f"{name}.weight_packed": t.packed, f"{name}.weight_scale": t.block_scale}
        tensors[f"{name}.weight_global_scale"] = 1 / t.global_scale
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}
    return write(folder, {"model.safetensors": tensors | changes}, config)


def test_fused_parts_with_different_global_scales_load_exactly(tmp_path):
    torch.manual_seed(0)
    parts = {
        f"layers.0.self_attn.{p}_proj": quantize(torch.randn(16, 32), global_scale=1 / torch.tensor([800.0 + 7 * i]))
        for i, p in enumerate("qkv")
    }
    checkpoint = Checkpoint(compressed_folder(tmp_path / "in", parts))
    read = [checkpoint.codes(name) for name in parts]
    assert len({t.global_scale.item() for t in read}) == 3
    dense, scale = pack(read).dequantize()
    assert torch.equal(dense * scale[:, None], torch.cat([dequantize(t) for t in parts.values()]))


# Mistakes and damage


def test_not_a_model_folder(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON object"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ValueError, match="only safetensors are read"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    with pytest.raises(ValueError, match=r"index\.json has no weight_map from tensors to shards"):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_named(qwen, tmp_path):
    folder = resharded(qwen, tmp_path / "in", 3)
    (folder / "model-2-of-3.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-2-of-3\.safetensors is missing"):
        Checkpoint(folder)


@pytest.mark.parametrize("length", [0, 5, -1])
def test_a_truncated_shard_is_named(qwen, tmp_path, length):
    folder = resharded(qwen, tmp_path / "in", 3)
    file = folder / "model-3-of-3.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model-3-of-3\.safetensors is damaged or cut off"):
        Checkpoint(folder)


def test_a_tensor_that_the_index_promises_is_named(qwen, tmp_path):
    folder = resharded(qwen, tmp_path / "in", 2)
    file = folder / "model-1-of-2.safetensors"
    tensors = load_file(file)
    tensors["other"] = tensors.pop("lm_head.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"model-1-of-2\.safetensors lacks lm_head\.weight, which model"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"group_size": 32}}},
        },
        *(
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": weights}},
            }
            for weights in ({"num_bits": 8, "type": "int", "group_size": 16}, {"num_bits": 8, "type": "float"}, None)
        ),
    ],
)
def test_an_unknown_quantization_is_named(config, tmp_path):
    folder = write(tmp_path / "in", {"model.safetensors": layer_weights()}, {"quantization_config": config})
    with pytest.raises(ValueError, match=rf"quantized as .*{config['quant_method']}.*not understood"):
        Checkpoint(folder)


def test_a_quantization_that_is_no_object_is_refused(tmp_path):
    folder = write(tmp_path / "in", {"model.safetensors": layer_weights()}, {"quantization_config": "nvfp4"})
    with pytest.raises(ValueError, match=r"config\.json: quantization_config is 'nvfp4', and no object"):
        Checkpoint(folder)


def test_rotated_weights_are_refused(tmp_path):
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    config |= {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}}
    folder = write(tmp_path / "in", {"model.safetensors": layer_weights()}, {"quantization_config": config})
    with pytest.raises(ValueError, match="wants transforms of its activations"):
        Checkpoint(folder)


def test_a_missing_tensor_is_named(packed):
    checkpoint = Checkpoint(packed)
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.9\.up"):
        checkpoint.tensor("model.layers.9.up")
    with pytest.raises(ValueError, match=r"has no tensor model\.norm\.weight_packed"):
        checkpoint.codes("model.norm")


def test_a_wrong_dtype_is_named(packed, tmp_path):
    with pytest.raises(
        ValueError, match=r"model\.safetensors: .*q_proj\.weight_scale is torch\.float8_e4m3fn, where bf16"
    ):
        Checkpoint(packed).tensor("model.layers.0.self_attn.q_proj.weight_scale")
    source = write(
        tmp_path / "int8", {"model.safetensors": {"layers.0.up_proj.weight": torch.ones(16, 32).to(torch.int8)}}
    )
    with pytest.raises(ValueError, match=r"up_proj\.weight is torch\.int8, where bf16"):
        quantize_checkpoint(source, tmp_path / "out")
    t = {"layers.0.up_proj": quantize(torch.ones(16, 32))}
    changed = {"layers.0.up_proj.weight_packed": torch.ones(16, 16)}
    with pytest.raises(ValueError, match=r"up_proj\.weight_packed is torch\.float32, where torch\.uint8"):
        Checkpoint(compressed_folder(tmp_path / "in", t, **changed)).codes("layers.0.up_proj")


def fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "part, value, message",
    [
        ("scale", fp8(torch.ones(16, 1)), r"weight_scale has shape \[16, 1\], where \[16, 2\] was expected"),
        ("scale", fp8(torch.full((16, 2), -1.0)), "weight_scale has negative or NaN scales"),
        ("scale", fp8(torch.full((16, 2), torch.nan)), "weight_scale has negative or NaN scales"),
        ("global_scale", torch.zeros(1), r"weight_global_scale must be one positive number, is tensor\(\[0\.\]\)"),
        ("global_scale", torch.tensor([torch.inf]), "weight_global_scale must be one positive number"),
        ("global_scale", torch.ones(3), "weight_global_scale must be one positive number"),
    ],
)
def test_impossible_scales_are_named(part, value, message, tmp_path):
    t = {"layers.0.up_proj": quantize(torch.ones(16, 32))}
    folder = compressed_folder(tmp_path / "in", t, **{f"layers.0.up_proj.weight_{part}": value})
    with pytest.raises(ValueError, match=rf"model\.safetensors: layers\.0\.up_proj\.{message}"):
        Checkpoint(folder).codes("layers.0.up_proj")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_a_weight_is_named_and_leaves_nothing_behind(bad, tmp_path):
    tensors = layer_weights()
    tensors["model.layers.0.self_attn.v_proj.weight"][3, 5] = bad
    source = write(tmp_path / "in", {"model.safetensors": tensors})
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn\.v_proj\.weight contains"):
        quantize_checkpoint(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_nan_in_what_stays_dense_is_named(qwen, tmp_path):
    """Masks that old folders carry along may hold what they like, in any dtype."""
    tensors = load_file(qwen / "model.safetensors")
    masks = {"model.layers.0.self_attn.bias_mask": torch.full((2, 2), -torch.inf)}
    masks["model.layers.0.self_attn.seen"] = torch.tensor([True, False])
    source = write(tmp_path / "in", {"model.safetensors": tensors | masks})
    quantize_checkpoint(source, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[name], mask) for name, mask in masks.items())
    tensors["model.norm.weight"][3] = torch.nan
    with pytest.raises(ValueError, match=r"^model\.norm\.weight contains NaN"):
        quantize_checkpoint(write(tmp_path / "nan", {"model.safetensors": tensors}), tmp_path / "other")


def test_a_packed_source_and_an_existing_target_are_refused(qwen, packed, tmp_path):
    with pytest.raises(ValueError, match="is packed already"):
        quantize_checkpoint(packed, tmp_path / "out")
    with pytest.raises(ValueError, match="exists: remove it"):
        quantize_checkpoint(qwen, packed)


def test_a_folder_without_decoder_layers_is_refused(tmp_path):
    source = write(tmp_path / "in", {"model.safetensors": {"lm_head.weight": torch.ones(16, 32)}})
    with pytest.raises(ValueError, match="not a decoder model"):
        quantize_checkpoint(source, tmp_path / "out")


def cut_off(monkeypatch, source: Path, target: Path, at: int) -> list[str]:
    """Let a run end where it saves shard `at`; the files saved before."""
    seen: list[str] = []

    def dies(tensors, path, **options):
        assert not target.exists() and path.parent == target.with_name("out.partial")
        if len(seen) == at:
            raise KeyboardInterrupt
        seen.append(path.name)
        save_file(tensors, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", dies)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, target)
    assert not target.exists()
    return seen


def test_a_run_that_was_cut_off_goes_on(qwen, tmp_path, monkeypatch):
    """Only what was missing is made, and all bytes are those of a run in one go, also where products span shards."""
    source = resharded(qwen, tmp_path / "in", 4)
    quantize_checkpoint(source, tmp_path / "whole")
    assert cut_off(monkeypatch, source, tmp_path / "out", 2) == ["0.part", "1.part"]
    made, progress = [], []
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", lambda t, path, **o: (made.append(path.name), save_file(t, path, **o)))
        quantize_checkpoint(source, tmp_path / "out", progress=lambda done, total: progress.append(done / total))
    assert made == ["2.part", "3.part"] and 0.4 < progress[0] < 0.9 and progress[-1] == 1
    files = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == files
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    record = json.loads((tmp_path / "out" / module.RECORD).read_text())
    assert record["format"] == "nvfp4" and record["source"] == str(source)
    digests = {s: hashlib.sha256((source / s).read_bytes()).hexdigest() for s in Checkpoint(source).shards}
    assert record["sha256"] == digests


@pytest.mark.parametrize("change", ["options", "source", "not ours"])
def test_what_another_run_left_is_not_gone_on_with(qwen, tmp_path, monkeypatch, change):
    source = resharded(qwen, tmp_path / "in", 3)
    target, partial = tmp_path / "out", tmp_path / "out.partial"
    if change == "not ours":
        partial.mkdir()
        (partial / "model-9-of-9.safetensors").write_bytes(b"half")
    else:
        cut_off(monkeypatch, source, target, 1)
        assert (partial / "0.part").is_file()
    if change == "source":
        (source / Checkpoint(source).shards[0]).touch()
    made = []
    monkeypatch.setattr(module, "save_file", lambda t, path, **o: (made.append(path.name), save_file(t, path, **o)))
    quantize_checkpoint(source, target, format=NVFP4("amax" if change == "options" else "sweep"))
    assert made == ["0.part", "1.part", "2.part"] and not partial.exists()
    assert not (target / "model-9-of-9.safetensors").exists()
    assert Checkpoint(target).is_packed("model.layers.0.mlp.up_proj")


def test_a_full_disk(qwen, tmp_path, monkeypatch, caplog):
    """It is told before anything is done; where it fills up later, what is done stays for the next call."""
    needs = sum(file.stat().st_size for file in packed_files(qwen, tmp_path / "whole"))
    usage, free = shutil.disk_usage(tmp_path), [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[0]))
    free[0] = int(0.9 * needs)
    with pytest.raises(ValueError, match=r"out takes about .* GB, and .* GB are free there: make room first"):
        quantize_checkpoint(qwen, tmp_path / "out")
    free[0] = int(1.1 * needs)
    cut_off(monkeypatch, resharded(qwen, tmp_path / "in", 3), tmp_path / "out", 2)
    assert "out.partial keeps what is done: the same command goes on with it" in caplog.text
    free[0] = needs // 2  # what is there already needs no room

    def fills_up(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fills_up)
        with pytest.raises(OSError, match=r"out.partial: a shard of 0.0 GB could not be written .*No space left"):
            quantize_checkpoint(tmp_path / "in", tmp_path / "out")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out")
    assert Checkpoint(tmp_path / "out").is_packed("model.layers.0.mlp.up_proj")


def packed_files(source: Path, target: Path) -> list[Path]:
    quantize_checkpoint(source, target)
    return list(target.glob("*.safetensors"))


def test_two_runs_do_not_write_one_folder(qwen, tmp_path):
    with module.staged(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=r"out.partial is being written by another process"):
            quantize_checkpoint(qwen, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]


def test_a_run_that_saved_nothing_leaves_nothing(qwen, tmp_path, monkeypatch):
    cut_off(monkeypatch, qwen, tmp_path / "out", 0)
    assert not (tmp_path / "out.partial").exists()
