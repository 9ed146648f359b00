"""The commands of the documentation run, and its error messages are those of the code.

Every line of an `sh` block, and every line of an unlabelled one that starts with `qerl`, `make` or `python`, is one of

* `qerl ...`: its options and settings are checked as they are written; then it runs at tiny size (TINY), in a folder
  that looks like a clone with models, data and finished runs in it (`clone`), the commands of a page in their order;
* `make TARGET`, `python -m pytest PATH`, `python FILE`: target, variables, paths, options and markers exist;
* NOT_RUN, with a reason each.

A command of any other kind fails.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
import typer
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config import EMBEDDED, LoraConfig, ModelConfig, RunConfig, load_config, validate
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora, lora_factors
from qerl.rl.checkpoint import save_adapter
from qerl.tasks import load_task
from qerl.tasks.rewards import RewardRunner

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("examples/*/README.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)

NOT_RUN = {
    "source .venv/bin/activate": "the tests run inside an environment",
    "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct": "a gigabyte from the network",
    "pip install -e '.[reasoning-gym]'": "the network",
}

TINY = {
    "train": [
        "steps=2",
        "model.device=cpu",
        "rollout.prompts_per_step=2",
        "rollout.num_generations=2",
        "rollout.max_completion_length=8",
        "rollout.kv_cache_tokens=16384",
        "loss.max_resamples=1",
        "task.max_prompt_length=4096",
        "eval.num_problems=2",
        "eval.num_samples=1",
        "eval.greedy=false",
    ],
    "plan": ["rollout.max_completion_length=8"],
    "bench": [
        "--model",
        "tiny",
        "--completions",
        "4",
        "--group",
        "2",
        "--prompt",
        "8",
        "--new",
        "8",
        "--device",
        "cpu",
    ],
    "eval": ["--limit", "2", "--samples", "2", "--max-new-tokens", "8"],
    "generate": ["--max-new-tokens", "8"],
    "quantize": ["--device", "cpu"],
    "quantize --calibrate": ["--windows", "2", "--length", "16", "--device", "cpu"],
    "inspect": ["--windows", "2", "--length", "16", "--device", "cpu"],
}

SUMS = [(f"{a}+{b}=?", a + b) for a in (12, 15, 31) for b in range(4, 12)]
DATA = {  # what is in place of each path: rows of its format
    "data/gsm8k/train.jsonl": [{"question": p, "answer": f"It is.\n#### {n}"} for p, n in SUMS[:8]],
    "data/gsm8k/test.jsonl": [{"question": p, "answer": f"It is.\n#### {n}"} for p, n in SUMS[8:]],
    "data/math500/test.jsonl": [
        {"problem": p, "answer": str(n), "level": 1, "subject": "Algebra"} for p, n in SUMS[8:]
    ],
    "data/bigmath.parquet": [{"problem": p, "answer": str(n), "llama8b_solve_rate": 0.5} for p, n in SUMS[:8]],
    "data/mine.jsonl": [{"prompt": p, "answer": n} for p, n in SUMS],
}
MODELS = ("MODEL", "models/Qwen2.5-0.5B-Instruct", "models/Qwen2.5-1.5B-Instruct", "models/Qwen2.5-3B-Instruct",
          "models/Qwen2.5-7B-Instruct", "models/Qwen2.5-14B-Instruct", "models/Qwen2.5-32B-Instruct")  # fmt: skip
RUNS = ("runs/demo", "runs/gsm8k-0.5b", "runs/gsm8k-0.5b-nvfp4", "runs/gsm8k-7b", "runs/bigmath-14b")


def commands(page: Path) -> list[list[str]]:
    """The commands of a page, as words."""
    found = []
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            starts = re.match(r"(\.venv/bin/)?(qerl|make|python3?)\s", line)
            if line.strip() and (language == "sh" or (not language and starts)):
                found.append(shlex.split(line.removeprefix(".venv/bin/"), comments=True))
    return found


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """An adapter that changes the model, as one that was trained."""
    model, _ = load_model(ModelConfig(path="embedded", device="cpu"))
    model = attach_lora(model, LoraConfig(r=4), seed=0)
    with torch.no_grad():
        for factors in filter(None, map(lora_factors, model.modules())):
            factors.b.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    save_adapter(model, folder)
    return folder


@pytest.fixture
def clone(tmp_path, monkeypatch, adapter) -> Path:
    """A folder with the repository's files, and with models, data and adapters that the pages say a reader has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in MODELS:
        (tmp_path / name).symlink_to(EMBEDDED)
    for name, rows in DATA.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows)
    (tmp_path / "GSM8K").symlink_to(tmp_path / "data" / "gsm8k")
    (tmp_path / "ADAPTER").symlink_to(adapter)
    for name in RUNS:
        shutil.copytree(adapter, tmp_path / name / "adapter")
        run = {"config": RunConfig(model=ModelConfig(path="embedded", device="cpu")).model_dump()}
        (tmp_path / name / "run.json").write_text(json.dumps(run))
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "run.toml").write_text(blocks("your-data.md", "toml")[0])
    (tmp_path / "text.txt").write_text("".join(f"{p} {n}\n" for p, n in SUMS))
    (tmp_path / "my_rewards.py").write_text("".join(blocks("your-reward.md", "python")))
    return tmp_path


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [block for name, block in BLOCK.findall(text) if name == language]


def write_rows(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ------------------------------------------------------------------ commands


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_the_commands_run(page, clone):
    for words in commands(page):
        print(shlex.join(words))  # names the culprit when one fails
        if shlex.join(words) in NOT_RUN_WORDS:
            continue
        CHECKS[words[0]](*words[1:])


def qerl(*arguments: str) -> None:
    """Check a command's options and settings as they are written, then run it at tiny size."""
    name, *rest = arguments
    COMMANDS[name].make_context(name, list(rest))
    if name == "train":
        path, *overrides = [word for word in rest if not word.startswith("-")]
        load_config(path, overrides)
    if any("reasoning" in word for word in rest) and not find_spec("reasoning_gym"):
        return  # an extra; its options are checked, and the example's settings in tests/unit/test_examples.py
    calibrates = name == "quantize" and "--calibrate" in rest
    tiny = [] if "--from-parquet" in rest else TINY.get(f"{name} --calibrate" if calibrates else name, [])
    tiny = [*tiny, "--dry-run"] if "--cap" in rest else tiny  # which is of a GPU
    with patch("qerl.report.plot.plot_run") if name == "train" else nullcontext():  # half of a tiny run's time
        result = CliRunner().invoke(app, [name, *rest, *tiny])
    if result.exception is not None:
        raise result.exception


def make(*arguments: str) -> None:
    """Check targets and variables; run the `qerl` commands of a target's recipe."""
    text = (ROOT / "Makefile").read_text()
    for argument in arguments:
        variable, assigned, _ = argument.partition("=")
        if assigned:
            assert re.search(rf"^{variable} *\?=", text, re.MULTILINE), f"the Makefile has no variable {variable}"
            continue
        recipe = re.search(rf"^{argument}:.*\n((?:\t.*\n)*)", text, re.MULTILINE)
        assert recipe, f"the Makefile has no target {argument}"
        for command in re.findall(r"\$\(BIN\)/qerl (.*)", recipe[1]):
            qerl(*shlex.split(command))


def python(*arguments: str) -> None:
    """Check that files, options and markers exist."""
    if arguments[:2] == ("-m", "pytest"):
        options = pytest_help()
        markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
        known = {marker.partition(":")[0] for marker in markers}
        words = iter(arguments[2:])
        for word in words:
            if word == "-m":
                assert set(re.findall(r"\w+", next(words))) - {"not", "and", "or"} <= known
            elif word.startswith("-"):
                assert re.search(rf"^ +{word.partition('=')[0]}\b", options, re.MULTILINE), word
            else:
                assert (ROOT / word).exists(), word
        return
    script = ROOT / arguments[0]
    source = script.read_text()
    for word in arguments[1:]:
        assert not word.startswith("--") or f'"{word}"' in source, f"{script.name} has no option {word}"


@functools.cache
def pytest_help() -> str:
    return subprocess.run([sys.executable, "-m", "pytest", "--help"], capture_output=True, text=True, check=True).stdout


COMMANDS = typer.main.get_command(app).commands
CHECKS = {"qerl": qerl, "make": make, "python": python}
NOT_RUN_WORDS = {shlex.join(shlex.split(command)) for command in NOT_RUN}


def test_what_is_not_run_is_still_there():
    assert {shlex.join(words) for page in PAGES for words in commands(page)} >= NOT_RUN_WORDS


def test_a_command_of_no_kind_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\nqerl doctor \\\n    --now  # a comment\nnpm install\n```\n```\nprose\nmake demo\n```\n")
    assert commands(page) == [["qerl", "doctor", "--now"], ["npm", "install"], ["make", "demo"]]
    with pytest.raises(KeyError):
        CHECKS["npm"]
    with pytest.raises(Exception, match="No such option"):
        qerl("doctor", "--now")
    with pytest.raises(ValueError, match="unknown key"):
        qerl("train", str(ROOT / "examples" / "demo.toml"), "rolout.top_p=1")
    with pytest.raises(AssertionError, match="no target"):
        make("coffee")


# ------------------------------------------------------------------ what else the pages say


def test_the_examples_of_rewards_run(clone):
    for toml in map(tomllib.loads, blocks("your-reward.md", "toml")):
        config = validate(toml)
        runner = RewardRunner.from_config(config.rewards, load_task(config.task, seed=0), max_steps=1)
        scores = runner.score(
            prompts=[[], []],
            texts=["<think>4+1=5 5+2=8</think><answer>7</answer>", "none"],
            completion_ids=[[], []],
            columns=[{"problem": "4+1+2=?", "answer": "7", "solution": ""}] * 2,
            step=0,
        )
        assert scores.totals[0] > scores.totals[1] == 0
        assert not any(scores.failed.values())


def test_the_examples_of_data_load(clone):
    rows = [json.loads(line) for line in blocks("your-data.md", "json")[0].splitlines()]
    repeated = [row | {"prompt": f"{i}. {row['prompt']}"} for row in rows for i in range(10)]
    write_rows(clone / "data" / "mine.jsonl", repeated)
    lines = ["question,gold,hint", *(f"{a}+1=?,{a + 1},x" for a in range(20))]
    (clone / "data" / "mine.csv").write_text("\n".join(lines))
    for toml in map(tomllib.loads, blocks("your-data.md", "toml")):
        task = load_task(validate(toml).task, seed=0)
        example = task.train_example(0)
        assert example.prompt[-1]["role"] == "user"
        reference = example.columns[validate(toml).task.answer_column]
        assert task.grade_batch([f"<answer>{reference}</answer>"], [example.columns]) == [True]


def test_quoted_messages_are_those_of_the_code():
    quoted = [line for block in blocks("troubleshooting.md", "text") for line in block.splitlines()]
    assert len(quoted) > 20
    templates = message_templates()
    assert [line for line in quoted if not any(template.search(line) for template in templates)] == []


def message_templates() -> list[re.Pattern[str]]:
    """A pattern for each text in the source with at least 20 characters beside its placeholders."""
    templates = []
    for path in (ROOT / "src" / "qerl").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in pieces:  # a message is matched whole
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value.rstrip("\n") if isinstance(part, ast.Constant) else None for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                parts = [None if part.startswith("%") else part for part in re.split(r"(%[.\d]*[dsrg])", node.value)]
            else:
                continue
            if sum(len(part) for part in parts if part) >= 20:
                templates.append(re.compile("".join(".+" if part is None else re.escape(part) for part in parts)))
    return templates


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [path.name for path in ROOT.glob("docs/*.md") if path.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in index] == []
    examples = [path.parent.name for path in ROOT.glob("examples/*/README.md")]
    assert [name for name in examples if f"](../examples/{name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target
