"""from_pretrained with our formats, and PEFT's own layers on such models: the unmodified libraries, on the CPU."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import peft
import pytest
import torch
from packaging.specifiers import SpecifierSet
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig

import qerl
from qerl.config import EMBEDDED, LoraConfig, ModelConfig
from qerl.formats.codes import format_named
from qerl.formats.folding import CALIBRATION_FILE
from qerl.formats.writing import quantize_checkpoint
from qerl.integrations.transformers import TRANSFORMERS_VERSIONS, HubLinear, packed_linears
from qerl.kernels.layout import unpack
from qerl.nn.linear import PackedLinear
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora

ROOT = Path(__file__).parents[3]
CONFIGS = {"nvfp4": qerl.NVFP4Config, "mxfp4": qerl.MXFP4Config}
TOKENS = torch.arange(5, 29).view(2, 12)
KEEP = "*.layers.0.mlp.down_proj"


def loaded(folder: Path = EMBEDDED, config=None, **options) -> PreTrainedModel:
    config = config or qerl.NVFP4Config()
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, **{"dtype": torch.float32} | options
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(scope="module", params=CONFIGS)
def packed(request, tmp_path_factory) -> tuple[str, Path]:
    """A folder that `qerl quantize` wrote."""
    folder = tmp_path_factory.mktemp("packed") / request.param
    quantize_checkpoint(EMBEDDED, folder, format=format_named(request.param), keep=[KEEP])
    return request.param, folder


# ------------------------------------------------------------------ transformers


@pytest.mark.parametrize("format", CONFIGS)
def test_quantised_while_loading_the_model_is_that_of_load_model(format):
    model = loaded(config=CONFIGS[format](scale="amax", keep=[KEEP]))
    settings = {"path": str(EMBEDDED), "format": format, "scale": "amax", "keep": [KEEP], "dtype": "float32"}
    ours, _ = load_model(ModelConfig.model_validate(settings))
    wanted = {name: module for name, module in ours.named_modules() if isinstance(module, PackedLinear)}
    assert [name for name, _ in packed_linears(model)] == list(wanted) and len(wanted) == 27
    for name, linear in packed_linears(model):
        for a, b in zip(linear.codes(), unpack(wanted[name].packed), strict=True):
            assert torch.equal(as_bytes(a), as_bytes(b)), name
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, ours(TOKENS).logits, rtol=1e-4, atol=1e-4)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.packed.storage is attention.v_proj.packed.storage  # one product for the engine


@pytest.mark.parametrize("given", [True, False], ids=["config", "no config"])
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_packed_folders_load_as_stored_and_are_saved_so_again(packed, tmp_path, given):
    format, folder = packed
    options = {"quantization_config": CONFIGS[format]()} if given else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert isinstance(model.config.quantization_config, CONFIGS[format])
    assert len(packed_linears(model)) == 27 and model.dtype == torch.bfloat16
    assert not isinstance(model.model.layers[0].mlp.down_proj, HubLinear)
    model.save_pretrained(tmp_path / "again")

    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(as_bytes(tensor), as_bytes(after[name])), name
    stored, again = (
        json.loads((path / "config.json").read_text())["quantization_config"] for path in (folder, tmp_path / "again")
    )
    stored["ignore"].remove("model.embed_tokens")  # no linear: nothing that loads the folder would pack it
    assert again == stored


def test_factors_that_are_not_saved_along_are_told(packed, tmp_path, caplog):
    _, folder = packed
    calibrated = tmp_path / "calibrated"
    (calibrated / CALIBRATION_FILE.parent).mkdir(parents=True)
    (calibrated / CALIBRATION_FILE).touch()
    for name, told in ((folder, 0), (calibrated, 1)):
        if told:
            for file in folder.iterdir():
                (calibrated / file.name).symlink_to(file)
        AutoModelForCausalLM.from_pretrained(name).save_pretrained(tmp_path / f"saved-{told}")
        assert caplog.text.count("channels.safetensors tells of, which is not written along: copy it") == told


def test_a_model_quantised_while_loading_is_saved_as_qerl_quantize_would(tmp_path):
    quantize_checkpoint(EMBEDDED, tmp_path / "command")
    loaded(dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    command, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("command", "saved"))
    assert all(torch.equal(as_bytes(tensor), as_bytes(saved[name])) for name, tensor in command.items())


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_device_maps_that_packed_weights_can_follow(device_map):
    model = loaded(device_map=device_map)
    torch.testing.assert_close(model(TOKENS).logits, loaded()(TOKENS).logits)


def test_generate_goes_on_as_the_dequantised_model_does():
    model, dense = loaded(), loaded()
    dense.dequantize()
    assert not packed_linears(dense) and not hasattr(dense.config, "quantization_config")
    torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-4, atol=1e-4)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(TOKENS, **greedy), dense.generate(TOKENS, **greedy))


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.keep: 'nothing' matches no linear layer"):
        loaded(config=qerl.NVFP4Config(keep=["nothing"]))
    with pytest.raises(ValueError, match="choose sweep or amax"):
        qerl.NVFP4Config(scale="best")
    with pytest.raises(ValueError, match="give a list of patterns"):
        qerl.NVFP4Config(keep=KEEP)
    with pytest.raises(ValueError, match='device_map is "meta"'):
        loaded(device_map="meta")
    with pytest.raises(ValueError, match=r"device_map spreads the model over cpu, disk"):
        loaded(device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path)
    config = json.loads((EMBEDDED / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(EMBEDDED / "model.safetensors")
    with pytest.raises(ValueError, match="packed by modelopt: qerl"):
        loaded(tmp_path)


def test_a_config_may_be_a_dict():
    settings = {"scale": "amax", "keep": [KEEP]}
    config = AutoQuantizationConfig.from_dict({"quant_method": "qerl_mxfp4", **settings})
    assert type(config) is qerl.MXFP4Config and (config.scale, config.keep) == ("amax", [KEEP])
    with pytest.raises(TypeError, match="kepe"):
        AutoQuantizationConfig.from_dict({"quant_method": "qerl_mxfp4", "kepe": [KEEP]})


def test_scales_that_no_quantiser_writes_are_refused(packed, tmp_path):
    _, folder = packed
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(folder / "model.safetensors")
    scale = next(tensor for name, tensor in tensors.items() if name.endswith("down_proj.weight_scale"))
    scale.view(torch.uint8)[0, 0] = 255  # NaN in both
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight_scale .*NaN"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_compressed_tensors_folders_stay_theirs(caplog):
    scheme = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}
    theirs = {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}  # fmt: skip
    assert type(AutoQuantizationConfig.from_dict(theirs)) is CompressedTensorsConfig
    w4a4 = qerl.NVFP4Config().to_dict()
    w4a4["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4}
    assert type(AutoQuantizationConfig.from_dict(w4a4)) is qerl.NVFP4Config
    assert "activations" in caplog.text


def test_the_tested_versions_are_those_that_are_promised():
    assert metadata.version("transformers") in SpecifierSet(TRANSFORMERS_VERSIONS)
    assert f"`{TRANSFORMERS_VERSIONS}`" in (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------ PEFT


def adapted(**settings) -> PeftModel:
    """PEFT's own layers on a packed model, B random."""
    torch.manual_seed(0)
    model = get_peft_model(loaded(), PeftConfig(r=4, target_modules="all-linear", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def gradients(model: PeftModel) -> dict[str, torch.Tensor]:
    model.train()
    model(TOKENS, labels=TOKENS).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in found.values())
    return found


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_adapters_train_are_saved_and_merge_only_into_dequantised_weights(kind, tmp_path):
    model, dense = adapted(**kind), adapted(**kind)
    dense.get_base_model().dequantize()
    for (name, ours), theirs in zip(gradients(model).items(), gradients(dense).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)
    logits = model.eval()(TOKENS).logits

    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(loaded(), tmp_path)
    torch.testing.assert_close(again(TOKENS).logits, logits)

    for merge in (model.merge_and_unload, lambda: model.merge_adapter(safe_merge=True)):
        with pytest.raises(ValueError, match=r"cannot be merged into packed weights.*dequantize\(\)"):
            merge()
        assert torch.equal(model(TOKENS).logits, logits)
    merged = dense.eval().merge_and_unload()
    torch.testing.assert_close(merged(TOKENS).logits, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["AdaLora", "IA3", "Vera", "RandLora", "OFT", "FourierFT", "Miss"])
def test_adapters_that_leave_the_weight_alone_compute_as_over_dequantised_weights(kind):
    settings = {
        "AdaLora": {"total_step": 10},
        "IA3": {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    }.get(kind, {})
    logits, grads = [], []
    for dequantised in (False, True):
        model = loaded()
        if dequantised:
            model.dequantize()
        torch.manual_seed(0)
        adapter = getattr(peft, f"{kind}Config")(**{"target_modules": ["q_proj"]} | settings)
        adapted = get_peft_model(model, adapter)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        logits.append(adapted(TOKENS).logits)
        grads.append(gradients(adapted))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    for (name, ours), theirs in zip(grads[0].items(), grads[1].values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)


def test_gradient_checkpointing_changes_no_gradient():
    model, again = adapted(), adapted()
    again.gradient_checkpointing_enable()
    again.enable_input_require_grads()
    for ours, theirs in zip(gradients(model).values(), gradients(again).values(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_adapter_that_we_trained_loads_on_such_a_model(tmp_path):
    ours, _ = load_model(ModelConfig.model_validate({"path": str(EMBEDDED), "dtype": "float32"}))
    trained = attach_lora(ours, LoraConfig(r=4, use_rslora=True), seed=0)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    trained.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(loaded(), tmp_path)(TOKENS).logits
        torch.testing.assert_close(theirs, trained(TOKENS).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(theirs, loaded()(TOKENS).logits, atol=1e-2)
