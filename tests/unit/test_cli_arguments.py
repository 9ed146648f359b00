"""Arguments of the commands: what is refused before anything loads, and the end of a chat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from qerl import cli
from qerl.cli import app, complete_setting
from qerl.config import RunConfig


def qerl(*arguments: str, input: str | None = None):
    # Wide, so that no message is broken.
    return CliRunner().invoke(app, arguments, input=input, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


def test_a_shell_completes_settings_and_formats():
    assert [text for text, _ in complete_setting("noise.sigma_s")] == ["noise.sigma_start="]
    assert [text for text, _ in complete_setting("lora.r")] == ["lora.r=", "lora.rank_pattern="]
    assert {text for text, _ in complete_setting("rollout.engine=")} == {
        f"rollout.engine={e}" for e in ("auto", "qerl", "hf", "vllm")
    }
    assert complete_setting("examples/") == []  # the shell offers files then
    for text, _ in complete_setting(""):
        key, _, value = text.partition("=")
        section, _, name = key.rpartition(".")
        fields = type(getattr(RunConfig(), section) if section else RunConfig()).model_fields
        assert name in fields, text
        assert not value or value in map(str, get_args(fields[name].annotation))
    shell = {"_QERL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "qerl generate embedded --format mx"}
    assert "mxfp4" in CliRunner().invoke(app, [], env=shell, prog_name="qerl").output


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "0"],
        ["--max-new-tokens", "0"],
        ["--temperature", "-1"],
    ],
)
def test_numbers_out_of_range_are_refused(arguments):
    result = qerl("generate", "embedded", "1+1=?", *arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in result.output


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_format_that_is_none_is_refused_in_one_line(command):
    result = qerl(command, "embedded", "--format", "int3")
    assert str(result.exception) == "--format int3: choose one of nvfp4, mxfp4, nf4, int4, bf16"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["report", "no/such"], "no/such holds no metrics.jsonl"),
        (["train", "model.path=no/such"], "model.path: no/such is not the folder of a transformers model"),
        (["eval", "no/such", "--task", "arithmetic"], "model.path: no/such is not the folder of a transformers model"),
        (["generate", "no/such", "1+1=?"], "model.path: no/such is not the folder of a transformers model"),
        (["inspect", "no/such"], "model.path: no/such is not the folder of a transformers model"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_folder_that_is_not_there_is_told_before_torch_is_imported(command, words, tmp_path):
    code = (
        f"import sys, qerl.cli; sys.argv = {['qerl', *command]!r}\n"
        "try: qerl.cli.main()\nfinally: print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert words in ran.stderr and ran.returncode == 2 and ran.stdout == "False\n", ran


@pytest.mark.parametrize("option", [["--no-awq"], ["--awq"], ["--windows", "256"], ["--length", "64"]])
def test_what_is_of_a_calibration_is_refused_without_one(option, tmp_path):
    result = qerl("quantize", str(tmp_path), str(tmp_path / "out"), *option)
    assert "are of a calibration: name its text, --calibrate FILE" in str(result.exception)


def test_a_picture_of_no_known_kind_is_refused_before_anything_is_compared():
    result = qerl("inspect", "embedded", "--plot", "picture.foo")
    assert str(result.exception) == "--plot picture.foo: its name must end with .png, .svg, .pdf"


def test_greedy_decoding_is_no_temperature_of_an_evaluation():
    error = qerl("eval", "embedded", "--temperature", "0").exception
    assert isinstance(error, ValueError)
    assert "leave it out and use --greedy" in str(error)


def test_a_config_needs_no_file():
    result = qerl("config", "steps=7", "lora.r=8")
    assert result.exit_code == 0
    settings = json.loads(result.output)
    assert (settings["steps"], settings["lora"]["r"]) == (7, 8)


def test_a_file_whose_name_has_an_equals_sign_is_a_file(tmp_path):
    (tmp_path / "steps=9.toml").write_text("steps = 3\n")
    assert json.loads(qerl("config", str(tmp_path / "steps=9.toml"), "lora.r=8").output)["steps"] == 3


def test_the_end_of_the_input_ends_a_chat():
    result = qerl("generate", "embedded", "--max-new-tokens", "8", input="1+1=?\n")
    assert (result.exit_code, result.exception) == (0, None)
    assert result.output.startswith("An empty line or Ctrl-D ends the chat.")


def test_memory_that_runs_out_is_one_line(monkeypatch, capsys):
    def full() -> None:
        raise torch.OutOfMemoryError("no memory to sample")

    monkeypatch.setattr(cli, "app", full)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1 and capsys.readouterr().err == "qerl: no memory to sample\n"


def test_the_package_runs_as_the_command():
    ran = subprocess.run([sys.executable, "-m", "qerl", "--help"], capture_output=True, text=True, check=True)
    assert " train " in ran.stdout and " plan " in ran.stdout
