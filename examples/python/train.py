"""A run from Python, cell by cell: rows, a reward function, a trainer, the trained model. See README.md."""

# %% Problems: a datasets.Dataset would do as well.
import random
import re

import qerl

rng = random.Random(0)
numbers = [(rng.randrange(10, 60), rng.randrange(10, 60), rng.randrange(2, 20)) for _ in range(300)]
SYSTEM = (
    "Solve the problem step by step. Write your reasoning between <think> and </think>, then only the final answer "
    "between <answer> and </answer>."
)
dataset = [
    {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a}+{b}-{c}=?"}],
        "answer": str(a + b - c),
    }
    for a, b, c in numbers
]


# %% Rewards, in TRL's signature: the data's columns come by name.
def right_answer(completions, answer, **kwargs):
    """Pay 1 for the answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(f"<answer>{wanted}</answer>" in text) for text, wanted in zip(texts, answer, strict=True)]


def shows_work(completions, **kwargs):
    """Pay 0.2 for a line of reasoning with a sum in it."""
    texts = [completion[0]["content"] for completion in completions]
    return [0.2 * bool(re.search(r"<think>.*\d=\d+.*</think>", text)) for text in texts]


# %% The run. Settings that are not named here keep their defaults: docs/configuration.md.
trainer = qerl.Trainer(
    model="embedded",
    reward_funcs=[right_answer, shows_work],
    args=qerl.Config(
        output_dir="runs/python",
        steps=15,
        task={"grader": "numeric"},
        rollout={"prompts_per_step": 16, "num_generations": 8, "max_completion_length": 48},
        optimizer={"learning_rate": 1e-3, "gradient_checkpointing": False},
        eval={"num_problems": 60, "num_samples": 4},
    ),
    train_dataset=dataset[60:],
    eval_dataset=dataset[:60],
)
log = trainer.train()
print(f"sampled accuracy {log[0]['eval/accuracy']:.1%} -> {log[-1]['eval/accuracy']:.1%}")

# %% What it learned: the adapter lies in output_dir, in PEFT's layout.
generator = qerl.Generator(trainer.config.model, trainer.output_dir / "adapter")
print(*generator(dataset[0]["prompt"], samples=2, max_new_tokens=48), sep="\n")
