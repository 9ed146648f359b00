"""Exports of tiny runs: what is written, that other libraries read it, what is refused, and what rounding costs."""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import qerl.formats.writing as writing
from qerl.cli import app
from qerl.config import LoraConfig, ModelConfig, RunConfig
from qerl.export import RECORD, Merged, dithered, export, find_adapter
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import INT4, dequantize, format_named
from qerl.formats.nvfp4 import quantize as to_nvfp4
from qerl.formats.nvfp4 import shared_global_scale
from qerl.formats.writing import quantize_checkpoint
from qerl.nn.load import load_model, open_base
from qerl.nn.lora import attach_lora, attach_saved_adapter, read_adapter
from qerl.rl.checkpoint import save_adapter

sys.path.append(str(Path(__file__).parent / "nn"))
from tiny_models import save_model, tiny_model

IDS = torch.arange(3, 33)[None]
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
LORA = {"r": 4, "alpha": 8, "use_rslora": True, "rank_pattern": {"down_proj": 2}}


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> dict[str, Path]:
    """A folder of each family."""
    return {f: save_model(tiny_model(f), tmp_path_factory.mktemp(f) / "bf16") for f in ("qwen2", "qwen3", "llama")}


@pytest.fixture(scope="module")
def packed(bf16) -> Path:
    target = bf16["qwen2"].parent / "nvfp4"
    quantize_checkpoint(bf16["qwen2"], target)
    return target


def make_run(folder: Path, model: Path, *, format="nvfp4", size=0.05, lora=LORA, **options) -> Path:
    """An output_dir as a run leaves it, with an adapter that changes the model by about `size`."""
    settings = ModelConfig(path=str(model), format=format, device="cpu", **options)
    lora = LoraConfig(**lora)
    adapted = attach_lora(load_model(settings)[0], lora, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    save_adapter(adapted, folder / "adapter")
    config = RunConfig(model=settings, lora=lora)
    (folder / "run.json").write_text(json.dumps({"config": config.model_dump()}))
    return folder


@pytest.fixture(scope="module")
def run(bf16, tmp_path_factory) -> Path:
    """A run that quantised its bf16 base while it loaded, and trained norms."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", bf16["qwen2"], lora=LORA | {"train_norms": True})


def policy_logits(run: Path) -> torch.Tensor:
    """Of the model that was trained: packed, with its adapter, in fp32."""
    settings = find_adapter(run).model
    model = attach_saved_adapter(load_model(settings)[0], run / "adapter")
    with torch.no_grad():
        return model(IDS).logits


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return (model if hasattr(model, "hf_quantizer") else model.float())(IDS).logits.float()


def exact(run: Path) -> dict[str, torch.Tensor]:
    """W + scaling B A in fp32, from the files alone, W being the codes' values."""
    settings = find_adapter(run).model
    dense = load_file(Path(settings.path) / "model.safetensors")
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    weights = {}
    for layer in range(2):
        for group in (("self_attn", "qkv"), ("self_attn", "o"), ("mlp", ("gate", "up")), ("mlp", ("down",))):
            names = [f"model.layers.{layer}.{group[0]}.{part}_proj" for part in group[1]]
            shared = shared_global_scale([dense[f"{name}.weight"] for name in names], names)
            for name in names:
                a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
                scaling = 8 / len(a) ** 0.5  # rsLoRA, by the layer's own rank
                base = dequantize(to_nvfp4(dense[f"{name}.weight"], global_scale=shared))
                weights[f"{name}.weight"] = base + scaling * (b @ a)
    return weights


# ------------------------------------------------------------------------------------------------------------- adapter


def test_the_adapter_is_the_trained_one_bit_for_bit(run, tmp_path):
    result = export(run, tmp_path / "out", "adapter", device="cpu")
    assert {file.name for file in result.folder.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        RECORD,
    }
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (run / "adapter", tmp_path / "out"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert result.total is None and result.layers == []


def test_peft_loads_the_adapter_and_gives_the_policys_logits(run, bf16, tmp_path):
    """Over plain transformers with the dequantised base; and AutoPeft finds the base by itself."""
    export(run, tmp_path / "out", "adapter", device="cpu")
    dense = AutoModelForCausalLM.from_pretrained(bf16["qwen2"], dtype=torch.float32)
    base = open_base(find_adapter(run).model)
    for group in base.groups:
        for name, codes in zip(group.names, base.codes(group), strict=True):
            dense.get_parameter(f"{name}.weight").data.copy_(dequantize(codes))
    loaded = peft.PeftModel.from_pretrained(dense, tmp_path / "out").eval()
    torch.testing.assert_close(logits(loaded), policy_logits(run), atol=2e-4, rtol=2e-4)
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert auto.peft_config["default"].base_model_name_or_path == str(bf16["qwen2"])


def test_a_moved_base_is_written_into_the_adapters_config(run, bf16, tmp_path):
    moved = shutil.copytree(bf16["qwen2"], tmp_path / "moved")
    export(run, tmp_path / "out", "adapter", base_folder=moved, device="cpu")
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(moved)


# -------------------------------------------------------------------------------------------------------------- merged


def a_step_apart(rounded: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether each is one of the two bf16 numbers around the exact one."""
    down = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    up = ((exact.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    return bool(((rounded == down) | (rounded == up) & (exact != down)).all())


def test_merged_is_base_plus_adapter_rounded_once(run, bf16, tmp_path):
    export(run, tmp_path / "out", "merged", device="cpu")
    dense, merged = load_file(bf16["qwen2"] / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    expected, adapter = exact(run), load_file(run / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == dense.keys() and len(expected) == 14
    norms = [name for name in merged if "norm" in name]
    assert len(norms) == 5
    for name, tensor in merged.items():
        wanted = adapter[f"base_model.model.{name}"] if name in norms else expected.get(name, dense[name].float())
        assert tensor.dtype == torch.bfloat16 and a_step_apart(tensor.float(), wanted), name
        assert torch.equal(tensor, dense[name]) == (name not in expected and name not in norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dither_keeps_the_mean_and_what_is_on_the_grid(dtype):
    step = torch.finfo(dtype).eps
    low, high = torch.tensor([1.0, -1.5]), torch.tensor([1 + step, -1.5 - step])
    for share in (0.1, 0.5, 0.9):
        exact = torch.lerp(low, high, share).expand(20_000, 2).contiguous()
        rounded = dithered(exact, dtype, seed=1).float()
        assert ((rounded == low) | (rounded == high)).all()
        assert (((rounded - low) / (high - low)).mean(0) - share).abs().max() < 0.02
        assert torch.equal(rounded, dithered(exact, dtype, seed=1).float())
        assert not torch.equal(rounded, dithered(exact, dtype, seed=2).float())
    grid = torch.randn(10_000).to(dtype)
    assert torch.equal(dithered(grid.float(), dtype, seed=0), grid)


@pytest.mark.parametrize("format, options", [("nf4", {}), ("int4", {"group_size": 32})])
def test_a_base_without_a_fused_kernel_is_merged_from_its_codes(bf16, tmp_path, format, options):
    run = make_run(tmp_path / "run", bf16["qwen2"], format=format, lora={"r": 4}, **options)
    export(run, tmp_path / "out", "merged", device="cpu")
    ours, theirs = policy_logits(run), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (theirs - ours).norm() < 0.02 * ours.norm()
    plain = export(
        make_run(tmp_path / "run2", bf16["qwen2"], format="bf16", lora={"r": 4}), tmp_path / "out2", "merged"
    )
    assert (logits(AutoModelForCausalLM.from_pretrained(plain.folder)) - ours).norm() > 0.1 * ours.norm()


def test_transformers_loads_the_merged_folder_and_gives_the_policys_logits(run, tmp_path):
    export(run, tmp_path / "out", "merged", device="cpu")
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    ours = policy_logits(run)
    assert (theirs - ours).norm() < 0.02 * ours.norm()  # bf16 weights
    base = logits(AutoModelForCausalLM.from_pretrained(find_adapter(run).model.path))
    assert (theirs - base).norm() > 0.2 * ours.norm()
    model, tokenizer = load_model(ModelConfig(path=str(tmp_path / "out"), format="bf16", device="cpu"))
    assert torch.equal(logits(model), theirs) and tokenizer.eos_token == "<eos>"


def test_a_packed_base_gives_the_same_folder_as_the_bf16_one_it_was_made_of(bf16, packed, tmp_path):
    """Without the quantization in its config, and with a layer that was left dense as it is."""
    tensors = []
    for name, model in (("a", bf16["qwen2"]), ("b", packed)):
        export(make_run(tmp_path / name, model), tmp_path / f"{name}-out", "merged", device="cpu")
        tensors.append(load_file(tmp_path / f"{name}-out" / "model.safetensors"))
        config = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
        assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_kept_layers_and_layers_without_an_adapter(bf16, tmp_path):
    """A dense layer takes its adapter without a detour; a layer without one is the codes' value, or the file's."""
    lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    run = make_run(tmp_path / "run", bf16["llama"], lora=lora, keep=["*.0.mlp.down_proj", "*.1.mlp.*"])
    export(run, tmp_path / "out", "merged", device="cpu")
    dense, merged = load_file(bf16["llama"] / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    down, up = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{down}.lora_{part}.weight"] for part in "AB")
    assert a_step_apart(merged[f"{down}.weight"].float(), dense[f"{down}.weight"].float() + 2.0 * (b @ a))
    assert torch.equal(merged[f"{UP}.weight"], dense[f"{UP}.weight"])
    gate_up = [dense[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    shared = shared_global_scale(gate_up, ["gate", "up"])
    values = dequantize(to_nvfp4(dense[f"{up}.weight"], global_scale=shared), torch.bfloat16)
    assert torch.equal(merged[f"{up}.weight"], values) and not torch.equal(values, dense[f"{up}.weight"])


def resharded(source: Path, folder: Path, count: int) -> Path:
    tensors = load_file(source / "model.safetensors")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1}-of-{count}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_those_of_the_base_or_smaller(run, bf16, packed, tmp_path, monkeypatch):
    whole = load_file(export(run, tmp_path / "one", "merged", device="cpu").folder / "model.safetensors")
    for base in (bf16["qwen2"], packed):
        sharded = resharded(base, tmp_path / f"{base.name}-sharded", 3)
        folder = export(run, tmp_path / f"{base.name}-3", "merged", base_folder=sharded, device="cpu").folder
        many = Checkpoint(folder)
        assert many.shards == Checkpoint(sharded).shards and sorted(many.names()) == sorted(whole)
        assert all(torch.equal(many.tensor(name), whole[name]) for name in whole)
    monkeypatch.setattr(writing, "MAX_SHARD_BYTES", 30_000)
    many = Checkpoint(export(run, tmp_path / "cut", "merged", device="cpu").folder)
    assert len(many.shards) > 3 and many.shards[0] == f"model-00001-of-{len(many.shards):05d}.safetensors"
    largest = max(tensor.nbytes for tensor in whole.values())
    sizes = [sum(many.tensor(name).nbytes for name in many.names(shard)) for shard in many.shards]
    assert max(sizes) <= max(30_000, largest)
    assert all(torch.equal(many.tensor(name), whole[name]) for name in whole)
    index = json.loads((many.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    AutoModelForCausalLM.from_pretrained(many.folder)


def test_memory_holds_one_new_shard_and_one_tensor(run, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MAX_SHARD_BYTES", 30_000)
    alive: list[weakref.ref] = []
    most = 0

    def tensor(self, name):
        nonlocal most
        made = original(self, name)
        alive.append(weakref.ref(made))
        most = max(most, sum(t.nbytes for ref in alive if (t := ref()) is not None))
        return made

    original = Merged.tensor
    monkeypatch.setattr(Merged, "tensor", tensor)
    folder = export(run, tmp_path / "out", "merged", device="cpu").folder
    largest = max(t.nbytes for file in folder.glob("*.safetensors") for t in load_file(file).values())
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert most <= 30_000 + 2 * largest < total / 2


# --------------------------------------------------------------------------------------------------------- requantized


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_requantized_is_the_merged_model_quantised(run, bf16, tmp_path, format):
    """Of the sum in fp32, which is not rounded to 16 bits on the way."""
    shutil.copytree(bf16["qwen2"], tmp_path / "exact")
    merged, weights = export(run, tmp_path / "merged", "merged", device="cpu").folder, exact(run)
    norms = load_file(merged / "model.safetensors")
    save_file(norms | weights, tmp_path / "exact" / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(tmp_path / "exact", tmp_path / "twice", format=format_named(format))
    result = export(run, tmp_path / "once", "requantized", format=format, device="cpu")
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys() and any(name.endswith("weight_packed") for name in once)
    assert all(torch.equal(once[n].view(torch.uint8), twice[n].view(torch.uint8)) for n in once)
    assert json.loads((tmp_path / "once" / "config.json").read_text()) == json.loads(
        (tmp_path / "twice" / "config.json").read_text()
    )
    checkpoint = Checkpoint(tmp_path / "once")
    assert len(result.layers) == 14
    for layer in result.layers:
        w = weights[f"{layer.name}.weight"].double()
        error = dequantize(checkpoint.codes(layer.name)).double() - w
        assert layer.sqnr_db == pytest.approx(10 * torch.log10(w.square().sum() / error.square().sum()).item())
        assert 15 < layer.sqnr_db < 25


def test_an_int4_run_is_requantized_with_its_own_settings(bf16, tmp_path):
    run = make_run(tmp_path / "run", bf16["qwen2"], format="int4", group_size=32, symmetric=True)
    folder = export(run, tmp_path / "out", "requantized", format="int4", device="cpu").folder
    assert Checkpoint(folder).format_of(Q) == INT4(32, symmetric=True)
    trained = policy_logits(run)
    ours = logits(load_model(ModelConfig(path=str(folder), format="int4", device="cpu"))[0])
    assert (ours - trained).norm() < 0.5 * trained.norm()


@pytest.mark.usefixtures("compressed_tensors_alone")
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_requantized_folder_loads_here_and_in_transformers(run, tmp_path, format):
    folder = export(run, tmp_path / "out", "requantized", format=format, device="cpu").folder
    theirs = logits(AutoModelForCausalLM.from_pretrained(folder))
    ours = logits(load_model(ModelConfig(path=str(folder), format=format, device="cpu"))[0])
    assert (ours - theirs).norm() < 0.02 * ours.norm()  # theirs are rounded to bf16 when they are decompressed
    trained = policy_logits(run)
    assert (ours - trained).norm() < 0.5 * trained.norm()


def test_layers_that_the_run_kept_stay_dense(bf16, tmp_path):
    run = make_run(tmp_path / "run", bf16["qwen2"], keep=["*.1.mlp.down_proj"])
    checkpoint = Checkpoint(export(run, tmp_path / "out", "requantized", device="cpu").folder)
    assert not checkpoint.is_packed("model.layers.1.mlp.down_proj") and checkpoint.is_packed(UP)


def test_a_small_change_is_taken_back_by_the_codes_it_came_from(bf16, tmp_path):
    """On the codes' own grid a change below half a step rounds to nothing, although the SQNR looks good."""
    small = export(make_run(tmp_path / "s", bf16["qwen2"], size=1e-4), tmp_path / "s4", "requantized", device="cpu")
    large = export(make_run(tmp_path / "l", bf16["qwen2"], size=0.2), tmp_path / "l4", "requantized", device="cpu")
    assert small.total.sqnr_db > 30 and small.total.change_kept < 0.2 and small.total.change_snr_db < 1
    assert large.total.sqnr_db < 25 and large.total.change_kept == pytest.approx(1, abs=0.1)
    in_bf16 = export(tmp_path / "s", tmp_path / "s16", "merged", device="cpu")
    assert in_bf16.total.sqnr_db > 50 and in_bf16.total.change_kept == pytest.approx(1, abs=0.05)


def test_the_numbers_of_the_record(run, tmp_path):
    result = export(run, tmp_path / "out", "merged", device="cpu")
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert (record["kind"], record["run"], record["step"]) == ("merged", str(run), None)
    assert record["model"]["format"] == "nvfp4" and len(record["layers"]) == 14 + 5
    by_name = {layer["name"]: layer for layer in record["layers"]}
    merged, dense = load_file(tmp_path / "out" / "model.safetensors"), exact(run)
    w, written = dense[f"{Q}.weight"].double(), merged[f"{Q}.weight"].double()
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{Q}.lora_{part}.weight"].double() for part in "AB")
    change, error = 8 / 4**0.5 * (b @ a), written - w
    found = by_name[Q]
    assert found["sqnr_db"] == pytest.approx(10 * torch.log10(w.square().sum() / error.square().sum()).item(), abs=1e-3)
    ratio = change.square().sum() / error.square().sum()
    assert found["change_snr_db"] == pytest.approx(10 * torch.log10(ratio).item(), abs=1e-3)
    assert found["change_kept"] == pytest.approx((1 + (error * change).sum() / change.square().sum()).item(), abs=1e-4)
    assert record["total"]["sqnr_db"] == result.total.sqnr_db


# ------------------------------------------------------------------------------------------------------------ the run


def test_an_unfinished_run_gives_its_newest_checkpoint(run, tmp_path):
    unfinished = tmp_path / "unfinished"
    for step in (20, 40):
        folder = unfinished / "checkpoints" / f"step-{step:06d}"
        shutil.copytree(run / "adapter", folder / "adapter")
        config = json.loads((run / "run.json").read_text())["config"]
        (folder / "state.json").write_text(json.dumps({"step": step, "config": config}))
    assert find_adapter(unfinished).step == 40
    assert find_adapter(unfinished / "checkpoints" / "step-000020").step == 20
    result = export(unfinished, tmp_path / "out", "merged", device="cpu")
    assert json.loads((result.folder / RECORD).read_text())["step"] == 40


@pytest.mark.parametrize("kind", ["adapter", "merged", "requantized"])
def test_nothing_is_overwritten_and_nothing_half_done_stays(run, tmp_path, monkeypatch, kind):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"out exists: remove it"):
        export(run, tmp_path / "out", kind, device="cpu")
    assert list((tmp_path / "out").iterdir()) == []

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(writing, "save_file", fail)
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="disk full"):
        export(run, tmp_path / "other", kind, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_exported_is_refused_before_anything_is_written(run, bf16, tmp_path, monkeypatch):
    target = tmp_path / "out"

    def refused(folder, message, kind="merged", **options):
        with pytest.raises(ValueError, match=message):
            export(folder, target, kind, device="cpu", **options)
        assert not target.exists() and not list(tmp_path.glob("*.partial"))

    refused(tmp_path / "nowhere", "holds no adapter/ and no checkpoints/")
    refused(run, "is not the folder of a transformers model", base_folder=tmp_path / "nowhere")
    refused(run, "adapter_model.safetensors does not fit", base_folder=bf16["qwen3"], kind="adapter")

    damaged = shutil.copytree(run, tmp_path / "damaged")
    file = damaged / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, file)
    refused(damaged, "contains NaN or infinity")
    (damaged / "run.json").unlink()
    refused(damaged, "has no run.json")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(run, r"takes about .* GB, and 0\.0 GB are free")


def test_an_adapter_that_changes_nothing_is_told(bf16, tmp_path, caplog):
    run = make_run(tmp_path / "untrained", bf16["qwen2"], size=0.0)
    result = export(run, tmp_path / "out", "merged", device="cpu")
    assert "changes nothing: B is zero in every layer" in caplog.text
    assert result.total.change_kept is None and result.total.sqnr_db > 50


def test_a_damaged_base_is_named(run, bf16, tmp_path):
    damaged = shutil.copytree(bf16["qwen2"], tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight contains an infinity"):
        export(run, tmp_path / "out", "merged", base_folder=damaged, device="cpu")
    assert not (tmp_path / "out").exists()


def test_reading_an_adapter_leaves_the_model_alone(run):
    base = open_base(find_adapter(run).model)
    names = [name for name, _ in base.model.named_modules()]
    adapter = read_adapter(base.model, run / "adapter")
    assert [name for name, _ in base.model.named_modules()] == names
    assert len(adapter.factors) == 14 and len(adapter.norms) == 5
    assert adapter.factors[Q].scaling == 4.0 and adapter.factors[Q].a.shape == (4, 64)


# --------------------------------------------------------------------------------------------------------- the command


def command(*arguments: str):
    return CliRunner().invoke(app, ["export", *arguments])


def test_the_command_prints_what_was_lost(run, bf16, tmp_path):
    small = make_run(tmp_path / "small", bf16["qwen2"], size=1e-4)
    result = command(str(small), "--to", str(tmp_path / "out"), "--requantize", "nvfp4", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "requantized: " in result.output and "all  " in result.output and "Rounding took 100%" in result.output
    result = command(str(run), "--to", str(tmp_path / "out2"), "--merged", "--device", "cpu")
    assert "merged: " in result.output and "Rounding took" not in result.output
    result = command(str(run), "--to", str(tmp_path / "out3"), "--adapter")
    assert result.output.startswith("adapter: ") and "SQNR" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "choose one of --adapter, --merged, --requantize"),
        (["--adapter", "--merged"], "choose one of"),
        (["--requantize", "bf16"], "--requantize bf16: choose one of nvfp4, mxfp4, nf4, int4"),
    ],
)
def test_the_command_refuses(run, tmp_path, arguments, message):
    result = command(str(run), "--to", str(tmp_path / "out"), *arguments)
    assert message in str(result.exception) and not (tmp_path / "out").exists()
