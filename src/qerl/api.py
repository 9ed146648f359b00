"""The training loop for Python programs and notebooks, with the arguments of TRL's trainers.

    Trainer(model=..., reward_funcs=[...], train_dataset=..., args=Config(...)).train()

    rows, functions, model -> RowsTask, RewardRunner, RunConfig -> rl/trainer.py, as `qerl train` runs it

What a config cannot hold is kept in it by name, for run.json and for the resumption of a run: a data set as
`train_dataset:<fingerprint>`, a function as `module:name`. Everything else, the files in `args.output_dir` included, is
as it is from a TOML file; docs/migrating.md says what differs from TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qerl.config import ModelConfig, RunConfig, TaskConfig
from qerl.display import Display
from qerl.rl import trainer
from qerl.rl.log import read_metrics
from qerl.tasks import Task, load_task
from qerl.tasks.rewards import RewardRunner, RewardSpec, load_reward, reward_specs
from qerl.tasks.rows import RowsTask, read_rows
from qerl.tasks.table import fingerprint

RewardFunction = Callable[..., Any]


class Trainer(trainer.Trainer):
    """One run. Building it loads the model; `train` trains it, and `model`, `tokenizer`, `output_dir` are there after.

    model: a folder, or "embedded"; default: `args.model.path`.
    reward_funcs: functions in TRL's signature, or their places as "module:function"; default: those of
        `args.rewards`, or the task's own.
    args: the settings; its weights and constants of `rewards` hold for `reward_funcs` as well.
    train_dataset: a datasets.Dataset or a list of dicts, with a column "prompt" (`args.task.prompt_column`) of text
        or chat messages; default: the task that `args.task` names.
    eval_dataset: the same, held out; its problems are graded by `args.task.grader`.
    resume: go on from the newest checkpoint in `args.output_dir`, with the same arguments.

    ValueError, before the model is loaded, for what does not fit together.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] | None = None,
        args: RunConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        resume: bool = False,
        display: Display | None = None,
    ) -> None:
        if args is not None and not isinstance(args, RunConfig):
            raise ValueError(
                f"args is a {type(args).__name__}: give a qerl.Config, whose names docs/migrating.md has beside TRL's"
            )
        config = (args or RunConfig()).model_copy(deep=True)
        if model is not None:
            _set_model(config.model, model)
        if train_dataset is not None:
            task: Task = _rows_task(config, train_dataset, eval_dataset)
        elif eval_dataset is None:
            task = load_task(config.task, config.seed)
        else:
            raise ValueError("eval_dataset goes with train_dataset; a task that args.task names holds out its own")
        rewards = _rewards(config, reward_funcs, task)
        super().__init__(config, task=task, rewards=rewards, resume=resume, display=display)

    def train(self) -> list[dict[str, Any]]:
        """Run to the last step; the lines of metrics.jsonl, one a step.

        Raises qerl.rl.trainer.Interrupted, with everything saved, when it is stopped.
        """
        super().train()
        return read_metrics(self.output_dir)


def _set_model(config: ModelConfig, model: Any) -> None:
    if not isinstance(model, str | Path):
        raise ValueError(f"model is a {type(model).__name__}: give its folder, which is loaded here, packed")
    path = str(model)
    if config.path not in (path, ModelConfig.model_fields["path"].default):
        raise ValueError(f"two models: model = {path!r} and args.model.path = {config.path!r}; give one")
    config.path = path


def _rows_task(config: RunConfig, train_dataset: Any, eval_dataset: Any) -> RowsTask:
    """The task over rows; the config is brought in line with it."""
    settings = config.task
    for key in ("name", "path", "eval_path"):
        if getattr(settings, key) not in (TaskConfig.model_fields[key].default, "data"):
            raise ValueError(f"args.task.{key} and train_dataset are two sources of problems: give one")
    rows = {"path": read_rows(train_dataset, "train_dataset"), "eval_path": []}
    if eval_dataset is not None:
        if settings.grader in (None, "none"):
            raise ValueError("eval_dataset is for accuracy, which needs a grader: set args.task.grader")
        rows["eval_path"] = read_rows(eval_dataset, "eval_dataset")
    else:
        config.eval.num_problems = 0
    settings.name = "data"
    settings.grader = settings.grader or "none"
    settings.system_prompt = settings.system_prompt or ""
    task = RowsTask(settings, rows["path"], rows["eval_path"])
    settings.path = f"train_dataset:{fingerprint(rows['path'])}"
    settings.eval_path = f"eval_dataset:{fingerprint(rows['eval_path'])}" if rows["eval_path"] else None
    return task


def _rewards(config: RunConfig, reward_funcs: Any, task: Task) -> RewardRunner:
    """What pays, with the weights, constants and time-out of the config, which then names the functions."""
    settings = config.rewards
    if reward_funcs is not None and settings.functions:
        raise ValueError("reward_funcs and args.rewards.functions both name functions: give one")
    if callable(reward_funcs) or isinstance(reward_funcs, str):
        reward_funcs = [reward_funcs]
    functions: list[Any] = list(settings.functions if reward_funcs is None else reward_funcs)
    functions = [load_reward(function) if isinstance(function, str) else function for function in functions]
    if other := [function for function in functions if not callable(function)]:
        raise ValueError(f"reward_funcs has {other[0]!r}, which is no function")
    plain_text = isinstance(task, RowsTask) and task.plain_text
    given = [RewardSpec(_name(function), function, plain_text=plain_text) for function in functions]
    if not given and not task.reward_functions:
        raise ValueError("nothing pays for completions: pass reward_funcs, or set args.task.grader")
    specs = reward_specs(settings.model_copy(update={"functions": []}), given or task.reward_functions)
    settings.functions = [f"{function.__module__}:{_name(function)}" for function in functions]
    columns = task.train_example(0).columns
    return RewardRunner(specs, columns=columns, max_steps=config.steps, timeout_s=settings.timeout_s)


def _name(function: Any) -> str:
    """What its metrics are called: the function's name, or its class's for another callable."""
    return getattr(function, "__name__", type(function).__name__)
