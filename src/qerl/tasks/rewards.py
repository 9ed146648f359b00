"""Reward functions: how they are named, called, checked and summed. The built-in ones are in `reward_functions.py`.

    prompts, completions, columns -> each function's values -> sum over functions of weight * value

A reward function has TRL's signature, and may be asynchronous,

    def f(prompts, completions, **columns) -> list[float | None]
    async def f(prompts, completions, **columns) -> list[float | None]

and is called once a batch, by keyword, with lists of one entry a completion:
* `prompts`: chat messages, `[{"role": "user", "content": ...}]`;
* `completions`: the sampled turn as chat messages, `[{"role": "assistant", "content": text}]`;
* `completion_ids`: the token ids of each completion;
* every column of the data set by its name (`answer`, ...), one value a completion;
* `trainer_state`: not a list, an object with `global_step` and `max_steps`.
With `RewardSpec.plain_text`, prompts (their last message) and completions are plain strings instead.
A function without `**kwargs` is given only what it names, and the constants of `rewards.arguments`. What it names
without a default must exist, which is checked before a run starts.

Asynchronous functions of a batch run at the same time, on one event loop that lives as long as the run, so that a
client may be kept. Plain ones run one after the other meanwhile, each in a thread of its own. One that needs the main
thread (for signals, as math-verify's own time-outs do) says so by its first error, and is called there from then on,
where nothing bounds its time; the log says it.

What can go wrong, and what then happens (`RewardRunner`):
* A value None: the function does not apply to the completion, and is left out of its sum.
* A value NaN, infinite or no number: the function could not tell. What the completion is worth is then unknown,
  whatever other functions gave: its reward is NaN. A sum without that term would pay it as if the term were 0.
* The function raises (SystemExit too; KeyboardInterrupt ends the run), or returns no list of the right length, or takes
  longer than `rewards.timeout_s`, or could tell of none: no completion of the batch has a value from it, and all are
  paid the rest. Python cannot end a thread: a plain function that hangs is left behind, and goes on.
All are counted (`failed`), and logged with an example but for None. A completion without a value from any function has
reward NaN too; the advantage leaves such a completion out of its group. A function of which no completion of a batch
has a value through such errors, in MAX_FAILED_BATCHES batches in a row, stops the run; so do as many batches without
any reward at all.

Refused before the run: a function that needs TRL's `log_extra`, `log_metric` or `environments`. With a default of None
for them it runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import importlib
import importlib.util
import inspect
import logging
import math
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qerl.config import REWARD_ARGUMENTS, RewardConfig
from qerl.tasks.reward_functions import (
    completion_text,
    correctness_by,
    exact_reward,
    format_reward,
    length_reward,
    math_reward,
    numeric_reward,
    overlong_reward,
    regex_reward,
    tag_count_reward,
)

if TYPE_CHECKING:
    from qerl.tasks import Task

__all__ = [
    "RewardRunner",
    "RewardScores",
    "RewardSpec",
    "TrainerState",
    "completion_text",
    "correctness_by",
    "exact_reward",
    "format_reward",
    "length_reward",
    "load_reward",
    "math_reward",
    "numeric_reward",
    "overlong_reward",
    "regex_reward",
    "reward_specs",
    "tag_count_reward",
]

RewardFunction = Callable[..., Sequence[float | None] | Coroutine[Any, Any, Sequence[float | None]]]

TRL_ONLY = ("log_extra", "log_metric", "environments")  # arguments of TRL's trainer that have no counterpart here
NEEDS_MAIN_THREAD = ("signal only works in main thread", "threaded environment")  # Python's words and math-verify's
LOOP_GRACE_S = 1.0  # for the event loop to answer after a time-out; else it is blocked, and given up

MAX_FAILED_BATCHES = 3  # in a row: a passing fault of, say, a remote judge is survived, a broken function is not

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One term of the reward."""

    name: str
    """Names its metrics: `rewards/<name>/mean`."""
    function: RewardFunction
    """See the module's docstring."""
    weight: float = 1.0
    """Factor of its values in the sum."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Constants that it is called with."""
    plain_text: bool = False
    """Hand it prompts and completions as text, not as chat messages: TRL's way where the data's prompts are text."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions may know of the run's progress; names as in transformers' TrainerState."""

    global_step: int
    """Steps done before this one."""
    max_steps: int
    """Steps of the whole run."""


@dataclass(frozen=True, slots=True)
class RewardScores:
    """Rewards of one batch; all lists have one entry a completion."""

    totals: list[float]
    """Sum of weight * value; NaN where no function gave a value, or where one could not tell."""
    parts: dict[str, list[float]]
    """Each function's own values, without weight; NaN where it gave none."""
    failed: dict[str, int]
    """Completions that each function gave no value for."""


class RewardRunner:
    """Calls reward functions and guards what they return.

    `columns` are the names of the data's columns and `max_steps` the length of the run; ValueError when a function
    needs an argument that nobody has, or when two functions share a name.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], *, columns: Collection[str], max_steps: int, timeout_s: float = 300.0
    ) -> None:
        if not specs:
            raise ValueError("no reward function: name one in rewards.functions")
        names = [spec.name for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward functions are called {name!r}: rename one, since metrics go by that name")
            if "/" in name:
                raise ValueError(f"a reward function is called {name!r}: rename it, since metrics go by that name")
        self.specs = list(specs)
        self.columns = tuple(columns)
        self.max_steps = max_steps
        self.timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_main_thread: set[str] = set()
        self._wanted = {spec.name: _wanted_arguments(spec, columns) for spec in specs}
        self._failed_batches = dict.fromkeys(names, 0)
        self._empty_batches = 0
        self.has_paid: bool | None = None
        """Whether any completion has had a reward; None before the first."""

    @classmethod
    def from_config(cls, config: RewardConfig, task: Task, *, max_steps: int) -> RewardRunner:
        """Build the runner of a run: the configured functions, or the task's own, over the task's columns."""
        specs = reward_specs(config, task.reward_functions)
        columns = task.train_example(0).columns
        return cls(specs, columns=columns, max_steps=max_steps, timeout_s=config.timeout_s)

    @property
    def require_tags(self) -> bool:
        """Whether an answer is right in the answer tags alone: not where a function is told `require_tags = false`."""
        return not any(spec.weight and spec.arguments.get("require_tags") is False for spec in self.specs)

    def score(
        self,
        *,
        prompts: Sequence[list[dict[str, str]]],
        texts: Sequence[str],
        completion_ids: Sequence[list[int]],
        columns: Sequence[Mapping[str, Any]],
        step: int,
    ) -> RewardScores:
        """Score n completions. All arguments but `step` have n entries; `columns` are those of each one's problem.

        RuntimeError when a function, or all of them together, failed for MAX_FAILED_BATCHES batches in a row.
        """
        arguments: dict[str, Any] = {name: [row[name] for row in columns] for name in self.columns} | {
            "prompts": list(prompts),
            "completions": [[{"role": "assistant", "content": text}] for text in texts],
            "completion_ids": [list(ids) for ids in completion_ids],  # copies: training goes on with the originals
            "trainer_state": TrainerState(step, self.max_steps),
        }
        pending = {spec.name: self._start(spec, arguments) for spec in self.specs if _is_asynchronous(spec.function)}
        unknown: set[int] = set()
        parts = {
            spec.name: self._values(spec, pending.get(spec.name), arguments, texts, unknown)
            for spec in sorted(self.specs, key=lambda spec: spec.name in pending)
        }
        parts = {spec.name: parts[spec.name] for spec in self.specs}
        totals = [self._total(values) for values in zip(*parts.values(), strict=True)]
        totals = [math.nan if i in unknown else total for i, total in enumerate(totals)]

        self._empty_batches = self._empty_batches + 1 if totals and all(map(math.isnan, totals)) else 0
        if totals:
            self.has_paid = bool(self.has_paid) or not all(map(math.isnan, totals))
        if self._empty_batches == MAX_FAILED_BATCHES:
            raise RuntimeError(
                f"no completion had a reward from any of {', '.join(parts)} in {MAX_FAILED_BATCHES} batches in a row: "
                "each gave None, or failed as the warnings above say: there is nothing to learn from"
            )
        failed = {name: sum(map(math.isnan, values)) for name, values in parts.items()}
        return RewardScores(totals, parts, failed)

    def _values(
        self,
        spec: RewardSpec,
        pending: Future[Any] | None,
        arguments: Mapping[str, Any],
        texts: Sequence[str],
        unknown: set[int],
    ) -> list[float]:
        """Return one function's values, NaN for a completion without one; adds to `unknown` those it could not tell."""
        try:
            returned = self._call(spec, arguments) if pending is None else self._await(pending)
            if isinstance(returned, str) or not isinstance(returned, Iterable):
                raise ValueError(f"it returned {repr(returned)[:80]}: return a list, one number a completion")
            values = list(returned)
            if len(values) != len(texts):
                raise ValueError(f"it returned {len(values)} values for {len(texts)} completions")
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a user's code raises is counted, and stops the run only when it persists
            self._batch_failed(spec.name, error, f"whose first completion is {_shorten(texts[0])}" if texts else "")
            return [math.nan] * len(texts)

        checked = [_checked(value) for value in values]
        refused = [i for i, value in enumerate(values) if value is not None and math.isnan(checked[i])]
        if refused:
            problem = ValueError(f"it returned {values[refused[0]]!r}, which is no finite number")
            if all(map(math.isnan, checked)):
                self._batch_failed(spec.name, problem, f"for {_shorten(texts[refused[0]])}")
                return checked
            unknown.update(refused)
            logger.warning(
                "reward %s has no value for %d of %d completions: %s for %s",
                *(spec.name, len(refused), len(texts), problem, _shorten(texts[refused[0]])),
            )
        self._failed_batches[spec.name] = 0
        return checked

    def _call(self, spec: RewardSpec, arguments: Mapping[str, Any]) -> Any:
        """Call a plain function in a thread of its own and wait for it, at most `timeout_s`."""
        call = partial(spec.function, **self._arguments(spec, arguments))
        if spec.name in self._in_main_thread:
            return call()
        result: Future[Any] = Future()
        threading.Thread(target=_fulfil, args=(result, call), name=f"reward {spec.name}", daemon=True).start()
        try:
            return result.result(self.timeout_s)
        except concurrent.futures.TimeoutError:
            if result.done():
                raise  # the function's own
            raise TimeoutError(f"it took longer than rewards.timeout_s = {self.timeout_s:g} s") from None
        except ValueError as error:
            if not any(words in str(error) for words in NEEDS_MAIN_THREAD):
                raise
        logger.warning("reward %s needs the main thread: it is called there, and nothing bounds its time", spec.name)
        self._in_main_thread.add(spec.name)
        return call()

    def _start(self, spec: RewardSpec, arguments: Mapping[str, Any]) -> Future[Any]:
        """Start an asynchronous function on the event loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="asynchronous rewards", daemon=True).start()
        coroutine: Any = spec.function(**self._arguments(spec, arguments))
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(_contained(coroutine), self.timeout_s), self._loop)

    def _await(self, pending: Future[Any]) -> Any:
        """Wait for an asynchronous function; it is cancelled at its time-out, and a loop that it blocks is given up."""
        try:
            return pending.result(self.timeout_s + LOOP_GRACE_S)
        except concurrent.futures.TimeoutError as error:
            if pending.done() and error.args:
                raise  # the function's own
            if not pending.done():
                self._loop = None  # another one for the next batch
            raise TimeoutError(f"it took longer than rewards.timeout_s = {self.timeout_s:g} s") from None

    def _arguments(self, spec: RewardSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
        wanted = self._wanted[spec.name]
        given = {name: value for name, value in arguments.items() if wanted is None or name in wanted}
        if spec.plain_text:
            chats = [name for name in ("prompts", "completions") if name in given]
            given |= {name: [messages[-1]["content"] for messages in given[name]] for name in chats}
        return given | dict(spec.arguments)

    def _batch_failed(self, name: str, error: BaseException, where: str) -> None:
        self._failed_batches[name] += 1
        message = f"reward {name} failed for a whole batch {where}: {type(error).__name__}: {error}"
        if self._failed_batches[name] == MAX_FAILED_BATCHES:
            raise RuntimeError(
                f"{message}; that is {MAX_FAILED_BATCHES} batches in a row: mend the function"
            ) from error
        logger.warning(message, exc_info=error)

    def _total(self, values: Iterable[float]) -> float:
        terms = [spec.weight * value for spec, value in zip(self.specs, values, strict=True) if not math.isnan(value)]
        return math.fsum(terms) if terms else math.nan


def reward_specs(config: RewardConfig, default: Sequence[RewardSpec]) -> list[RewardSpec]:
    """Return the configured functions with their weights, or the task's own (`default`) when none is named.

    ValueError: a function that cannot be loaded, an argument that a built-in one has not, a wrong number of weights.
    """
    if config.functions:
        specs = [RewardSpec(place.rpartition(":")[2], load_reward(place)) for place in config.functions]
    else:
        specs = list(default)
    names = [spec.name for spec in specs]
    if unknown := [name for name in config.arguments if name not in names]:
        raise ValueError(
            f"rewards.arguments: no reward function is called {unknown[0]!r}; there are {', '.join(names)}"
        )
    specs = [replace(spec, arguments=config.arguments.get(spec.name, {})) for spec in specs]
    for spec in specs:
        _check_arguments(spec)
    if config.weights is None:
        return specs
    if len(config.weights) != len(specs):
        raise ValueError(
            f"rewards.weights has {len(config.weights)} numbers, the reward functions are "
            f"{', '.join(spec.name for spec in specs)}: give one weight a function"
        )
    return [replace(spec, weight=weight) for spec, weight in zip(specs, config.weights, strict=True)]


def _check_arguments(spec: RewardSpec) -> None:
    """ValueError for an argument that a function does not name, and that its **kwargs do not take.

    Those of this package's functions would swallow it. A user's own may read them; a warning, where what goes there
    looks like the name of another argument.
    """
    parameters = inspect.signature(spec.function).parameters.values()
    names = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
    built_in = getattr(spec.function, "__module__", "").startswith("qerl.")
    refused = built_in or len(names) == len(parameters)
    for argument in (a for a in spec.arguments if a not in names):
        near = difflib.get_close_matches(argument, [n for n in names if refused or n not in spec.arguments], n=1)
        if refused:
            raise ValueError(
                f"rewards.arguments: {spec.name} has no argument {argument!r}"
                + (f"; did you mean {near[0]}?" if near else f"; it has {', '.join(names)}")
            )
        if near:
            logger.warning(
                "rewards.arguments: %r of %s goes into its **kwargs; did you mean %s, which it names?",
                argument, spec.name, near[0],
            )  # fmt: skip


def load_reward(place: str) -> Callable[..., Any]:
    """Load `module:function` or `path/to/file.py:function`. ValueError says what is missing."""
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(f"reward {place!r} is not of the form module:function or file.py:function")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (
        Exception,
        SystemExit,
    ) as error:  # the file is a user's: whatever importing it raises is told with the place
        hint = "" if where.endswith(".py") else "; a function in a file is named path/to/file.py:function"
        raise ValueError(f"reward {place!r} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    function = getattr(module, name, None)
    if function is None:
        known = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1) or known
        raise ValueError(f"{where} has no function {name!r}; it has {', '.join(near) or 'none'}")
    if not callable(function):
        raise ValueError(f"reward {place!r} is a {type(function).__name__}, not a function")
    return function


def _load_file(path: Path) -> ModuleType:
    # Registered under a name of its own: two functions of one file share one module, and dataclasses work in it.
    path = path.resolve()
    name = f"qerl_user_rewards:{path}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _wanted_arguments(spec: RewardSpec, columns: Collection[str]) -> set[str] | None:
    """Return the names that a function takes, None for all; ValueError when it needs one that nobody has."""
    known = {*REWARD_ARGUMENTS, *columns, *spec.arguments}
    parameters = inspect.signature(spec.function).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"reward {spec.name} takes {parameter.name!r} by position only; arguments come by name")
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if needed and parameter.name in TRL_ONLY and parameter.name not in known:
            raise ValueError(
                f"reward {spec.name} needs {parameter.name!r}, which only TRL's trainer has: give it the default None"
            )
        if needed and parameter.name not in known:
            raise ValueError(
                f"reward {spec.name} needs the argument {parameter.name!r}, and there is none of that name; "
                f"there are {', '.join(sorted(known))}. A constant goes into rewards.arguments"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object's `__call__`, is `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await a function; its SystemExit would end the event loop with whatever else runs on it."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"it raised SystemExit({error})") from error


def _fulfil(result: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # it belongs to whoever waits
        result.set_exception(error)


def _checked(value: Any) -> float:
    """Return a function's value as a float, NaN for None, infinity and whatever is no number."""
    try:
        number = float(value) if value is not None and not isinstance(value, str) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _shorten(text: str, length: int = 200) -> str:
    return repr(text if len(text) <= length else text[: length // 2] + " ... " + text[-length // 2 :])
