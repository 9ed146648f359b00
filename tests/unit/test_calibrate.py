"""Calibration on tiny models: folding changes nothing, factors help, noise and adapters follow them, a cut goes on."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import qerl.calibrate as module
import qerl.formats.writing as writing
from qerl.calibrate import calibrate, calibrated_quantize
from qerl.cli import app
from qerl.config import EMBEDDED, LoraConfig, ModelConfig, RunConfig
from qerl.engine.norms import NormBuffers
from qerl.export import export
from qerl.formats import int4, mxfp4, nvfp4
from qerl.formats.awq import exact_in_norm, untied
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import dequantize, format_named
from qerl.formats.folding import CALIBRATION_FILE, Calibration, Fold, Folded, read_calibration, write_calibration
from qerl.formats.writing import quantize_checkpoint, write_dense
from qerl.inspection.text import compare_text
from qerl.inspection.weights import compare_weights, open_pair
from qerl.nn.attention import packed_forward
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora, attach_saved_adapter
from qerl.noise import NoiseDraw, applied, noise_sites, relative_noise
from qerl.rl.checkpoint import save_adapter

sys.path.append(str(Path(__file__).parent / "nn"))
from tiny_models import save_model, tiny_model

IDS, ENDS = torch.arange(3, 33), torch.tensor([0, 11, 30])
Q, NORM = "model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm"
TEXT = "".join(chr(33 + (i * i + i // 7) % 60) for i in range(2000))  # a token each, of ids below 97


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> dict[str, Path]:
    """Folders of several families; two channels of every layer's input are twenty times as large as the others."""
    folders = {}
    for family in ("qwen2", "qwen3", "phi3", "gpt_neox"):
        model = tiny_model(family)
        for name, parameter in model.named_parameters():
            if "layernorm" in name and name.endswith("weight"):
                parameter.data[3:5] *= 20
        folders[family] = save_model(model, tmp_path_factory.mktemp(family) / "bf16")
        for file in ("tokenizer.json", "tokenizer_config.json"):  # bytes; transformers has no Qwen tokenizer of words
            shutil.copyfile(EMBEDDED / file, folders[family] / file)
    return folders


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def folded(bf16) -> Path:
    """The Qwen2 with arbitrary factors in all four places of a layer, unquantised, as other code would find it."""
    tensors = load_file(bf16["qwen2"] / "model.safetensors")
    torch.manual_seed(5)

    def factors(size: int) -> torch.Tensor:
        return torch.exp(torch.randn(size))

    folds = {}
    for i in range(2):
        layer = f"model.layers.{i}"
        for norm, block, parts in (("input", "self_attn", "q k v"), ("post_attention", "mlp", "gate up")):
            name = f"{layer}.{norm}_layernorm"
            s = exact_in_norm(tensors[f"{name}.weight"], factors(64))
            folds[name] = Fold(outputs=s)
            folds |= {f"{layer}.{block}.{part}_proj": Fold(inputs=s) for part in parts.split()}
        s = factors(32)  # two heads of keys and values for four of queries
        folds[f"{layer}.self_attn.v_proj"] = folds[f"{layer}.self_attn.v_proj"]._replace(outputs=s)
        folds[f"{layer}.self_attn.o_proj"] = Fold(inputs=untied(s, 2, 4))
        s = factors(96)
        folds[f"{layer}.mlp.up_proj"] = folds[f"{layer}.mlp.up_proj"]._replace(outputs=s)
        folds[f"{layer}.mlp.down_proj"] = Fold(inputs=s)
    folder = bf16["qwen2"].parent / "folded"
    folder.mkdir()
    write_dense(Folded(Checkpoint(bf16["qwen2"]), folds), folder)
    write_calibration(folder, Calibration(folds, {}))
    return folder


def loaded(folder: Path, format: str = "bf16", **options) -> nn.Module:
    return load_model(ModelConfig(path=str(folder), format=format, device="cpu", **options))[0]


def hidden(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return packed_forward(model, IDS, ENDS)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-3) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


# -------------------------------------------------------------------------------------------------------------- folding


def test_folding_changes_nothing(bf16, folded):
    """Only v_proj's bias is rounded again: norms are exact by the choice of the factors."""
    assert close(hidden(loaded(folded)), hidden(loaded(bf16["qwen2"])))
    before, after = (load_file(folder / "model.safetensors") for folder in (bf16["qwen2"], folded))
    factors = read_calibration(folded).folds[NORM].outputs
    assert after[f"{NORM}.weight"].dtype == torch.bfloat16 and not torch.equal(
        *(t[f"{NORM}.weight"] for t in (before, after))
    )
    assert torch.allclose(after[f"{NORM}.weight"].float() * factors, before[f"{NORM}.weight"].float(), rtol=1e-6)


def test_noise_on_a_folded_norm_is_divided_by_its_factors(bf16, folded):
    """Loud noise: the two models agree under it, and would not if Z were added as it is."""
    before, after, draw = loaded(bf16["qwen2"]), loaded(folded), NoiseDraw(seed=1, step=2, sigma=0.5)
    with applied(before, draw):
        noisy = hidden(before)
    with applied(after, draw):
        assert close(hidden(after), noisy)
    assert not close(noisy, hidden(before), 0.1)
    assert relative_noise(after, draw) == pytest.approx(relative_noise(before, draw), rel=1e-5)
    for site in noise_sites(after):
        site.fold = None
    with applied(after, draw):
        assert not close(hidden(after), noisy, 0.1)


def test_the_engines_norms_do_the_same(bf16, folded):
    gains = []
    for folder in (bf16["qwen2"], folded):
        model = loaded(folder)
        sites = noise_sites(model)
        buffers = NormBuffers(sites, [model.model.norm])
        buffers.sync(NoiseDraw(seed=1, step=2, sigma=0.5, per="prompt"))
        factors = torch.stack([torch.ones(64) if site.fold is None else site.fold for site in sites])
        gains.append(torch.cat([buffers.shared, buffers.gains([7, 9], buffers.draw)], 1) * factors[:, None])
    assert torch.allclose(*gains, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_exported_for_the_model_before(bf16, folded, tmp_path):
    settings = ModelConfig(path=str(folded), format="bf16", device="cpu")
    lora = LoraConfig(r=4, alpha=8, train_norms=True)
    adapted = attach_lora(load_model(settings)[0], lora, seed=0)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    run = tmp_path / "run"
    save_adapter(adapted, run / "adapter")
    (run / "run.json").write_text(json.dumps({"config": RunConfig(model=settings, lora=lora).model_dump()}))
    export(run, tmp_path / "out", "adapter", unfold=True, device="cpu")
    export(run, tmp_path / "same", "adapter", device="cpu")
    before = loaded(bf16["qwen2"])
    plain = hidden(before)
    unfolded = hidden(attach_saved_adapter(before, tmp_path / "out"))
    assert close(unfolded, hidden(adapted), 4e-3) and not close(unfolded, plain, 0.1)
    assert not close(hidden(attach_saved_adapter(loaded(bf16["qwen2"]), tmp_path / "same")), unfolded, 0.1)
    with pytest.raises(ValueError, match="--unfold is for --adapter"):
        export(run, tmp_path / "merged", "merged", unfold=True, device="cpu")
    with pytest.raises(ValueError, match="nothing is folded into"):
        export(run, tmp_path / "no", "adapter", unfold=True, base_folder=bf16["qwen2"], device="cpu")
    export(run, tmp_path / "merged", "merged", device="cpu")  # as folded as its base
    assert read_calibration(tmp_path / "merged").folds.keys() == read_calibration(folded).folds.keys()


# -------------------------------------------------------------------------------------------------------------- factors


@pytest.mark.usefixtures("compressed_tensors_alone")
@pytest.mark.parametrize(("family", "format"), [("qwen2", "nvfp4"), ("qwen3", "mxfp4"), ("qwen2", "int4")])
def test_awq_brings_the_model_nearer(bf16, text, tmp_path, family, format):
    """On text that it was not calibrated on, and with no tensor at run time that was not there before."""
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    chosen, kl = format_named(format, group_size=32, symmetric=True), {}
    for kind in ("sweep", "awq"):
        if kind == "sweep":
            quantize_checkpoint(bf16[family], tmp_path / kind, format=chosen)
        else:
            options = {"format": chosen, "length": 64, "max_windows": 16, "device": "cpu"}
            report = calibrated_quantize(bf16[family], tmp_path / kind, text, **options)
            assert report["calibration_tokens"] == 1024 and report["awq_inputs"].endswith(" of 8 scaled")
        pair = open_pair(ModelConfig(path=str(tmp_path / kind), format=format, device="cpu"), bf16[family])
        kl[kind] = compare_text(*pair, other, length=64, max_windows=8).mean["kl"]
        found = compare_weights(*pair)  # of the model before, and not of what is stored
        assert 15 < found.total.sqnr_db < 25 and found.others == []
    assert kl["awq"] < 0.9 * kl["sweep"]
    names = [set(Checkpoint(tmp_path / kind).names()) for kind in kl]
    assert names[0] == names[1]
    with torch.no_grad():
        AutoModelForCausalLM.from_pretrained(tmp_path / "awq")(IDS[None])


def test_what_a_calibration_finds(bf16, text):
    """Every loss is no worse than without; importance is the mean square of what the folded model's layers see."""
    found = calibrate(bf16["qwen2"], text, length=64, max_windows=4, device="cpu")
    assert len(found.sites) == 8 and found.num_tokens == 256
    assert all(site.loss <= site.loss_before for site in found.sites)
    norm = next(site for site in found.sites if site.name == NORM)
    assert norm.alpha > 0 and norm.loss < 0.9 * norm.loss_before  # two channels stick out
    folds, importance = found.calibration
    inputs = folds[Q].inputs
    assert torch.equal(inputs, folds[NORM].outputs) and set(inputs.topk(2).indices.tolist()) == {3, 4}
    seen = []
    model = loaded(bf16["qwen2"])
    model.get_submodule(Q).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = load_tokens(bf16["qwen2"])
    with torch.no_grad():
        packed_forward(model, ids, torch.arange(0, 257, 64))
    assert torch.allclose(importance[Q], (seen[0].flatten(0, -2) / inputs).square().mean(0), rtol=1e-3)
    checkpoint = Checkpoint(bf16["qwen2"])
    for name in (name for name in folds if "norm" in name):  # w / s is a number of the folder's dtype
        before, after = (c.tensor(f"{name}.weight").float() for c in (checkpoint, Folded(checkpoint, folds)))
        assert torch.allclose(after * folds[name].outputs, before, rtol=1e-6, atol=0)


def load_tokens(folder: Path) -> torch.Tensor:
    tokenizer = load_model(ModelConfig(path=str(folder), format="bf16", device="cpu"))[1]
    return torch.tensor(tokenizer(TEXT)["input_ids"][:256])


def test_sites_with_a_kept_layer_are_left_alone(bf16, text):
    keep = ["*.0.self_attn.o_proj", "*.1.mlp.*"]
    found = calibrate(bf16["qwen2"], text, keep=keep, length=32, max_windows=2, device="cpu")
    assert [site.name.removeprefix("model.layers.") for site in found.sites] == [
        "0.input_layernorm",
        "0.post_attention_layernorm",
        "0.mlp.up_proj",
        "1.input_layernorm",
        "1.self_attn.v_proj",
    ]
    assert not any("0.self_attn.o_proj" in name or "1.mlp" in name for name in found.calibration.importance)


def test_fused_products(bf16, text):
    """Phi's qkv and gate_up read from norms, and nothing else is there to divide."""
    found = calibrate(bf16["phi3"], text, length=32, max_windows=2, device="cpu")
    assert {site.name.rpartition(".")[2] for site in found.sites} == {"input_layernorm", "post_attention_layernorm"}
    assert len(found.calibration.importance) == 8


def test_a_folder_of_fused_products_loads_as_it_was_written(bf16, tmp_path):
    quantize_checkpoint(bf16["phi3"], tmp_path / "packed")
    assert torch.equal(hidden(loaded(tmp_path / "packed", "nvfp4")), hidden(loaded(bf16["phi3"], "nvfp4")))


@pytest.mark.parametrize("quantize", [nvfp4.quantize, mxfp4.quantize, int4.quantize])
def test_importance_weighs_the_columns(quantize):
    torch.manual_seed(0)
    weight, importance = torch.randn(64, 128), torch.exp(2 * torch.randn(128))

    def error(weights: torch.Tensor | None, measure: torch.Tensor) -> float:
        codes = quantize(weight, scale="sweep", importance=weights)
        return ((dequantize(codes) - weight).square() * measure).sum().item()

    ones = torch.ones(128)
    assert error(importance, importance) < 0.97 * error(None, importance)
    assert error(None, ones) < error(importance, ones)
    for a, b in zip(
        quantize(weight, scale="sweep", importance=ones)[:2], quantize(weight, scale="sweep"), strict=False
    ):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_folded_is_refused(bf16, text, tmp_path, monkeypatch):
    options = {"length": 32, "max_windows": 2, "device": "cpu"}
    with pytest.raises(ValueError, match=r"AWQ: gpt_neox.layers.0 of GPTNeoX.* use --no-awq"):
        calibrate(bf16["gpt_neox"], text, **options)
    found = calibrate(bf16["gpt_neox"], text, awq=False, **options)
    assert len(found.calibration.importance) == 8 and not found.sites and not found.calibration.folds
    with pytest.raises(ValueError, match="--length 600 is beyond the model's context of 512 tokens"):
        calibrate(bf16["qwen2"], text, length=600, device="cpu")
    with pytest.raises(ValueError, match="there is no such file"):
        calibrated_quantize(bf16["qwen2"], tmp_path / "out", tmp_path / "nowhere.txt")
    monkeypatch.setattr(module, "SITES", (("input_layernorm", ("mlp.gate_proj", "mlp.up_proj")),))
    with pytest.raises(ValueError, match=r"layer 0 of Qwen2ForCausalLM is off by .* of what it adds"):
        calibrate(bf16["qwen2"], text, **options)


def test_a_folded_model_is_not_folded_again(folded, text, tmp_path):
    with pytest.raises(ValueError, match="has AWQ's factors in it already"):
        calibrated_quantize(folded, tmp_path / "out", text, length=32, max_windows=2, device="cpu")
    quantize_checkpoint(folded, tmp_path / "out")
    assert read_calibration(tmp_path / "out").folds.keys() == read_calibration(folded).folds.keys()


def test_a_damaged_file_of_factors(folded, tmp_path):
    for content, message in ((b"1234", "damaged or cut off"), (None, "no vector of finite numbers")):
        copy = tmp_path / message.split()[0]
        write_calibration_raw(copy, content)
        with pytest.raises(ValueError, match=message):
            read_calibration(copy)


def write_calibration_raw(folder: Path, content: bytes | None) -> None:
    (folder / CALIBRATION_FILE).parent.mkdir(parents=True)
    if content is not None:
        (folder / CALIBRATION_FILE).write_bytes(content)
    else:
        write_calibration(folder, Calibration({"m": Fold(inputs=torch.tensor([1.0, torch.nan]))}, {}))


# ---------------------------------------------------------------------------------------------------------- the command


def test_a_cut_goes_on_with_the_same_factors(bf16, text, tmp_path, monkeypatch):
    command = ["--calibrate", str(text), "--length", "32", "--windows", "2", "--device", "cpu"]
    whole = CliRunner().invoke(app, ["quantize", str(bf16["qwen2"]), str(tmp_path / "whole"), *command])
    assert whole.exit_code == 0 and "awq_inputs: " in whole.output, whole.exception

    def cut(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing, "save_file", cut)
        CliRunner().invoke(app, ["quantize", str(bf16["qwen2"]), str(tmp_path / "again"), *command])
    assert (tmp_path / "again.partial" / CALIBRATION_FILE).is_file()
    with monkeypatch.context() as patch:
        patch.setattr(module, "calibrate", cut)
        again = CliRunner().invoke(app, ["quantize", str(bf16["qwen2"]), str(tmp_path / "again"), *command])
    assert again.exit_code == 0, again.exception
    assert "awq_inputs: " not in again.output
    for file in ("model.safetensors", str(CALIBRATION_FILE), "qerl_quantize.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    shutil.rmtree(tmp_path / "whole" / "calibration")  # as `cp folder/* elsewhere` leaves it behind
    with pytest.raises(ValueError, match=r"channels.safetensors is missing, though qerl_quantize.json tells of"):
        loaded(tmp_path / "whole", "nvfp4")
    record = json.loads((tmp_path / "again" / "qerl_quantize.json").read_text())
    assert record["calibration"]["windows"] == 2 and record["calibration"]["awq"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scale", "weighted"], "name the text to weigh by"),
        (["--scale", "best"], "choose one of sweep, amax, weighted"),
        (["--calibrate", "TEXT", "--no-awq", "--scale", "sweep"], "--calibrate is of no use with --no-awq"),
        (["--calibrate", "TEXT", "--format", "nf4"], "nf4 has no choice of scales to calibrate"),
        (["--format", "bf16"], "--format bf16: choose one of nvfp4, mxfp4, nf4, int4"),
        (["--format", "nf4", "--scale", "amax"], "model.scale is a setting of nvfp4 and mxfp4 and int4, and"),
        (
            ["--format", "mxfp4", "--group-size", "64"],
            'model.group_size is a setting of int4, and model.format = "mxfp4"',
        ),
        (["--format", "int4", "--group-size", "48"], "model.group_size: Input should be 32, 64 or 128 (got 48)"),
    ],
)
def test_options_that_contradict_each_other(bf16, text, tmp_path, options, message):
    options = [str(text) if option == "TEXT" else option for option in options]
    result = CliRunner().invoke(app, ["quantize", str(bf16["qwen2"]), str(tmp_path / "out"), *options])
    assert message in str(result.exception) and not (tmp_path / "out").exists()
