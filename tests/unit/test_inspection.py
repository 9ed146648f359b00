"""`qerl inspect` on tiny models: numbers worked out again from whole models, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config import EMBEDDED, ModelConfig
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import dequantize, distortion, format_named
from qerl.formats.writing import quantize_checkpoint
from qerl.inspection.text import MEASURES, compare_text, read_windows
from qerl.inspection.weights import compare_weights, open_pair, stored_format
from qerl.nn.attention import packed_forward
from qerl.nn.linear import PackedLinear
from qerl.nn.load import load_model, open_base
from qerl.nn.stream import streamed
from qerl.nn.structure import decoder_layers
from qerl.report.inspection import as_json

sys.path.append(str(Path(__file__).parent / "nn"))
from tiny_models import save_model, tiny_model

KEPT = ["*.1.mlp.down_proj"]
IDS, ENDS = torch.arange(3, 33), torch.tensor([0, 11, 30])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Tiny models of three families; one of them and the embedded model packed too."""
    root = tmp_path_factory.mktemp("models")
    found = {family: save_model(tiny_model(family), root / family) for family in ("qwen2", "qwen3", "gpt_neox")}
    found["embedded"] = EMBEDDED
    for format in ("nvfp4", "mxfp4"):
        for source, name in (("qwen2", format), ("embedded", f"embedded-{format}")):
            found[name] = root / name
            quantize_checkpoint(found[source], found[name], format=format_named(format), keep=KEPT)
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Sums as the embedded model knows them, 150 tokens (characters) and more."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{a}+{a % 7}-4={a + a % 7 - 4}\n" for a in range(11, 30)))
    return file


def settings(folder: Path, format: str = "nvfp4", **options) -> ModelConfig:
    return ModelConfig(path=str(folder), format=format, device="cpu", **options)


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_sqnr_of_every_layer(folders, format):
    found = compare_weights(*open_pair(settings(folders[format], format), folders["qwen2"]))
    dense, checkpoint = load_file(folders["qwen2"] / "model.safetensors"), Checkpoint(folders[format])
    assert len(found.layers) == 14 and found.others == []
    signal = noise = 0.0
    for layer in found.layers:
        w = dense[f"{layer.name}.weight"].double()
        assert (layer.rows, layer.columns) == tuple(w.shape)
        signal += w.square().sum().item()
        if layer.name == "model.layers.1.mlp.down_proj":
            assert layer.distortion.sqnr_db == math.inf and layer.bits == 16
            continue
        error = (dequantize(checkpoint.codes(layer.name)).double() - w).square().sum().item()
        noise += error
        assert layer.distortion.sqnr_db == pytest.approx(10 * math.log10(w.square().sum().item() / error), abs=1e-4)
        assert 17 < layer.distortion.sqnr_db < 25
        assert layer.bits == pytest.approx({"nvfp4": 4.5, "mxfp4": 4.25}[format], abs=0.02)
    assert found.total.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
    assert [layer.distortion.sqnr_db for layer in found.worst] == sorted(
        layer.distortion.sqnr_db for layer in found.layers if layer.distortion.noise
    )
    assert {kind: len(layers) for kind, layers in found.by_kind.items()} == dict.fromkeys(found.by_kind, 2)
    json.dumps(as_json(found, None), allow_nan=False)
    assert [layer["name"] for layer in as_json(found, None)["layers"] if layer["sqnr_db"] is None] == [
        "model.layers.1.mlp.down_proj"
    ]


def test_a_bf16_folder_is_compared_with_itself(folders):
    """As a run would quantise it: the same codes as the packed folder has."""
    packed = compare_weights(*open_pair(settings(folders["nvfp4"]), folders["qwen2"]))
    while_loading = compare_weights(*open_pair(settings(folders["qwen2"], keep=KEPT), None))
    assert while_loading.layers == packed.layers
    nf4 = compare_weights(*open_pair(settings(folders["qwen2"], "nf4", keep=KEPT), None))
    assert 4.1 < nf4.layers[0].bits < 5 and packed.total.noise < nf4.total.noise < 4 * packed.total.noise
    amax = compare_weights(*open_pair(settings(folders["qwen2"], keep=KEPT, scale="amax"), None))
    assert amax.total.noise > 1.1 * packed.total.noise


def test_a_zero_matrix_and_an_exact_one():
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    assert distortion(one, one).sqnr_db == distortion(zero, zero).sqnr_db == math.inf
    assert distortion(zero, one).sqnr_db == -math.inf
    assert distortion(2 * one, one).sqnr_db == pytest.approx(10 * math.log10(4))
    assert distortion(one, zero) + distortion(2 * one, zero) == (30.0, 30.0)


def test_other_tensors_that_differ_are_named(folders, tmp_path):
    other = shutil.copytree(folders["qwen2"], tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert compare_weights(*open_pair(settings(folders["nvfp4"]), other)).others == ["model.norm.weight"]


# ---------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(("family", "format"), [("qwen2", "nvfp4"), ("qwen2", "bf16"), ("gpt_neox", "mxfp4")])
@torch.no_grad()
def test_a_streamed_model_computes_what_the_loaded_one_does(folders, family, format):
    expected = packed_forward(load_model(settings(folders[family], format))[0], IDS, ENDS)
    base = open_base(settings(folders[family], format))
    counts = []

    def count(*_):
        loaded = [
            isinstance(module, PackedLinear) or not module.weight.is_meta
            for module in decoder_layers(base.model).modules()
            if isinstance(module, nn.Linear)
        ]
        counts.append(sum(loaded))

    with streamed(base) as model:
        count()
        for layer in decoder_layers(model):
            layer.register_forward_pre_hook(count)  # after the one that loads
        assert torch.equal(packed_forward(model, IDS, ENDS), expected)
        assert torch.equal(packed_forward(model, IDS, ENDS), expected)  # and again
    count()
    linears = sum(len(group.names) for group in base.groups) // 2
    assert counts == [0, *[linears] * 4, 0]  # of one of two layers


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@torch.no_grad()
def test_measures_on_text_by_position(folders, text, format):
    pair = open_pair(settings(folders[f"embedded-{format}"], format), EMBEDDED)
    told: list[tuple[int, int]] = []
    found = compare_text(*pair, text, length=40, max_windows=3, progress=lambda *seen: told.append(seen))
    assert told == [(i, 8) for i in range(1, 9)]  # the layers of both
    assert (found.num_windows, found.num_tokens) == (3, 120)
    windows = torch.tensor(read_windows(text, AutoTokenizer.from_pretrained(EMBEDDED), 40, 3))
    ours = load_model(settings(folders[f"embedded-{format}"], format))[0]
    theirs = load_model(settings(EMBEDDED, "bf16"))[0]
    log_q, log_p = (model(windows).logits.double().log_softmax(-1) for model in (ours, theirs))
    p, q, targets = log_p.exp(), log_q.exp(), windows[:, 1:, None]
    expected = {
        "kl": (p * (log_p - log_q)).sum(-1),
        "agreement": (p.argmax(-1) == q.argmax(-1)).double(),
        "entropy": -(q * log_q).sum(-1),
        "reference_entropy": -(p * log_p).sum(-1),
        "nll": -log_q[:, :-1].gather(-1, targets).squeeze(-1),
        "reference_nll": -log_p[:, :-1].gather(-1, targets).squeeze(-1),
    }
    assert expected.keys() == set(MEASURES)
    for measure, values in expected.items():
        by_position = torch.tensor(found.by_position[measure], dtype=torch.float64)
        torch.testing.assert_close(by_position, values.mean(0), atol=2e-4, rtol=2e-4)
        assert found.mean[measure] == pytest.approx(values.mean().item(), abs=2e-4)
    assert 0.001 < found.mean["kl"] < 1 and 0.8 < found.mean["agreement"] <= 1


def test_a_model_against_itself_loses_nothing(text):
    found = compare_text(*open_pair(settings(EMBEDDED, "bf16"), None), text, length=20, max_windows=2)
    assert found.mean["kl"] == pytest.approx(0, abs=1e-6) and found.mean["agreement"] == 1
    assert found.mean["entropy"] == found.mean["reference_entropy"]


def test_windows(text, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    assert 120 < len(ids) < 200
    whole = [ids[i : i + 40] for i in range(0, len(ids) - 39, 40)]
    assert read_windows(text, tokenizer, 40, 9) == whole  # what is left of the text is left out
    assert read_windows(text, tokenizer, 40, 2) == whole[:2]
    assert read_windows(text, tokenizer, 400, 9) == [ids]

    words = Tokenizer(models.WordLevel({"<bos>": 0, "<unk>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    with_bos = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>")
    letters = tmp_path / "letters.txt"
    letters.write_text("a b b a a b b b a")
    assert read_windows(letters, with_bos, 4, 2) == [[0, 2, 3, 3], [0, 2, 2, 3]]
    short = tmp_path / "short.txt"
    short.write_text("5")
    with pytest.raises(ValueError, match="has 1 tokens: give a longer text"):
        read_windows(short, tokenizer, 40, 9)
    with pytest.raises(ValueError, match=r"nowhere\S* cannot be read as UTF-8 text"):
        read_windows(tmp_path / "nowhere", tokenizer, 40, 9)
    short.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="can't decode"):
        read_windows(short, tokenizer, 40, 9)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_compared(folders, tmp_path):
    assert (stored_format(str(folders["mxfp4"])), stored_format(str(folders["qwen2"]))) == ("mxfp4", None)
    with pytest.raises(ValueError, match=r"nvfp4 is packed: name the bf16 folder .* --against"):
        open_pair(settings(folders["nvfp4"]), None)
    with pytest.raises(ValueError, match=r"qwen3 is another model: .*_proj is \[\d+, 64\] there and \[\d+, \d+\] in"):
        open_pair(settings(folders["nvfp4"]), folders["qwen3"])
    with pytest.raises(ValueError, match=r"--against .*mxfp4 is packed itself \(mxfp4\): name the bf16 folder"):
        open_pair(settings(folders["nvfp4"]), folders["mxfp4"])
    long = tmp_path / "long.txt"
    long.write_text("5+" * 600)
    with pytest.raises(ValueError, match="beyond the model's context of 1024 tokens"):
        compare_text(*open_pair(settings(EMBEDDED), None), long, length=1025, max_windows=1)


# ---------------------------------------------------------------------------------------------------------- the command


def command(*arguments: str):
    return CliRunner().invoke(app, ["inspect", *arguments])


def test_the_command_on_the_embedded_model(text, tmp_path):
    files = [tmp_path / "found.json", tmp_path / "found.png"]
    result = command(
        "embedded",
        *("--text", str(text), "--length", "64", "--windows", "2", "--worst", "3", "--device", "cpu"),
        *("--json", str(files[0]), "--plot", str(files[1])),
    )
    assert result.exit_code == 0, result.exception
    lines = result.output.splitlines()
    assert any(line.split()[:2] == ["all", "28"] for line in lines)
    assert any(line.startswith("down_proj") for line in lines)
    assert sum(line.startswith("model.layers.") for line in lines) == 3
    assert [line.split()[0] for line in lines[-9:]] == [
        *("position", "all", "0", "1", "2-3", "4-7", "8-15", "16-31", "32-63")
    ]
    found = json.loads(files[0].read_text())
    assert found["format"] == "nvfp4" and len(found["layers"]) == 28 and 21 < found["sqnr_db"] < 23
    assert len(found["text"]["by_position"]["kl"]) == 64 and len(found["text"]["by_position"]["nll"]) == 63
    assert files[1].read_bytes()[:4] == b"\x89PNG"


def test_the_command_without_text(folders, tmp_path):
    result = command(str(folders["mxfp4"]), "--against", str(folders["qwen2"]), "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 0, result.exception
    assert "(mxfp4, " in result.output and "position" not in result.output and (tmp_path / "x.png").stat().st_size
    (down,) = [line.split() for line in result.output.splitlines() if line.startswith("down_proj")]
    assert down[-1] == "exact" and down[-2] != "exact"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "int3"], "--format int3: choose one of nvfp4, mxfp4, "),
        (["--json", "nowhere/x.json"], "nowhere/x.json: there is no folder nowhere"),
        (["--against", "nowhere"], "nowhere is not the folder of a transformers model"),
    ],
)
def test_the_command_refuses(arguments, message):
    assert message in str(command("embedded", *arguments).exception)


def test_a_reference_with_nan_is_refused_by_name(folders, tmp_path):
    source = Checkpoint(folders["qwen2"])
    broken = tmp_path / "broken"
    shutil.copytree(folders["qwen2"], broken)
    tensors = {name: source.tensor(name).clone() for name in source.names()}
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"{broken}: {name} has NaN or infinity")):
        compare_weights(*open_pair(ModelConfig(path=str(folders["nvfp4"]), format="nvfp4"), broken))
