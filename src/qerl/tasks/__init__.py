"""Where problems come from: data, prompts, graders and rewards.

    load_task(config.task, seed) -> Task: training problems by index, held-out problems, rewards, a grader

| file | what it is |
|---|---|
| `arithmetic.py` | generated chains of sums, endless |
| `data.py` | GSM8K, MATH, Big-Math, MATH-500, AIME, AMC, and a user's own data; rows come from `table.py` |
| `rows.py` | rows of a Python program |
| `reasoning.py` | the generators of reasoning-gym |
| `prompts.py` | the system message and the think and answer tags |
| `graders.py` | graders by name: `numbers.py`; `math_grader.py` with its `math_pool.py` and `math_worker.py` |
| `rewards.py` | reward functions: loading, calling, checking, summing; `reward_functions.py` the built-in ones |

A task knows neither tokens nor the order of training: the rollout draws indices, shuffles epochs, and encodes prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from qerl.config import TaskConfig
from qerl.tasks.arithmetic import ArithmeticTask
from qerl.tasks.data import LAYOUTS, DataTask
from qerl.tasks.reasoning import PREFIX, ReasoningGymTask
from qerl.tasks.rewards import RewardSpec
from qerl.types import Example

TASKS = ("arithmetic", *LAYOUTS)

# Settings of [task] that only some tasks read, and which; setting one for another task is an error.
MATH_LIKE = ("math", "math500", "aime", "amc")
TRAINING_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if not layout.evaluation_only)
READ_BY = {
    "path": tuple(LAYOUTS),
    "subset": tuple(LAYOUTS),
    "split": TRAINING_LAYOUTS,
    "eval_path": tuple(LAYOUTS),
    "eval_split": tuple(LAYOUTS),
    "held_out_share": TRAINING_LAYOUTS,
    "difficulty": ("arithmetic",),
    "levels": MATH_LIKE,
    "subjects": MATH_LIKE,
    "sources": ("bigmath",),
    "solve_rate": ("bigmath",),
    "prompt_column": ("data",),
    "answer_column": ("data",),
    "grader": tuple(LAYOUTS),
    "percent": tuple(LAYOUTS),
    "options": (PREFIX,),
}


@runtime_checkable  # for the run-time type checks of the tests
class Task(Protocol):
    """A set of problems with a way to pay for completions and a way to grade them.

    Every example of a task has the same columns. A task's state is nothing but its arguments, so that a position in the
    training problems is all that a resumed run needs.
    """

    @property
    def name(self) -> str:
        """Name in `task.name`."""
        ...

    @property
    def num_train_examples(self) -> int | None:
        """Number of training problems; None when they are endless."""
        ...

    @property
    def num_eval_examples(self) -> int | None:
        """Number of held-out problems; None when they are generated, as many as are asked for."""
        ...

    @property
    def reward_functions(self) -> Sequence[RewardSpec]:
        """What a completion is paid for when `rewards.functions` names nothing else."""
        ...

    def train_example(self, index: int) -> Example:
        """Return training problem `index`: same index, same problem, in any order of calls."""
        ...

    def eval_examples(self, n: int) -> list[Example]:
        """Return `n` problems that are never trained on, the same for every seed; ValueError when too few exist."""
        ...

    def grade_batch(
        self, texts: Sequence[str], columns: Sequence[Mapping[str, Any]], *, require_tags: bool = True
    ) -> list[bool | None]:
        """Whether each completion is right, given its problem's columns: what accuracy counts.

        None: the grader could not tell; counted, never dropped. `require_tags=False` looks for the final answer outside
        the answer tags too.
        """
        ...


def load_task(config: TaskConfig, seed: int) -> Task:
    """Build the configured task; `seed` orders generated training problems. ValueError names the fix."""
    family = PREFIX if config.name.startswith(PREFIX) else config.name
    if family not in (*TASKS, PREFIX):
        raise ValueError(f"task.name: there is no task {config.name!r}; known are {', '.join(TASKS)}, {PREFIX}NAME")
    for key, names in READ_BY.items():
        if getattr(config, key) != TaskConfig.model_fields[key].default and family not in names:
            raise ValueError(f"task.{key} is read by {', '.join(names)}, not by {config.name!r}: take it out")
    if config.name == "arithmetic":
        return ArithmeticTask(difficulty=config.difficulty, seed=seed, system_prompt=config.system_prompt)
    if config.name in LAYOUTS:
        return DataTask(config)
    return ReasoningGymTask(config, seed=seed)
