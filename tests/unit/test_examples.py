"""Every example's configuration is valid, has a README that runs it, and says what it claims to say.

They run, at tiny size, in tests/e2e/test_docs_commands.py, as the commands of their READMEs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qerl.config import RunConfig, load_config
from qerl.tasks import load_task
from qerl.tasks.rewards import RewardRunner

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.rglob("*.toml"))
PAPER = [path for path in FILES if path.parent.name in ("gsm8k-3b-7b", "bigmath-14b-32b")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_an_example_is_valid_and_writes_to_a_folder_of_its_own(path):
    config = load_config(path)
    takes_a_model = "model.path=" in path.read_text()  # and does not take the embedded one where it is not given
    assert config.model.path.startswith("models/") if takes_a_model else config.model.path == "embedded"
    same = [other for other in FILES if load_config(other).output_dir == config.output_dir]
    assert same == [path]


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != EXAMPLES], ids=name_of)
def test_its_readme_runs_it(path):
    readme = (path.parent / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^qerl train {name_of(path)}( |$)", readme, re.MULTILINE)


def test_every_setting_of_a_comment_is_a_setting():
    """Comments give the command line: its overrides are checked with the file."""
    for path in FILES:
        comment = " ".join(line[1:].strip(" \\") for line in path.read_text().splitlines() if line.startswith("#"))
        overrides = re.findall(r"\b[a-z_]+\.[a-z_]+=\S+", comment)
        load_config(path, overrides)


def test_gsm8ks_pair_differs_in_the_base_and_the_noise_alone(tmp_path):
    nvfp4, bf16 = (load_config(EXAMPLES / "gsm8k-0.5b" / f"{name}.toml") for name in ("nvfp4", "bf16"))
    same = bf16.model_copy(update={name: getattr(nvfp4, name) for name in ("output_dir", "model", "noise")})
    assert same == nvfp4 and (nvfp4.noise.enabled, bf16.noise.enabled) == (True, False)
    for split, question in (("train", "7+8=?"), ("test", "8+7=?")):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"question": "{question}", "answer": "#### 15"}}\n')
    task = load_task(nvfp4.task.model_copy(update={"path": str(tmp_path)}), seed=0)
    rewards = RewardRunner.from_config(nvfp4.rewards, task, max_steps=1)
    texts = ["It is 15.", "<think>so</think><answer>15</answer>", "<think>so</think><answer>14</answer>", "It is 14."]
    scores = rewards.score(
        prompts=[[]] * 4,
        texts=texts,
        completion_ids=[[]] * 4,
        columns=[task.train_example(0).columns] * 4,
        step=0,
    )
    assert scores.totals == pytest.approx([1.0, 1.05, 0.05, 0.0])


def test_there_are_two_sizes_of_each_of_the_papers_runs():
    assert [path.name for path in PAPER] == ["14b.toml", "32b.toml", "3b.toml", "7b.toml"]


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_the_papers_settings(path):
    """The hyperparameters of arXiv 2510.11696 for 4-bit training."""
    config, gsm8k = load_config(path), "gsm8k" in path.parent.name
    optimizer, rollout, loss, noise = config.optimizer, config.rollout, config.loss, config.noise
    assert optimizer.learning_rate == 1e-5
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.99, 0.1)
    assert (optimizer.warmup_ratio, optimizer.lr_scheduler, optimizer.max_grad_norm) == (0.1, "cosine", 0.2)
    assert rollout.prompts_per_step * rollout.num_generations == 128
    assert rollout.num_generations == (8 if gsm8k else 16)
    assert rollout.max_completion_length == (4096 if gsm8k else 8192)
    assert (rollout.temperature, rollout.top_p) == (1, 1)
    assert loss.type == ("grpo" if gsm8k else "dapo")
    assert (loss.epsilon, loss.epsilon_high, loss.beta) == (0.2, 0.28, 0)
    assert loss.updates_per_rollout == (4 if gsm8k else 1)
    assert (noise.schedule, noise.sigma_start, noise.sigma_end, noise.num_stages) == ("exponential", 1e-2, 5e-4, 10)
    assert (config.lora.r, config.model.format) == (32, "nvfp4")
    assert (config.eval.temperature, config.eval.top_p) == (0.6, 0.95)
    assert config.task.name == ("gsm8k" if gsm8k else "bigmath")


def test_two_sizes_differ_in_size_alone():
    differing = {"output_dir", "model.path", "rollout.kv_cache_tokens"}
    for one, other in (PAPER[:2], PAPER[2:]):
        a, b = (load_config(path).model_dump() for path in (one, other))
        different = {key for key in a if not isinstance(a[key], dict) and a[key] != b[key]}
        different |= {f"{s}.{key}" for s in a if isinstance(a[s], dict) for key in a[s] if a[s][key] != b[s][key]}
        assert different <= differing


# ------------------------------------------------------------------ your own reward


@pytest.fixture
def own(monkeypatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return load_config(EXAMPLES / "your-own-reward" / "run.toml")


def test_the_data_are_right(own):
    task = load_task(own.task, seed=0)
    assert (task.num_train_examples, task.num_eval_examples) == (240, 60)
    examples = [*map(task.train_example, range(240)), *task.eval_examples(60)]
    for example in examples:
        assert eval(example.prompt[-1]["content"].removesuffix("=?")) == example.columns["total"]
    assert own.eval.num_problems == 60


@pytest.mark.parametrize(
    ("text", "right", "true"),
    [
        ("<think>12+7=19 19-4=15</think><answer>15</answer>", 1, 1),
        ("<think>12+7=18 18-4=14</think><answer>14</answer>", 0, 1 / 2),
        ("<think>12+7-4=15</think><answer>15</answer>", 1, 0),
        ("<think></think><answer>15</answer>", 1, 0),
        ("", 0, 0),
    ],
)
def test_the_rewards_pay_as_they_say(own, text, right, true):
    rewards = RewardRunner.from_config(own.rewards, load_task(own.task, seed=0), max_steps=1)
    scores = rewards.score(prompts=[[]], texts=[text], completion_ids=[[]], columns=[{"total": 15}], step=0)
    assert scores.parts["right_total"] == [right]
    assert scores.parts["true_steps"] == [true]
    assert scores.totals == [pytest.approx(right + 0.5 * true + 0.2 * scores.parts["format_reward"][0])]
